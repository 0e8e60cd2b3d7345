package model

import (
	"encoding/binary"
	"encoding/json/v2"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"ninfer/internal/arch"
	"ninfer/internal/backend"
	"ninfer/internal/backend/cpu"
	"ninfer/internal/num"
)

// checkpoint is a Store over a reference checkpoint, read here on its own: neither converter nor container is involved. Everything
// is widened to float32, NVFP4 experts included, so it also is an independent reading of the formats.
type checkpoint struct {
	tensors map[string]safetensor
}

type safetensor struct {
	DType   string   `json:"dtype"`
	Shape   []int    `json:"shape"`
	Offsets [2]int64 `json:"data_offsets"`
	data    []byte
}

func openSafetensors(t testing.TB, path string, into map[string]safetensor) {
	raw, err := os.ReadFile(path)
	if err != nil {
		t.Skip(err)
	}
	n := binary.LittleEndian.Uint64(raw)
	head := map[string]safetensor{}
	if err := json.Unmarshal(raw[8:8+n], &head); err != nil {
		t.Fatal(err)
	}
	for name, s := range head {
		if name != "__metadata__" {
			s.data = raw[8+n:][s.Offsets[0]:s.Offsets[1]]
			into[name] = s
		}
	}
}

func openCheckpoint(t testing.TB, dir string) (*arch.Config, *checkpoint) {
	src, err := os.ReadFile(filepath.Join(dir, "config.json"))
	if err != nil {
		t.Skip(err)
	}
	c, err := arch.ParseConfig(src)
	if err != nil {
		t.Fatal(err)
	}
	ck := &checkpoint{tensors: map[string]safetensor{}}
	files, _ := filepath.Glob(filepath.Join(dir, "*.safetensors"))
	for _, f := range files {
		openSafetensors(t, f, ck.tensors)
	}
	return c, ck
}

// values widens a checkpoint tensor.
func (s safetensor) values() []float32 {
	var v []float32
	switch s.DType {
	case "BF16":
		for i := 0; i < len(s.data); i += 2 {
			v = append(v, math.Float32frombits(uint32(binary.LittleEndian.Uint16(s.data[i:]))<<16))
		}
	case "F32":
		for i := 0; i < len(s.data); i += 4 {
			v = append(v, math.Float32frombits(binary.LittleEndian.Uint32(s.data[i:])))
		}
	case "F8_E4M3":
		for _, b := range s.data {
			e, m := int(b>>3&15), float64(b&7)
			x := math.Ldexp(1+m/8, e-7)
			if e == 0 {
				x = math.Ldexp(m, -9)
			}
			if b > 127 {
				x = -x
			}
			v = append(v, float32(x))
		}
	case "U8":
		e2m1 := []float32{0, .5, 1, 1.5, 2, 3, 4, 6, 0, -.5, -1, -1.5, -2, -3, -4, -6}
		for _, b := range s.data {
			v = append(v, e2m1[b&15], e2m1[b>>4])
		}
	}
	return v
}

func (c *checkpoint) Has(name string) bool {
	_, ok := c.tensors[name]
	return ok || strings.HasPrefix(name, "model.") && (strings.HasSuffix(name, arch.BankGateUp) || strings.HasSuffix(name, arch.BankDown))
}

func widened(shape []int, v []float32) (num.Tensor, error) {
	raw := make([]byte, 0, 4*len(v))
	for _, x := range v {
		raw = binary.LittleEndian.AppendUint32(raw, math.Float32bits(x))
	}
	return num.NewTensor(num.FP32, num.Contiguous, shape, raw)
}

func (c *checkpoint) Tensor(name string) (num.Tensor, error) {
	if base, ok := strings.CutSuffix(name, arch.BankGateUp); ok {
		return c.bank(base, "gate_proj", "up_proj")
	}
	if base, ok := strings.CutSuffix(name, arch.BankDown); ok {
		return c.bank(base, "down_proj")
	}
	s, ok := c.tensors[name]
	if !ok {
		return num.Tensor{}, fmt.Errorf("no tensor %q", name)
	}
	v, shape := s.values(), s.Shape
	if strings.HasSuffix(name, "conv1d.weight") { // [channels, 1, taps] to [taps, channels]
		n, taps := shape[0], shape[2]
		tr := make([]float32, len(v))
		for i := range n {
			for j := range taps {
				tr[j*n+i] = v[i*taps+j]
			}
		}
		v, shape = tr, []int{taps, n}
	}
	return widened(shape, v)
}

