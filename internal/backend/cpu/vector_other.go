//go:build !amd64

package cpu

func (Level) expShift(dst, x []float32, a float32)      { plainExpShift(dst, x, a) }
func (Level) sigmoidMul(dst, x, g []float32, a float32) { plainSigmoidMul(dst, x, g, a) }
func (Level) silu(dst, x []float32, a float32)          { plainSilu(dst, x, a) }
func (Level) siluMul(dst, g, u []float32)               { plainSiluMul(dst, g, u) }
func (Level) sigmoidMulAdd(dst, x, g []float32)         { plainSigmoidMulAdd(dst, x, g) }
func (Level) mulAdd(dst, x, y []float32)                { plainMulAdd(dst, x, y) }
func (Level) axpy(dst, x []float32, a float32)          { plainAxpy(dst, x, a) }
func (Level) inner(x, y []float32) float32              { return plainInner(x, y) }
func (Level) deltaRead(u, s, k []float32)               { plainDeltaRead(u, s, k) }
func (Level) deltaFold(s, k, d []float32, a float32)    { plainDeltaFold(s, k, d, a) }

func (Level) deltaWrite(out, s, k, q, d []float32, a float32) { plainDeltaWrite(out, s, k, q, d, a) }
func (Level) weighRows(dst, p, v []float32, stride int)       { plainWeighRows(dst, p, v, stride) }

func (Level) expandBF16(dst []float32, src []uint16)             { plainExpandBF16(dst, src) }
func (Level) shrinkBF16(dst []uint16, src []float32)             { plainShrinkBF16(dst, src) }
func (Level) expandFP8(dst []float32, src []byte, scale float32) { plainExpandFP8(dst, src, scale) }

func (Level) mul(dst, x, y []float32) {
	for i := range dst {
		dst[i] = x[i] * y[i]
	}
}

func (Level) scale(dst, x []float32, a float32) {
	for i := range dst {
		dst[i] = a * x[i]
	}
}

func (Level) scaleMul(dst, x, y []float32, a float32) {
	for i := range dst {
		dst[i] = a * x[i] * y[i]
	}
}

func relax() {}

func scanBytes(_ Level, p []byte) uint64 { return plainScan(p) }

func kernelsOf(Level) *kernels { return nil }
