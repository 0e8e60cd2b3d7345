// Package selftest compares a backend with recorded results of the reference implementation.
//
// A golden folder holds golden.json (cases: prompts, continuations, margins), golden.safetensors (logits, streams, decisions) and
// optionally tokenizer_golden.json. Run computes every text case on a backend and reports one line a case with its worst error. It
// is the first thing to run on a new machine.
package selftest

import (
	"encoding/binary"
	"encoding/json/jsontext"
	"encoding/json/v2"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"

	"ninfer/internal/hf"
)

// golden is an opened folder.
type golden struct {
	dir       string
	names     []string // of the cases, sorted
	cases     map[string]*goldenCase
	tensors   *hf.Checkpoint
	tokenizer []tokenizerCase
}

// goldenCase is one prompt with what the reference computes from it. A margin is the distance of the two best logits.
type goldenCase struct {
	Tokens       []int32   `json:"tokens"`
	Next         int32     `json:"next"`
	NextMargin   float64   `json:"next_margin"`
	Drafts       []int32   `json:"drafts"`
	DraftsMargin []float64 `json:"drafts_margin"`
	Greedy       []int32   `json:"greedy"`
	Margin       []float64 `json:"margin"`

	// Of conversations only.
	Messages       jsontext.Value `json:"messages"`
	EnableThinking bool           `json:"enable_thinking"`
	Prompt         string         `json:"prompt"`
	Text           string         `json:"text"`
}

// chat reports whether the case is a conversation.
func (c *goldenCase) chat() bool { return c.Messages != nil }

type tokenizerCase struct {
	Text    string  `json:"text"`
	IDs     []int32 `json:"ids"`
	Decoded string  `json:"decoded"`
}

func openGolden(dir string) (*golden, error) {
	g := &golden{dir: dir}
	var meta struct {
		Cases map[string]*goldenCase `json:"cases"`
	}
	if err := readJSON(filepath.Join(dir, "golden.json"), &meta); err != nil {
		return nil, err
	}
	if len(meta.Cases) == 0 {
		return nil, fmt.Errorf("%s: golden.json has no cases", dir)
	}
	g.cases, g.names = meta.Cases, slices.Sorted(maps.Keys(meta.Cases))
	for name, c := range g.cases {
		if len(c.Tokens) < 2 || len(c.Margin) != len(c.Greedy) || len(c.DraftsMargin) != len(c.Drafts) {
			return nil, fmt.Errorf("%s: golden.json: case %q: needs two tokens and one margin for each id", dir, name)
		}
		if len(c.Greedy) == 0 {
			c.Greedy, c.Margin = []int32{c.Next}, []float64{c.NextMargin}
		}
	}
	if err := readJSON(filepath.Join(dir, "tokenizer_golden.json"), &g.tokenizer); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	var err error
	g.tensors, err = hf.OpenFile(filepath.Join(dir, "golden.safetensors"))
	return g, err
}

func readJSON(path string, v any) error {
	raw, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(raw, v); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	return nil
}

// rows returns a recorded float32 matrix, or an error if it is absent or has other than n rows.
func (g *golden) rows(name string, n int) ([][]float32, error) {
	t, err := g.tensors.Tensor(name)
	if err != nil {
		return nil, err
	}
	if t.DType != "F32" || len(t.Shape) != 2 || t.Shape[0] != n {
		return nil, fmt.Errorf("%s: tensor %q is %s %v, need %d rows of F32", t.File, name, t.DType, t.Shape, n)
	}
	out := make([][]float32, n)
	w := t.Shape[1]
	for r := range out {
		out[r] = make([]float32, w)
		for i := range out[r] {
			out[r][i] = math.Float32frombits(binary.LittleEndian.Uint32(t.Data[4*(r*w+i):]))
		}
	}
	return out, nil
}

// experts returns the recorded routing of a layer, or nil if it was not recorded.
func (g *golden) experts(c string, layer int) [][]int32 {
	t, err := g.tensors.Tensor(fmt.Sprintf("%s.layer%d.experts", c, layer))
	if err != nil || t.DType != "I32" || len(t.Shape) != 2 {
		return nil
	}
	out := make([][]int32, t.Shape[0])
	for r := range out {
		for i := range t.Shape[1] {
			out[r] = append(out[r], int32(binary.LittleEndian.Uint32(t.Data[4*(r*t.Shape[1]+i):])))
		}
	}
	return out
}

// selected returns the recorded key selection of a layer, row by visible token, or nil if it was not recorded.
func (g *golden) selected(c string, layer int) [][]bool {
	t, err := g.tensors.Tensor(fmt.Sprintf("%s.layer%d.selected", c, layer))
	if err != nil || t.DType != "U8" || len(t.Shape) != 2 {
		return nil
	}
	out := make([][]bool, t.Shape[0])
	for r := range out {
		for i := range min(r+1, t.Shape[1]) {
			out[r] = append(out[r], t.Data[r*t.Shape[1]+i] != 0)
		}
	}
	return out
}
