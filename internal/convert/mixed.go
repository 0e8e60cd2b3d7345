package convert

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json/v2"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"

	"ninfer/internal/arch"
	"ninfer/internal/hf"
	"ninfer/internal/num"
)

// The INT4 table's folder (docs/format.md 5.2.3).
const (
	packedFolder = "ples_int4"
	packedMeta   = "META.json"
	packedLayout = "group16_int4_fp16scale_lownibblefirst"
	packedCodes  = "weight_i4"
	packedScales = "weight_scale"
)

// readTable reads what the folder of the INT4 table says of itself: S20.
func (c *conversion) readTable(context.Context) error {
	if c.variant.Profile != arch.Mixed {
		return nil
	}
	path := filepath.Join(c.PLE, packedMeta)
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) { // perhaps the repository that has the folder
		below := filepath.Join(c.PLE, packedFolder)
		if again, err2 := os.ReadFile(filepath.Join(below, packedMeta)); err2 == nil {
			c.PLE, path, text, err = below, filepath.Join(below, packedMeta), again, nil
		}
	}
	if err != nil {
		return classify(IO, fmt.Errorf("n-gram table: %w", err))
	}
	var meta struct {
		Layout string `json:"layout"`
		Shards int    `json:"shards"`
		Rows   int64  `json:"rows"`
		Width  int    `json:"width"`
	}
	if err := json.Unmarshal(text, &meta); err != nil {
		return fail(Source, "%s: %w", path, err)
	}
	g, t := c.config.Text.Ngram(0), &c.config.Text
	for _, m := range []struct {
		name      string
		has, need any
	}{
		{"layout", meta.Layout, packedLayout}, {"shards", meta.Shards, t.NgramParts}, {"rows", meta.Rows, g.Rows}, {"width", meta.Width, g.HeadWidth},
	} {
		if m.has != m.need {
			return fail(Source, "%s: %s is %v, need %v", path, m.name, m.has, m.need)
		}
	}
	return nil
}

// openTable opens the shards of the INT4 table. Their words are checked when they are copied.
func (c *conversion) openTable(context.Context) error {
	if c.variant.Profile != arch.Mixed {
		return nil
	}
	g, t := c.config.Text.Ngram(0), &c.config.Text
	rows := int(g.Rows) / t.NgramParts
	for i := range t.NgramParts {
		f, err := hf.OpenFile(filepath.Join(c.PLE, "shard_"+strconv.Itoa(i)+".safetensors"))
		if errors.Is(err, fs.ErrNotExist) { // the folder is there, so it is not whole
			return fail(Source, "n-gram table: %w", err)
		}
		if err != nil {
			return classify(Source, fmt.Errorf("n-gram table: %w", err))
		}
		c.ple = append(c.ple, f)
		for _, need := range []arch.SourceTensor{
			{Name: packedCodes, DType: "U8", Shape: []int{rows, g.HeadWidth / 2}}, {Name: packedScales, DType: "F16", Shape: []int{rows, g.HeadWidth / 16}},
		} {
			if err := checkTensor(f, need); err != nil {
				return err
			}
		}
		if f.Len() != 2 {
			return fail(Source, "%s: %d tensors, need %s and %s only", f.Files()[0], f.Len(), packedCodes, packedScales)
		}
	}
	return nil
}

// packedTable adds one shard of the INT4 table: codes, then scales. The words of a row are checked together when its codes are copied.
func (o *content) packedTable(spec *arch.Spec) error {
	g, err := num.NewGeometry(spec.Format, spec.Layout, spec.Shape)
	if err != nil {
		return fmt.Errorf("%q: %w", spec.ID, err)
	}
	f := o.c.ple[spec.Source.Index]
	codes, err := f.Tensor(packedCodes)
	if err != nil {
		return &Error{Source, err}
	}
	scales, err := f.Tensor(packedScales)
	if err != nil {
		return &Error{Source, err}
	}
	step := max(1, o.chunk/int(g.Codes.Stride))
	for first := 0; first < g.Rows; first += step {
		n := min(step, g.Rows-first)
		o.add(int64(n)*g.Codes.Stride, func(b *buffer) ([]byte, error) {
			rows := num.RowBytes{First: first, N: n, Codes: sized(&b.source, n*int(g.Codes.Stride)), Scales: sized(&b.scales, n*int(g.Scales.Stride))}
			if _, err := codes.ReadAt(rows.Codes, int64(first)*g.Codes.Stride); err != nil {
				return nil, classify(Source, err)
			}
			if _, err := scales.ReadAt(rows.Scales, int64(first)*g.Scales.Stride); err != nil {
				return nil, classify(Source, err)
			}
			if err := g.CheckRows(rows); err != nil {
				return nil, fail(Source, "%s: as %q: %w", codes.File, spec.ID, err)
			}
			return rows.Codes, nil
		})
	}
	o.pad(g.Scales.Off)
	o.copy(nil, scales)
	return nil
}

