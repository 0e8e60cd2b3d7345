package convert

import (
	"context"
	"encoding/binary"
	"fmt"
	"math"
	"slices"
	"sync"
	"sync/atomic"

	"ninfer/internal/arch"
	"ninfer/internal/hf"
	"ninfer/internal/num"
)

// checkTensors is S7 to S9: the checkpoint has exactly the tensors of the inventory, with their dtypes and shapes. The int64 index
// tensors may be there; the program derives what they hold, so they must agree with it.
func (c *conversion) checkTensors(context.Context) error {
	need := arch.SourceTensors(c.specs)
	optional := map[string]bool{}
	for k := range c.config.Text.PLELayerIDs {
		g := c.config.Text.Ngram(k)
		for i, t := range c.config.IndexTensors()[3*k:][:3] {
			optional[t.Name] = true
			if !c.model.Has(t.Name) {
				continue
			}
			if err := checkTensor(c.model, t); err != nil {
				return err
			}
			if err := c.checkIndex(t.Name, [][]int64{g.Multipliers, g.Offsets, g.Sizes}[i]); err != nil {
				return err
			}
		}
	}

	// Both lists are sorted: walk them together. The first difference is named, the others are counted.
	var first string
	others, absent := -1, 0
	differ := func(format, name string) {
		if others++; others == 0 {
			first = fmt.Sprintf(format, name)
		}
	}
	have := c.model.Names()
	for _, t := range need {
		for len(have) > 0 && have[0] < t.Name {
			if !optional[have[0]] {
				differ("tensor %q is not expected", have[0])
			}
			have = have[1:]
		}
		if len(have) > 0 && have[0] == t.Name {
			have = have[1:]
			continue
		}
		absent++
		differ("tensor %q is missing", t.Name)
	}
	for _, name := range have {
		if !optional[name] {
			differ("tensor %q is not expected", name)
		}
	}
	switch {
	case others > 0:
		return fail(Source, "%s: %s (and %d more tensors are missing or not expected; %d of %d are there)",
			c.Model, first, others, len(need)-absent, len(need))
	case others == 0:
		return fail(Source, "%s: %s", c.Model, first)
	}
	for _, t := range need {
		if err := checkTensor(c.model, t); err != nil {
			return err
		}
	}
	return c.checkFiles()
}

// checkTensor is S9 for one tensor that is there.
func checkTensor(m *hf.Checkpoint, need arch.SourceTensor) error {
	t, err := m.Tensor(need.Name)
	switch {
	case err != nil:
		return &Error{Source, err}
	case t.DType != need.DType:
		return fail(Source, "%s: tensor %q has dtype %s, need %s", t.File, t.Name, t.DType, need.DType)
	case !slices.Equal(t.Shape, need.Shape):
		return fail(Source, "%s: tensor %q has shape %v, need %v", t.File, t.Name, t.Shape, need.Shape)
	}
	return nil
}

// checkIndex compares an int64 tensor with the values derived from the config.
func (c *conversion) checkIndex(name string, need []int64) error {
	t, err := c.model.Tensor(name)
	if err != nil {
		return &Error{Source, err}
	}
	buf := make([]byte, t.Size())
	if _, err := t.ReadAt(buf, 0); err != nil {
		return classify(Source, err)
	}
	for i, want := range need {
		if got := int64(binary.LittleEndian.Uint64(buf[8*i:])); got != want {
			return fail(Source, "%s: tensor %q has %d at %d, but the config gives %d", t.File, name, got, i, want)
		}
	}
	return nil
}

// checkScales is S11 and S12, and what S20 says of scales: it reads the multipliers of all experts, and keeps the divisors that will be
// stored in their place.
func (c *conversion) checkScales(ctx context.Context) error {
	c.divisors = make([][]float32, len(c.specs))
	return c.parallel(ctx, len(c.specs), func(i int) error {
		s := &c.specs[i].Source
		switch s.Op {
		case arch.OpRowScaled:
			return c.checkRowScales(s)
		case arch.OpBank, arch.OpDivisors, arch.OpPackedBank:
		default:
			return nil
		}
		list := make([]float32, s.Count)
		for e := range list {
			var first string
			for j, p := range s.Projections {
				name, d, err := c.divisor(s, e, p)
				switch {
				case err != nil:
					return err
				case j == 0:
					list[e], first = d, name
				case d != list[e]:
					return fail(Source, "tensor %q differs from %q: a fused bank needs one value", name, first)
				}
			}
		}
		c.divisors[i] = list
		return nil
	})
}

// divisor reads what is stored for one projection of an expert, and names the tensor it comes from.
func (c *conversion) divisor(s *arch.Source, e int, p string) (string, float32, error) {
	_, _, name, input := s.Expert(e, p)
	switch s.Op {
	case arch.OpDivisors:
		name = input
	case arch.OpPackedBank:
		_, _, name, input = s.PackedExpert(e, p)
		t, x, err := c.scalar(input)
		if err != nil {
			return name, 0, err
		}
		if err := num.CheckPackedInputScale(x); err != nil {
			return name, 0, fail(Source, "%s: tensor %q: %w", t.File, input, err)
		}
	}
	t, d, err := c.scalar(name)
	if err != nil {
		return name, 0, err
	}
	if s.Op == arch.OpPackedBank {
		d, err = num.PackedFusedDivisor(d, d)
	} else {
		d, err = num.ModelOptDivisor(d)
	}
	if err != nil {
		return name, 0, fail(Source, "%s: tensor %q: %w", t.File, name, err)
	}
	return name, d, nil
}

// scalar reads an F32 tensor of one value.
func (c *conversion) scalar(name string) (hf.Tensor, float32, error) {
	t, err := c.model.Tensor(name)
	if err != nil {
		return t, 0, &Error{Source, err}
	}
	var b [4]byte
	if _, err := t.ReadAt(b[:], 0); err != nil {
		return t, 0, classify(Source, err)
	}
	return t, math.Float32frombits(binary.LittleEndian.Uint32(b[:])), nil
}

// parallel calls f for 0 to n-1 on all cores, begun in order. After the first error nothing further is begun; of several errors
// that of the lowest number is returned.
func (c *conversion) parallel(ctx context.Context, n int, f func(i int) error) error {
	errs := make([]error, n)
	var next atomic.Int64
	var stop atomic.Bool
	var wg sync.WaitGroup
	for range min(n, c.workers()) {
		wg.Go(func() {
			for !stop.Load() {
				i := int(next.Add(1)) - 1
				if i >= n {
					return
				}
				if errs[i] = ctx.Err(); errs[i] == nil {
					errs[i] = f(i)
				}
				if errs[i] != nil {
					stop.Store(true)
				}
			}
		})
	}
	wg.Wait()
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}
