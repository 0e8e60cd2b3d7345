package cpu

import (
	"encoding/binary"
	"math"

	"ninfer/internal/num"
)

// The element-wise operations in plain Go, for processors without the generated ones. Each is one function without special cases for
// lengths, so that an element's roundings do not depend on its place.

func exp32(x float32) float32     { return float32(math.Exp(float64(x))) }
func sigmoid32(x float32) float32 { return float32(1 / (1 + math.Exp(-float64(x)))) }

func plainExpShift(dst, x []float32, a float32) {
	for i := range dst {
		dst[i] = exp32(x[i] - a)
	}
}

func plainSigmoidMul(dst, x, g []float32, a float32) {
	for i := range dst {
		dst[i] = x[i] * sigmoid32(a*g[i])
	}
}

func plainSilu(dst, x []float32, a float32) {
	for i := range dst {
		v := a * x[i]
		dst[i] = v * sigmoid32(v)
	}
}

func plainSiluMul(dst, g, u []float32) {
	for i := range dst {
		dst[i] = g[i] * sigmoid32(g[i]) * u[i]
	}
}

func plainSigmoidMulAdd(dst, x, g []float32) {
	for i := range dst {
		dst[i] += x[i] * sigmoid32(g[i])
	}
}

func plainMulAdd(dst, x, y []float32) {
	for i := range dst {
		dst[i] += x[i] * y[i]
	}
}

func plainAxpy(dst, x []float32, a float32) {
	for i := range dst {
		dst[i] += a * x[i]
	}
}

// plainInner adds eight interleaved sums.
func plainInner(x, y []float32) float32 {
	y = y[:len(x)]
	var a, b, c, d, e, f, g, h float32
	i := 0
	for ; i+8 <= len(x); i += 8 {
		u, v := (*[8]float32)(x[i:]), (*[8]float32)(y[i:])
		a += u[0] * v[0]
		b += u[1] * v[1]
		c += u[2] * v[2]
		d += u[3] * v[3]
		e += u[4] * v[4]
		f += u[5] * v[5]
		g += u[6] * v[6]
		h += u[7] * v[7]
	}
	var t float32
	for ; i < len(x); i++ {
		t += x[i] * y[i]
	}
	return ((a + b) + (c + d)) + ((e + f) + (g + h)) + t
}

func plainDeltaRead(u, s, k []float32) {
	clear(u)
	for i, v := range k {
		plainAxpy(u, s[i*len(u):], v)
	}
}

func plainDeltaWrite(out, s, k, q, d []float32, decay float32) {
	plainDeltaFold(s, k, d, decay)
	clear(out)
	for i, v := range q[:len(k)] {
		plainAxpy(out, s[i*len(d):], v)
	}
}

func plainDeltaFold(s, k, d []float32, decay float32) {
	for i, v := range k {
		row := s[i*len(d):][:len(d)]
		for j, e := range d {
			row[j] = float32(row[j]*decay) + float32(v*e) // not fused: the same in every copy the compiler makes
		}
	}
}

func plainWeighRows(dst, p, v []float32, stride int) {
	for i, w := range p {
		plainAxpy(dst, v[i*stride:], w)
	}
}

func plainExpandBF16(dst []float32, src []uint16) {
	for i := range dst {
		dst[i] = num.FromBF16(src[i])
	}
}

func plainShrinkBF16(dst []uint16, src []float32) {
	for i := range dst {
		dst[i] = num.ToBF16(src[i])
	}
}

func plainExpandFP8(dst []float32, src []byte, scale float32) {
	for i := range dst {
		dst[i] = scale * num.FromE4M3(src[i])
	}
}

func plainScan(p []byte) uint64 {
	var v uint64
	for i := 0; i+8 <= len(p); i += 8 {
		v |= binary.LittleEndian.Uint64(p[i:])
	}
	return v
}
