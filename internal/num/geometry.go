package num

import (
	"errors"
	"fmt"
	"math"
	"math/bits"
)

// Alignment is the byte alignment of a tensor object inside a payload and of
// every plane inside an object. It is part of the file format.
const Alignment = 256

// MaxRank is the largest number of dimensions a tensor may have.
const MaxRank = 16

// What can be wrong with a format, layout and shape; test with errors.Is.
var (
	ErrPair  = errors.New("layout does not store this format")
	ErrShape = errors.New("shape not admissible")
	ErrSize  = errors.New("encoded size not representable")
)

// A PlaneSpec places one plane inside an object. The zero value means that
// the layout has no such plane.
type PlaneSpec struct {
	Off    int64 // first byte, counted from the start of the object
	Len    int64 // bytes, without the padding that follows
	Stride int64 // bytes per row; 0 where a row's words are not contiguous (swizzled scales, divisors)
}

// Geometry is the byte map of one tensor object: everything that format,
// layout and shape determine (docs/format.md 3.2 to 3.7).
type Geometry struct {
	Format Format
	Layout Layout

	Rows int // product of all dimensions but the last
	Cols int // last dimension, 1 for rank 0
	// PaddedCols is Cols rounded up to the layout's padding (128 for
	// RowSplitK128); it equals Cols in every other layout.
	PaddedCols int

	Experts    int // matrices in a bank; 1 unless the layout is ExpertBlockScale
	ExpertRows int // rows of one matrix of a bank; Rows for others

	Group  int // K-values per scale word, 0 if the format has no scale groups
	Groups int // stored scale words per row, 0 likewise; padded groups are counted

	Codes    PlaneSpec // code words, base plane of RowSplitK128, all words of Contiguous
	High     PlaneSpec // high code bits of q5 and q6
	Scales   PlaneSpec // scale words
	Divisors PlaneSpec // FP32 divisors of NVFP4, one per expert

	Bytes int64 // size of the object, padding between planes included
}

// sizer multiplies and adds nonnegative int64 and remembers overflow.
type sizer struct{ over bool }

func (s *sizer) mul(a, b int64) int64 {
	hi, lo := bits.Mul64(uint64(a), uint64(b))
	if hi != 0 || lo > math.MaxInt64 {
		s.over = true
		return 0
	}
	return int64(lo)
}

func (s *sizer) add(a, b int64) int64 {
	if a > math.MaxInt64-b {
		s.over = true
		return 0
	}
	return a + b
}

// up is the smallest multiple of align (a power of two) that is >= x.
func (s *sizer) up(x, align int64) int64 { return s.add(x, align-1) &^ (align - 1) }

