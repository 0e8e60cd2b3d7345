// Package converttest makes small checkpoints of every profile for tests: it edits safetensors files, and derives checkpoints of the
// profiles swift and mixed from the one of profile radixark that every clone has.
//
// Its decoders and encoders are written from the formats' definitions and share nothing with package num, so that tests compare two
// readings.
package converttest

import (
	"encoding/binary"
	"encoding/json/v2"
	"fmt"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// Raw is one tensor of a checkpoint under edit. Shape nil is a scalar.
type Raw struct {
	DType string
	Shape []int
	Data  []byte
}

// Tensors reads all tensors of a checkpoint folder, with the general JSON decoder.
func Tensors(t testing.TB, dir string) map[string]Raw {
	t.Helper()
	out := map[string]Raw{}
	names, err := filepath.Glob(filepath.Join(dir, "*.safetensors"))
	if err != nil || len(names) == 0 {
		t.Fatalf("no shards in %s: %v", dir, err)
	}
	for _, name := range names {
		maps.Copy(out, File(t, name))
	}
	return out
}

// File reads all tensors of a safetensors file.
func File(t testing.TB, path string) map[string]Raw {
	t.Helper()
	out := map[string]Raw{}
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
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
		out[name] = Raw{e.DType, e.Shape, slices.Clone(data[n:][e.Offsets[0]:e.Offsets[1]])}
	}
	return out
}

// Save writes tensors as two shards and an index.
func Save(t testing.TB, dir string, all map[string]Raw) {
	t.Helper()
	index := map[string]string{}
	var half [2]map[string]Raw
	for i, name := range slices.Sorted(maps.Keys(all)) {
		k := min(2*i/len(all), 1)
		if half[k] == nil {
			half[k] = map[string]Raw{}
		}
		half[k][name] = all[name]
		index[name] = fmt.Sprintf("model-%05d-of-00002.safetensors", k+1)
	}
	for k := range half {
		SaveFile(t, filepath.Join(dir, fmt.Sprintf("model-%05d-of-00002.safetensors", k+1)), half[k])
	}
	text, err := json.Marshal(map[string]any{"metadata": map[string]any{}, "weight_map": index}, json.Deterministic(true))
	if err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(dir, "model.safetensors.index.json"), text)
}

// SaveFile writes a safetensors file.
func SaveFile(t testing.TB, path string, all map[string]Raw) {
	t.Helper()
	header := map[string]any{}
	var data []byte
	for _, name := range slices.Sorted(maps.Keys(all)) {
		x := all[name]
		if x.Shape == nil {
			x.Shape = []int{}
		}
		header[name] = map[string]any{"dtype": x.DType, "shape": x.Shape, "data_offsets": []int{len(data), len(data) + len(x.Data)}}
		data = append(data, x.Data...)
	}
	h, err := json.Marshal(header, json.Deterministic(true))
	if err != nil {
		t.Fatal(err)
	}
	write(t, path, slices.Concat(binary.LittleEndian.AppendUint64(nil, uint64(len(h))), h, data))
}

func write(t testing.TB, path string, data []byte) {
	t.Helper()
	if err := os.WriteFile(path, data, 0o666); err != nil {
		t.Fatal(err)
	}
}

// Clone copies a folder to where it can be changed.
func Clone(t testing.TB, dir string) string {
	t.Helper()
	to := t.TempDir()
	if err := os.CopyFS(to, os.DirFS(dir)); err != nil {
		t.Fatal(err)
	}
	return to
}

const table = "model.language_model.layers.1.ple.ple_embedding.ngram_embedding."

// Swift derives a checkpoint of profile swift from one of profile radixark: the table is BF16, near what it was.
func Swift(t testing.TB, radixark string) string {
	t.Helper()
	dir := Clone(t, radixark)
	all := Tensors(t, dir)
	scale := BF16(all[table+"weight_scale"].Data, 0)
	delete(all, table+"weight_scale")
	for name, x := range all {
		if !strings.HasPrefix(name, table) {
			continue
		}
		var words []byte
		for _, c := range x.Data {
			words = binary.LittleEndian.AppendUint16(words, bf16Word(E4M3(c)*scale))
		}
		all[name] = Raw{"BF16", x.Shape, words}
	}
	Save(t, dir, all)
	replace(t, filepath.Join(dir, "config.json"), `"ple_embedding_dtype": "float8_e4m3fn"`, `"ple_embedding_dtype": null`)
	return dir
}