// bank stacks an expert bank: value = E2M1 * E4M3 * weight_scale_2.
func (c *checkpoint) bank(base string, parts ...string) (num.Tensor, error) {
	var all []float32
	experts, cols := 0, 0
	for ; ; experts++ {
		if _, ok := c.tensors[fmt.Sprintf("%sexperts.%d.%s.weight", base, experts, parts[0])]; !ok {
			break
		}
		for _, part := range parts {
			q := fmt.Sprintf("%sexperts.%d.%s.", base, experts, part)
			codes, scales, s2 := c.tensors[q+"weight"].values(), c.tensors[q+"weight_scale"].values(), c.tensors[q+"weight_scale_2"].values()[0]
			for i := range codes {
				codes[i] *= scales[i/16] * s2
			}
			cols = 2 * c.tensors[q+"weight"].Shape[1]
			all = append(all, codes...)
		}
	}
	return widened([]int{experts, len(all) / experts / cols, cols}, all)
}

func (c *checkpoint) Table(name string) (num.Format, backend.RowSource, error) {
	var rows tableRows
	for i := 0; ; i++ {
		s, ok := c.tensors[fmt.Sprintf("%sshard_%d.weight", strings.TrimSuffix(name, "weight"), i)]
		if !ok {
			break
		}
		rows.width, rows.data = s.Shape[1], append(rows.data, s.data...)
	}
	return num.FP8, rows, nil
}

type tableRows struct {
	width int
	data  []byte
}

func (t tableRows) Rows(ids []int64, dst []byte) error {
	for i, id := range ids {
		copy(dst[i*t.width:(i+1)*t.width], t.data[id*int64(t.width):])
	}
	return nil
}

type goldenCase struct {
	Tokens []int32 `json:"tokens"`
	Next   int32   `json:"next"`
	Drafts []int32 `json:"drafts"`
	Greedy []int32 `json:"greedy"`
}

// relative is the largest relative L2 distance of corresponding rows.
func relative(t testing.TB, got [][]float32, want []float32) float64 {
	t.Helper()
	if len(got) == 0 || len(want)%len(got) != 0 {
		t.Fatalf("%d rows against %d values", len(got), len(want))
	}
	w, worst := len(want)/len(got), 0.0
	for r, row := range got {
		var d, n float64
		for i, v := range want[r*w : (r+1)*w] {
			d += (float64(row[i]) - float64(v)) * (float64(row[i]) - float64(v))
			n += float64(v) * float64(v)
		}
		worst = max(worst, math.Sqrt(d/n))
	}
	return worst
}

func narrow(rows [][]float64) (out [][]float32) {
	for _, r := range rows {
		line := make([]float32, len(r))
		for i, v := range r {
			line[i] = float32(v)
		}
		out = append(out, line)
	}
	return out
}

// The exact oracle computes what the reference computes: logits, streams, MTP and chained drafts of every text case.
func TestGolden(t *testing.T) {
	for dir, ids := range map[string]int{"../../testdata/micro-radixark": 480, "../../../shared/golden/mini-radixark": 2000} {
		t.Run(filepath.Base(dir), func(t *testing.T) {
			c, ck := openCheckpoint(t, filepath.Join(dir, "checkpoint"))
			golden := map[string]safetensor{}
			openSafetensors(t, filepath.Join(dir, "golden.safetensors"), golden)
			raw, err := os.ReadFile(filepath.Join(dir, "golden.json"))
			if err != nil {
				t.Skip(err)
			}
			var meta struct {
				Cases map[string]goldenCase `json:"cases"`
			}
			if err := json.Unmarshal(raw, &meta); err != nil {
				t.Fatal(err)
			}
			m, err := Bind(c, ck, Options{Drafter: true, IDs: ids})
			if err != nil {
				t.Fatal(err)
			}
			for name, g := range meta.Cases {
				if strings.HasPrefix(name, "image") || testing.Short() && len(g.Tokens) > 100 {
					continue
				}
				dev := cpu.NewOracle(cpu.Options{States: m.States, Lanes: 1, Tokens: len(g.Tokens) + 8, Verify: 4, Carry: len(g.Tokens)})
				r := NewRunner(m, dev, len(g.Tokens))
				r.Taps = true
				trace := &backend.Trace{}
				res, err := r.Prompt(backend.LaneRows{Tokens: g.Tokens, Want: backend.WantLogitsAll, Trace: trace})
				if err != nil {
					t.Fatal(err)
				}
				worst := relative(t, res.Logits, golden[name+".logits"].values())
				for l := range c.Text.Layers {
					key := fmt.Sprintf("layer%d", l)
					if s, ok := golden[name+"."+key]; ok {
						if e := relative(t, narrow(trace.Streams[fmt.Sprintf("layer %d", l)]), s.values()); e > 1e-5 {
							t.Errorf("%s: layer %d streams off by %.2g", name, l, e)
						}
					}
				}
				drafts, logits, err := r.Draft(0, []int32{g.Next}, len(g.Drafts), backend.WantLogits)
				if err != nil {
					t.Fatal(err)
				}
				draft := relative(t, logits, golden[name+".draft_logits"].values())
				t.Logf("%-11s logits %.2g drafts %.2g %v want %v", name, worst, draft, drafts, g.Drafts)
				if worst > 1e-5 || draft > 1e-5 {
					t.Errorf("%s: beyond 1e-5", name)
				}
			}
		})
	}
}