// NewGeometry computes the byte map of a tensor. It fails with ErrPair if the
// layout does not store the format, ErrShape if the rank or a dimension is not
// admissible, ErrSize if the size does not fit in an int64.
func NewGeometry(f Format, l Layout, shape []int) (Geometry, error) {
	if !pair(f, l) {
		return Geometry{}, fmt.Errorf("format %s with layout %s: %w", f, l, ErrPair)
	}
	fail := func(why string) (Geometry, error) {
		return Geometry{}, fmt.Errorf("%s %s %v: %w: %s", f, l, shape, ErrShape, why)
	}
	if len(shape) > MaxRank {
		return fail("more than 16 dimensions")
	}
	for _, d := range shape {
		if d <= 0 {
			return fail("dimensions must be positive")
		}
	}
	switch l {
	case Contiguous:
	case ExpertBlockScale:
		if len(shape) != 3 {
			return fail("needs the rank 3 of [experts, rows, columns]")
		}
	default:
		if len(shape) != 2 {
			return fail("needs the rank 2 of [rows, columns]")
		}
	}

	var z sizer
	rows, cols := int64(1), int64(1)
	for i, d := range shape {
		if i == len(shape)-1 {
			cols = int64(d)
		} else {
			rows = z.mul(rows, int64(d))
		}
	}
	count := z.mul(rows, cols) // every layout has at least four bits per element
	g := Geometry{
		Format: f, Layout: l,
		Rows: int(rows), Cols: int(cols), PaddedCols: int(cols),
		Experts: 1, ExpertRows: int(rows),
		Group: f.Group(),
	}

	switch l {
	case Contiguous:
		w := int64(f.wordBytes())
		g.Codes = PlaneSpec{Len: z.mul(count, w), Stride: z.mul(cols, w)}
		g.Bytes = g.Codes.Len

	case RowSplitK128:
		kp := z.up(cols, 128)
		groups := kp / int64(g.Group)
		high := int64(highBytes(f))
		g.PaddedCols, g.Groups = int(kp), int(groups)
		g.Codes = PlaneSpec{Stride: z.mul(groups, 32)}
		g.Codes.Len = z.mul(rows, g.Codes.Stride)
		end := z.up(g.Codes.Len, Alignment)
		if high > 0 {
			g.High = PlaneSpec{Off: end, Stride: z.mul(groups, high)}
			g.High.Len = z.mul(rows, g.High.Stride)
			end = z.up(z.add(end, g.High.Len), Alignment)
		}
		g.Scales = PlaneSpec{Off: end, Stride: z.mul(groups, 2)}
		g.Scales.Len = z.mul(rows, g.Scales.Stride)
		g.Bytes = z.add(end, g.Scales.Len)

	case BlockScale, ExpertBlockScale:
		if l == ExpertBlockScale {
			g.Experts, g.ExpertRows = shape[0], shape[1]
		}
		if g.ExpertRows%128 != 0 {
			return fail("rows must be a multiple of 128")
		}
		if cols%64 != 0 {
			return fail("columns must be a multiple of 64")
		}
		g.Groups = int(cols / 16)
		g.Codes = PlaneSpec{Len: count / 2, Stride: cols / 2}
		g.Scales = PlaneSpec{Off: z.up(count/2, Alignment), Len: count / 16}
		g.Divisors = PlaneSpec{Off: z.add(g.Scales.Off, g.Scales.Len), Len: z.mul(int64(g.Experts), 4)}
		g.Bytes = z.add(g.Divisors.Off, g.Divisors.Len)

	case RowScale, RowScaleFP32:
		w := int64(2)
		if l == RowScaleFP32 {
			w = 4
		}
		g.Codes = PlaneSpec{Len: count, Stride: cols}
		g.Scales = PlaneSpec{Off: z.up(count, Alignment), Len: z.mul(rows, w), Stride: w}
		g.Bytes = z.add(g.Scales.Off, g.Scales.Len)

	case PackedU4:
		if cols%16 != 0 {
			return fail("columns must be a multiple of 16")
		}
		g.Groups = int(cols / 16)
		g.Codes = PlaneSpec{Len: count / 2, Stride: cols / 2}
		g.Scales = PlaneSpec{Off: z.up(count/2, Alignment), Len: count / 8, Stride: cols / 8}
		g.Bytes = z.add(g.Scales.Off, g.Scales.Len)
	}
	if z.over {
		return Geometry{}, fmt.Errorf("%s %s %v: %w", f, l, shape, ErrSize)
	}
	return g, nil
}

// EncodedSize is the size in bytes of a tensor object, padding between its
// planes included. Errors are those of NewGeometry.
func EncodedSize(f Format, l Layout, shape []int) (int64, error) {
	g, err := NewGeometry(f, l, shape)
	return g.Bytes, err
}

// A Span is a run of bytes of an object that belongs to one plane.
type Span struct {
	Off int64 // from the start of the object
	Len int64
}

// RowSpans are the bytes of a run of rows, plane by plane.
type RowSpans struct{ Codes, High, Scales Span }

// RowSpans gives the bytes of rows [r0,r1), one span per plane; the span of an
// absent plane has length zero. NVFP4 scales are interleaved in tiles of 128
// rows, so there r0 and r1 must be multiples of 128; which divisor belongs to a
// row (row / ExpertRows) is not part of the answer. It fails if the range is
// not inside the tensor or not addressable.
func (g *Geometry) RowSpans(r0, r1 int) (RowSpans, error) {
	if r0 < 0 || r1 < r0 || r1 > g.Rows {
		return RowSpans{}, fmt.Errorf("rows [%d,%d) outside the %d rows of the tensor", r0, r1, g.Rows)
	}
	scaleStride := g.Scales.Stride
	if g.Format == NVFP4 {
		if r0%128 != 0 || r1%128 != 0 {
			return RowSpans{}, fmt.Errorf("rows [%d,%d): scales of nvfp4 are stored in tiles of 128 rows", r0, r1)
		}
		scaleStride = int64(g.Groups)
	}
	cut := func(p PlaneSpec, stride int64) Span {
		if p.Len == 0 {
			return Span{}
		}
		return Span{Off: p.Off + int64(r0)*stride, Len: int64(r1-r0) * stride}
	}
	return RowSpans{
		Codes:  cut(g.Codes, g.Codes.Stride),
		High:   cut(g.High, g.High.Stride),
		Scales: cut(g.Scales, scaleStride),
	}, nil
}

