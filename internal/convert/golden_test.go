package convert

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json/v2"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"ninfer/internal/arch"
	"ninfer/internal/artifact"
	"ninfer/internal/hf"
	"ninfer/internal/num"
)

const (
	micro  = "../../testdata/micro-radixark/checkpoint"
	output = "qwen3_8_flash_next_125b_a6b_nvfp4.ninfer"

	mixedOutput = "qwen3_8_flash_next_mixed.ninfer"
)

// shared is a folder beside the repository that a fresh clone does not have.
func shared(t *testing.T, path string) string {
	t.Helper()
	dir := filepath.Join("../../../shared", path)
	if _, err := os.Stat(dir); err != nil {
		t.Skipf("%s is not here", dir)
	}
	return dir
}

func convert(t testing.TB, o Options) (*Report, *artifact.File) {
	t.Helper()
	r, err := Run(context.Background(), o)
	if err != nil {
		t.Fatal(err)
	}
	f, err := artifact.Open(o.Out)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return r, f
}

func TestGolden(t *testing.T) {
	for _, tt := range []struct {
		name  string
		model func(t *testing.T) string
		rows  int // largest multiple of 64 not above 0.6 of the ids
	}{
		{"micro-radixark", func(*testing.T) string { return micro }, 256},
		{"mini-radixark", func(t *testing.T) string { return shared(t, "golden/mini-radixark/checkpoint") }, 1152},
	} {
		t.Run(tt.name, func(t *testing.T) {
			model := tt.model(t)
			dir := t.TempDir()
			var steps []Step
			r, f := convert(t, Options{Model: model, Out: filepath.Join(dir, output), Progress: func(s Step) {
				if !s.Partial {
					steps = append(steps, s)
				}
			}})
			checkContent(t, model, f, tt.rows, nil)
			checkReport(t, r, f)

			v, err := artifact.Verify(f.Path(), artifact.Options{})
			if err != nil || !v.Passed || v.ReportEqual != len(f.Directory().Objects) || v.IDKind != "content" {
				t.Errorf("verify: %+v: %v", v, err)
			}

			n := len(f.Directory().Objects)
			if len(steps) != n {
				t.Fatalf("%d steps for %d objects", len(steps), n)
			}
			names := map[string]bool{}
			for i, s := range steps {
				names[s.Name] = true
				if s.Index != i+1 || s.Total != n || s.Done > s.All || s.Rate() <= 0 {
					t.Errorf("step %d: %+v", i, s)
				}
			}
			if last := steps[n-1]; len(names) != n || last.Done != last.All {
				t.Errorf("%d names, %d of %d bytes", len(names), last.Done, last.All)
			}

			// The same bytes again, and the same content and id split otherwise.
			other := t.TempDir()
			convert(t, Options{Model: model, Out: filepath.Join(other, output)})
			a, b := read(t, f.Path()), read(t, filepath.Join(other, output))
			if !bytes.Equal(a, b) {
				t.Error("a second run gave other bytes")
			}
			for _, limit := range []int64{1 << 20, 1<<20 + 12345} {
				split := t.TempDir()
				_, g := convert(t, Options{Model: model, Out: filepath.Join(split, output), MaxFileBytes: limit})
				if len(g.Directory().Files) < 4 {
					t.Errorf("%d files of %d bytes", len(g.Directory().Files), limit)
				}
				if f.ID() != g.ID() {
					t.Errorf("id %x with files of %d bytes, %x else", g.ID(), limit, f.ID())
				}
				payload := make([]byte, f.PayloadBytes())
				if _, err := g.ReadAt(payload, 0); err != nil || !bytes.Equal(payload, a[f.PayloadStart():]) {
					t.Errorf("payload differs when split at %d: %v", limit, err)
				}
			}
		})
	}
}

