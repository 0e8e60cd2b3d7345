package convert

import (
	"context"
	"encoding/binary"
	"fmt"
	"math"
	"sync"
	"time"

	"ninfer/internal/arch"
	"ninfer/internal/artifact"
	"ninfer/internal/hf"
	"ninfer/internal/num"
)

// chunk is how many source bytes a worker holds at a time.
const chunk = 4 << 20

// write makes and writes all objects. Each object is written front to back by one worker, so that its digest is taken on the way.
func (c *conversion) write(ctx context.Context) error {
	start := time.Now()
	var all int64
	for _, o := range c.plan.Directory.Objects {
		all += o.Bytes
	}
	var mu sync.Mutex // guards done, finished and the calls of Progress
	var done int64
	finished := 0
	buffers := sync.Pool{New: func() any { return new(buffer) }}
	return parallel(ctx, len(c.specs), func(i int) error {
		o := &c.plan.Directory.Objects[i]
		b := buffers.Get().(*buffer)
		defer buffers.Put(b)
		w, err := c.writer.Object(o.ID)
		if err != nil {
			return classify(IO, err)
		}
		s := &sink{ctx: ctx, object: o.ID, w: w, fault: c.fault}
		if err := c.encode(i, s, b); err != nil {
			return err
		}
		if err := w.Close(); err != nil {
			return classify(IO, err)
		}
		mu.Lock()
		defer mu.Unlock()
		finished++
		done += o.Bytes
		if c.Progress != nil {
			c.Progress(Step{finished, len(c.specs), o.ID, o.Bytes, done, all, time.Since(start)})
		}
		return nil
	})
}

// sink takes an object's bytes in order.
type sink struct {
	ctx    context.Context
	object string
	w      *artifact.ObjectWriter
	off    int64
	fault  func(object string, off int64) error
}

func (s *sink) write(p []byte) error {
	if err := s.ctx.Err(); err != nil {
		return err
	}
	if s.fault != nil {
		if err := s.fault(s.object, s.off); err != nil {
			return classify(IO, fmt.Errorf("writing %q: %w", s.object, err))
		}
	}
	if _, err := s.w.Write(p); err != nil {
		return classify(IO, err)
	}
	s.off += int64(len(p))
	return nil
}

// pad writes zeros up to an offset of the object.
func (s *sink) pad(off int64) error {
	if off <= s.off {
		return nil
	}
	return s.write(make([]byte, off-s.off))
}

// buffer is the memory of one worker, kept from object to object.
type buffer struct{ source, codes, high, scales []byte }

// sized returns *b with n bytes, grown if needed. Contents are undefined.
func sized(b *[]byte, n int) []byte {
	if cap(*b) < n {
		*b = make([]byte, n)
	}
	return (*b)[:n]
}

// encode writes object i.
func (c *conversion) encode(i int, out *sink, b *buffer) error {
	spec := &c.specs[i]
	s := &spec.Source
	switch s.Op {
	case arch.OpResource:
		return out.write(c.resources[spec.ID])
	case arch.OpBank:
		return c.bank(i, out, b)
	case arch.OpDivisors:
		return out.write(floats(c.divisors[i]))
	case arch.OpProposalIDs:
		var words []byte
		for _, id := range c.chosen {
			words = binary.LittleEndian.AppendUint32(words, uint32(id))
		}
		return out.write(words)
	case arch.OpCopy:
		for t := range s.Tensors() {
			if err := c.copy(t.Name, out, b); err != nil {
				return err
			}
		}
		return nil
	case arch.OpTranspose:
		return c.transpose(spec, out, b)
	case arch.OpWiden, arch.OpQuantize:
		t, err := c.model.Tensor(s.Name)
		if err != nil {
			return &Error{Source, err}
		}
		return c.rows(spec, t, out, b, func(dst []byte, first, n int) error {
			_, err := t.ReadAt(dst, int64(len(dst)/n)*int64(first))
			return err
		})
	case arch.OpProposal:
		t, err := c.model.Tensor(s.Name)
		if err != nil {
			return &Error{Source, err}
		}
		return c.rows(spec, t, out, b, func(dst []byte, first, n int) error {
			row := len(dst) / n
			for k := range n {
				if _, err := t.ReadAt(dst[k*row:][:row], int64(row)*int64(c.chosen[first+k])); err != nil {
					return err
				}
			}
			return nil
		})
	}
	return fmt.Errorf("%q: no way to make it yet", spec.ID)
}

func floats(list []float32) []byte {
	var out []byte
	for _, x := range list {
		out = binary.LittleEndian.AppendUint32(out, math.Float32bits(x))
	}
	return out
}