// rowScaled adds FP8 matrices one below the other: their codes, then the multipliers of their rows, which checkScales has seen.
func (o *content) rowScaled(spec *arch.Spec) error {
	g, err := num.NewGeometry(spec.Format, spec.Layout, spec.Shape)
	if err != nil {
		return fmt.Errorf("%q: %w", spec.ID, err)
	}
	var codes, scales []hf.Tensor
	for _, p := range spec.Source.Parts {
		t, err := o.c.tensor(p.Name)
		if err != nil {
			return err
		}
		codes = append(codes, t)
		if t, err = o.c.tensor(arch.RowScale(p.Name)); err != nil {
			return err
		}
		scales = append(scales, t)
	}
	o.copy(func(r cut, data []byte) error {
		if i := num.E4M3NaN(data); i >= 0 {
			at := r.off + int64(i)
			return fail(Source, "%s: tensor %q: code 0x%02x of row %d column %d is not a number", r.t.File, r.t.Name, data[i], at/int64(g.Cols), at%int64(g.Cols))
		}
		return nil
	}, codes...)
	o.pad(g.Scales.Off)
	o.copy(nil, scales...)
	return nil
}

// checkRowScales: every multiplier of the FP8 matrices is finite and positive.
func (c *conversion) checkRowScales(s *arch.Source) error {
	for _, p := range s.Parts {
		t, err := c.tensor(arch.RowScale(p.Name))
		if err != nil {
			return err
		}
		words := make([]byte, t.Size())
		if _, err := t.ReadAt(words, 0); err != nil {
			return classify(Source, err)
		}
		for i := range len(words) / 4 {
			if x := math.Float32frombits(binary.LittleEndian.Uint32(words[4*i:])); !(x > 0 && x <= math.MaxFloat32) {
				return fail(Source, "%s: tensor %q: multiplier %v of row %d is not finite and positive", t.File, t.Name, x, i)
			}
		}
	}
	return nil
}

// What is known of the published checkpoint (docs/format.md 5.2.3). It binds for the official config only: other models have other files.
const (
	mixedRevision   = "a4e813ed3cfbbcc61e2929699eccb864a4dfa843"
	packedRevision  = "da8b39586016d8325ac619be28ad77d6296625ec"
	expertsFilePart = "ct-experts-layer"
	expertsInFile   = 6144
)

// checkPins compares folders of the official model with what was published, as far as they tell: S20.
func (c *conversion) checkPins(context.Context) error {
	if c.variant.Profile != arch.Mixed || !c.config.IsOfficial() {
		return nil
	}
	for _, f := range []struct{ dir, file, need string }{{c.Model, hf.ConfigName, mixedRevision}, {c.PLE, packedMeta, packedRevision}} {
		if rev := revision(f.dir, f.file); rev != "" && rev != f.need {
			return fail(Source, "%s: revision %s was downloaded, need %s", f.dir, rev, f.need)
		}
	}
	return nil
}

// checkFiles compares the files of the official checkpoint that the index names, and how many tensors each holds, with the published
// ones.
func (c *conversion) checkFiles() error {
	if c.variant.Profile != arch.Mixed || !c.config.IsOfficial() {
		return nil
	}
	count := map[string]int{}
	for _, name := range c.model.Names() {
		t, err := c.tensor(name)
		if err != nil {
			return err
		}
		count[t.File]++
	}
	return checkFileSet(count, c.config.Text.Layers)
}

func checkFileSet(count map[string]int, layers int) error {
	need := []string{"fp8-tail-00.safetensors"}
	for _, n := range []string{"00001", "00010", "00011", "00012"} {
		need = append(need, "carry-model-bf16-"+n+".safetensors")
	}
	for l := range layers {
		name := fmt.Sprintf("%s%02d.safetensors", expertsFilePart, l)
		need = append(need, name)
		if n, ok := count[name]; ok && n != expertsInFile {
			return fail(Source, "%s: %d tensors are in use, the published file has %d", name, n, expertsInFile)
		}
	}
	for _, name := range need {
		if _, ok := count[name]; !ok {
			return fail(Source, "file %s of the published checkpoint is not in the index", name)
		}
	}
	for name := range count {
		if !slices.Contains(need, name) {
			return fail(Source, "file %s is not one of the published checkpoint", name)
		}
	}
	return nil
}

// revision finds out which commit of its repository a file was downloaded from: by the notes that the hub's own client leaves in a
// folder, or by the folder's place in that client's cache. It is empty where nothing tells.
func revision(dir, file string) string {
	full, err := filepath.Abs(dir)
	if err != nil {
		return ""
	}
	if filepath.Base(full) == packedFolder { // a folder of its repository
		full, file = filepath.Dir(full), filepath.Join(packedFolder, file)
	}
	text, err := os.ReadFile(filepath.Join(full, ".cache", "huggingface", "download", file+".metadata"))
	if err == nil {
		line, _, _ := bytes.Cut(text, []byte("\n"))
		return string(bytes.TrimSpace(line))
	}
	if parent, base := filepath.Split(full); filepath.Base(parent) == "snapshots" {
		return base
	}
	return ""
}
