package convert

import (
	"encoding/binary"
	"encoding/json/v2"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"testing"
)

// raw is one tensor of a checkpoint under edit.
type raw struct {
	dtype string
	shape []int
	data  []byte
}

// tensors reads all tensors of a checkpoint folder, with the general JSON decoder.
func tensors(t testing.TB, dir string) map[string]raw {
	t.Helper()
	out := map[string]raw{}
	names, err := filepath.Glob(filepath.Join(dir, "*.safetensors"))
	if err != nil || len(names) == 0 {
		t.Fatalf("no shards in %s: %v", dir, err)
	}
	for _, name := range names {
		data := read(t, name)
		n := 8 + binary.LittleEndian.Uint64(data)
		var h map[string]struct {
			DType   string `json:"dtype"`
			Shape   []int  `json:"shape"`
			Offsets [2]int `json:"data_offsets"`
		}
		if err := json.Unmarshal(data[8:n], &h); err != nil {
			t.Fatal(err)
		}
		delete(h, "__metadata__")
		for name, e := range h {
			out[name] = raw{e.DType, e.Shape, slices.Clone(data[n:][e.Offsets[0]:e.Offsets[1]])}
		}
	}
	return out
}

// save writes tensors as two shards and an index.
func save(t testing.TB, dir string, all map[string]raw) {
	t.Helper()
	index := map[string]string{}
	headers := [2]map[string]any{{}, {}}
	var data [2][]byte
	for i, name := range slices.Sorted(maps.Keys(all)) {
		x := all[name]
		k := min(2*i/len(all), 1)
		if x.shape == nil {
			x.shape = []int{}
		}
		headers[k][name] = map[string]any{"dtype": x.dtype, "shape": x.shape, "data_offsets": []int{len(data[k]), len(data[k]) + len(x.data)}}
		data[k] = append(data[k], x.data...)
		index[name] = fmt.Sprintf("model-%05d-of-00002.safetensors", k+1)
	}
	write := func(name string, data []byte) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, name), data, 0o666); err != nil {
			t.Fatal(err)
		}
	}
	for k := range headers {
		h, err := json.Marshal(headers[k], json.Deterministic(true))
		if err != nil {
			t.Fatal(err)
		}
		out := binary.LittleEndian.AppendUint64(nil, uint64(len(h)))
		write(fmt.Sprintf("model-%05d-of-00002.safetensors", k+1), append(append(out, h...), data[k]...))
	}
	text, err := json.Marshal(map[string]any{"metadata": map[string]any{}, "weight_map": index}, json.Deterministic(true))
	if err != nil {
		t.Fatal(err)
	}
	write("model.safetensors.index.json", text)
}

// clone copies a checkpoint folder to where it can be changed.
func clone(t testing.TB, dir string) string {
	t.Helper()
	to := t.TempDir()
	if err := os.CopyFS(to, os.DirFS(dir)); err != nil {
		t.Fatal(err)
	}
	return to
}

// list gives the names in a folder.
func list(t testing.TB, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, e := range entries {
		out = append(out, e.Name())
	}
	return out
}
