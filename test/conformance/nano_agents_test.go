package conformance

import (
	"os"
	"path/filepath"
	"testing"
)

// The agents on nano, with instructions short enough for its context and few of their tools. Nano was not trained on those, so what it makes
// of them is not looked at: the requests are served to their end, and the agents take the answers.
func TestNanoAgents(t *testing.T) {
	question := questions(t, "copy", true, 1)[0].Messages
	prompt := question[len(question)-1].Content
	s := start(t, "serve", "--port", "0", "--device", "cpu", "--max-context", "8192", "--default-max-tokens", "1000")
	for _, c := range []struct {
		agent agent
		setup func(a *agent, url string)
	}{
		{agent{command: "codex", args: []string{"exec", "--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", prompt}}, func(a *agent, url string) {
			short := filepath.Join(a.home, "short.md")
			a.env = []string{"CODEX_HOME=" + a.home}
			config := "model = \"nano\"\nmodel_provider = \"ninfer\"\nweb_search = \"disabled\"\nmodel_instructions_file = \"" + short + "\"\n[agents]\nenabled = false\n[features]\ngoals = false\n" +
				"[model_providers.ninfer]\nname = \"ninfer\"\nbase_url = \"" + url + "/v1\"\nwire_api = \"responses\"\nrequest_max_retries = 0\nstream_max_retries = 0\n"
			for name, text := range map[string]string{short: "Answer shortly.", filepath.Join(a.home, "config.toml"): config} {
				if err := os.WriteFile(name, []byte(text), 0o644); err != nil {
					t.Fatal(err)
				}
			}
		}},
		{agent{command: "qwen"}, func(a *agent, url string) {
			a.args = []string{"--auth-type", "openai", "--bare", "--approval-mode", "plan", "--max-session-turns", "2", "--system-prompt", "Answer shortly.", "--core-tools", "read_file", "-p", prompt}
			a.env = []string{"OPENAI_API_KEY=none", "OPENAI_BASE_URL=" + url + "/v1", "OPENAI_MODEL=nano"}
		}},
	} {
		c.agent.lenient = true
		out := c.agent.run(t, s, func(url string) { c.setup(&c.agent, url) })
		if len(c.agent.requests) == 0 || out == "" {
			t.Errorf("%s: %d requests, %q", c.agent.command, len(c.agent.requests), out)
		}
		t.Logf("%s: %d requests\n%.1000s", c.agent.command, len(c.agent.requests), out)
	}
}
