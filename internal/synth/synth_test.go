package synth

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"ninfer/internal/arch"
	"ninfer/internal/artifact"
	"ninfer/internal/num"
	"ninfer/internal/text/chat"
	"ninfer/internal/text/token"
)

func microConfig(t testing.TB) *arch.Config {
	t.Helper()
	text, err := os.ReadFile("../../testdata/micro-radixark/checkpoint/config.json")
	if err != nil {
		t.Fatal(err)
	}
	c, err := arch.ParseConfig(text)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

var variants = []arch.Variant{
	{Profile: arch.Radixark}, {Profile: arch.Radixark, FP8Proj: true, NVFP4MTP: true}, {Profile: arch.Swift}, {Profile: arch.Swift, FP8PLE: true}, {Profile: arch.Mixed},
}

func inventory(t testing.TB, c *arch.Config, v arch.Variant) []arch.Spec {
	t.Helper()
	specs, err := arch.Inventory(c, v, c.ProposalRows(IDs(c)))
	if err != nil {
		t.Fatal(err)
	}
	return specs
}

// TestObjects: every object of every variant has valid words, is the same however it is filled, and depends on the seed.
func TestObjects(t *testing.T) {
	c := microConfig(t)
	rng := rand.New(rand.NewPCG(1, 2))
	for _, v := range variants {
		for _, sparse := range []bool{false, true} {
			for _, s := range inventory(t, c, v) {
				if s.Resource {
					continue
				}
				name := fmt.Sprintf("%s %s sparse %v", v.Recipe(), s.ID, sparse)
				x, err := NewObject(c, &s, Options{Seed: 7, SparseTable: sparse, IDs: IDs(c)})
				if err != nil {
					t.Fatalf("%s: %v", name, err)
				}
				whole := make([]byte, x.Bytes())
				x.Fill(whole, 0)
				y, err := num.NewTensor(s.Format, s.Layout, s.Shape, whole)
				if err == nil {
					err = y.Validate()
				}
				if err == nil && s.Format == num.FP8 && num.E4M3NaN(whole) >= 0 {
					err = errors.New("a code is not a number")
				}
				if err != nil {
					t.Fatalf("%s: %v", name, err)
				}
				for range 3 {
					off := rng.Int64N(x.Bytes())
					n := 1 + rng.Int64N(min(x.Bytes()-off, 20_000))
					part := make([]byte, n)
					for i := range part {
						part[i] = 0xa5
					}
					x.Fill(part, off)
					if !bytes.Equal(part, whole[off:][:n]) {
						t.Fatalf("%s: bytes [%d,%d) differ when filled alone", name, off, off+n)
					}
					if x.Zero(off, n) && len(bytes.Trim(part, "\x00")) > 0 {
						t.Fatalf("%s: bytes [%d,%d) are said to be zero", name, off, off+n)
					}
				}
				again, _ := NewObject(c, &s, Options{Seed: 8, SparseTable: sparse, IDs: IDs(c)})
				other := make([]byte, x.Bytes())
				again.Fill(other, 0)
				table := strings.HasSuffix(s.ID, arch.PLETable) || strings.Contains(s.ID, "/shards/")
				free := x.whole == nil || x.geom.PaddedCols != x.geom.Cols
				if bytes.Equal(whole, other) == (free && !(table && sparse)) {
					t.Errorf("%s: seeds matter: %v", name, !bytes.Equal(whole, other))
				}
				checkValues(t, name, &s, y, sparse && table)
			}
		}
	}
}

// checkValues compares the standard deviation with the one that keeps activations in size, as far as the number of values allows.
func checkValues(t *testing.T, name string, s *arch.Spec, x num.Tensor, zero bool) {
	t.Helper()
	row := make([]float64, x.Cols())
	n, sum, square := 0.0, 0.0, 0.0
	for r := range x.Rows() {
		x.DecodeRow(row, r)
		for _, v := range row {
			n++
			sum += v
			square += v * v
			if math.IsNaN(v) || math.IsInf(v, 0) {
				t.Fatalf("%s: value %v", name, v)
			}
		}
	}
	mean := sum / n
	std := math.Sqrt(max(square/n-mean*mean, 0))
	if zero {
		if math.Abs(mean) > 1e-6 || std > 1e-6 {
			t.Errorf("%s: mean %v, deviation %v of a table of zeros", name, mean, std)
		}
		return
	}
	matrix := len(s.Shape) >= 2 && n >= 4096 && !strings.Contains(s.ID, "conv") && s.ID != arch.EmbedTokens && s.ID != "text/token_embedding" &&
		s.ID != arch.VisionPositions && s.Format != num.FP8 && s.Format != num.U4Z8G16 && !strings.Contains(s.ID, "ngram_embedding")
	if want := 1 / math.Sqrt(float64(x.Cols())); matrix && (math.Abs(std/want-1) > 0.1 || math.Abs(mean) > 0.1*want) {
		t.Errorf("%s: mean %v, deviation %v, want 0, %v", name, mean, std, want)
	}
	for _, end := range []string{"linear_attn.norm.weight", "gdn/norm", "norm1/weight", "merger/norm/weight"} {
		if strings.HasSuffix(s.ID, end) && math.Abs(mean-1) > 0.02 {
			t.Errorf("%s: mean %v, want 1: this norm multiplies by its weight", name, mean)
		}
	}
	for _, end := range []string{"q_norm.weight", "hc_norm.weight", "layernorm.weight", "hidden_norm.weight", "/bias"} {
		if strings.HasSuffix(s.ID, end) && math.Abs(mean) > 0.02 {
			t.Errorf("%s: mean %v, want 0: this norm multiplies by 1 + weight", name, mean)
		}
	}
}

// TestFixed: what is not free has the values that a loader demands.
func TestFixed(t *testing.T) {
	c := microConfig(t)
	get := func(v arch.Variant, id string) []byte {
		t.Helper()
		specs := inventory(t, c, v)
		i := slices.IndexFunc(specs, func(s arch.Spec) bool { return s.ID == id })
		if i < 0 {
			t.Fatalf("no object %s", id)
		}
		x, err := NewObject(c, &specs[i], Options{IDs: IDs(c)})
		if err != nil {
			t.Fatal(err)
		}
		b := make([]byte, x.Bytes())
		x.Fill(b, 0)
		return b
	}
	ids := get(variants[0], arch.ProposalIDs)
	last := int32(-1)
	for i := 0; i < len(ids); i += 4 {
		id := int32(binary.LittleEndian.Uint32(ids[i:]))
		if id <= last || int(id) >= IDs(c) {
			t.Fatalf("row %d stands for %d after %d", i/4, id, last)
		}
		last = id
	}
	g := c.Text.Ngram(0)
	for i, want := range [][]int64{g.Multipliers, g.Offsets, g.Sizes} {
		b := get(arch.Variant{Profile: arch.Mixed}, arch.MixedIndex(c.Text.PLELayerIDs[0]-1, i))
		for k, n := range want {
			if got := int64(binary.LittleEndian.Uint64(b[8*k:])); got != n {
				t.Errorf("index %d[%d] = %d, want %d", i, k, got, n)
			}
		}
	}
	mtp := arch.MLPPrefix(arch.MTPLayerPrefix)
	for id, want := range map[string]uint32{ // docs/format.md 2.8
		mtp + arch.BankGateUp + arch.DivisorsSuffix: 0x42e00000, mtp + arch.BankDown + arch.DivisorsSuffix: 0x3f7cfcfd,
	} {
		b := get(variants[1], id)
		for i := 0; i < len(b); i += 4 {
			if got := binary.LittleEndian.Uint32(b[i:]); got != want {
				t.Errorf("%s[%d] = 0x%08x, want 0x%08x", id, i/4, got, want)
			}
		}
	}
}

// TestOfficialObjects prepares every object of the published model: its words exist in every format and size.
func TestOfficialObjects(t *testing.T) {
	c := arch.Official()
	buf := make([]byte, 10_000)
	enough := regexp.MustCompile(`layers[./]([4-9]|\d\d)|vision/layers/[1-9]|shards/[1-9]`) // more of the same
	for _, v := range []arch.Variant{variants[1], variants[2], variants[4]} {
		for _, s := range inventory(t, c, v) {
			if s.Resource || enough.MatchString(s.ID) {
				continue
			}
			x, err := NewObject(c, &s, Options{IDs: IDs(c), SparseTable: true})
			if err != nil {
				t.Fatal(err)
			}
			n := min(int64(len(buf)), x.Bytes())
			x.Fill(buf[:n], 0)
			x.Fill(buf[:n], x.Bytes()-n)
		}
	}
}

func TestFrontend(t *testing.T) {
	for name, c := range map[string]*arch.Config{"micro": microConfig(t), "official": arch.Official()} {
		files, err := Frontend(c)
		if err != nil {
			t.Fatal(err)
		}
		if len(files) != 6 {
			t.Errorf("%s: %d files", name, len(files))
		}
		tok, err := token.Load(files["frontend/tokenizer.json"], files["frontend/tokenizer_config.json"])
		if err != nil {
			t.Fatal(err)
		}
		if tok.Count() != IDs(c) {
			t.Errorf("%s: %d ids, want %d", name, tok.Count(), IDs(c))
		}
		for spelling, want := range map[string]int32{
			"<|image_pad|>": c.ImageTokenID, "<|video_pad|>": c.VideoTokenID, "<|vision_start|>": c.VisionStartTokenID,
			"<|vision_end|>": c.VisionEndTokenID, "<|endoftext|>": c.Text.ResetID(),
		} {
			if id, ok := tok.ID(spelling); !ok || id != want {
				t.Errorf("%s: %s is %d, the config says %d", name, spelling, id, want)
			}
		}
		const text = "Grüße, 世界 \x00\t🎉 <think> x"
		ids := tok.Encode(text)
		var back []byte
		for _, id := range ids {
			back = append(back, tok.Bytes(id)...)
		}
		if string(back) != text {
			t.Errorf("%s: %q comes back as %q", name, text, back)
		}
		tmpl, err := chat.NewTemplate("t", files["frontend/chat_template.jinja"])
		if err == nil {
			err = tmpl.Check(tok)
		}
		if err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	small := microConfig(t)
	small.Text.VocabSize = 200
	if _, err := Frontend(small); err == nil {
		t.Error("a vocabulary of 200 has room for 256 bytes")
	}
}

func testPlan(t testing.TB, c *arch.Config, specs []arch.Spec, files map[string][]byte, limit int64) *artifact.Plan {
	t.Helper()
	d := &artifact.Directory{Components: []artifact.Component{{ID: "text", Config: []byte(`{}`)}}}
	for _, s := range specs {
		o := artifact.Object{ID: s.ID, Resource: s.Resource, Shape: s.Shape, Format: s.Format.String(), Layout: s.Layout.String()}
		if s.Resource {
			o = artifact.Object{ID: s.ID, Resource: true, Bytes: int64(len(files[s.ID]))}
		}
		d.Objects = append(d.Objects, o)
	}
	p, err := artifact.NewPlan("s.ninfer", d, artifact.PlanOptions{Limit: limit})
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestWrite(t *testing.T) {
	c := microConfig(t)
	files, err := Frontend(c)
	if err != nil {
		t.Fatal(err)
	}
	var ids [][16]byte
	for _, o := range []Options{{Seed: 1}, {Seed: 1}, {Seed: 2}, {Seed: 1, SparseTable: true}} {
		o.IDs = IDs(c)
		specs := inventory(t, c, variants[0])
		path := filepath.Join(t.TempDir(), "s.ninfer")
		var last Step
		r, err := Write(context.Background(), path, testPlan(t, c, specs, files, 1<<21), specs, c, files, o, func(s Step) { last = s })
		if err != nil {
			t.Fatal(err)
		}
		v, err := artifact.Verify(path, artifact.Options{})
		if err != nil || !v.Passed || v.IDKind != "content" || len(v.Unchecked) > 0 {
			t.Errorf("verify: %+v, %v", v, err)
		}
		if last.Done != last.All || last.All == 0 || last.Rate() <= 0 {
			t.Errorf("last step %+v", last)
		}
		ids = append(ids, r.ID)
	}
	if ids[0] != ids[1] || ids[0] == ids[2] || ids[0] == ids[3] {
		t.Errorf("ids %x", ids)
	}

	dir := t.TempDir()
	ctx, cancel := context.WithCancel(context.Background())
	specs := inventory(t, c, variants[0])
	_, err = Write(ctx, filepath.Join(dir, "s.ninfer"), testPlan(t, c, specs, files, 0), specs, c, files, Options{IDs: IDs(c)}, func(Step) { cancel() })
	if !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
	if left, _ := os.ReadDir(dir); len(left) > 0 {
		t.Errorf("%v left", left)
	}
	if _, err := Write(context.Background(), filepath.Join(dir, "s.ninfer"), testPlan(t, c, specs, files, 0), specs, c, files, Options{IDs: 10}, nil); err == nil {
		t.Error("a proposal head of more rows than there are ids")
	}
}

// BenchmarkFill measures how fast one core makes words.
func BenchmarkFill(b *testing.B) {
	c := arch.Official()
	specs := inventory(b, c, variants[0])
	buf := make([]byte, chunk)
	for _, id := range []string{arch.LMHead, arch.MLPPrefix(arch.LayerPrefix(0)) + arch.BankGateUp, arch.PLEPrefix(arch.LayerPrefix(1)) + arch.PLETable, arch.ProposalWeight} {
		i := slices.IndexFunc(specs, func(s arch.Spec) bool { return s.ID == id })
		x, err := NewObject(c, &specs[i], Options{IDs: IDs(c)})
		if err != nil {
			b.Fatal(err)
		}
		b.Run(specs[i].Format.String(), func(b *testing.B) {
			b.SetBytes(chunk)
			for b.Loop() {
				x.Fill(buf, 0)
			}
		})
	}
}

// The planes say what Fill makes: in range, in order, and their words have the bits, or the mean and deviation, that they tell.
func TestPlanes(t *testing.T) {
	c := microConfig(t)
	for _, v := range variants {
		for _, s := range inventory(t, c, v) {
			if s.Resource {
				continue
			}
			x, err := NewObject(c, &s, Options{Seed: 3, IDs: IDs(c), SparseTable: true})
			if err != nil {
				t.Fatal(err)
			}
			planes, ok := x.Planes()
			if !ok {
				continue
			}
			data := make([]byte, x.Bytes())
			x.Fill(data, 0)
			end := int64(0)
			for _, p := range planes {
				if p.Offset < end || p.Bytes < 1 || p.Offset+p.Bytes > x.Bytes() || slices.ContainsFunc(data[end:p.Offset], func(b byte) bool { return b != 0 }) {
					t.Fatalf("%s: plane %+v after byte %d", s.ID, p, end)
				}
				end = p.Offset + p.Bytes
				checkWords(t, s.ID, data[p.Offset:end], p.Words)
			}
			if slices.ContainsFunc(data[end:], func(b byte) bool { return b != 0 }) {
				t.Errorf("%s: bytes in no plane", s.ID)
			}
		}
	}
}

func checkWords(t *testing.T, id string, b []byte, w Words) {
	t.Helper()
	if w.Bytes == 8 {
		for ; len(b) >= 8; b = b[8:] {
			if word := binary.LittleEndian.Uint64(b); word&^w.Mask != w.Fixed&^w.Mask || word&w.Fixed != w.Fixed {
				t.Fatalf("%s: word %x with %+v", id, word, w)
			}
		}
		return
	}
	var sum, square, n float64
	for ; len(b) >= w.Bytes; b = b[w.Bytes:] {
		f := num.FromBF16(binary.LittleEndian.Uint16(b))
		if w.Bytes == 4 {
			f = math.Float32frombits(binary.LittleEndian.Uint32(b))
		}
		sum, square, n = sum+float64(f), square+float64(f)*float64(f), n+1
	}
	mean := sum / n
	// Five standard errors of the mean.
	if math.Abs(mean-w.Mean) > 5*w.Deviation/math.Sqrt(n)+0.01*math.Abs(w.Mean) {
		t.Errorf("%s: mean %g of %g words with %+v", id, mean, n, w)
	}
	if d := math.Sqrt(square/n - mean*mean); n > 2000 && math.Abs(d-w.Deviation) > 0.1*w.Deviation {
		t.Errorf("%s: deviation %g with %+v", id, d, w)
	}
}
