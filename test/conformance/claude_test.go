package conformance

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// claude is a run of Claude Code, which asks for Messages. Its package's own starter is used, because its command is put in place by a script
// of the installation, and those are not run.
func claude(t *testing.T, prompt func(folder string) string, env ...string) (*agent, map[string]any) {
	t.Helper()
	node, err := exec.LookPath("node")
	if err != nil {
		t.Skip(err)
	}
	bin, err := installAgents()
	if err != nil {
		t.Fatal(err)
	}
	a := &agent{command: node}
	out := a.run(t, act(t), func(url string) {
		a.args = []string{filepath.Join(bin, "../@anthropic-ai/claude-code/cli-wrapper.cjs"), "-p", prompt(a.folder), "--allowedTools", "Bash,Edit,Read,Write", "--output-format", "json"}
		a.env = append([]string{"ANTHROPIC_BASE_URL=" + url, "ANTHROPIC_API_KEY=none", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1", "DISABLE_AUTOUPDATER=1"}, env...)
	})
	var result map[string]any
	if err := json.Unmarshal([]byte(out), &result); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	// It looks for the server first.
	a.requests = slices.DeleteFunc(a.requests, func(r sentRequest) bool { return len(r.Body) == 0 })
	return a, result
}

// Claude Code writes a file, reads it twice in one answer, edits it, sees a command fail, and says what it is told to.
func TestClaudeCode(t *testing.T) {
	use := func(name string, args ...string) string {
		out := "<tool_call>\n<function=" + name + ">\n"
		for i := 0; i < len(args); i += 2 {
			out += "<parameter=" + args[i] + ">\n" + args[i+1] + "\n</parameter>\n"
		}
		return out + "</function>\n</tool_call>"
	}
	a, result := claude(t, func(folder string) string {
		file := filepath.Join(folder, "a.txt")
		return "Do it.\nSAY\nPlan.</think>\n\nWriting.\n" + use("Write", "file_path", file, "content", "one\ntwo\n") +
			"\nTHEN\nTwo at once.</think>\n\n" + use("Bash", "command", "cat a.txt", "description", "show") + "\n" + use("Read", "file_path", file) +
			"\nTHEN\n</think>\n\nEdit.\n" + use("Edit", "file_path", file, "old_string", "two", "new_string", "three") +
			"\nTHEN\nFail.</think>\n\n" + use("Bash", "command", "false", "description", "fail") +
			"\nTHEN\nDone.</think>\n\nAll done."
	})
	if result["result"] != "All done." || result["is_error"] != false || result["stop_reason"] != "end_turn" || result["num_turns"] != 6.0 {
		t.Errorf("%v", result)
	}
	if b, err := os.ReadFile(filepath.Join(a.folder, "a.txt")); string(b) != "one\nthree\n" {
		t.Errorf("%q, %v", b, err)
	}
	if len(a.requests) != 5 {
		t.Fatalf("%d requests", len(a.requests))
	}
	// The thoughts of the first answers come back, and what failed is said to have.
	for _, want := range []string{`"type":"thinking","thinking":"Two at once.","signature":"`, `"is_error":true`, `"cache_control":{"type":"ephemeral"}`} {
		if !strings.Contains(string(a.requests[4].Body), want) {
			t.Errorf("no %s in the last request", want)
		}
	}
	a.keep(t, "claude-code")
}

// Under the names of older models it asks for a thinking budget one below the limit.
func TestClaudeCodeBudget(t *testing.T) {
	a, result := claude(t, func(string) string { return "Do it.\nSAY\nT</think>\n\nFine." }, "ANTHROPIC_MODEL=claude-sonnet-4-5")
	if result["result"] != "Fine." || result["is_error"] != false || len(a.requests) != 1 {
		t.Errorf("%d requests: %v", len(a.requests), result)
	}
	if !strings.Contains(string(a.requests[0].Body), `"budget_tokens":`) {
		t.Error("no budget")
	}
	a.keep(t, "claude-code-budget")
}

// Claude Code on nano, with instructions short enough for its context and one harmless tool: what nano is asked to copy is its answer, or
// whatever else it makes of a prompt that it was not trained on, but an answer.
func TestNanoClaudeCode(t *testing.T) {
	question := questions(t, "copy", false, 1)[0].Messages
	node, err := exec.LookPath("node")
	if err != nil {
		t.Skip(err)
	}
	bin, err := installAgents()
	if err != nil {
		t.Fatal(err)
	}
	a := &agent{command: node}
	out := a.run(t, start(t, "serve", "--port", "0", "--device", "cpu", "--max-context", "8192", "--default-max-tokens", "1000", "--greedy"), func(url string) {
		a.args = []string{
			filepath.Join(bin, "../@anthropic-ai/claude-code/cli-wrapper.cjs"), "-p", question[len(question)-1].Content, "--tools", "Read", "--system-prompt", "Answer shortly.",
			"--max-turns", "4", "--output-format", "json",
		}
		a.env = []string{
			"ANTHROPIC_BASE_URL=" + url, "ANTHROPIC_API_KEY=none", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1", "DISABLE_AUTOUPDATER=1", "ANTHROPIC_MODEL=nano", "MAX_THINKING_TOKENS=0",
		}
	})
	var result map[string]any
	if err := json.Unmarshal([]byte(out), &result); err != nil || result["is_error"] != false || result["stop_reason"] != "end_turn" || result["result"] == "" {
		t.Errorf("%v: %s", err, out)
	}
	t.Logf("%d requests: %q", len(a.requests), result["result"])
}
