package server

import (
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// openapi.yaml has every route with every method, and no other.
func TestDescription(t *testing.T) {
	file, err := os.ReadFile("openapi.yaml")
	if err != nil {
		t.Fatal(err)
	}
	_, paths, ok := strings.Cut(string(file), "\npaths:\n")
	paths, _, ok2 := strings.Cut(paths, "\ncomponents:\n")
	if !ok || !ok2 {
		t.Fatal("openapi.yaml has no paths and components")
	}
	var described []string
	path := ""
	for line := range strings.Lines(paths) {
		if m := regexp.MustCompile(`^  (/\S*):\n`).FindStringSubmatch(line); m != nil {
			path = m[1]
		}
		if m := regexp.MustCompile(`^    (get|post|delete):`).FindStringSubmatch(line); m != nil {
			described = append(described, strings.ToUpper(m[1])+" "+path)
		}
	}
	served := []string{
		"GET /", "GET /v1/models/{id}", // not among the fixed ones
		"GET /v1/responses/{response_id}", "DELETE /v1/responses/{response_id}", "GET /v1/responses/{response_id}/input_items", "POST /v1/responses/{response_id}/cancel",
	}
	for path, methods := range New(Options{}).fixed() {
		for method := range maps.Keys(methods) {
			served = append(served, method+" "+path)
		}
	}
	slices.Sort(described)
	slices.Sort(served)
	if !slices.Equal(described, served) {
		t.Errorf("described\n%s\nserved\n%s", strings.Join(described, "\n"), strings.Join(served, "\n"))
	}
}
