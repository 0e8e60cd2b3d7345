package cli

import (
	"encoding/json/v2"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
)

// The machine log of the program: appended to over two runs, with an end for each start, also for clients that leave and at the end of
// the server; the log for people tells where the memory goes; metrics tell the pool.
func TestServeJournal(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log.jsonl")
	for run := range 2 {
		c := serveChild(t, "--max-context", "2048", "--max-concurrency", "2", "--kv-capacity", "3072", "--api-key", "hidden", "--request-log-jsonl", path,
			"--spec", "mtp", "--draft-tokens", "2", "--model-id", "m")
		send := func(method, route, body string) *http.Response {
			t.Helper()
			r, _ := http.NewRequest(method, c.url+route, strings.NewReader(body))
			r.Header.Set("x-api-key", "hidden")
			res, err := http.DefaultClient.Do(r)
			if err != nil {
				t.Fatal(err)
			}
			return res
		}
		read := func(res *http.Response) string {
			defer res.Body.Close()
			b, _ := io.ReadAll(res.Body)
			return string(b)
		}
		if body := read(send("POST", "/v1/chat/completions", `{"messages":[{"role":"user","content":"promptword"}],"max_tokens":5,"temperature":0}`)); !strings.Contains(body, `"completion_tokens":5`) {
			t.Errorf("%s", body)
		}
		read(send("POST", "/v1/chat/completions", `{"promptword":1}`))
		left := send("POST", "/v1/chat/completions", fmt.Sprintf(longChat, 1500))
		io.ReadFull(left.Body, make([]byte, 10))
		left.Body.Close()
		metrics := read(send("GET", "/metrics", ""))
		for _, want := range []string{"\nninfer_engine_ready 1\n", "\nninfer_device_kv_capacity_pages 48\n", "\nninfer_max_concurrency 2\n", `vllm:kv_cache_usage_perc{model_name="m"} `} {
			if !strings.Contains(metrics, want) {
				t.Errorf("%q is not in the metrics:\n%s", want, metrics)
			}
		}
		last := send("POST", "/v1/chat/completions", fmt.Sprintf(longChat, 3)) // the signal comes while it is there
		http.DefaultClient.CloseIdleConnections()
		if err := c.Process.Signal(syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}
		read(last)
		log := <-c.log
		if err := c.Wait(); err != nil {
			t.Errorf("%v:\n%s", err, log)
		}
		sizes := regexp.MustCompile(`memory \| pages 48 \| tokens 3072 \| a page \d+\.\d [KM]iB \| pool \d+\.\d [KM]iB \| sequences beside it \d+\.\d [KM]iB`)
		ready := regexp.MustCompile(`ready \|.* \| cache bf16 in 48 pages of 64 tokens \| state fp32 \| weights \d+\.\d [KM]iB mapped \|`)
		if !sizes.MatchString(log) || !ready.MatchString(log) {
			t.Errorf("no sizes in the log:\n%s", log)
		}
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if info, _ := os.Stat(path); info.Mode().Perm() != 0o600 {
			t.Errorf("mode %v", info.Mode())
		}
		events, open, instances := map[string]int{}, map[string]bool{}, map[string]bool{}
		for line := range strings.Lines(string(b)) {
			var e struct {
				Event    string `json:"event"`
				ID       string `json:"request_id"`
				Instance string `json:"server_instance_id"`
			}
			if err := json.Unmarshal([]byte(line), &e); err != nil {
				t.Fatalf("%q: %v", line, err)
			}
			if !instances[e.Instance] && e.Event != "server_start" {
				t.Errorf("%s before server_start", e.Event)
			}
			instances[e.Instance] = true
			events[e.Event]++
			switch e.Event {
			case "request_start":
				open[e.ID] = true
			case "request_done", "request_error":
				if !open[e.ID] {
					t.Errorf("an end without a start: %s", line)
				}
				delete(open, e.ID)
			}
		}
		n := run + 1
		if len(open) > 0 || len(instances) != n || events["server_start"] != n || events["request_start"] != 3*n || events["request_done"] != 3*n || events["request_rejected"] != n {
			t.Errorf("run %d: %v, open %v, %d instances", run, events, open, len(instances))
		}
		for _, word := range []string{"hidden", "promptword", "how are you"} {
			if strings.Contains(string(b), word) {
				t.Errorf("%q is in the machine log:\n%s", word, b)
			}
		}
		if !strings.Contains(string(b), "--api-key ***") {
			t.Errorf("no command line:\n%s", b)
		}
	}
}