// copy writes a tensor's words.
func (c *conversion) copy(name string, out *sink, b *buffer) error {
	t, err := c.model.Tensor(name)
	if err != nil {
		return &Error{Source, err}
	}
	for off := int64(0); off < t.Size(); {
		p := sized(&b.source, int(min(chunk, t.Size()-off)))
		if _, err := t.ReadAt(p, off); err != nil {
			return classify(Source, err)
		}
		if err := out.write(p); err != nil {
			return err
		}
		off += int64(len(p))
	}
	return nil
}

// transpose writes [channels, 1, taps] as [taps, channels].
func (c *conversion) transpose(spec *arch.Spec, out *sink, b *buffer) error {
	t, err := c.model.Tensor(spec.Source.Name)
	if err != nil {
		return &Error{Source, err}
	}
	p := sized(&b.source, int(t.Size()))
	if _, err := t.ReadAt(p, 0); err != nil {
		return classify(Source, err)
	}
	taps, channels := spec.Shape[0], spec.Shape[1]
	q := sized(&b.codes, len(p))
	for i := range taps {
		for j := range channels {
			copy(q[2*(i*channels+j):][:2], p[2*(j*taps+i):])
		}
	}
	return out.write(q)
}

// rows encodes BF16 rows that read supplies, in runs. Codes are written as they come; high bits and scales, a small part of the
// object, are held until all codes are out, so that the object is written front to back.
func (c *conversion) rows(spec *arch.Spec, t hf.Tensor, out *sink, b *buffer, read func(dst []byte, first, n int) error) error {
	g, err := num.NewGeometry(spec.Format, spec.Layout, spec.Shape)
	if err != nil {
		return fmt.Errorf("%q: %w", spec.ID, err)
	}
	high, scales := sized(&b.high, int(g.High.Len)), sized(&b.scales, int(g.Scales.Len))
	step := max(1, chunk/(2*g.Cols))
	for first := 0; first < g.Rows; first += step {
		n := min(step, g.Rows-first)
		src := sized(&b.source, 2*g.Cols*n)
		if err := read(src, first, n); err != nil {
			return classify(Source, err)
		}
		span, err := g.RowSpans(first, first+n)
		if err != nil {
			return fmt.Errorf("%q: %w", spec.ID, err)
		}
		dst := num.RowBytes{First: first, N: n, Codes: sized(&b.codes, int(span.Codes.Len))}
		dst.High = high[int64(first)*g.High.Stride:][:span.High.Len]
		dst.Scales = scales[int64(first)*g.Scales.Stride:][:span.Scales.Len]
		if err := g.EncodeRows(dst, src); err != nil {
			return encodeError(t, spec.ID, err)
		}
		if err := out.write(dst.Codes); err != nil {
			return err
		}
	}
	for _, plane := range []struct {
		num.PlaneSpec
		data []byte
	}{{g.High, high}, {g.Scales, scales}} {
		if plane.Len == 0 {
			continue
		}
		if err := out.pad(plane.Off); err != nil {
			return err
		}
		if err := out.write(plane.data); err != nil {
			return err
		}
	}
	return nil
}

// bank copies ModelOpt experts: all codes, then all scale words in their places, then the divisors (artifact.md 2.4, 3.5).
func (c *conversion) bank(i int, out *sink, b *buffer) error {
	spec := &c.specs[i]
	s := &spec.Source
	g, err := num.NewGeometry(spec.Format, spec.Layout, spec.Shape)
	if err != nil {
		return fmt.Errorf("%q: %w", spec.ID, err)
	}
	for e := range s.Count {
		for _, p := range s.Projections {
			name, _, _, _ := s.Expert(e, p)
			if err := c.copy(name, out, b); err != nil {
				return err
			}
		}
	}
	if err := out.pad(g.Scales.Off); err != nil {
		return err
	}
	rows, cols := s.Shape[0], s.Shape[1]
	plane := sized(&b.scales, int(g.Scales.Len)/g.Experts)
	words := sized(&b.source, rows*cols/16)
	for e := range s.Count {
		for k, p := range s.Projections {
			_, name, _, _ := s.Expert(e, p)
			t, err := c.model.Tensor(name)
			if err != nil {
				return &Error{Source, err}
			}
			if _, err := t.ReadAt(words, 0); err != nil {
				return classify(Source, err)
			}
			for j, w := range words {
				if w >= 0x7f { // a sign, or not a number: S13
					return fail(Source, "%s: tensor %q: scale word 0x%02x of row %d group %d is negative or not a number",
						t.File, name, w, j/(cols/16), j%(cols/16))
				}
			}
			num.SwizzleScales(plane, words, k*rows, rows, cols)
		}
		if err := out.write(plane); err != nil {
			return err
		}
	}
	if err := out.pad(g.Divisors.Off); err != nil {
		return err
	}
	return out.write(floats(c.divisors[i]))
}

// encodeError is a source value that a quantizer cannot take (S14) or a group that it cannot scale (S15).
func encodeError(t hf.Tensor, object string, err error) error {
	return fail(Encode, "%s: tensor %q as %q: %w", t.File, t.Name, object, err)
}