// bf16Word rounds toward zero, which is near enough.
func bf16Word(x float64) uint16 { return uint16(math.Float32bits(float32(x)) >> 16) }

func replace(t testing.TB, path, old, new string) {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(text), old) {
		t.Fatalf("%s has no %s", path, old)
	}
	write(t, path, []byte(strings.Replace(string(text), old, new, 1)))
}

// Mixed derives a checkpoint of profile mixed and the folder of its INT4 table from a checkpoint of profile radixark: the same experts in
// the other container, projections in FP8 with one multiplier a row, the table requantized. Words that quantizers seldom make are put in: a
// group of the table with scale zero, a subnormal scale, both zeros of FP8.
func Mixed(t testing.TB, radixark string) (dir, ple string) {
	t.Helper()
	dir, ple = Clone(t, radixark), t.TempDir()
	all := Tensors(t, dir)
	scale := BF16(all[table+"weight_scale"].Data, 0)
	delete(all, table+"weight_scale")
	rows, width, shards := 0, 0, 0
	for ; ; shards++ {
		name := table + "shard_" + strconv.Itoa(shards) + ".weight"
		x, ok := all[name]
		if !ok {
			break
		}
		delete(all, name)
		rows, width = rows+x.Shape[0], x.Shape[1]
		codes, scales := make([]byte, len(x.Data)/2), make([]byte, len(x.Data)/8)
		for g := range len(x.Data) / 16 {
			most := 0.
			for _, c := range x.Data[16*g:][:16] {
				most = max(most, math.Abs(E4M3(c)*scale))
			}
			word := uint16(g % 7) // zero and subnormals
			if g%50 != 0 {
				word = halfWord(most / 7)
			}
			binary.LittleEndian.PutUint16(scales[2*g:], word)
			for i, c := range x.Data[16*g:][:16] {
				u := byte(8)
				if s := half(word); s > 0 {
					u = byte(8 + max(-8, min(7, math.RoundToEven(E4M3(c)*scale/s))))
				}
				codes[8*g+i/2] |= u << (i % 2 * 4)
			}
		}
		SaveFile(t, filepath.Join(ple, "shard_"+strconv.Itoa(shards)+".safetensors"), map[string]Raw{
			"weight_i4":    {"U8", []int{x.Shape[0], width / 2}, codes},
			"weight_scale": {"F16", []int{x.Shape[0], width / 16}, scales},
		})
	}
	write(t, filepath.Join(ple, "META.json"), fmt.Appendf(nil, `{"layout": "group16_int4_fp16scale_lownibblefirst", "shards": %d, "rows": %d, "width": %d}`, shards, rows, width))

	for name, x := range maps.Clone(all) {
		expert, isExpert := strings.CutPrefix(name, "model.language_model.layers.")
		isExpert = isExpert && strings.Contains(expert, ".mlp.experts.")
		switch {
		case isExpert && strings.HasSuffix(name, "_proj.weight"):
			all[name+"_packed"] = x
			delete(all, name)
		case isExpert && strings.HasSuffix(name, ".weight_scale_2"):
			base := strings.TrimSuffix(name, "weight_scale_2")
			d := 1 / math.Float32frombits(binary.LittleEndian.Uint32(x.Data))
			all[base+"weight_global_scale"] = Raw{"F32", []int{1}, F32(d)}
			all[base+"input_global_scale"] = Raw{"F32", []int{1}, F32(1)}
			delete(all, name)
			delete(all, base+"input_scale")
		case strings.HasPrefix(name, "model.") && projection(name):
			codes, scales := fp8Rows(x)
			all[name] = Raw{"F8_E4M3", x.Shape, codes}
			all[name+"_scale"] = Raw{"F32", []int{x.Shape[0], 1}, scales}
		}
	}
	Save(t, dir, all)
	path := filepath.Join(dir, "config.json")
	replace(t, path, `"quant_method": "modelopt"`, `"quant_method": "compressed-tensors"`)
	replace(t, path, `"ple_embedding_dtype": "float8_e4m3fn"`, `"ple_embedding_dtype": null`)
	return dir, ple
}

