package server_test

import (
	"net/http"
	"testing"
)

func BenchmarkHealth(b *testing.B) {
	s := start(b, setup{gen: &script{text: "x"}})
	r := must(http.NewRequest("GET", "/health", nil))
	b.ReportAllocs()
	for b.Loop() {
		s.ServeHTTP(&httpRecorder{header: http.Header{}}, r)
	}
}
