package cpu

// Element-wise operations on float32 vectors. The result of an element does not depend on its place or on the length: a tail that
// does not fill a vector goes through the same instructions, padded. Destinations may be sources.

// tail is room for the last elements of up to three vectors.
type tail [3][8]float32

// expShift: dst = exp(x - a).
func (l Level) expShift(dst, x []float32, a float32) {
	if l < AVX2 {
		plainExpShift(dst, x, a)
		return
	}
	x = x[:len(dst)]
	n := len(dst) &^ 7
	if n > 0 {
		expShiftAVX2(&dst[0], &x[0], n, a)
	}
	if n < len(dst) {
		var t tail
		copy(t[1][:], x[n:])
		expShiftAVX2(&t[0][0], &t[1][0], 8, a)
		copy(dst[n:], t[0][:])
	}
}

// sigmoidMul: dst = x * sigmoid(a*g).
func (l Level) sigmoidMul(dst, x, g []float32, a float32) {
	if l < AVX2 {
		plainSigmoidMul(dst, x, g, a)
		return
	}
	x, g = x[:len(dst)], g[:len(dst)]
	n := len(dst) &^ 7
	if n > 0 {
		sigmoidMulAVX2(&dst[0], &x[0], &g[0], n, a)
	}
	if n < len(dst) {
		var t tail
		copy(t[1][:], x[n:])
		copy(t[2][:], g[n:])
		sigmoidMulAVX2(&t[0][0], &t[1][0], &t[2][0], 8, a)
		copy(dst[n:], t[0][:])
	}
}

// silu: dst = a*x * sigmoid(a*x).
func (l Level) silu(dst, x []float32, a float32) {
	if l < AVX2 {
		plainSilu(dst, x, a)
		return
	}
	x = x[:len(dst)]
	n := len(dst) &^ 7
	if n > 0 {
		siluAVX2(&dst[0], &x[0], n, a)
	}
	if n < len(dst) {
		var t tail
		copy(t[1][:], x[n:])
		siluAVX2(&t[0][0], &t[1][0], 8, a)
		copy(dst[n:], t[0][:])
	}
}

// siluMul: dst = silu(g) * u.
func (l Level) siluMul(dst, g, u []float32) {
	if l < AVX2 {
		plainSiluMul(dst, g, u)
		return
	}
	g, u = g[:len(dst)], u[:len(dst)]
	n := len(dst) &^ 7
	if n > 0 {
		siluMulAVX2(&dst[0], &g[0], &u[0], n)
	}
	if n < len(dst) {
		var t tail
		copy(t[1][:], g[n:])
		copy(t[2][:], u[n:])
		siluMulAVX2(&t[0][0], &t[1][0], &t[2][0], 8)
		copy(dst[n:], t[0][:])
	}
}

// sigmoidMulAdd: dst += x * sigmoid(g).
func (l Level) sigmoidMulAdd(dst, x, g []float32) {
	if l < AVX2 {
		plainSigmoidMulAdd(dst, x, g)
		return
	}
	x, g = x[:len(dst)], g[:len(dst)]
	n := len(dst) &^ 7
	if n > 0 {
		sigmoidMulAddAVX2(&dst[0], &x[0], &g[0], n)
	}
	if n < len(dst) {
		var t tail
		copy(t[0][:], dst[n:])
		copy(t[1][:], x[n:])
		copy(t[2][:], g[n:])
		sigmoidMulAddAVX2(&t[0][0], &t[1][0], &t[2][0], 8)
		copy(dst[n:], t[0][:])
	}
}

// mul: dst = x * y.
func (l Level) mul(dst, x, y []float32) {
	x, y = x[:len(dst)], y[:len(dst)]
	n := len(dst) &^ 7
	if l < AVX2 {
		n = 0
	}
	if n > 0 {
		mulAVX2(&dst[0], &x[0], &y[0], n)
	}
	for i := n; i < len(dst); i++ { // one rounding: the same everywhere
		dst[i] = x[i] * y[i]
	}
}

// mulAdd: dst += x * y.
func (l Level) mulAdd(dst, x, y []float32) {
	if l < AVX2 {
		plainMulAdd(dst, x, y)
		return
	}
	x, y = x[:len(dst)], y[:len(dst)]
	n := len(dst) &^ 7
	if n > 0 {
		mulAddAVX2(&dst[0], &x[0], &y[0], n)
	}
	if n < len(dst) {
		var t tail
		copy(t[0][:], dst[n:])
		copy(t[1][:], x[n:])
		copy(t[2][:], y[n:])
		mulAddAVX2(&t[0][0], &t[1][0], &t[2][0], 8)
		copy(dst[n:], t[0][:])
	}
}

// scale: dst = a * x.
func (l Level) scale(dst, x []float32, a float32) {
	x = x[:len(dst)]
	n := len(dst) &^ 7
	if l < AVX2 {
		n = 0
	}
	if n > 0 {
		scaleAVX2(&dst[0], &x[0], n, a)
	}
	for i := n; i < len(dst); i++ {
		dst[i] = a * x[i]
	}
}

