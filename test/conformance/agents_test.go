package conformance

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// Agents as people run them, from npm, each in a folder of its own with nothing but our server in reach of its settings. The model's part is
// played by tools/actor: what the agent's user says after SAY is the model's first answer, what follows THEN the next one.
//
// With -record the requests are written to internal/server/testdata/agents, without texts, ids and paths, for the tests of the server, which
// answer them without the agents.

var record = flag.Bool("record", false, "write the requests of agents to internal/server/testdata/agents")

// installAgents installs the packages of agents/package.json once. It is npm install and not ci, because their optional parts for other
// systems are missing from the lock file of any one system.
var installAgents = sync.OnceValues(func() (string, error) {
	dir := filepath.Join(filepath.Dir(program), "agents")
	if err := os.CopyFS(dir, os.DirFS("agents")); err != nil {
		return "", err
	}
	install := exec.Command("npm", "install", "--no-save", "--ignore-scripts", "--no-audit", "--no-fund")
	install.Dir = dir
	if out, err := install.CombinedOutput(); err != nil {
		return "", fmt.Errorf("npm install: %w\n%s", err, out)
	}
	return filepath.Join(dir, "node_modules", ".bin"), nil
})

// agent is a run of one.
type agent struct {
	command      string // of the packages, or a path
	args         []string
	env          []string // beside a HOME and PATH
	home, folder string   // where its settings are, and where it works
	lenient      bool     // how it ends does not matter

	requests []sentRequest
	answers  []int
}

// sentRequest is a request as it is kept.
type sentRequest struct {
	Method  string            `json:"method"`
	Path    string            `json:"path"`
	Headers map[string]string `json:"headers"`
	Body    json.RawMessage   `json:"body"`
}

// run starts an agent with a server behind a recorder, whose address setup gets, and returns what it printed.
func (a *agent) run(t *testing.T, s *site, setup func(url string)) string {
	t.Helper()
	for _, name := range []string{"node", "npm"} {
		if _, err := exec.LookPath(name); err != nil {
			t.Skip(err)
		}
	}
	bin, err := installAgents()
	if err != nil {
		t.Fatal(err)
	}
	target, err := url.Parse(s.url)
	if err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	proxy := &httputil.ReverseProxy{FlushInterval: -1, Rewrite: func(r *httputil.ProxyRequest) { r.SetURL(target) }, ModifyResponse: func(r *http.Response) error {
		mu.Lock()
		defer mu.Unlock()
		a.answers = append(a.answers, r.StatusCode)
		return nil
	}}
	recorder := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			return
		}
		r.Body = io.NopCloser(bytes.NewReader(body))
		kept := sentRequest{Method: r.Method, Path: r.URL.RequestURI(), Headers: map[string]string{}, Body: body}
		for name := range r.Header {
			kept.Headers[strings.ToLower(name)] = r.Header.Get(name)
		}
		mu.Lock()
		a.requests = append(a.requests, kept)
		mu.Unlock()
		proxy.ServeHTTP(w, r)
	}))
	defer recorder.Close()
	a.home, a.folder = t.TempDir(), t.TempDir()
	setup(recorder.URL)
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	command := a.command
	if !filepath.IsAbs(command) {
		command = filepath.Join(bin, command)
	}
	cmd := exec.CommandContext(ctx, command, a.args...)
	cmd.Dir, cmd.WaitDelay = a.folder, time.Second
	cmd.Env = append([]string{"PATH=" + os.Getenv("PATH"), "HOME=" + a.home, "TERM=dumb"}, a.env...)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil && (!a.lenient || ctx.Err() != nil) {
		t.Fatalf("%s: %v\n%s\n%s", a.command, err, stdout.Bytes(), stderr.Bytes())
	}
	mu.Lock()
	defer mu.Unlock()
	if len(a.answers) != len(a.requests) || slices.ContainsFunc(a.answers, func(status int) bool { return status != 200 }) {
		t.Errorf("%s: %d requests, answers %v", a.command, len(a.requests), a.answers)
	}
	return stdout.String()
}