func read(t testing.TB, path string) []byte {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

// Decoders of the checkpoint's words, written from the definitions: they share nothing with package num.
func bf16(p []byte, i int) float64 {
	return float64(math.Float32frombits(uint32(binary.LittleEndian.Uint16(p[2*i:])) << 16))
}

func f32(p []byte, i int) float64 {
	return float64(math.Float32frombits(binary.LittleEndian.Uint32(p[4*i:])))
}

func e4m3(w byte) float64 {
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

func e2m1(c byte) float64 {
	v := []float64{0, 0.5, 1, 1.5, 2, 3, 4, 6}[c&7]
	if c&8 != 0 {
		return -v
	}
	return v
}

// half rounds to the nearest binary16 value, ties to even.
func half(x float64) float64 {
	if x == 0 {
		return 0
	}
	_, e := math.Frexp(math.Abs(x))
	unit := math.Ldexp(1, max(e-11, -24))
	return math.RoundToEven(x/unit) * unit
}

// checkContent compares every object with what the checkpoint holds.
func checkContent(t *testing.T, model string, f *artifact.File, rows int, counts []int64) {
	t.Helper()
	src, err := hf.Open(model)
	if err != nil {
		t.Fatal(err)
	}
	defer src.Close()
	used := map[string]bool{}
	get := func(name string) hf.Tensor {
		t.Helper()
		x, err := src.Tensor(name)
		if err != nil {
			t.Fatal(err)
		}
		used[name] = true
		return x
	}
	text, ok := f.Directory().Component("text")
	if !ok || text.Proposal == nil || text.Proposal.Rows != int64(rows) {
		t.Fatalf("proposal %+v, want %d rows", text.Proposal, rows)
	}
	ids, err := f.Tensor(arch.ProposalIDs)
	if err != nil {
		t.Fatal(err)
	}
	chosen := make([]int, rows)
	for i := range chosen {
		chosen[i] = int(int32(binary.LittleEndian.Uint32(ids.Data[4*i:])))
	}
	checkChosen(t, chosen, get("lm_head.weight"), counts)

	visual := strings.NewReplacer("vision/layers/", "model.visual.blocks.", "vision/merger/norm/", "model.visual.merger.norm.",
		"vision/merger/", "model.visual.merger.linear_", "/attention/qkv", ".attn.qkv", "/attention/output", ".attn.proj",
		"/mlp/", ".mlp.linear_", "/norm1/", ".norm1.", "/norm2/", ".norm2.")
	for _, o := range f.Directory().Objects {
		if o.Resource {
			data, err := f.Resource(o.ID)
			if err != nil || !bytes.Equal(data, read(t, filepath.Join(model, strings.TrimPrefix(o.ID, "frontend/")))) {
				t.Errorf("%s differs from its file: %v", o.ID, err)
			}
			continue
		}
		x, err := f.Tensor(o.ID)
		if err != nil {
			t.Fatal(err)
		}
		if err := x.Validate(); err != nil {
			t.Errorf("%s: %v", o.ID, err)
		}
		name := o.ID
		switch {
		case name == "vision/patch_embedding":
			name = "model.visual.patch_embed.proj.weight"
		case name == "vision/patch_embedding_bias":
			name = "model.visual.patch_embed.proj.bias"
		case name == "vision/position_embedding":
			name = "model.visual.pos_embed.weight"
		case strings.HasPrefix(name, "vision/"):
			if name = visual.Replace(name); strings.HasSuffix(name, "_bias") {
				name = strings.TrimSuffix(name, "_bias") + ".bias"
			} else if !strings.Contains(name, "norm") {
				name += ".weight"
			}
		}
		switch {
		case o.ID == arch.ProposalIDs:
		case o.ID == arch.ProposalWeight:
			head := get("lm_head.weight")
			n := head.Shape[1]
			var p []byte
			for _, id := range chosen {
				p = append(p, head.Data[2*n*id:][:2*n]...)
			}
			checkGrouped(t, o.ID, x, p, 64, 7)
		case strings.HasSuffix(o.ID, "_input_divisors"):
			for e := range o.Shape[0] {
				for _, p := range projections(o.ID) {
					m := f32(get(expert(o.ID, e, p)+"input_scale").Data, 0)
					if got := f32(x.Data, e); got != float64(float32(1/m)) {
						t.Errorf("%s[%d] = %v, source 1/%v", o.ID, e, got, m)
					}
				}
			}
		case o.Format == "nvfp4":
			checkBank(t, o, x, get)
		case strings.HasSuffix(o.ID, "conv1d.weight"):
			p := get(name)
			c, taps := p.Shape[0], p.Shape[2]
			if !slices.Equal(o.Shape, []int{taps, c}) {
				t.Fatalf("%s has shape %v", o.ID, o.Shape)
			}
			for i := range c {
				for j := range taps {
					if !bytes.Equal(x.Data[2*(j*c+i):][:2], p.Data[2*(i*taps+j):][:2]) {
						t.Fatalf("%s tap %d of channel %d differs", o.ID, j, i)
					}
				}
			}
		case strings.HasSuffix(o.ID, "A_log") || strings.HasSuffix(o.ID, "dt_bias"):
			p := get(name)
			for i := range o.Shape[0] {
				if o.Format != "fp32" || f32(x.Data, i) != bf16(p.Data, i) {
					t.Fatalf("%s[%d] differs", o.ID, i)
				}
			}
		case o.Format == "fp8_e4m3fn":
			var all []byte
			for i := 0; src.Has(shard(name, i)); i++ {
				all = append(all, get(shard(name, i)).Data...)
			}
			if !bytes.Equal(all, x.Data) {
				t.Errorf("%s is not its shards", o.ID)
			}
		case o.Format == "q4_g64_fp16":
			checkGrouped(t, o.ID, x, get(name).Data, 64, 7)
		case o.Format == "q5_g64_fp16":
			checkGrouped(t, o.ID, x, get(name).Data, 64, 15)
		case o.Format == "q6_g64_fp16":
			checkGrouped(t, o.ID, x, get(name).Data, 64, 31)
		case o.Format == "q8_g32_fp16":
			checkGrouped(t, o.ID, x, get(name).Data, 32, 127)
		case o.Format == "bf16":
			if p := get(name); !bytes.Equal(p.Data, x.Data) || num64(p.Shape) != num64(o.Shape) {
				t.Errorf("%s is not a copy of %s", o.ID, name)
			}
		default:
			t.Errorf("%s: unexpected format %s", o.ID, o.Format)
		}
	}
	for _, name := range src.Names() {
		if x, err := src.Tensor(name); err == nil && !used[name] && x.DType != "I64" {
			t.Errorf("%s went nowhere", name)
		}
	}
}

func num64(shape []int) int {
	n := 1
	for _, d := range shape {
		n *= d
	}
	return n
}

func shard(table string, i int) string {
	return strings.TrimSuffix(table, "weight") + "shard_" + string(rune('0'+i)) + ".weight"
}

func projections(id string) []string {
	if strings.Contains(id, "gate_up") {
		return []string{"gate", "up"}
	}
	return []string{"down"}
}

func expert(id string, e int, p string) string {
	at := strings.Index(id, "experts.") + len("experts.")
	return id[:at] + string(appendInt(nil, e)) + "." + p + "_proj."
}

func appendInt(b []byte, n int) []byte {
	if n >= 10 {
		b = appendInt(b, n/10)
	}
	return append(b, byte('0'+n%10))
}

// checkBank: every value is e2m1 * scale * scale_2 to 1e-6.
func checkBank(t *testing.T, o artifact.Object, x num.Tensor, get func(string) hf.Tensor) {
	t.Helper()
	k := o.Shape[2]
	row := make([]float64, k)
	for e := range o.Shape[0] {
		at := e * o.Shape[1]
		for _, p := range projections(o.ID) {
			name := expert(o.ID, e, p)
			codes, scales, global := get(name+"weight"), get(name+"weight_scale"), f32(get(name+"weight_scale_2").Data, 0)
			for r := range codes.Shape[0] {
				x.DecodeRow(row, at)
				at++
				for c, got := range row {
					code := codes.Data[(r*k+c)/2] >> (c % 2 * 4)
					want := e2m1(code&15) * e4m3(scales.Data[r*k/16+c/16]) * global
					if math.Abs(got-want) > 1e-6*math.Abs(want) {
						t.Fatalf("%s expert %d %s[%d,%d] = %v, source %v", o.ID, e, p, r, c, got, want)
					}
				}
			}
		}
	}
}

// checkGrouped encodes again by artifact.md 2.3, in the plainest way, and compares the values.
func checkGrouped(t *testing.T, id string, x num.Tensor, source []byte, group int, qmax float64) {
	t.Helper()
	k := x.Cols()
	if len(source) != 2*k*x.Rows() {
		t.Fatalf("%s: %d source bytes for %d x %d", id, len(source), x.Rows(), k)
	}
	qmin := -qmax - 1
	if qmax == 127 {
		qmin = -127
	}
	row := make([]float64, k)
	for r := range x.Rows() {
		x.DecodeRow(row, r)
		for g := 0; g < k; g += group {
			amax := 0.0
			for c := g; c < min(g+group, k); c++ {
				amax = max(amax, math.Abs(bf16(source, r*k+c)))
			}
			s := half(float64(float32(amax / qmax)))
			if s == 0 && amax > 0 {
				s = math.Ldexp(1, -24)
			}
			for c := g; c < min(g+group, k); c++ {
				want := 0.0
				if s > 0 {
					y := float32(bf16(source, r*k+c) * float64(float32(1/s)))
					want = s * min(max(math.RoundToEven(float64(y)), qmin), qmax)
				}
				if row[c] != want {
					t.Fatalf("%s[%d,%d] = %v, want %v from %v", id, r, c, row[c], want, bf16(source, r*k+c))
				}
			}
		}
	}
}

// checkChosen picks the proposal rows again; without counts the rank by count is the id. A rank is the number of ids that are better.
func checkChosen(t *testing.T, got []int, head hf.Tensor, counts []int64) {
	t.Helper()
	ids := map[int]int{512: 480, 2048: 2000}[head.Shape[0]] // tokenizer ids, by the golden data's README
	if ids == 0 {
		t.Fatalf("vocabulary of %d", head.Shape[0])
	}
	const special = 13
	norm := make([]float32, ids)
	for i := range norm {
		sum := 0.0
		for c := range head.Shape[1] {
			x := bf16(head.Data, i*head.Shape[1]+c)
			sum += x * x
		}
		norm[i] = float32(sum)
	}
	type token struct{ id, score int }
	var list []token
	for i := range norm {
		rank := 0
		if counts == nil {
			rank = i
		}
		for j := range norm {
			if counts != nil && (counts[j] > counts[i] || counts[j] == counts[i] && j < i) {
				rank++
			}
			if norm[j] > norm[i] || norm[j] == norm[i] && j < i {
				rank++
			}
		}
		list = append(list, token{i, rank})
	}
	byScore := func(a, b token) int { return cmp.Compare(a.score, b.score) }
	slices.SortStableFunc(list, byScore)
	var free, forced []token
	for _, x := range list {
		if x.id >= special {
			free = append(free, x)
		} else {
			forced = append(forced, x)
		}
	}
	slices.SortFunc(forced, func(a, b token) int { return cmp.Compare(a.id, b.id) })
	list = append(free[:len(got)-special:len(got)-special], forced...)
	slices.SortStableFunc(list, byScore)
	for i, x := range list {
		if got[i] != x.id {
			t.Fatalf("row %d is token %d, want %d", i, got[i], x.id)
		}
	}
}

func checkReport(t *testing.T, r *Report, f *artifact.File) {
	t.Helper()
	text := read(t, artifact.ReportPath(f.Path()))
	if !bytes.HasPrefix(text, []byte("{\n  \"identity\": {\n    \"model_id\": ")) || !bytes.HasSuffix(text, []byte("}\n")) {
		t.Errorf("report begins %.60q", text)
	}
	at := 0
	for _, m := range []string{
		"identity", "target_key", "recipe_id", "source", "output", "config_summary", "source_dtype_counts", "objects", "file_bytes",
		"elapsed_seconds", "conversion_device", "ple_materialization", "ple_format", "projection_format", "mtp_expert_format",
		"proposal_shortlist", "directory_sha256", "object_sha256",
	} {
		i := bytes.Index(text[at:], []byte("\n  \""+m+"\": "))
		if i < 0 {
			t.Fatalf("report has no member %s after offset %d", m, at)
		}
		at += i
	}
	var got struct {
		FileBytes int64             `json:"file_bytes"`
		PLEFormat string            `json:"ple_format"`
		Shortlist string            `json:"proposal_shortlist"`
		ID        string            `json:"artifact_id"`
		Dir       string            `json:"directory_sha256"`
		Sums      map[string]string `json:"object_sha256"`
		Objects   struct {
			Count int   `json:"count"`
			Bytes int64 `json:"payload_bytes"`
		} `json:"objects"`
		Source struct {
			Repository string `json:"repository"`
		} `json:"source"`
	}
	if err := json.Unmarshal(text, &got); err != nil {
		t.Fatal(err)
	}
	var sum int64
	for _, o := range f.Directory().Objects {
		sum += o.Bytes
		data := make([]byte, o.Bytes)
		if _, err := f.ReadAt(data, o.Offset); err != nil || got.Sums[o.ID] != digest(data) {
			t.Errorf("digest of %s is %s: %v", o.ID, got.Sums[o.ID], err)
		}
	}
	info, err := os.Stat(f.Path())
	if err != nil || got.FileBytes != info.Size() || got.Objects.Bytes != sum || got.Objects.Count != len(f.Directory().Objects) {
		t.Errorf("report %+v: %v", got, err)
	}
	if got.Dir != digest(f.DirectoryText()) || got.ID != artifact.FormatID(f.ID()) || got.PLEFormat != "fp8_e4m3fn" ||
		got.Source.Repository != "" || got.Shortlist != "token-id-rank-plus-lm-head-norm-rank" {
		t.Errorf("report %+v", got)
	}
	if r.ArtifactID != got.ID {
		t.Errorf("returned report has id %s", r.ArtifactID)
	}
}

func digest(p []byte) string {
	sum := sha256.Sum256(p)
	return hex.EncodeToString(sum[:])
}
