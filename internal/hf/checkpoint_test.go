package hf

import (
	"bytes"
	"encoding/binary"
	"encoding/json/jsontext"
	"encoding/json/v2"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

const micro = "../../testdata/micro-radixark/checkpoint"

// header is the format as the general decoder sees it: the independent reading that tests compare with.
type header map[string]struct {
	DType   string   `json:"dtype"`
	Shape   []uint64 `json:"shape"`
	Offsets []uint64 `json:"data_offsets"`
}

func TestOpenGolden(t *testing.T) {
	c, err := Open(micro)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	var index struct {
		WeightMap map[string]string `json:"weight_map"`
	}
	text, err := os.ReadFile(filepath.Join(micro, indexName))
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(text, &index); err != nil {
		t.Fatal(err)
	}
	if got := slices.Sorted(maps.Keys(index.WeightMap)); !slices.Equal(got, c.Names()) || c.Len() != len(got) {
		t.Fatalf("%d names, index has %d", c.Len(), len(got))
	}
	raw, headers := map[string][]byte{}, map[string]header{}
	for _, f := range c.Files() {
		if raw[f], err = os.ReadFile(filepath.Join(micro, f)); err != nil {
			t.Fatal(err)
		}
		h := header{}
		n := binary.LittleEndian.Uint64(raw[f])
		var all map[string]jsonValue
		if err := json.Unmarshal(raw[f][8:8+n], &all); err != nil {
			t.Fatal(err)
		}
		delete(all, "__metadata__")
		for name, v := range all {
			e := h[name]
			if err := json.Unmarshal(v, &e); err != nil {
				t.Fatal(err)
			}
			h[name] = e
		}
		headers[f], raw[f] = h, raw[f][8+n:]
	}
	counts := map[string]int{}
	for name, file := range index.WeightMap {
		got, err := c.Tensor(name)
		if err != nil {
			t.Fatal(err)
		}
		want := headers[file][name]
		if got.Name != name || got.File != file || got.DType != want.DType || fmt.Sprint(got.Shape) != fmt.Sprint(want.Shape) {
			t.Fatalf("%s: %s %s %v, header %s %v", name, got.File, got.DType, got.Shape, want.DType, want.Shape)
		}
		data := raw[file][want.Offsets[0]:want.Offsets[1]]
		read := make([]byte, len(data))
		if _, err := got.ReadAt(read, 0); err != nil || !bytes.Equal(read, data) || !bytes.Equal(got.Data, data) {
			t.Fatalf("%s: content differs: %v", name, err)
		}
		counts[got.DType]++
	}
	if !maps.Equal(counts, c.DTypes()) {
		t.Errorf("dtypes %v, counted %v", c.DTypes(), counts)
	}
}

type jsonValue = jsontext.Value

// files writes a checkpoint folder; a nil content is left out.
func files(t testing.TB, content map[string][]byte) string {
	t.Helper()
	dir := t.TempDir()
	for name, data := range content {
		if data == nil {
			continue
		}
		if err := os.WriteFile(filepath.Join(dir, name), data, 0o666); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// shardOf frames a header and data.
func shardOf(text string, data int) []byte {
	out := binary.LittleEndian.AppendUint64(nil, uint64(len(text)))
	return append(append(out, text...), make([]byte, data)...)
}

func TestOpenRefusals(t *testing.T) {
	const one = `{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}`
	index := func(s string) []byte { return []byte(`{"metadata":{"total_size":2},"weight_map":{` + s + `}}`) }
	config := []byte("{}")
	for name, tt := range map[string]struct {
		files   map[string][]byte
		message []string
	}{
		"no config":       {map[string][]byte{}, []string{"config.json"}},
		"no weights":      {map[string][]byte{"config.json": config}, []string{indexName, singleName}},
		"index not json":  {map[string][]byte{indexName: []byte(`{"weight_map":{"a":`)}, []string{indexName, "ends early"}},
		"index tail":      {map[string][]byte{indexName: []byte(`{"weight_map":{}} x`)}, []string{indexName, "follows"}},
		"index no map":    {map[string][]byte{indexName: []byte(`{}`)}, []string{indexName, "weight_map"}},
		"index array":     {map[string][]byte{indexName: []byte(`[]`)}, []string{indexName, "offset 0"}},
		"index twice":     {map[string][]byte{indexName: index(`"a":"s","a":"s"`)}, []string{indexName, `duplicate tensor "a"`}},
		"map twice":       {map[string][]byte{indexName: []byte(`{"weight_map":{},"weight_map":{}}`)}, []string{indexName, "duplicate"}},
		"metadata twice":  {map[string][]byte{indexName: []byte(`{"metadata":{"a":1,"a":2},"weight_map":{}}`)}, []string{indexName, "duplicate"}},
		"file not string": {map[string][]byte{indexName: index(`"a":1`)}, []string{indexName, `"a"`}},
		"file elsewhere":  {map[string][]byte{indexName: index(`"a":"../s"`)}, []string{indexName, `"a"`, "same folder"}},
		"file missing":    {map[string][]byte{indexName: index(`"a":"s"`)}, []string{"s: ", "no such file"}},
		"tensor missing":  {map[string][]byte{indexName: index(`"b":"s","c":"s"`), "s": shardOf(one, 2)}, []string{"s: ", `"b"`}},
		"short file":      {map[string][]byte{singleName: []byte("1234567")}, []string{singleName, "too short"}},
		"long header":     {map[string][]byte{singleName: shardOf(one, 2)[:20]}, []string{singleName, "does not fit"}},
		"huge header":     {map[string][]byte{singleName: bytes.Repeat([]byte{0xff}, 9)}, []string{singleName, "does not fit"}},
		"truncated data":  {map[string][]byte{singleName: shardOf(one, 1)}, []string{singleName, `"a"`, "not inside"}},
		"unindexed bad": {
			map[string][]byte{indexName: index(""), singleName: shardOf(one, 1)},
			nil, // the file is not named by the index
		},
	} {
		t.Run(name, func(t *testing.T) {
			if name != "no config" {
				tt.files["config.json"] = config
			}
			c, err := Open(files(t, tt.files))
			if err == nil {
				c.Close()
			}
			if (tt.message == nil) != (err == nil) {
				t.Fatalf("error %v, want %q", err, tt.message)
			}
			for _, m := range tt.message {
				if !strings.Contains(err.Error(), m) || strings.Contains(err.Error(), "\n") {
					t.Errorf("error %q lacks %q", err, m)
				}
			}
		})
	}
	if _, err := Open(filepath.Join(micro, "config.json", "below")); err == nil || errors.Is(err, fs.ErrNotExist) {
		t.Errorf("folder below a file: %v", err)
	}
}

func TestHeaderRefusals(t *testing.T) {
	for _, tt := range []struct{ text, message string }{
		{`{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}`, "duplicate"},
		{`{"a":{"dtype":"U8","dtype":"U8","shape":[2],"data_offsets":[0,2]}}`, "duplicate member dtype"},
		{`{"a":{"dtype":"U8","shape":[2],"shape":[2],"data_offsets":[0,2]}}`, "duplicate member shape"},
		{`{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2],"data_offsets":[0,2]}}`, "duplicate member data_offsets"},
		{`{"__metadata__":{},"__metadata__":{}}`, "duplicate member __metadata__"},
		{`{"__metadata__":{"x":"1","x":"1"}}`, "duplicate"},
		{`{"__metadata__":1}`, "not an object"},
		{`{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2],"more":1}}`, "unknown member"},
		{`{"a":{"shape":[2],"data_offsets":[0,2]}}`, "no dtype"},
		{`{"a":{"dtype":"U8","data_offsets":[0,2]}}`, "no shape"},
		{`{"a":{"dtype":"U8","shape":[2]}}`, "no data_offsets"},
		{`{"a":{"dtype":"U8","shape":[3],"data_offsets":[0,2]}}`, "does not have"},
		{`{"a":{"dtype":"BF16","shape":[2],"data_offsets":[0,2]}}`, "does not have"},
		{`{"a":{"dtype":"F32","shape":[],"data_offsets":[0,2]}}`, "does not have"},
		{`{"a":{"dtype":"U8","shape":[4294967296,4294967296,4294967296],"data_offsets":[0,2]}}`, "does not have"},
		{`{"a":{"dtype":"U8","shape":[2],"data_offsets":[2,0]}}`, "not inside"},
		{`{"a":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}}`, "not inside"},
		{`{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2,2]}}`, "3 numbers"},
		{`{"a":{"dtype":"U8","shape":[2],"data_offsets":[0]}}`, "1 numbers"},
		{`{"a":{"dtype":"U8","shape":[2],"data_offsets":[-1,1]}}`, "integer"},
		{`{"a":{"dtype":"U8","shape":[2.0],"data_offsets":[0,2]}}`, "not an integer"},
		{`{"a":{"dtype":"U8","shape":[2e0],"data_offsets":[0,2]}}`, "not an integer"},
		{`{"a":{"dtype":"U8","shape":[02],"data_offsets":[0,2]}}`, "leading zero"},
		{`{"a":{"dtype":"U8","shape":[true],"data_offsets":[0,2]}}`, "integer"},
		{`{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,9223372036854775808]}}`, "too large"},
		{`{"a":{"dtype":1,"shape":[2],"data_offsets":[0,2]}}`, "need"},
		{`{"a":[]}`, "need"},
		{`{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},}`, "need"},
		{`{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}`, "ends early"},
		{`{"a`, "ends early"},
		{`{"a\`, "ends early"},
		{"{\"a\n\":1}", "control character"},
		{"{\"\xff\":{}}", "UTF-8"},
		{`{} {}`, "follows"},
		{``, "ends early"},
		{`[]`, "need"},
	} {
		_, err := Open(files(t, map[string][]byte{"config.json": []byte("{}"), singleName: shardOf(tt.text, 2)}))
		if err == nil || !strings.Contains(err.Error(), tt.message) || !strings.Contains(err.Error(), singleName) {
			t.Errorf("%s: %v, want %q", tt.text, err, tt.message)
		}
	}
}

// TestUnusedDType: a dtype outside the list is refused where the tensor is used, not where the file is opened.
func TestUnusedDType(t *testing.T) {
	const text = `{"__metadata__":{"format":"pt"},"\u0061":{"dtype":"F64","shape":[7],"data_offsets":[0,2]},"s":{"dtype":"F8_E4M3","shape":[1,1],"data_offsets":[1,2]}}   `
	c, err := Open(files(t, map[string][]byte{"config.json": []byte("{}"), singleName: shardOf(text, 2)}))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.Tensor("a"); err == nil || !strings.Contains(err.Error(), `"F64"`) || !strings.Contains(err.Error(), singleName) {
		t.Errorf("F64: %v", err)
	}
	s, err := c.Tensor("s")
	if err != nil || len(s.Data) != 1 {
		t.Errorf("s: %v", err)
	}
	for _, r := range [][2]int64{{-1, 1}, {0, 2}, {2, 0}} {
		if _, err := s.ReadAt(make([]byte, r[1]), r[0]); err == nil {
			t.Errorf("read of %d at %d accepted", r[1], r[0])
		}
	}
	if _, err := c.Tensor("b"); err == nil || !strings.Contains(err.Error(), `"b" is missing`) {
		t.Errorf("b: %v", err)
	}
}

// TestReadAtShrunk: a file that became shorter after Open is an error of ReadAt.
func TestReadAtShrunk(t *testing.T) {
	const text = `{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}`
	dir := files(t, map[string][]byte{"config.json": []byte("{}"), singleName: shardOf(text, 2)})
	c, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := os.Truncate(filepath.Join(dir, singleName), 20); err != nil {
		t.Skipf("a mapped file cannot be shortened here: %v", err)
	}
	a, err := c.Tensor("a")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := a.ReadAt(make([]byte, 2), 0); err == nil || !strings.Contains(err.Error(), singleName) {
		t.Errorf("short read: %v", err)
	}
}

// manyTensors writes a checkpoint of n tensors in 192 shards, the names and numbers of the RadixArk checkpoint's experts.
func manyTensors(t testing.TB, n int) string {
	t.Helper()
	const shards = 192
	content := map[string][]byte{"config.json": []byte("{}")}
	headers := make([][]byte, shards)
	at := make([]int, shards)
	var index []byte
	for i := range n {
		name := fmt.Sprintf("model.language_model.layers.%d.mlp.experts.%d.gate_proj.weight_scale_%d", i%48, i/48%512, i/48/512)
		s := i * shards / n
		sep := ","
		if at[s] == 0 {
			sep = "{"
		}
		headers[s] = fmt.Appendf(headers[s], `%s"%s":{"dtype":"F8_E4M3","shape":[1,4],"data_offsets":[%d,%d]}`, sep, name, at[s], at[s]+4)
		at[s] += 4
		index = fmt.Appendf(index, `%s"%s": "layer-%05d-experts-of-00192.safetensors"`, []string{"", ",\n    "}[min(i, 1)], name, s)
	}
	for s := range headers {
		content[fmt.Sprintf("layer-%05d-experts-of-00192.safetensors", s)] = shardOf(string(headers[s])+"}", at[s])
	}
	content[indexName] = []byte(`{"metadata": {"total_size": ` + strconv.Itoa(4*n) + `}, "weight_map": {` + string(index) + "}}")
	return files(t, content)
}

// TestOpenMany: 300,000 tensors open in about a second.
func TestOpenMany(t *testing.T) {
	const n = 300_000
	dir := manyTensors(t, n)
	start := time.Now()
	c, err := Open(dir)
	took := time.Since(start)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	t.Logf("%d tensors in %d shards opened in %v", c.Len(), len(c.Files()), took)
	if c.Len() != n {
		t.Errorf("%d tensors", c.Len())
	}
	if took > 10*time.Second {
		t.Errorf("opening took %v: about a second is wanted, and ten is beyond any busy machine", took)
	}
	x, err := c.Tensor("model.language_model.layers.47.mlp.experts.511.gate_proj.weight_scale_2")
	if err != nil || !slices.Equal(x.Shape, []int{1, 4}) || len(x.Data) != 4 {
		t.Errorf("%+v: %v", x, err)
	}
}

func BenchmarkOpenMany(b *testing.B) {
	dir := manyTensors(b, 300_000)
	for b.Loop() {
		c, err := Open(dir)
		if err != nil {
			b.Fatal(err)
		}
		c.Close()
	}
}

// FuzzHeader: the parser never panics, and what it accepts the general decoder reads the same.
func FuzzHeader(f *testing.F) {
	for _, s := range []string{
		`{}`, `{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}`, `{"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[],"data_offsets":[0,4]}} `,
		`{"\u0061\n":{"shape":[0,3],"data_offsets":[5,5],"dtype":"BF16"}}`, `{"é":{"dtype":"X","shape":[1,2,3],"data_offsets":[1,9]}}`,
		`{"a":{"dtype":"U8","shape":[18446744073709551616],"data_offsets":[0,2]}}`, `{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"a":{}}`, `{"a`, `{"\`,
	} {
		f.Add([]byte(s), int64(9))
	}
	f.Fuzz(func(t *testing.T, text []byte, data int64) {
		got := map[string]entry{}
		err := parseHeader(text, data, func(name []byte, e entry) error {
			if _, ok := got[string(name)]; ok {
				return errors.New("duplicate")
			}
			got[string(name)] = e
			return nil
		})
		if err != nil {
			if strings.Contains(err.Error(), "\n") {
				t.Errorf("error of more than one line: %q", err)
			}
			return
		}
		var all map[string]jsonValue
		if err := json.Unmarshal(text, &all); err != nil {
			t.Fatalf("accepted, but %v", err)
		}
		delete(all, "__metadata__")
		if len(all) != len(got) {
			t.Fatalf("%d tensors, decoder has %d", len(got), len(all))
		}
		for name, v := range all {
			var w struct {
				DType   string  `json:"dtype"`
				Shape   []int   `json:"shape"`
				Offsets []int64 `json:"data_offsets"`
			}
			if err := json.Unmarshal(v, &w, json.RejectUnknownMembers(true)); err != nil {
				t.Fatalf("%q: accepted, but %v", name, err)
			}
			e := got[name]
			if e.dtype != w.DType || !slices.Equal(e.shape, w.Shape) || !slices.Equal([]int64{e.begin, e.end}, w.Offsets) {
				t.Fatalf("%q: %+v, decoder has %+v", name, e, w)
			}
			if e.begin > e.end || e.end > data {
				t.Fatalf("%q: [%d, %d) outside %d", name, e.begin, e.end, data)
			}
		}
	})
}

// FuzzIndex: what the index's parser accepts the general decoder reads the same, and every shard is a file of the same folder.
func FuzzIndex(f *testing.F) {
	for _, s := range []string{
		`{"weight_map":{}}`, `{"metadata":{"total_size":1},"weight_map":{"a":"s1","b":"s2","\u0061\n":"s1"}} `, `{"weight_map":{"a":"../s"}}`,
		`{"weight_map":{"a":"s","a":"s"}}`, `{"weight_map":{"a":1}}`, `{"weight_map":{"a":"s\n1"}}`, `{"weight_map":{"é":"ü","\ud83d\ude00":"x"},"x":[null,{"y":1e9}]}`, `{"weight_map":`,
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		var c Checkpoint
		if err := c.parseIndex(text); err != nil {
			if strings.ContainsAny(err.Error(), "\r\n") {
				t.Errorf("error of more than one line: %q", err)
			}
			return
		}
		var want struct {
			Map map[string]string `json:"weight_map"`
		}
		if err := json.Unmarshal(text, &want); err != nil {
			t.Fatalf("accepted, but %v", err)
		}
		if len(want.Map) != len(c.index) || len(c.tensors) != len(c.index) {
			t.Fatalf("%d names and %d tensors, decoder has %d", len(c.index), len(c.tensors), len(want.Map))
		}
		for name, file := range want.Map {
			i, ok := c.index[name]
			if !ok || c.tensors[i].name != name || c.shards[c.tensors[i].shard].name != file {
				t.Fatalf("%q: %v, decoder has %q", name, ok, file)
			}
			if strings.ContainsAny(file, "/\\\r\n") || file == "" || file == ".." {
				t.Fatalf("%q lies in %q", name, file)
			}
		}
	})
}

// TestOpenFile: one file outside a checkpoint folder; int32 is read there.
func TestOpenFile(t *testing.T) {
	dir := files(t, map[string][]byte{"x.safetensors": shardOf(`{"a":{"dtype":"I32","shape":[2],"data_offsets":[0,8]}}`, 8)})
	c, err := OpenFile(filepath.Join(dir, "x.safetensors"))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if a, err := c.Tensor("a"); err != nil || a.DType != "I32" || len(a.Data) != 8 {
		t.Errorf("%+v: %v", a, err)
	}
	if _, err := OpenFile(filepath.Join(dir, "y.safetensors")); err == nil || !strings.Contains(err.Error(), "y.safetensors") {
		t.Errorf("missing file: %v", err)
	}
}

// TestOpenWithout: unwanted tensors do not exist, and a shard of nothing else need not be there.
func TestOpenWithout(t *testing.T) {
	const two = `{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[1],"data_offsets":[2,3]}}`
	without := func(name string) bool { return name == "b" || name == "c" }
	for name, content := range map[string]map[string][]byte{
		"index":  {indexName: []byte(`{"weight_map":{"a":"s","b":"s","c":"absent"}}`), "s": shardOf(two, 3)},
		"single": {singleName: shardOf(two, 3)},
	} {
		content["config.json"] = []byte("{}")
		c, err := OpenWithout(files(t, content), without)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if !slices.Equal(c.Names(), []string{"a"}) || c.Has("b") || len(c.Files()) != 1 {
			t.Errorf("%s: %q in %q", name, c.Names(), c.Files())
		}
		c.Close()
	}
	if _, err := OpenFile(filepath.Join(t.TempDir(), "absent")); err == nil || strings.Contains(err.Error(), "index") || !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("missing file: %v", err)
	}
}
