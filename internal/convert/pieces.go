package convert

import (
	"encoding/binary"
	"fmt"
	"math"

	"ninfer/internal/arch"
	"ninfer/internal/hf"
	"ninfer/internal/num"
)

// content collects the pieces of one object.
type content struct {
	c      *conversion
	chunk  int
	pieces []piece
	at     int64
}

func (o *content) add(n int64, make func(b *buffer) ([]byte, error)) {
	o.pieces = append(o.pieces, piece{bytes: n, make: make})
	o.at += n
}

// fixed adds bytes that are known.
func (o *content) fixed(p []byte) {
	o.add(int64(len(p)), func(*buffer) ([]byte, error) { return p, nil })
}

// pad adds zeros up to an offset of the object.
func (o *content) pad(off int64) {
	if off > o.at {
		o.fixed(make([]byte, off-o.at))
	}
}

// held adds what earlier pieces will have collected in p.
func (o *content) held(p []byte) {
	for len(p) > 0 {
		n := min(len(p), o.chunk)
		o.fixed(p[:n:n])
		o.pieces[len(o.pieces)-1].after = true
		p = p[n:]
	}
}

// pieces says how object i is made.
func (c *conversion) pieces(i int) ([]piece, error) {
	spec := &c.specs[i]
	s := &spec.Source
	o := &content{c: c, chunk: c.chunk()}
	var err error
	switch s.Op {
	case arch.OpResource:
		o.fixed(c.resources[spec.ID])
	case arch.OpCopy:
		err = o.copies(s)
	case arch.OpTranspose:
		err = o.transpose(spec)
	case arch.OpWiden, arch.OpQuantize:
		err = o.quantized(spec)
	case arch.OpBank, arch.OpPackedBank:
		err = o.bank(spec, c.divisors[i])
	case arch.OpDivisors:
		o.fixed(floats(c.divisors[i]))
	case arch.OpConstant:
		list := make([]float32, spec.Shape[0])
		for e := range list {
			list[e] = s.Constant
		}
		o.fixed(floats(list))
	case arch.OpEncodeBank:
		err = o.encodedBank(spec)
	case arch.OpTableScale:
		o.fixed(binary.LittleEndian.AppendUint16(nil, c.tables[s.Name].multiplier))
	case arch.OpEncodeTable:
		err = o.encodedTable(s)
	case arch.OpProposal:
		err = o.proposal(spec)
	case arch.OpProposalIDs:
		var words []byte
		for _, id := range c.chosen {
			words = binary.LittleEndian.AppendUint32(words, uint32(id))
		}
		o.fixed(words)
	case arch.OpRowScaled:
		err = o.rowScaled(spec)
	case arch.OpPackedTable:
		err = o.packedTable(spec)
	default:
		err = fmt.Errorf("%q: no way to make it", spec.ID)
	}
	return o.pieces, err
}

// chunk is how many source bytes a piece is made of.
func (c *conversion) chunk() int {
	if c.Options.chunk > 0 {
		return c.Options.chunk
	}
	return chunk
}

func floats(list []float32) []byte {
	out := make([]byte, 0, 4*len(list))
	for _, x := range list {
		out = binary.LittleEndian.AppendUint32(out, math.Float32bits(x))
	}
	return out
}

// tensor finds a source tensor; checkTensors has seen it.
func (c *conversion) tensor(name string) (hf.Tensor, error) {
	t, err := c.model.Tensor(name)
	if err != nil {
		return t, &Error{Source, err}
	}
	return t, nil
}

// cut is a run of a tensor's bytes.
type cut struct {
	t   hf.Tensor
	off int64
	n   int
}

// cuts divides tensors that follow each other into lists of at most n bytes, at multiples of unit bytes.
func cuts(n, unit int, tensors ...hf.Tensor) [][]cut {
	n = max(unit, n/unit*unit)
	var out [][]cut
	var list []cut
	left := n
	for _, t := range tensors {
		for off := int64(0); off < t.Size(); {
			k := int(min(int64(left), t.Size()-off))
			list = append(list, cut{t, off, k})
			off += int64(k)
			if left -= k; left == 0 {
				out, list, left = append(out, list), nil, n
			}
		}
	}
	if list != nil {
		out = append(out, list)
	}
	return out
}

// readCuts reads a list of cuts into p.
func readCuts(list []cut, p []byte) error {
	for _, r := range list {
		if _, err := r.t.ReadAt(p[:r.n], r.off); err != nil {
			return classify(Source, err)
		}
		p = p[r.n:]
	}
	return nil
}

func size(list []cut) int {
	n := 0
	for _, r := range list {
		n += r.n
	}
	return n
}