// scaleMul: dst = (a * x) * y.
func (l Level) scaleMul(dst, x, y []float32, a float32) {
	x, y = x[:len(dst)], y[:len(dst)]
	n := len(dst) &^ 7
	if l < AVX2 {
		n = 0
	}
	if n > 0 {
		scaleMulAVX2(&dst[0], &x[0], &y[0], n, a)
	}
	for i := n; i < len(dst); i++ {
		dst[i] = a * x[i] * y[i]
	}
}

// axpy: dst += a * x.
func (l Level) axpy(dst, x []float32, a float32) {
	if l < AVX2 {
		plainAxpy(dst, x, a)
		return
	}
	x = x[:len(dst)]
	n := len(dst) &^ 7
	if n > 0 {
		axpyAVX2(&dst[0], &x[0], n, a)
	}
	if n < len(dst) {
		var t tail
		copy(t[0][:], dst[n:])
		copy(t[1][:], x[n:])
		axpyAVX2(&t[0][0], &t[1][0], 8, a)
		copy(dst[n:], t[0][:])
	}
}

// inner is the sum of x*y, in an order that depends on the length only.
func (l Level) inner(x, y []float32) float32 {
	if l < AVX2 {
		return plainInner(x, y)
	}
	y = y[:len(x)]
	n := len(x) &^ 7
	var s float32
	if n > 0 {
		s = innerAVX2(&x[0], &y[0], n)
	}
	for i := n; i < len(x); i++ {
		s += x[i] * y[i]
	}
	return s
}

// deltaRead: u[j] = sum over i of s[i][j]*k[i], for a matrix of len(k) rows and len(u) columns.
func (l Level) deltaRead(u, s, k []float32) {
	if l < AVX2 || len(u)%64 != 0 {
		plainDeltaRead(u, s, k)
		return
	}
	_ = s[len(u)*len(k)-1]
	deltaReadAVX2(&u[0], &s[0], &k[0], len(k), len(u))
}

// deltaWrite: s = s*decay + k d'; out[j] = sum over i of s[i][j]*q[i].
func (l Level) deltaWrite(out, s, k, q, d []float32, decay float32) {
	if l < AVX2 || len(d)%64 != 0 {
		plainDeltaWrite(out, s, k, q, d, decay)
		return
	}
	_, _, _ = s[len(d)*len(k)-1], q[len(k)-1], out[len(d)-1]
	deltaWriteAVX2(&out[0], &s[0], &k[0], &q[0], &d[0], len(k), len(d), decay)
}

// deltaFold: s = s*decay + k d', with the same roundings as deltaWrite.
func (l Level) deltaFold(s, k, d []float32, decay float32) {
	if l < AVX2 || len(d)%64 != 0 {
		plainDeltaFold(s, k, d, decay)
		return
	}
	_ = s[len(d)*len(k)-1]
	deltaFoldAVX2(&s[0], &k[0], &d[0], len(k), len(d), decay)
}

// weighRows: dst += p[0]*v[0:] + p[1]*v[stride:] and so on, one row after the other.
func (l Level) weighRows(dst, p, v []float32, stride int) {
	if l < AVX2 || len(dst)%64 != 0 {
		plainWeighRows(dst, p, v, stride)
		return
	}
	if len(p) > 0 {
		_ = v[(len(p)-1)*stride+len(dst)-1]
		weighRowsAVX2(&dst[0], &p[0], &v[0], stride, len(p), len(dst))
	}
}

// expandBF16: dst = src, as many as dst has.
func (l Level) expandBF16(dst []float32, src []uint16) {
	n := 0
	if src = src[:len(dst)]; l >= AVX2 {
		if n = len(dst) &^ 7; n > 0 {
			expandBF16AVX2(&dst[0], &src[0], n)
		}
	}
	plainExpandBF16(dst[n:], src[n:])
}

// shrinkBF16: dst = src, ties to even, as many as dst has.
func (l Level) shrinkBF16(dst []uint16, src []float32) {
	n := 0
	if src = src[:len(dst)]; l >= AVX2 {
		if n = len(dst) &^ 7; n > 0 {
			shrinkBF16AVX2(&dst[0], &src[0], n)
		}
	}
	plainShrinkBF16(dst[n:], src[n:])
}

// expandFP8: dst = scale * src, as many as dst has. Words are not NaN.
func (l Level) expandFP8(dst []float32, src []byte, scale float32) {
	n := 0
	if src = src[:len(dst)]; l >= AVX2 {
		if n = len(dst) &^ 7; n > 0 {
			expandFP8AVX2(&dst[0], &src[0], n, &scale)
		}
	}
	plainExpandFP8(dst[n:], src[n:], scale)
}

// relax is called in waiting loops.
func relax() { pause() }

// scanBytes reads p, a multiple of 256 bytes: the yardstick of the benchmarks.
func scanBytes(l Level, p []byte) uint64 {
	if l < AVX2 {
		return plainScan(p)
	}
	return scanAVX2(&p[0], len(p))
}