func projection(name string) bool {
	for _, s := range []string{
		"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "linear_attn.in_proj_qkv", "linear_attn.in_proj_z", "linear_attn.out_proj",
	} {
		if strings.HasSuffix(name, s+".weight") {
			return true
		}
	}
	return false
}

// fp8Rows encodes a BF16 matrix, one multiplier a row.
func fp8Rows(x Raw) (codes, scales []byte) {
	cols := x.Shape[1]
	for r := range x.Shape[0] {
		most := 0.
		for c := range cols {
			most = max(most, math.Abs(BF16(x.Data, r*cols+c)))
		}
		s := float32(max(most, 1e-6) / 448)
		scales = append(scales, F32(s)...)
		for c := range cols {
			codes = append(codes, NearestE4M3(BF16(x.Data, r*cols+c)/float64(s)))
		}
	}
	return codes, scales
}

// F32 is a little-endian binary32 word.
func F32(x float32) []byte { return binary.LittleEndian.AppendUint32(nil, math.Float32bits(x)) }

// BF16 is the value of word i.
func BF16(p []byte, i int) float64 {
	return float64(math.Float32frombits(uint32(binary.LittleEndian.Uint16(p[2*i:])) << 16))
}

// E4M3 is the value of a word, NaN apart.
func E4M3(w byte) float64 {
	e, m := int(w>>3&15), float64(w&7)
	v := math.Ldexp(m, -9)
	if e > 0 {
		v = math.Ldexp(1+m/8, e-7)
	}
	if w&0x80 != 0 {
		return -v
	}
	return v
}

// magnitudes are the values of the words 0 to 0x7e.
var magnitudes = func() (v [0x7f]float64) {
	for w := range v {
		v[w] = E4M3(byte(w))
	}
	return v
}()

// NearestE4M3 is the nearest word, the even one of two; the sign bit is that of x. Magnitudes above 448 become 448.
func NearestE4M3(x float64) byte {
	a := min(math.Abs(x), 448)
	w, _ := slices.BinarySearch(magnitudes[:], a)
	if w > 0 {
		if below, above := a-magnitudes[w-1], magnitudes[w]-a; below < above || below == above && w%2 == 1 {
			w--
		}
	}
	if math.Signbit(x) {
		w |= 0x80
	}
	return byte(w)
}

// E2M1 is the value of a code.
func E2M1(c byte) float64 {
	v := []float64{0, 0.5, 1, 1.5, 2, 3, 4, 6}[c&7]
	if c&8 != 0 {
		return -v
	}
	return v
}

// NearestE2M1 is the nearest magnitude's code for a >= 0, the even one of two.
func NearestE2M1(a float64) byte {
	best := byte(0)
	for c := range byte(8) {
		d, b := math.Abs(E2M1(c)-a), math.Abs(E2M1(best)-a)
		if d < b || d == b && c%2 == 0 {
			best = c
		}
	}
	return best
}

// half is the value of a finite binary16 word that is not negative.
func half(w uint16) float64 {
	e, m := int(w>>10), float64(w&0x3ff)
	if e == 0 {
		return math.Ldexp(m, -24)
	}
	return math.Ldexp(1+m/1024, e-25+10)
}

// halfWord is the largest binary16 word not above x.
func halfWord(x float64) uint16 {
	lo, hi := uint16(0), uint16(0x7bff)
	for lo < hi {
		if mid := (lo + hi + 1) / 2; half(mid) <= x {
			lo = mid
		} else {
			hi = mid - 1
		}
	}
	return lo
}
