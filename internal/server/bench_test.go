package server_test

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"runtime"
	"slices"
	"strings"
	"testing"

	"ninfer/internal/front"
	"ninfer/internal/server"
)

func BenchmarkHealth(b *testing.B) {
	s := start(b, setup{gen: &script{text: "x"}})
	r := must(http.NewRequest("GET", "/health", nil))
	b.ReportAllocs()
	for b.Loop() {
		s.ServeHTTP(&httpRecorder{header: http.Header{}}, r)
	}
}

// Requests for /health over 16 sockets, beside those of a handler that does nothing but write as much.
func BenchmarkHealthSocket(b *testing.B) {
	s := start(b, setup{gen: &script{text: "x"}})
	bare := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		io.WriteString(w, `{"status":"ok"}`)
	}))
	defer bare.Close()
	for _, c := range []struct{ name, url string }{{"bare", bare.URL}, {"health", s.url}} {
		b.Run(c.name, func(b *testing.B) {
			b.SetParallelism((16 + runtime.GOMAXPROCS(0) - 1) / runtime.GOMAXPROCS(0))
			b.RunParallel(func(pb *testing.PB) {
				conn, err := net.Dial("tcp", strings.TrimPrefix(c.url, "http://"))
				if err != nil {
					b.Error(err)
					return
				}
				defer conn.Close()
				in := bufio.NewReader(conn)
				for pb.Next() {
					io.WriteString(conn, "GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
					for line := ""; line != "\r\n"; {
						if line, err = in.ReadString('\n'); err != nil {
							b.Error(err)
							return
						}
					}
					if n, err := in.Discard(len(`{"status":"ok"}`)); err != nil {
						b.Error(n, err)
						return
					}
				}
			})
		})
	}
}

// Events of a stream over a socket, beside those of a handler that does nothing but write and flush as many of the same size.
func BenchmarkStream(b *testing.B) {
	const n = 20_000
	gen := &script{ids: slices.Repeat(tokenizer().Encode("x"), n)}
	s := start(b, setup{gen: gen, front: front.Options{Context: 1 << 20, MaxTokens: n}, opt: server.Options{Log: server.NewLog(io.Discard, server.LevelTrace)}})
	const event = `data: {"id":"chatcmpl-0123456789abcdef","object":"chat.completion.chunk","created":1790000000,"model":"m","choices":[{"index":0,"delta":{"content":"x"},"logprobs":null,"finish_reason":null}]}` + "\n\n"
	bare := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		control := http.NewResponseController(w)
		for range n {
			io.WriteString(w, event)
			control.Flush()
		}
	}))
	defer bare.Close()
	for _, c := range []struct{ name, url, body string }{
		{"bare", bare.URL, ""},
		{"chat", s.url + "/v1/chat/completions", `{"messages":[{"role":"user","content":"Q"}],"stream":true,"enable_thinking":false}`},
		{"messages", s.url + "/v1/messages", `{"model":"m","messages":[{"role":"user","content":"Q"}],"stream":true,"thinking":{"type":"disabled"}}`},
	} {
		b.Run(c.name, func(b *testing.B) {
			for b.Loop() {
				res, err := client.Post(c.url, "application/json", strings.NewReader(c.body))
				if err != nil {
					b.Fatal(err)
				}
				if read, err := io.Copy(io.Discard, res.Body); err != nil || read < n*int64(len("data: {}\n\n")) {
					b.Fatal(fmt.Errorf("%d bytes, %w", read, err))
				}
				res.Body.Close()
				gen.mu.Lock()
				gen.requests = nil
				gen.mu.Unlock()
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*n), "ns/event")
		})
	}
}
