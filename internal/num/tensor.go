package num

import (
	"encoding/binary"
	"fmt"
	"math"
	"slices"
)

// Tensor is an encoded tensor: the bytes of one artifact object and how to
// read them. Data may be a read-only mapping and is not copied. Make one with
// NewTensor; the fields must not be changed afterwards.
type Tensor struct {
	Format Format
	Layout Layout
	Shape  []int
	Data   []byte

	geom *Geometry
}

// NewTensor checks format, layout and shape as NewGeometry does, and that data
// has exactly the encoded size. It does not look at the words: see Validate.
func NewTensor(f Format, l Layout, shape []int, data []byte) (Tensor, error) {
	g, err := NewGeometry(f, l, shape)
	if err != nil {
		return Tensor{}, err
	}
	if int64(len(data)) != g.Bytes {
		return Tensor{}, fmt.Errorf("%s %s %v has %d bytes, its encoding needs %d", f, l, shape, len(data), g.Bytes)
	}
	return Tensor{Format: f, Layout: l, Shape: slices.Clone(shape), Data: data, geom: &g}, nil
}

// Geometry is the byte map of the tensor's object. It must not be changed.
func (t Tensor) Geometry() *Geometry {
	if t.geom == nil {
		panic("num: tensor was not made by NewTensor")
	}
	return t.geom
}

// Rows is the product of all dimensions but the last.
func (t Tensor) Rows() int { return t.Geometry().Rows }

// Cols is the last dimension, 1 for rank 0.
func (t Tensor) Cols() int { return t.Geometry().Cols }

// Planes are the byte views of a tensor's planes; a plane that the layout does
// not have is nil. Strides count bytes from one row to the next. In a bank,
// expert e's codes and scales begin at e*ExpertCodes and e*ExpertScales, its
// divisor at 4*e.
type Planes struct {
	Codes    []byte // row-major code words; the base plane of RowSplitK128; all words of Contiguous
	High     []byte // high code bits of q5 and q6
	Scales   []byte // scale words; swizzled (see Swizzle) for NVFP4
	Divisors []byte // little-endian FP32, one per expert, for NVFP4

	CodeStride   int // bytes per row of Codes
	HighStride   int // bytes per row of High
	ScaleStride  int // bytes per row of Scales; 0 where they are swizzled
	ExpertCodes  int // bytes of Codes per expert; all of them where there is one matrix
	ExpertScales int // bytes of Scales per expert, likewise
}

// Planes gives views of the object's planes, without copying.
func (t Tensor) Planes() Planes {
	g := t.Geometry()
	cut := func(p PlaneSpec) []byte {
		if p.Len == 0 {
			return nil
		}
		return t.Data[p.Off : p.Off+p.Len : p.Off+p.Len]
	}
	return Planes{
		Codes: cut(g.Codes), High: cut(g.High), Scales: cut(g.Scales), Divisors: cut(g.Divisors),
		CodeStride:   int(g.Codes.Stride),
		HighStride:   int(g.High.Stride),
		ScaleStride:  int(g.Scales.Stride),
		ExpertCodes:  int(g.Codes.Len) / g.Experts,
		ExpertScales: int(g.Scales.Len) / g.Experts,
	}
}

// Divisor is the FP32 divisor of an NVFP4 matrix (expert 0) or of one expert
// of a bank.
func (t Tensor) Divisor(expert int) float32 {
	d := t.Geometry().Divisors
	return math.Float32frombits(binary.LittleEndian.Uint32(t.Data[d.Off : d.Off+d.Len][4*expert:]))
}

// row cuts one row out of every plane that has contiguous rows.
func (t Tensor) row(row int) (codes, high, scales []byte) {
	g := t.Geometry()
	if uint(row) >= uint(g.Rows) {
		panic(fmt.Sprintf("num: row %d of a tensor with %d rows", row, g.Rows))
	}
	r := int64(row)
	codes = t.Data[g.Codes.Off+r*g.Codes.Stride:][:g.Codes.Stride]
	high = t.Data[g.High.Off+r*g.High.Stride:][:g.High.Stride]
	scales = t.Data[g.Scales.Off+r*g.Scales.Stride:][:g.Scales.Stride]
	return codes, high, scales
}

// DecodeRow writes the exact values of one row into dst, which must have room
// for Cols values; row counts over the flattened leading dimensions. Products
// of code and multiplier are exact in float64. NVFP4 is (E2M1*E4M3)/d with one
// float64 division. An int64 beyond 2^53 is rounded. Words that Validate
// refuses decode to whatever the formula gives.
func (t Tensor) DecodeRow(dst []float64, row int) { decodeTensorRow(t, dst, row) }

// DecodeRow32 writes the values of one row into dst, rounded once to float32:
// the value that the format defines as f32(code * multiplier), or one float32
// division for NVFP4.
func (t Tensor) DecodeRow32(dst []float32, row int) { decodeTensorRow(t, dst, row) }

func decodeTensorRow[F float32 | float64](t Tensor, dst []F, row int) {
	codes, high, scales := t.row(row)
	g := t.geom
	dst = dst[:g.Cols]
	if g.Format == NVFP4 {
		expert, n := row/g.ExpertRows, row%g.ExpertRows
		swz := t.Data[g.Scales.Off+int64(expert)*int64(g.ExpertRows)*int64(g.Groups):]
		decodeNVFP4(dst, codes, swz[Swizzle(n, 0, g.Cols):], t.Divisor(expert))
		return
	}
	decodeRow(g.Format, dst, codes, high, scales)
}

// DecodeRowBytes32 decodes one row whose planes were read separately, as when
// a row crosses a file boundary: the bytes are those of Geometry.RowSpans for
// that row. len(dst) is the number of columns. NVFP4 has no such rows.
func DecodeRowBytes32(f Format, dst []float32, codes, high, scales []byte) {
	if f == NVFP4 {
		panic("num: a row of nvfp4 needs its matrix")
	}
	decodeRow(f, dst, codes, high, scales)
}
