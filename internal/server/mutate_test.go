package server_test

import (
	"encoding/json/v2"
	"maps"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"ninfer/internal/front"
)

// Bodies that agents send and bodies of random conversations, each with something in them replaced, taken away or doubled: whatever it is,
// the answer is one or says what is wrong, and the server goes on.
func TestMutatedBodies(t *testing.T) {
	gen := &script{text: "x"}
	s := start(t, setup{gen: gen, template: string(read(t, own)), front: front.Options{Context: 1 << 16}})
	type sample struct{ path, body string }
	var samples []sample
	files, err := filepath.Glob("testdata/agents/*.json")
	if err != nil || len(files) == 0 {
		t.Fatal(files, err)
	}
	for _, file := range files {
		var sent struct {
			Path string `json:"path"`
			Body any    `json:"body"`
		}
		if err := json.Unmarshal(read(t, file), &sent); err != nil {
			t.Fatal(err)
		}
		b, _ := json.Marshal(sent.Body)
		samples = append(samples, sample{sent.Path, strings.ReplaceAll(string(b), `"actor"`, `"m"`)})
	}
	rng := rand.New(rand.NewPCG(5, 6))
	for range 20 {
		d := randomDialogue(rng)
		samples = append(
			samples, sample{"/v1/chat/completions", d.chat() + "}"}, sample{"/v1/responses", d.responses() + "}"}, sample{"/v1/messages", d.messages() + "}"},
			sample{"/v1/responses/input_tokens", d.responses() + "}"}, sample{"/v1/messages/count_tokens", d.messages() + "}"},
		)
	}
	statuses := map[int]int{}
	for range 800 {
		c := samples[rng.IntN(len(samples))]
		var v any
		if err := json.Unmarshal([]byte(c.body), &v); err != nil {
			t.Fatal(err)
		}
		for range 1 + rng.IntN(2) {
			mutate(rng, v)
		}
		b, err := json.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		a := send(t, "POST", s.url+c.path, string(b))
		statuses[a.status]++
		switch a.status {
		case 200:
		case 400, 404:
			if strings.HasPrefix(c.path, "/v1/messages") {
				if !strings.HasPrefix(a.body, `{"type":"error","error":{"type":"`) {
					t.Errorf("%s %s: %s", c.path, b, a.body)
				}
			} else if message, _, _, code := errorIn(t, a.body); message == "" || code == "" || strings.Contains(message, "\n") {
				t.Errorf("%s %s: %s", c.path, b, a.body)
			}
		default:
			t.Errorf("%s %s: %d %s", c.path, b, a.status, a.body)
		}
	}
	if statuses[200] < 80 || statuses[400] < 80 {
		t.Errorf("%v: the bodies are not what they should be", statuses)
	}
}

// others are what is put in the place of values.
var others = []string{`null`, `true`, `-1`, `1e300`, `""`, `"x"`, `"assistant"`, `"function"`, `"\u0000"`, `[]`, `[null]`, `["a",1]`, `{}`, `{"type":"text","text":"t"}`}

func parse(text string) (v any) {
	json.Unmarshal([]byte(text), &v)
	return v
}

// mutate changes one value somewhere in v, which is an object or an array.
func mutate(rng *rand.Rand, v any) {
	// Down a random way, and change something at its end.
	for {
		var inner any
		change := rng.IntN(4) == 0
		switch v := v.(type) {
		case map[string]any:
			names := slices.Sorted(maps.Keys(v))
			if len(names) == 0 {
				v["x"] = parse(others[rng.IntN(len(others))])
				return
			}
			name := names[rng.IntN(len(names))]
			if e := v[name]; !change && isContainer(e) {
				inner = e
				break
			}
			if rng.IntN(4) == 0 {
				delete(v, name)
				return
			}
			v[name] = parse(others[rng.IntN(len(others))])
			return
		case []any:
			if len(v) == 0 {
				return
			}
			i := rng.IntN(len(v))
			if e := v[i]; !change && isContainer(e) {
				inner = e
				break
			}
			if rng.IntN(2) == 0 {
				b, _ := json.Marshal(v[rng.IntN(len(v))])
				v[i] = parse(string(b))
				return
			}
			v[i] = parse(others[rng.IntN(len(others))])
			return
		}
		v = inner
	}
}

func isContainer(v any) bool {
	switch v.(type) {
	case map[string]any, []any:
		return true
	}
	return false
}