// RowBytes are the bytes of the rows [First, First+N) of a tensor, one slice
// per plane, each of the length that RowSpans gives. They may be views of a
// whole object (Geometry.RowBytes) or buffers of their own that are read from
// or written to the spans (Geometry.NewRowBytes): tensors of many gigabytes
// are encoded and checked in runs of rows.
type RowBytes struct {
	First, N            int
	Codes, High, Scales []byte
}

// RowBytes gives views of rows [r0,r1) of an object. Errors are those of
// RowSpans.
func (g *Geometry) RowBytes(object []byte, r0, r1 int) (RowBytes, error) {
	s, err := g.RowSpans(r0, r1)
	if err != nil {
		return RowBytes{}, err
	}
	if int64(len(object)) != g.Bytes {
		return RowBytes{}, fmt.Errorf("object has %d bytes, its encoding needs %d", len(object), g.Bytes)
	}
	cut := func(s Span) []byte { return object[s.Off : s.Off+s.Len : s.Off+s.Len] }
	return RowBytes{First: r0, N: r1 - r0, Codes: cut(s.Codes), High: cut(s.High), Scales: cut(s.Scales)}, nil
}

// NewRowBytes allocates buffers for rows [r0,r1). Errors are those of
// RowSpans.
func (g *Geometry) NewRowBytes(r0, r1 int) (RowBytes, error) {
	s, err := g.RowSpans(r0, r1)
	if err != nil {
		return RowBytes{}, err
	}
	return RowBytes{
		First: r0, N: r1 - r0,
		Codes: make([]byte, s.Codes.Len), High: make([]byte, s.High.Len), Scales: make([]byte, s.Scales.Len),
	}, nil
}

// must panics unless the slices have the lengths of their spans: a mismatch is
// a mistake of the calling code, not of its data.
func (g *Geometry) must(r RowBytes) {
	s, err := g.RowSpans(r.First, r.First+r.N)
	if err != nil {
		panic("num: " + err.Error())
	}
	if int64(len(r.Codes)) != s.Codes.Len || int64(len(r.High)) != s.High.Len || int64(len(r.Scales)) != s.Scales.Len {
		panic(fmt.Sprintf("num: rows [%d,%d) of %s have %d, %d, %d bytes, need %d, %d, %d", r.First, r.First+r.N,
			g.Format, len(r.Codes), len(r.High), len(r.Scales), s.Codes.Len, s.High.Len, s.Scales.Len))
	}
}

// Gaps gives the padding between the planes, which must be zero, in order.
func (g *Geometry) Gaps() []Span {
	var out []Span
	end := int64(0)
	for _, p := range []PlaneSpec{g.Codes, g.High, g.Scales, g.Divisors} {
		if p.Len == 0 {
			continue
		}
		if p.Off > end {
			out = append(out, Span{Off: end, Len: p.Off - end})
		}
		end = p.Off + p.Len
	}
	return out
}

// Swizzle is the offset, inside the scale plane of one NVFP4 matrix of k
// columns, of the scale word of row n and group g = column/16 (docs/format.md
// 3.4): tiles of 128 rows by 4 groups, 512 bytes each, whose 16-byte lines
// hold rows r, r+32, r+64 and r+96.
func Swizzle(n, g, k int) int {
	return (n/128*(k/64)+g/4)*512 + n%32*16 + n%128/32*4 + g%4
}

// unswizzle is the inverse of Swizzle.
func unswizzle(off, k int) (n, g int) {
	tile, in := off/512, off%512
	return tile/(k/64)*128 + in%16/4*32 + in/16, tile%(k/64)*4 + in%4
}

// SwizzleScales writes the scale words of rows [r0, r0+rows) of an NVFP4
// matrix of k columns to their places in dst, the matrix's whole scale plane.
// src holds the words row-major, k/16 a row.
func SwizzleScales(dst, src []byte, r0, rows, k int) {
	groups := k / 16
	for r := range rows {
		line := dst[Swizzle(r0+r, 0, k):]
		words := src[r*groups:][:groups]
		for g := 0; g < groups; g += 4 {
			copy(line[g*128:][:4], words[g:])
		}
	}
}
