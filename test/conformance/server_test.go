package conformance

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"
)

const root = "../.."

// The program, built once.
var program string

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "ninfer-conformance-")
	if err != nil {
		panic(err)
	}
	program = filepath.Join(dir, "ninfer")
	build := exec.Command("go", "build", "-o", program, "./cmd/ninfer")
	build.Dir, build.Env = root, append(os.Environ(), "CGO_ENABLED=0", "GOWORK=off")
	if out, err := build.CombinedOutput(); err != nil {
		fmt.Fprintf(os.Stderr, "build: %v\n%s", err, out)
		os.Exit(1)
	}
	code := m.Run()
	os.RemoveAll(dir)
	os.Exit(code)
}

// folder is a golden folder: a checkpoint with what the reference implementation computes from it.
type folder struct{ name, path string }

var (
	micro = folder{"micro", filepath.Join(root, "testdata/micro-radixark")}
	mini  = folder{"mini", filepath.Join(os.Getenv("NINFER_GOLDEN"), "mini-radixark")}
)

// conversation is a recorded case with messages.
type conversation struct {
	Tokens   []int           `json:"tokens"`
	Greedy   []int           `json:"greedy"`
	Messages json.RawMessage `json:"messages"`
	Thinking bool            `json:"enable_thinking"`
	Text     string          `json:"text"`
}

// conversations returns the recorded cases with messages; it skips the test if the folder is absent.
func (f folder) conversations(t *testing.T) map[string]conversation {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join(f.path, "golden.json"))
	if os.IsNotExist(err) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	var golden struct {
		Cases map[string]conversation `json:"cases"`
	}
	if err := json.Unmarshal(raw, &golden); err != nil {
		t.Fatal(err)
	}
	for name, c := range golden.Cases {
		if c.Messages == nil {
			delete(golden.Cases, name)
		}
	}
	if len(golden.Cases) < 2 {
		t.Fatalf("%d conversations", len(golden.Cases))
	}
	return golden.Cases
}

// visible is what a client may see of a continuation: its text up to the end token, how many tokens that is, and why it ends there.
// Ids 1 and 6 are the end tokens of the reference checkpoints.
func (c conversation) visible() (text string, tokens int, finish string) {
	for i, id := range c.Greedy {
		if id == 1 || id == 6 {
			text, _, _ = strings.Cut(c.Text, map[int]string{1: "<|im_end|>", 6: "<|endoftext|>"}[id])
			return text, i + 1, "stop"
		}
	}
	return c.Text, len(c.Greedy), "length"
}

// site is a running server.
type site struct {
	url string
	cmd *exec.Cmd
}

// serve converts a checkpoint and serves it; it skips the test if the checkpoint is absent.
func serve(t *testing.T, f folder, flags ...string) *site {
	t.Helper()
	if _, err := os.Stat(f.path); err != nil {
		t.Skip(err)
	}
	out := filepath.Join(t.TempDir(), "qwen3_8_flash_next_125b_a6b_nvfp4.ninfer")
	if b, err := exec.Command(program, "convert", "--quiet", "--model", filepath.Join(f.path, "checkpoint"), "--out", out).CombinedOutput(); err != nil {
		t.Fatalf("convert: %v\n%s", err, b)
	}
	return start(t, append([]string{"serve", out, "--port", "0", "--device", "cpu"}, flags...)...)
}

// start runs the program as a server.
func start(t *testing.T, args ...string) *site {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	t.Cleanup(cancel)
	s := &site{cmd: exec.CommandContext(ctx, program, args...)}
	stderr, err := s.cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := s.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewReader(stderr)
	address := regexp.MustCompile(`http://[0-9.]+:\d+`)
	for s.url == "" {
		line, err := lines.ReadString('\n')
		if err != nil {
			t.Fatalf("the server ended before it was ready: %v", err)
		}
		s.url = address.FindString(line)
	}
	drained := make(chan struct{})
	go func() {
		defer close(drained)
		io.Copy(io.Discard, lines)
	}()
	t.Cleanup(func() {
		s.cmd.Process.Signal(os.Interrupt)
		<-drained
		if err := s.cmd.Wait(); err != nil {
			t.Errorf("the server ended with %v", err)
		}
	})
	return s
}

// memory is the server's resident set in KiB, or 0 where it is not to be had.
func (s *site) memory(t *testing.T) int {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", s.cmd.Process.Pid))
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(b)) {
		if v, ok := strings.CutPrefix(line, "VmRSS:"); ok {
			n, err := strconv.Atoi(strings.TrimSuffix(strings.TrimSpace(v), " kB"))
			if err != nil {
				t.Fatal(err)
			}
			return n
		}
	}
	return 0
}
