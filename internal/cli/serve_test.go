package cli

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"ninfer/internal/backend/cpu"
	"ninfer/internal/convert"
)

// child is a running "ninfer serve".
type child struct {
	*exec.Cmd
	url string
	log chan string // what it wrote to stderr, once it has ended
}

// serveChild starts the program on the micro model and waits until it is ready.
func serveChild(t *testing.T, flags ...string) *child {
	t.Helper()
	path := filepath.Join(t.TempDir(), "qwen3_8_flash_next_125b_a6b_nvfp4.ninfer")
	if _, err := convert.Run(t.Context(), convert.Options{Model: "../../testdata/micro-radixark/checkpoint", Out: path, Profile: "radixark"}); err != nil {
		t.Fatal(err)
	}
	return startServe(t, path, flags...)
}

// startServe starts the program on an artifact and waits until it is ready.
func startServe(t *testing.T, path string, flags ...string) *child {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	t.Cleanup(cancel)
	c := &child{Cmd: exec.CommandContext(ctx, "ninfer", append([]string{"serve", path, "--port", "0", "--device", "cpu"}, flags...)...), log: make(chan string, 1)}
	stderr, err := c.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Process.Kill(); c.Wait() })
	lines := bufio.NewReader(stderr)
	var seen strings.Builder
	address := regexp.MustCompile(`http://[0-9.]+:\d+`)
	for c.url == "" {
		line, err := lines.ReadString('\n')
		seen.WriteString(line)
		if err != nil {
			t.Fatalf("not ready: %s", seen.String())
		}
		c.url = address.FindString(line)
	}
	go func() {
		rest, _ := io.ReadAll(lines)
		c.log <- seen.String() + string(rest)
	}()
	return c
}

const longChat = `{"messages":[{"role":"user","content":"Hello, how are you?"}],"temperature":0,"stream":true,"enable_thinking":false,"max_tokens":%d,"seed":1}`

// A termination lets streams that can finish do so, also those that wait, and ends with status 0.
func TestServeDrain(t *testing.T) {
	c := serveChild(t, "--max-context", "4096", "--api-key", "hidden")
	request := func(tokens int) *http.Response {
		t.Helper()
		r, _ := http.NewRequest("POST", c.url+"/v1/chat/completions", strings.NewReader(fmt.Sprintf(longChat, tokens)))
		r.Header.Set("Authorization", "Bearer hidden")
		res, err := http.DefaultClient.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		return res
	}
	defer http.DefaultClient.CloseIdleConnections()
	var streams []*http.Response
	for range 12 { // most of them are waiting when the signal comes
		res := request(40)
		defer res.Body.Close()
		if res.StatusCode != 200 {
			t.Fatalf("status %d", res.StatusCode)
		}
		streams = append(streams, res)
	}
	if err := c.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	for i, res := range streams {
		body, err := io.ReadAll(res.Body)
		if err != nil || !strings.HasSuffix(string(body), "data: [DONE]\n\n") || !strings.Contains(string(body), `"finish_reason":"`) {
			t.Errorf("stream %d ended with %q, %v", i, body[max(0, len(body)-300):], err)
		}
	}
	log := <-c.log
	if err := c.Wait(); err != nil {
		t.Errorf("ended with %v:\n%s", err, log)
	}
	for _, want := range []string{"ready | model qwen4_exp | address http://127.0.0.1:", "context 4,096", "--api-key ***", "stopping", "stopped"} {
		if !strings.Contains(log, want) {
			t.Errorf("%q is not in the log:\n%s", want, log)
		}
	}
	if strings.Contains(log, "hidden") {
		t.Errorf("the key is in the log:\n%s", log)
	}
}

