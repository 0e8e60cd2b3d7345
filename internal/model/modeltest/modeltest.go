// Package modeltest opens the reference checkpoints for tests of packages that need a model.
//
// It reads safetensors on its own: neither converter nor container is involved, and everything is widened to float32, NVFP4 experts
// included. So a model bound to it is an independent reading of the formats too.
package modeltest

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
	"ninfer/internal/model"
	"ninfer/internal/num"
)

// Folder is a golden folder and how many ids its tokenizer knows.
type Folder struct {
	Dir string
	IDs int
}

// Folders are the radixark golden folders seen from a package two levels below the root. The second is one of NINFER_GOLDEN, a folder of
// further ones (CONTRIBUTING.md): where it is absent, Open skips.
var Folders = []Folder{{"../../testdata/micro-radixark", 480}, {filepath.Join(os.Getenv("NINFER_GOLDEN"), "mini-radixark"), 2000}}

// Model binds the folder's checkpoint, with its drafter.
func (f Folder) Model(t testing.TB) (*model.Model, *Checkpoint) {
	c, ck := OpenCheckpoint(t, filepath.Join(f.Dir, "checkpoint"))
	m, err := model.Bind(c, ck, model.Options{Drafter: true, IDs: f.IDs})
	if err != nil {
		t.Fatal(err)
	}
	return m, ck
}

// Micro binds the small checkpoint that every clone has.
func Micro(t testing.TB) *model.Model {
	m, _ := Folders[0].Model(t)
	return m
}

// Checkpoint is a model.Store over a reference checkpoint.
type Checkpoint struct {
	Tensors map[string]Safetensor
}

// Safetensor is one tensor as its file has it.
type Safetensor struct {
	DType   string   `json:"dtype"`
	Shape   []int    `json:"shape"`
	Offsets [2]int64 `json:"data_offsets"`
	Data    []byte   `json:"-"`
}

// OpenSafetensors reads all tensors of a file into a map; it skips the test if the file is absent.
func OpenSafetensors(t testing.TB, path string, into map[string]Safetensor) {
	raw, err := os.ReadFile(path)
	if err != nil {
		t.Skip(err)
	}
	n := binary.LittleEndian.Uint64(raw)
	head := map[string]Safetensor{}
	if err := json.Unmarshal(raw[8:8+n], &head); err != nil {
		t.Fatal(err)
	}
	for name, s := range head {
		if name != "__metadata__" {
			s.Data = raw[8+n:][s.Offsets[0]:s.Offsets[1]]
			into[name] = s
		}
	}
}

// OpenCheckpoint reads a checkpoint folder; it skips the test if the folder is absent.
func OpenCheckpoint(t testing.TB, dir string) (*arch.Config, *Checkpoint) {
	src, err := os.ReadFile(filepath.Join(dir, "config.json"))
	if err != nil {
		t.Skip(err)
	}
	c, err := arch.ParseConfig(src)
	if err != nil {
		t.Fatal(err)
	}
	ck := &Checkpoint{Tensors: map[string]Safetensor{}}
	files, _ := filepath.Glob(filepath.Join(dir, "*.safetensors"))
	for _, f := range files {
		OpenSafetensors(t, f, ck.Tensors)
	}
	return c, ck
}

// Values widens a tensor to float32.
func (s Safetensor) Values() []float32 {
	var v []float32
	switch s.DType {
	case "BF16":
		for i := 0; i < len(s.Data); i += 2 {
			v = append(v, math.Float32frombits(uint32(binary.LittleEndian.Uint16(s.Data[i:]))<<16))
		}
	case "F32":
		for i := 0; i < len(s.Data); i += 4 {
			v = append(v, math.Float32frombits(binary.LittleEndian.Uint32(s.Data[i:])))
		}
	case "F8_E4M3":
		for _, b := range s.Data {
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
		for _, b := range s.Data {
			v = append(v, e2m1[b&15], e2m1[b>>4])
		}
	}
	return v
}

// Has is of model.Store.
func (c *Checkpoint) Has(name string) bool {
	_, ok := c.Tensors[name]
	return ok || strings.HasPrefix(name, "model.") && (strings.HasSuffix(name, arch.BankGateUp) || strings.HasSuffix(name, arch.BankDown))
}

func widened(shape []int, v []float32) (num.Tensor, error) {
	raw := make([]byte, 0, 4*len(v))
	for _, x := range v {
		raw = binary.LittleEndian.AppendUint32(raw, math.Float32bits(x))
	}
	return num.NewTensor(num.FP32, num.Contiguous, shape, raw)
}

// Weight is of model.Store.
func (c *Checkpoint) Weight(name string) (backend.Weight, error) {
	t, err := c.tensor(name)
	if err != nil {
		return backend.Weight{}, err
	}
	return backend.Whole(t), nil
}

func (c *Checkpoint) tensor(name string) (num.Tensor, error) {
	if base, ok := strings.CutSuffix(name, arch.BankGateUp); ok {
		return c.bank(base, "gate_proj", "up_proj")
	}
	if base, ok := strings.CutSuffix(name, arch.BankDown); ok {
		return c.bank(base, "down_proj")
	}
	s, ok := c.Tensors[name]
	if !ok {
		return num.Tensor{}, fmt.Errorf("no tensor %q", name)
	}
	v, shape := s.Values(), s.Shape
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
func (c *Checkpoint) bank(base string, parts ...string) (num.Tensor, error) {
	var all []float32
	experts, cols := 0, 0
	for ; ; experts++ {
		if _, ok := c.Tensors[fmt.Sprintf("%sexperts.%d.%s.weight", base, experts, parts[0])]; !ok {
			break
		}
		for _, part := range parts {
			q := fmt.Sprintf("%sexperts.%d.%s.", base, experts, part)
			codes, scales, s2 := c.Tensors[q+"weight"].Values(), c.Tensors[q+"weight_scale"].Values(), c.Tensors[q+"weight_scale_2"].Values()[0]
			for i := range codes {
				codes[i] *= scales[i/16] * s2
			}
			cols = 2 * c.Tensors[q+"weight"].Shape[1]
			all = append(all, codes...)
		}
	}
	return widened([]int{experts, len(all) / experts / cols, cols}, all)
}

// Table is of model.Store.
func (c *Checkpoint) Table(name string) (num.Format, backend.RowSource, error) {
	var rows tableRows
	for i := 0; ; i++ {
		s, ok := c.Tensors[fmt.Sprintf("%sshard_%d.weight", strings.TrimSuffix(name, "weight"), i)]
		if !ok {
			break
		}
		rows.width, rows.data = s.Shape[1], append(rows.data, s.Data...)
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
