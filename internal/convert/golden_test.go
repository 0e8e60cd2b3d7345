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
	"ninfer/internal/convert/converttest"
	"ninfer/internal/hf"
	"ninfer/internal/num"
)

const (
	micro  = "../../testdata/micro-radixark/checkpoint"
	output = "qwen3_8_flash_next_125b_a6b_nvfp4.ninfer"

	mixedOutput = "qwen3_8_flash_next_mixed.ninfer"
)

// further is a golden folder that a fresh clone does not have.
func further(t *testing.T, name string) string {
	t.Helper()
	dir := filepath.Join(os.Getenv("NINFER_GOLDEN"), name)
	if _, err := os.Stat(dir); err != nil {
		t.Skipf("NINFER_GOLDEN has no %s", name)
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

// sources are checkpoints by profile: the golden ones, and for a fresh clone those that can be derived.
func sources(t *testing.T, profile arch.Profile) (model, ple string) {
	t.Helper()
	switch profile {
	case arch.Swift:
		return converttest.Swift(t, micro), ""
	case arch.Mixed:
		return converttest.Mixed(t, micro)
	}
	return micro, ""
}

// variants are all legal combinations of options.
var variants = func() (out []Options) {
	for _, proj := range []string{"", "fp8_e4m3fn_row_bf16"} {
		for _, mtp := range []string{"", "nvfp4"} {
			out = append(out, Options{Profile: "radixark", ProjectionFormat: proj, MTPExpertFormat: mtp})
			for _, ple := range []string{"", "fp8_e4m3fn"} {
				out = append(out, Options{Profile: "swift", PLEFormat: ple, ProjectionFormat: proj, MTPExpertFormat: mtp})
			}
		}
	}
	return append(out, Options{Profile: "mixed"})
}()

func variant(t testing.TB, o Options) arch.Variant {
	t.Helper()
	v, err := arch.ParseVariant(o.Profile, o.PLEFormat, o.ProjectionFormat, o.MTPExpertFormat)
	if err != nil {
		t.Fatal(err)
	}
	return v
}

// TestVariants: every variant holds what its checkpoint does, and is the same to the bit whatever the number of workers, the size of pieces
// and the size of files.
func TestVariants(t *testing.T) {
	t.Parallel()
	if len(variants) != 13 {
		t.Fatalf("%d variants", len(variants))
	}
	folders := map[arch.Profile][2]string{}
	for _, p := range []arch.Profile{arch.Radixark, arch.Swift, arch.Mixed} {
		model, ple := sources(t, p)
		folders[p] = [2]string{model, ple}
	}
	for _, o := range variants {
		v := variant(t, o)
		t.Run(v.OutputName(), func(t *testing.T) {
			t.Parallel()
			o.Model, o.PLE = folders[v.Profile][0], folders[v.Profile][1]
			o.Out = filepath.Join(t.TempDir(), v.OutputName())
			r, f := convert(t, o)
			if v.Profile == arch.Mixed {
				checkMixed(t, o, f)
			} else {
				checkContent(t, o.Model, v, f, 256, nil)
			}
			checkFormats(t, r, v)
			if x, err := artifact.Verify(f.Path(), artifact.Options{}); err != nil || !x.Passed || x.ReportEqual != len(f.Directory().Objects) || x.IDKind != "content" {
				t.Errorf("verify: %+v: %v", x, err)
			}
			whole := read(t, f.Path())
			for _, other := range []struct {
				workers, chunk int
				limit          int64
			}{{1, 0, 0}, {2, 1 << 16, 0}, {2, 0, 1 << 20}, {7, 50001, 1<<20 + 12345}} {
				c := o
				c.Out = filepath.Join(t.TempDir(), v.OutputName())
				c.workers, c.chunk, c.MaxFileBytes = other.workers, other.chunk, other.limit
				_, g := convert(t, c)
				if other.limit == 0 {
					if !bytes.Equal(read(t, g.Path()), whole) {
						t.Errorf("%+v: other bytes", other)
					}
					continue
				}
				if len(g.Directory().Files) < 4 {
					t.Errorf("%d files of %d bytes", len(g.Directory().Files), other.limit)
				}
				payload := make([]byte, g.PayloadBytes())
				if _, err := g.ReadAt(payload, 0); err != nil || !bytes.Equal(payload, whole[f.PayloadStart():]) || g.ID() != f.ID() {
					t.Errorf("%+v: other payload or id: %v", other, err)
				}
			}
		})
	}
}

// checkFormats compares what a report says of formats.
func checkFormats(t *testing.T, r *Report, v arch.Variant) {
	t.Helper()
	want := []string{"fp8_e4m3fn", "bf16", "bf16"}
	switch v.Profile {
	case arch.Swift:
		want[0] = "bf16"
	case arch.Mixed:
		want = []string{"u4z8_g16_fp16", "fp8_e4m3fn_row_fp32", "nvfp4"}
	}
	if v.FP8PLE {
		want[0] = "fp8_e4m3fn"
	}
	if v.FP8Proj {
		want[1] = "fp8_e4m3fn_row_bf16"
	}
	if v.NVFP4MTP {
		want[2] = "nvfp4"
	}
	if got := []string{r.PLEFormat, r.ProjectionFormat, r.MTPExpertFormat}; !slices.Equal(got, want) {
		t.Errorf("report tells of formats %q, want %q", got, want)
	}
	if q := r.PLEQuantization; (q != nil) != v.FP8PLE || q != nil && (q.Method == "" || !(q.AMax > 0) || q.Scale < q.AMax/448 || q.Scale > q.AMax/448*1.01) {
		t.Errorf("table: %+v", q)
	}
	q := r.MTPExpertQuantization
	switch {
	case (q != nil) != (v.NVFP4MTP || v.Profile == arch.Mixed):
		t.Errorf("experts: %+v", q)
	case q == nil:
	case v.NVFP4MTP && (q.InputAmax == nil || *q.InputAmax != InputAmax{24, 2720}):
		t.Errorf("experts: %+v", q)
	case v.Profile == arch.Mixed && (q.InputAmax != nil || q.Method != "NVFP4_MAXABS_DIVISOR_RNE_V1"):
		t.Errorf("experts: %+v", q)
	}
	if (r.ProposalShortlist == "") != (v.Profile == arch.Mixed) {
		t.Errorf("shortlist %q", r.ProposalShortlist)
	}
}

// TestGolden converts the golden checkpoints: in a fresh clone the first.
func TestGolden(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		folder string
		o      Options
		rows   int // largest multiple of 64 not above 0.6 of the ids
	}{
		{"micro-radixark", Options{}, 256},
		{"mini-radixark", Options{}, 1152},
		{"micro-swift", Options{Profile: "swift"}, 256},
		{"micro-swift", Options{Profile: "swift", PLEFormat: "fp8_e4m3fn", ProjectionFormat: "fp8_e4m3fn_row_bf16", MTPExpertFormat: "nvfp4"}, 256},
		{"micro-mixed", Options{Profile: "mixed"}, 0},
	} {
		v := variant(t, tt.o)
		t.Run(tt.folder+"/"+v.OutputName(), func(t *testing.T) {
			o := tt.o
			dir := filepath.Dir(micro)
			if tt.folder != filepath.Base(dir) {
				dir = further(t, tt.folder)
			}
			o.Model, o.Out = filepath.Join(dir, "checkpoint"), filepath.Join(t.TempDir(), v.OutputName())
			if v.Profile == arch.Mixed {
				o.PLE = filepath.Join(dir, "ples_int4")
			}
			var steps []Step
			o.Progress = func(s Step) {
				if !s.Partial {
					steps = append(steps, s)
				}
			}
			r, f := convert(t, o)
			if v.Profile == arch.Mixed {
				checkMixed(t, o, f)
			} else {
				checkContent(t, o.Model, v, f, tt.rows, nil)
			}
			checkReport(t, r, f, v)
			x, err := artifact.Verify(f.Path(), artifact.Options{})
			if err != nil || !x.Passed || x.ReportEqual != len(f.Directory().Objects) || x.IDKind != "content" {
				t.Errorf("verify: %+v: %v", x, err)
			}

			n := len(f.Directory().Objects)
			if len(steps) != n {
				t.Fatalf("%d steps for %d objects", len(steps), n)
			}
			names := map[string]bool{}
			for i, s := range steps {
				names[s.Name] = true
				if s.Index != i+1 || s.Total != n || s.Done > s.All || s.Rate() <= 0 || s.Left() < 0 {
					t.Errorf("step %d: %+v", i, s)
				}
			}
			if last := steps[n-1]; len(names) != n || last.Done != last.All || last.Left() != 0 {
				t.Errorf("%d names, %d of %d bytes", len(names), last.Done, last.All)
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

// Decoders of the checkpoint's words, which share nothing with package num.
var (
	bf16 = converttest.BF16
	e4m3 = converttest.E4M3
	e2m1 = converttest.E2M1
)

func f32(p []byte, i int) float64 {
	return float64(math.Float32frombits(binary.LittleEndian.Uint32(p[4*i:])))
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
func checkContent(t *testing.T, model string, v arch.Variant, f *artifact.File, rows int, counts []int64) {
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

	projected := 0
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
		case strings.HasPrefix(o.ID, "mtp.") && strings.HasSuffix(o.ID, "_input_divisors"):
			want := uint32(0x42e00000)
			if strings.Contains(o.ID, "experts.down") {
				want = 0x3f7cfcfd
			}
			for e := range o.Shape[0] {
				if got := binary.LittleEndian.Uint32(x.Data[4*e:]); got != want {
					t.Errorf("%s[%d] = %08x, want %08x", o.ID, e, got, want)
				}
			}
		case strings.HasPrefix(o.ID, "mtp.") && o.Format == "nvfp4":
			checkEncodedBank(t, o, x, get(o.ID+"_proj"), false)
		case o.Format == "fp8_e4m3fn_row_bf16":
			p := get(name)
			checkFP8Rows(t, o, x, p.Data)
			projected++
		case v.FP8PLE && strings.HasSuffix(o.ID, "ngram_embedding.weight_scale"):
		case v.FP8PLE && o.Format == "fp8_e4m3fn":
			scale, err := f.Tensor(o.ID + "_scale")
			if err != nil {
				t.Fatal(err)
			}
			var all []byte
			for i := 0; src.Has(shard(name, i)); i++ {
				all = append(all, get(shard(name, i)).Data...)
			}
			checkTable(t, o.ID, x.Data, all, bf16(scale.Data, 0))
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
		case o.Format == "fp8_e4m3fn" || strings.HasSuffix(o.ID, "ngram_embedding.weight"):
			if (o.Format == "bf16") != (v.Profile == arch.Swift) {
				t.Errorf("%s is %s", o.ID, o.Format)
			}
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
	if want := projections8(f.Directory()); v.FP8Proj && projected != want || !v.FP8Proj && projected != 0 {
		t.Errorf("%d projections are FP8, want %d", projected, want)
	}
	for _, name := range src.Names() {
		if x, err := src.Tensor(name); err == nil && !used[name] && x.DType != "I64" {
			t.Errorf("%s went nowhere", name)
		}
	}
}

// projections8 counts the matrices of docs/format.md 4.1.3 by the table's words.
func projections8(d *artifact.Directory) int {
	n := 0
	for _, o := range d.Objects {
		for _, s := range []string{
			"self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight", "self_attn.o_proj.weight",
			"linear_attn.in_proj_qkv.weight", "linear_attn.in_proj_z.weight", "linear_attn.out_proj.weight",
			"mlp.gate.weight", "shared_expert.gate_proj.weight", "shared_expert.up_proj.weight",
			"input_mix_weight_down.weight", "input_mix_weight_up.weight", "lm_head.weight", "mtp.fc_embedding.weight", "mtp.fc_hidden.weight",
		} {
			if strings.HasSuffix(o.ID, s) {
				n++
			}
		}
	}
	return n
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

// checkGrouped encodes again by docs/format.md 2.3, in the plainest way, and compares the values.
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

func checkReport(t *testing.T, r *Report, f *artifact.File, v arch.Variant) {
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
		if m == "proposal_shortlist" && v.Profile == arch.Mixed {
			continue
		}
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
	if got.Dir != digest(f.DirectoryText()) || got.ID != artifact.FormatID(f.ID()) || got.Source.Repository != "" || v.Profile != arch.Mixed && got.Shortlist != "token-id-rank-plus-lm-head-norm-rank" {
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