// keep writes the requests for the tests of the server, under a name and a number each.
func (a *agent) keep(t *testing.T, name string) {
	t.Helper()
	if !*record {
		return
	}
	dir := filepath.Join(root, "internal/server/testdata/agents")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	c := cleaner{paths: strings.NewReplacer(a.folder, "/project", a.home, "/home/user"), ids: map[string]string{}}
	for i, r := range a.requests {
		var b bytes.Buffer
		c.value(json.NewDecoder(bytes.NewReader(r.Body)), &b, "")
		r.Body = b.Bytes()
		headers := map[string]string{}
		for _, name := range []string{"accept", "content-type", "user-agent", "originator", "anthropic-version", "anthropic-beta", "x-stainless-lang", "x-app"} {
			if v, ok := r.Headers[name]; ok {
				headers[name] = systems.ReplaceAllString(c.text(v), "")
			}
		}
		r.Headers = headers
		out, err := json.MarshalIndent(r, "", "\t")
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, fmt.Sprintf("%s-%d.json", name, i+1)), append(out, '\n'), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// cleaner makes requests fit to be kept: texts of the agents' own are replaced by their length, ids by others, paths by plain ones.
type cleaner struct {
	paths *strings.Replacer
	ids   map[string]string
}

var (
	uuids   = regexp.MustCompile(`[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}`)
	systems = regexp.MustCompile(` \([^)]*\)`) // in a User-Agent
	long    = map[string]bool{"text": true, "content": true, "description": true, "instructions": true, "output": true, "system": true, "thinking": true}
)

func (c cleaner) text(s string) string {
	s = uuids.ReplaceAllStringFunc(c.paths.Replace(s), func(id string) string {
		if c.ids[id] == "" {
			c.ids[id] = fmt.Sprintf("00000000-0000-0000-0000-%012d", len(c.ids)+1)
		}
		return c.ids[id]
	})
	return s
}

// value copies one value, keeping the order of members. member is the name it stands under.
func (c cleaner) value(in *json.Decoder, out *bytes.Buffer, member string) {
	token, err := in.Token()
	if err != nil {
		panic(err)
	}
	switch v := token.(type) {
	case json.Delim:
		out.WriteRune(rune(v))
		for first := true; in.More(); first = false {
			if !first {
				out.WriteByte(',')
			}
			name := member
			if v == '{' {
				key, _ := in.Token()
				name = key.(string)
				b, _ := json.Marshal(name)
				out.Write(append(b, ':'))
			}
			c.value(in, out, name)
		}
		end, _ := in.Token()
		out.WriteRune(rune(end.(json.Delim)))
	case string:
		switch {
		case strings.HasPrefix(member, "x-codex") || strings.HasSuffix(member, "_id") && member != "call_id" && member != "tool_call_id" && member != "tool_use_id":
			v = "removed"
		case strings.HasPrefix(v, "x-anthropic-billing-header:"):
			v = fmt.Sprintf("x-anthropic-billing-header: [%d characters]", len(v))
		case member == "description", long[member] && len(v) > 60:
			v = fmt.Sprintf("[%d characters]", len(v))
		default:
			v = c.text(v)
		}
		b, _ := json.Marshal(v)
		out.Write(b)
	default:
		b, _ := json.Marshal(v)
		out.Write(b)
	}
}

// Codex writes a file, runs two tools in one answer, one of them out of a group, and says what it is told to.
func TestCodex(t *testing.T) {
	s := act(t)
	tool := func(name, key, value string) string {
		return "<tool_call>\n<function=" + name + ">\n<parameter=" + key + ">\n" + value + "\n</parameter>\n</function>\n</tool_call>"
	}
	prompt := "Write a file.\nSAY\nI think.</think>\n\nI write it.\n\n" + tool("exec_command", "cmd", "echo from the agent > out.txt && cat out.txt") +
		"\nTHEN\nIt is there.</think>\n\n" + tool("multi_agent_v1__close_agent", "target", "nobody") + "\n" + tool("exec_command", "cmd", "wc -c out.txt") +
		"\nTHEN\nBoth ran.</think>\n\nAll done."
	a := agent{command: "codex", args: []string{"exec", "--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", prompt}}
	out := a.run(t, s, func(url string) {
		a.env = []string{"CODEX_HOME=" + a.home}
		config := "model = \"actor\"\nmodel_provider = \"ninfer\"\nweb_search = \"disabled\"\n[model_providers.ninfer]\nname = \"ninfer\"\nbase_url = \"" + url + "/v1\"\nwire_api = \"responses\"\n"
		if err := os.WriteFile(filepath.Join(a.home, "config.toml"), []byte(config), 0o644); err != nil {
			t.Fatal(err)
		}
	})
	for _, want := range []string{`"text":"I write it."`, `"aggregated_output":"from the agent\n"`, `"aggregated_output":"15 out.txt\n"`, `"text":"All done."`, `"type":"turn.completed"`} {
		if !strings.Contains(out, want) {
			t.Errorf("no %s in\n%s", want, out)
		}
	}
	if b, err := os.ReadFile(filepath.Join(a.folder, "out.txt")); string(b) != "from the agent\n" {
		t.Errorf("%q, %v", b, err)
	}
	if len(a.requests) != 3 {
		t.Errorf("%d requests", len(a.requests))
	}
	a.keep(t, "codex")
}

// Qwen Code writes a file and runs a command in one answer.
func TestQwenCode(t *testing.T) {
	s := act(t)
	a := agent{command: "qwen"}
	out := a.run(t, s, func(url string) {
		prompt := "Write a file.\nSAY\nI think.</think>\n\nI write it.\n\n<tool_call>\n<function=write_file>\n<parameter=file_path>\n" + filepath.Join(a.folder, "out.txt") +
			"\n</parameter>\n<parameter=content>\nfrom the agent\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=run_shell_command>\n<parameter=command>\necho it $((40+2)) ran\n</parameter>\n" +
			"<parameter=is_background>\nfalse\n</parameter>\n</function>\n</tool_call>\nTHEN\nIt is there.</think>\n\nAll done."
		a.args = []string{"--auth-type", "openai", "--approval-mode", "yolo", "--output-format", "stream-json", prompt}
		a.env = []string{"OPENAI_API_KEY=none", "OPENAI_BASE_URL=" + url + "/v1", "OPENAI_MODEL=actor"}
	})
	for _, want := range []string{`"thinking":"I think."`, `"text":"I write it."`, `it 42 ran`, `"result":"All done."`, `"is_error":false`} {
		if !strings.Contains(out, want) {
			t.Errorf("no %s in\n%s", want, out)
		}
	}
	if b, err := os.ReadFile(filepath.Join(a.folder, "out.txt")); strings.TrimSpace(string(b)) != "from the agent" {
		t.Errorf("%q, %v", b, err)
	}
	if len(a.requests) < 2 {
		t.Errorf("%d requests", len(a.requests))
	}
	a.keep(t, "qwen-code")
}