// copy adds the words of tensors, one after another; check, if not nil, sees each run of a tensor.
func (o *content) copy(check func(r cut, data []byte) error, tensors ...hf.Tensor) {
	for _, list := range cuts(o.chunk, 1, tensors...) {
		n := size(list)
		o.add(int64(n), func(b *buffer) ([]byte, error) {
			p := sized(&b.source, n)
			if err := readCuts(list, p); err != nil {
				return nil, err
			}
			at := 0
			for _, r := range list {
				if check != nil {
					if err := check(r, p[at:at+r.n]); err != nil {
						return nil, err
					}
				}
				at += r.n
			}
			return p, nil
		})
	}
}

func (o *content) copies(s *arch.Source) error {
	var list []hf.Tensor
	for x := range s.Tensors() {
		t, err := o.c.tensor(x.Name)
		if err != nil {
			return err
		}
		list = append(list, t)
	}
	o.copy(nil, list...)
	return nil
}

// transpose adds [channels, 1, taps] as [taps, channels].
func (o *content) transpose(spec *arch.Spec) error {
	t, err := o.c.tensor(spec.Source.Name)
	if err != nil {
		return err
	}
	taps, channels := spec.Shape[0], spec.Shape[1]
	o.add(t.Size(), func(b *buffer) ([]byte, error) {
		p, q := sized(&b.source, int(t.Size())), sized(&b.out, int(t.Size()))
		if _, err := t.ReadAt(p, 0); err != nil {
			return nil, classify(Source, err)
		}
		for i := range taps {
			for j := range channels {
				copy(q[2*(i*channels+j):][:2], p[2*(j*taps+i):])
			}
		}
		return q, nil
	})
	return nil
}

// rows adds a matrix encoded from BF16 rows that read supplies. High bits and scales, a small part of the object, are collected while
// the codes are made.
func (o *content) rows(spec *arch.Spec, t hf.Tensor, read func(dst []byte, first, n int) error) error {
	g, err := num.NewGeometry(spec.Format, spec.Layout, spec.Shape)
	if err != nil {
		return fmt.Errorf("%q: %w", spec.ID, err)
	}
	high, scales := make([]byte, g.High.Len), make([]byte, g.Scales.Len)
	step := max(1, o.chunk/(2*g.Cols))
	for first := 0; first < g.Rows; first += step {
		n := min(step, g.Rows-first)
		span, err := g.RowSpans(first, first+n)
		if err != nil {
			return fmt.Errorf("%q: %w", spec.ID, err)
		}
		o.add(span.Codes.Len, func(b *buffer) ([]byte, error) {
			src := sized(&b.source, 2*g.Cols*n)
			if err := read(src, first, n); err != nil {
				return nil, classify(Source, err)
			}
			dst := num.RowBytes{First: first, N: n, Codes: sized(&b.out, int(span.Codes.Len))}
			dst.High = high[int64(first)*g.High.Stride:][:span.High.Len]
			dst.Scales = scales[int64(first)*g.Scales.Stride:][:span.Scales.Len]
			if err := g.EncodeRows(dst, src); err != nil {
				return nil, encodeError(t, spec.ID, err)
			}
			return dst.Codes, nil
		})
	}
	if g.High.Len > 0 {
		o.pad(g.High.Off)
		o.held(high)
	}
	if g.Scales.Len > 0 {
		o.pad(g.Scales.Off)
		o.held(scales)
	}
	return nil
}

func (o *content) quantized(spec *arch.Spec) error {
	t, err := o.c.tensor(spec.Source.Name)
	if err != nil {
		return err
	}
	return o.rows(spec, t, func(dst []byte, first, n int) error {
		_, err := t.ReadAt(dst, int64(len(dst)/n)*int64(first))
		return err
	})
}

// proposal adds the chosen rows of the output head.
func (o *content) proposal(spec *arch.Spec) error {
	t, err := o.c.tensor(spec.Source.Name)
	if err != nil {
		return err
	}
	return o.rows(spec, t, func(dst []byte, first, n int) error {
		row := len(dst) / n
		for k := range n {
			if _, err := t.ReadAt(dst[k*row:][:row], int64(row)*int64(o.c.chosen[first+k])); err != nil {
				return err
			}
		}
		return nil
	})
}