// A second signal ends the program at once.
func TestServeSecondSignal(t *testing.T) {
	c := serveChild(t, "--max-context", "8192")
	// Any one of them may meet an end token soon, but not all of them.
	var clients sync.WaitGroup
	defer clients.Wait()
	for seed := range 17 {
		body := fmt.Sprintf(`{"messages":[{"role":"user","content":"Hello"}],"seed":%d,"stream":true,"max_tokens":8000}`, seed)
		res, err := http.Post(c.url+"/v1/chat/completions", "", strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		clients.Go(func() {
			io.Copy(io.Discard, res.Body)
			res.Body.Close()
		})
	}
	begin := time.Now()
	for range 2 {
		if err := c.Process.Signal(syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}
		time.Sleep(200 * time.Millisecond)
	}
	<-c.log
	err := c.Wait()
	if code := c.ProcessState.ExitCode(); code != exitInterrupted || time.Since(begin) > 5*time.Second {
		t.Errorf("status %d after %v: %v", code, time.Since(begin), err)
	}
}

// Flags that the options of the seeds use and that mean nothing here are accepted; the model's name is free; logs can be silent.
func TestServeFlags(t *testing.T) {
	c := serveChild(t, "--max-context", "512", "--model-id", "org/name", "--max-concurrency", "2", "--kv-capacity", "1024", "--kv-dtype", "bf16",
		"--no-prefix-reuse", "--gdn-state-dtype", "fp32", "--no-cuda-graph", "--preserve-thinking", "--desktop-reserve-mib", "0", "--repetition-penalty", "1",
		"--spec", "mtp", "--draft-tokens", "3", "--log-level", "off", "--cors", "--max-pending-requests", "0", "--default-max-tokens", "5")
	res, err := http.Post(c.url+"/v1/chat/completions", "", strings.NewReader(`{"model":"org/name","messages":[{"role":"user","content":"Q"}],"temperature":0}`))
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	if err != nil || res.StatusCode != 200 || !strings.Contains(string(b), `"completion_tokens":5`) || !strings.Contains(string(b), `"draft_n":`) {
		t.Errorf("%d %s", res.StatusCode, b)
	}
	http.DefaultClient.CloseIdleConnections()
	if err := c.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if log := <-c.log; strings.Contains(log, "info") {
		t.Errorf("log:\n%s", log)
	}
	if err := c.Wait(); err != nil {
		t.Error(err)
	}
}

// The serve command lines of the model's two descriptions start as they stand, apart from host, port and file; without --vision, which
// this build refuses. They say what has no effect, keep the memory that they promise to others, and answer.
func TestServeSeedLines(t *testing.T) {
	if n, ok := cpu.Available(); ok && n < 6<<30 {
		t.Skipf("%d bytes of memory are too few for a reserve of 3 GiB", n)
	}
	// The same checkpoint with the positions of the real model.
	dir := t.TempDir()
	if err := os.CopyFS(dir, os.DirFS("../../testdata/micro-radixark/checkpoint")); err != nil {
		t.Fatal(err)
	}
	config := filepath.Join(dir, "config.json")
	text, err := os.ReadFile(config)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(config, []byte(strings.Replace(string(text), `"max_position_embeddings": 8192`, `"max_position_embeddings": 262144`, 1)), 0o666); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "qwen3_8_flash_next_125b_a6b_nvfp4.ninfer")
	if _, err := convert.Run(t.Context(), convert.Options{Model: dir, Out: path, Profile: "radixark"}); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		line, model string
		log         []string
	}{
		{
			`--model-id Qwen/Qwen3.8-Flash-Next --max-context 196608 --kv-capacity auto --kv-dtype bf16 --max-concurrency 2
			--device-state-slots 2 --host-state-slots 8 --host-kv-mib 16384 --spec mtp --draft-tokens 3 --lm-head-draft
			--preserve-thinking --prefill-chunk 8192`, "Qwen/Qwen3.8-Flash-Next",
			[]string{"context 196,608", "cache bf16 in 6,144 pages", "concurrency 2", "drafts 3", "--device-state-slots --host-state-slots --host-kv-mib", "slack 1.0 GiB"},
		},
		{
			`--model-id qwen3.8-flash-next --max-context 32768 --kv-capacity 65536 --max-concurrency 2 --prefill-chunk 8192 --desktop-reserve-gib 3
			--kv-dtype fp8 --gdn-state-dtype bf16 --spec mtp --draft-tokens 4 --preserve-thinking`, "qwen3.8-flash-next",
			[]string{"context 32,768", "cache fp8 in 1,024 pages", "state bf16", "drafts 4", "left to others 3.0 GiB"},
		},
		{
			`--model-id qwen3.8-flash-next --max-context 65536 --kv-capacity 65536 --kv-dtype fp8`, "qwen3.8-flash-next",
			[]string{"context 65,536", "cache fp8 in 1,024 pages", "concurrency 1"},
		},
		{
			`--max-context 131072 --kv-capacity 262144 --max-concurrency 4 --prefill-chunk 8192 --kv-dtype fp8`, "qwen4_exp",
			[]string{"context 131,072", "cache fp8 in 4,096 pages", "concurrency 4"},
		},
	} {
		s := startServe(t, path, strings.Fields(c.line)...)
		res, err := http.Post(s.url+"/v1/chat/completions", "", strings.NewReader(fmt.Sprintf(`{"model":%q,"messages":[{"role":"user","content":"Q"}],"max_tokens":5,"temperature":0}`, c.model)))
		if err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(res.Body)
		res.Body.Close()
		if err != nil || res.StatusCode != 200 || !strings.Contains(string(b), `"completion_tokens":5`) {
			t.Errorf("%s\n%d %s %v", c.line, res.StatusCode, b, err)
		}
		http.DefaultClient.CloseIdleConnections()
		if err := s.Process.Signal(syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}
		log := <-s.log
		if err := s.Wait(); err != nil {
			t.Errorf("%s: %v", c.line, err)
		}
		for _, want := range c.log {
			if !strings.Contains(log, want) {
				t.Errorf("%s\n%q is not in the log:\n%s", c.line, want, log)
			}
		}
	}
}
