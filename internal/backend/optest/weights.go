package optest

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"

	"ninfer/internal/backend"
	"ninfer/internal/num"
)

// Formats are the formats that a matrix may have.
var Formats = []num.Format{
	num.BF16, num.FP32, num.FP8RowBF16, num.FP8RowFP32, num.NVFP4, num.Q4G64, num.Q5G64, num.Q6G64, num.Q8G32,
}

// Fits reports whether a format can store a matrix of rows and cols.
func Fits(f num.Format, rows, cols int) bool {
	_, err := num.NewGeometry(f, num.LayoutOf(f, 2), []int{rows, cols})
	return err == nil
}

// Tensor makes a tensor of random words whose values are of size about 1/sqrt(columns): every code of the format occurs, signed
// zeros, subnormals and the largest ones too, so it covers what an encoder's output might not. shape has rank 2, or 3 for a bank.
func Tensor(r *rand.Rand, f num.Format, shape ...int) num.Tensor {
	l := num.LayoutOf(f, len(shape))
	g, err := num.NewGeometry(f, l, shape)
	if err != nil {
		panic(err)
	}
	data := make([]byte, g.Bytes)
	le := binary.LittleEndian
	size := 1 / math.Sqrt(float64(g.Cols))
	codes := data[g.Codes.Off:][:g.Codes.Len]
	scales := data[g.Scales.Off:][:g.Scales.Len]
	factor := func(largest float64) float64 { return size / largest * (0.5 + r.Float64()) }
	switch f {
	case num.BF16:
		for i := 0; i < len(codes); i += 2 {
			le.PutUint16(codes[i:], num.ToBF16(float32(r.NormFloat64()*size)))
		}
	case num.FP32:
		for i := 0; i < len(codes); i += 4 {
			le.PutUint32(codes[i:], math.Float32bits(float32(r.NormFloat64()*size)))
		}
	case num.FP8RowBF16, num.FP8RowFP32:
		for i := range codes {
			codes[i] = byte(r.Uint32())
			if codes[i]&0x7f == 0x7f {
				codes[i] ^= 0x40
			}
		}
		for i := range g.Rows {
			if f == num.FP8RowBF16 {
				le.PutUint16(scales[2*i:], num.ToBF16(float32(factor(100))))
			} else {
				le.PutUint32(scales[4*i:], math.Float32bits(float32(factor(100))))
			}
		}
	case num.NVFP4:
		for i := range codes {
			codes[i] = byte(r.Uint32())
		}
		for i := range scales {
			scales[i] = byte(r.IntN(0x7f))
		}
		for e := range g.Experts {
			le.PutUint32(data[g.Divisors.Off+4*int64(e):], math.Float32bits(float32(1/factor(300))))
		}
	case num.Q4G64, num.Q5G64, num.Q6G64, num.Q8G32:
		lanes := make([]int8, g.Cols)
		for i := range g.Rows {
			for j := range lanes {
				lanes[j] = int8(r.Uint32())
			}
			num.PackCodes(f, lanes, codes[i*int(g.Codes.Stride):][:g.Codes.Stride], data[g.High.Off:][i*int(g.High.Stride):][:g.High.Stride])
		}
		largest := map[num.Format]float64{num.Q4G64: 4, num.Q5G64: 9, num.Q6G64: 18, num.Q8G32: 70}[f]
		for i := 0; i < len(scales); i += 2 {
			le.PutUint16(scales[i:], num.ToF16(float32(factor(largest))))
		}
	default:
		panic(fmt.Sprintf("optest: no random tensors of format %v", f))
	}
	t, err := num.NewTensor(f, l, shape, data)
	if err != nil {
		panic(err)
	}
	return t
}

// Weight is a whole random matrix.
func Weight(r *rand.Rand, f num.Format, rows, cols int) backend.Weight {
	return backend.Whole(Tensor(r, f, rows, cols))
}