// bank adds quantized experts: all codes, then all scale words in their places, then the divisors (docs/format.md 2.4, 3.5).
func (o *content) bank(spec *arch.Spec, divisors []float32) error {
	s := &spec.Source
	g, err := num.NewGeometry(spec.Format, spec.Layout, spec.Shape)
	if err != nil {
		return fmt.Errorf("%q: %w", spec.ID, err)
	}
	var codes, words []hf.Tensor
	for e := range s.Count {
		for _, p := range s.Projections {
			code, scale, _, _ := s.Expert(e, p)
			if s.Op == arch.OpPackedBank {
				code, scale, _, _ = s.PackedExpert(e, p)
			}
			for _, x := range []struct {
				name string
				list *[]hf.Tensor
			}{{code, &codes}, {scale, &words}} {
				t, err := o.c.tensor(x.name)
				if err != nil {
					return err
				}
				*x.list = append(*x.list, t)
			}
		}
	}
	o.copy(nil, codes...)
	o.pad(g.Scales.Off)
	rows, cols, each := s.Shape[0], s.Shape[1], len(s.Projections)
	plane := int(g.Scales.Len) / g.Experts
	step := max(1, o.chunk/plane)
	for first := 0; first < g.Experts; first += step {
		n := min(step, g.Experts-first)
		o.add(int64(n*plane), func(b *buffer) ([]byte, error) {
			out, in := sized(&b.out, n*plane), sized(&b.source, rows*cols/16)
			for i, t := range words[first*each:][:n*each] {
				if _, err := t.ReadAt(in, 0); err != nil {
					return nil, classify(Source, err)
				}
				if err := checkBlockScales(t, in, cols/16); err != nil {
					return nil, err
				}
				num.SwizzleScales(out[i/each*plane:][:plane], in, i%each*rows, rows, cols)
			}
			return out, nil
		})
	}
	o.pad(g.Divisors.Off)
	o.fixed(floats(divisors))
	return nil
}

// checkBlockScales is S13.
func checkBlockScales(t hf.Tensor, words []byte, groups int) error {
	for j, w := range words {
		if w >= 0x7f { // a sign, or not a number
			return fail(Source, "%s: tensor %q: scale word 0x%02x of row %d group %d is negative or not a number", t.File, t.Name, w, j/groups, j%groups)
		}
	}
	return nil
}

// encodedBank adds BF16 experts as NVFP4. Scales and divisors are collected while the codes are made: 105 MB for the larger bank of the
// real model.
func (o *content) encodedBank(spec *arch.Spec) error {
	s := &spec.Source
	g, err := num.NewGeometry(spec.Format, spec.Layout, spec.Shape)
	if err != nil {
		return fmt.Errorf("%q: %w", spec.ID, err)
	}
	t, err := o.c.tensor(s.Name)
	if err != nil {
		return err
	}
	scales, divisors := make([]byte, g.Scales.Len), make([]byte, g.Divisors.Len)
	codes, plane := int(g.Codes.Len)/g.Experts, int(g.Scales.Len)/g.Experts
	for e := range g.Experts {
		o.add(int64(codes), func(b *buffer) ([]byte, error) {
			src, out := sized(&b.source, 4*codes), sized(&b.out, codes)
			if _, err := t.ReadAt(src, int64(len(src))*int64(e)); err != nil {
				return nil, classify(Source, err)
			}
			d, err := num.EncodeNVFP4(s.Encoder, g.ExpertRows, g.Cols, src, out, scales[e*plane:][:plane])
			if err != nil {
				return nil, encodeError(t, spec.ID, fmt.Errorf("expert %d: %w", e, err))
			}
			binary.LittleEndian.PutUint32(divisors[4*e:], math.Float32bits(d))
			return out, nil
		})
	}
	o.pad(g.Scales.Off)
	o.held(scales)
	o.pad(g.Divisors.Off)
	o.held(divisors)
	return nil
}

// encodedTable adds the shards of a BF16 table as FP8 codes.
func (o *content) encodedTable(s *arch.Source) error {
	var list []hf.Tensor
	for x := range s.Tensors() {
		t, err := o.c.tensor(x.Name)
		if err != nil {
			return err
		}
		list = append(list, t)
	}
	table := o.c.tables[s.Name].encoder
	for _, list := range cuts(o.chunk, 2, list...) {
		n := size(list)
		o.add(int64(n/2), func(b *buffer) ([]byte, error) {
			src, out := sized(&b.source, n), sized(&b.out, n/2)
			if err := readCuts(list, src); err != nil {
				return nil, err
			}
			if err := table.Encode(out, src); err != nil {
				return nil, encodeError(list[0].t, "n-gram table", err) // it has changed since the first pass
			}
			return out, nil
		})
	}
	return nil
}

// encodeError is a source value that a quantizer cannot take (S14) or a group that it cannot scale (S15).
func encodeError(t hf.Tensor, object string, err error) error {
	return fail(Encode, "%s: tensor %q as %q: %w", t.File, t.Name, object, err)
}
