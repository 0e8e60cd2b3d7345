package conformance

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"
)

// Clients that mean no good get their status and shape, and a stream that runs beside them all the while loses nothing.
func TestHostile(t *testing.T) {
	const tokens = 12000
	s := act(t, "-delay", "1ms")
	address := strings.TrimPrefix(s.url, "http://")
	transport := &http.Transport{}
	t.Cleanup(transport.CloseIdleConnections)
	client := &http.Client{Transport: transport}
	var calm sync.WaitGroup
	calm.Go(func() {
		res, err := client.Post(s.url+"/v1/chat/completions", "application/json", strings.NewReader(fmt.Sprintf(`{"messages":[{"role":"user","content":"COUNT %d"}],"stream":true,"enable_thinking":false}`, tokens)))
		if err != nil {
			t.Error(err)
			return
		}
		defer res.Body.Close()
		n, done, last := 0, false, time.Now()
		var longest time.Duration
		for lines := bufio.NewScanner(res.Body); lines.Scan(); {
			line := lines.Text()
			if strings.Contains(line, `"content":"x"`) {
				n++
			}
			done = line == "data: [DONE]" || done
			longest = max(longest, time.Since(last))
			last = time.Now()
		}
		if n != tokens || !done {
			t.Errorf("the calm stream has %d tokens, done %v", n, done)
		}
		t.Logf("longest gap of the calm stream: %v", longest)
	})

	// Connections that say nothing, or a little at a time. As many as the system allows, up to ten thousand.
	var idle []net.Conn
	for len(idle) < 10_000 {
		c, err := net.DialTimeout("tcp", address, 5*time.Second)
		if err != nil {
			if len(idle) < 1000 {
				t.Fatal(err)
			}
			break
		}
		if len(idle)%2 == 0 {
			fmt.Fprintf(c, "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nX-A: ")
		}
		idle = append(idle, c)
	}
	t.Logf("%d connections", len(idle))
	defer func() {
		for _, c := range idle {
			c.Close()
		}
	}()

	const message = `{"messages":[{"role":"user","content":"Hi"}],"max_tokens":1`
	for _, c := range []struct {
		name, body string
		status     int
		code       string
	}{
		{"good", message + `}`, 200, ""},
		{"malformed", message, 400, "invalid_json"},
		{"no object", `"x"`, 400, "invalid_json"},
		{"deep", `{"messages":` + strings.Repeat(`[`, 1<<20) + strings.Repeat(`]`, 1<<20) + `}`, 400, "invalid_json"},
		{"deep objects", `{"messages":` + strings.Repeat(`{"a":`, 1<<18) + "1" + strings.Repeat(`}`, 1<<18) + `}`, 400, "invalid_json"},
		{"invalid UTF-8", "{\"messages\":[{\"role\":\"user\",\"content\":\"\xc3\x28\"}]}", 400, "invalid_json"},
		{"half a surrogate", `{"messages":[{"role":"user","content":"\udc00"}]}`, 400, "invalid_json"},
		{"duplicate keys", `{"messages":5,"messages":[{"role":"user","content":"Hi"}],"max_tokens":1,"temperature":9,"temperature":1}`, 200, ""},
		{"wrong type", `{"messages":{"role":"user"}}`, 400, "invalid_type"},
		{"huge number", message + `,"temperature":` + strings.Repeat("9", 1<<20) + `}`, 400, "invalid_value"},
		{"100 MB of blanks", message + strings.Repeat(" ", 100<<20) + `}`, 200, ""},
		{"100 MB of text", `{"messages":[{"role":"user","content":"` + strings.Repeat("abcdefgh ", 100<<20/9) + `"}]}`, 400, "context_length_exceeded"},
		{"500 MB", strings.Repeat(" ", 500<<20), 413, "request_too_large"},
	} {
		start := time.Now()
		res, err := client.Post(s.url+"/v1/chat/completions", "", strings.NewReader(c.body))
		if err != nil {
			if c.status == 413 { // the server may answer and close before all of it is sent
				continue
			}
			t.Fatalf("%s: %v", c.name, err)
		}
		body, _ := io.ReadAll(res.Body)
		res.Body.Close()
		var refused struct {
			Error struct {
				Message, Type, Code string
			}
		}
		json.Unmarshal(body, &refused)
		if res.StatusCode != c.status || refused.Error.Code != c.code || c.code != "" && (refused.Error.Message == "" || refused.Error.Type != "invalid_request_error") {
			t.Errorf("%s: %d %.300s, want %d %s", c.name, res.StatusCode, body, c.status, c.code)
		}
		t.Logf("%s: %d in %v", c.name, res.StatusCode, time.Since(start).Round(time.Millisecond))
	}
	calm.Wait()
}
