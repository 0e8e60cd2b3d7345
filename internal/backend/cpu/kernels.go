package cpu

import (
	"encoding/binary"
	"math"
	"unsafe"

	"ninfer/internal/backend"
	"ninfer/internal/num"
)

// order is how a kernel wants its activations: a permutation of the columns inside runs.
type order uint8

const (
	natural     order = iota
	bytes8            // E4M3 in vectors of 8: of a run of 32 the even columns, then the odd ones
	bytes16           // in vectors of 16: the same of 64
	nibbles           // see tools/asmgen, nibble
	evenOdd           // columns 0 2 4 .. 14, then 1 3 5 .. 15
	interleaved       // columns 0 8 1 9 .. 7 15
	numOrders
)

// orders are runs of columns by place.
var orders = func() (t [numOrders][]uint8) {
	set := func(o order, run int, source func(i int) int) {
		t[o] = make([]uint8, run)
		for i := range run {
			t[o][i] = uint8(source(i))
		}
	}
	set(natural, 1, func(int) int { return 0 })
	set(bytes8, 32, func(i int) int { return i%16*2 + i/16 })
	set(bytes16, 64, func(i int) int { return i%32*2 + i/32 })
	set(nibbles, 64, func(i int) int {
		lane, odd, upper, high := i%8, i/8%2, i/16%2, i/32
		b := lane/4*16 + upper*8 + lane%4*2 + odd
		return 2*b + high
	})
	set(evenOdd, 16, func(i int) int { return i%8*2 + i/8 })
	set(interleaved, 16, func(i int) int { return i/2 + i%2*8 })
	return t
}()

// gemvFunc: out[r*ldo+4q+i] = sum over columns of weight[4q+i]*x_r for one or two x; see tools/asmgen. Strides are bytes; the Next values
// take a plane from the end of a quad of rows to the next quad.
type gemvFunc func(out *float32, ldo int, x0, x1 *float32, codes, high, scales *byte, codesStride, highStride, scalesStride, codesNext, highNext, scalesNext, blocks, quads int)

// decodeFunc writes the float32 values of one row, in the kernel's order, without the factor of the whole row.
type decodeFunc func(dst *float32, codes, high, scales *byte, blocks int)

// dotFunc: out[r*ldo+4q+i] = sum over columns of w[4q+i]*x_r, for one to three x; vectors counts runs of 16 columns.
type dotFunc func(out *float32, ldo int, x0, x1, x2 *float32, w *float32, stride, next, vectors, quads int)

// kernel multiplies one format. Every output is the same sequence of roundings in gemv and in decode followed by a dot.
type kernel struct {
	order  order
	block  int // columns it works on at a time
	bytes  int // of codes a block
	high   int
	scales int
	gemv   [2]gemvFunc // for one and for two rows of activations; the second may be missing
	decode decodeFunc  // nil: rows are float32 already
	dot    *[3]dotFunc
}

// kernels are those of one level.
type kernels struct {
	formats map[num.Format]*kernel
	dot     [3]dotFunc
}

// fp8Factor is what a finished sum over FP8 weights is still multiplied with: the kernels read codes as binary16, 2^-8 of their values.
const fp8Factor = 0x1p8

// matrix is a weight made ready for multiplication.
type matrix struct {
	w     backend.Weight
	n, k  int
	bytes int // stored ones of a row
	kern  *kernel
	plain bool

	codes, high, scales                   []byte
	codesStride, highStride, scalesStride int
	blocks                                int
	padded                                int  // columns of activations the kernel reads
	direct                                bool // rows are read in place; otherwise their last block would pass the row's end

	format     num.Format
	expertRows int
	planes     num.Planes
}

// newMatrix prepares w for a level's kernels; ks is nil for plain Go.
func newMatrix(w backend.Weight, ks *kernels) matrix {
	m := matrix{w: w, n: w.N, k: w.Cols(), format: w.T.Format}
	m.padded = m.k
	if g := w.T.Geometry(); g.Rows > 0 {
		m.bytes = len(w.T.Data) / g.Rows
	}
	if ks == nil || ks.formats[m.format] == nil {
		m.plain = true
		return m
	}
	kern := ks.formats[m.format]
	m.kern, m.planes = kern, w.T.Planes()
	m.expertRows = w.T.Geometry().ExpertRows
	m.codes, m.high, m.scales = m.planes.Codes, m.planes.High, m.planes.Scales
	m.codesStride, m.highStride = m.planes.CodeStride, m.planes.HighStride
	m.blocks = (m.k + kern.block - 1) / kern.block
	m.padded = m.blocks * kern.block
	m.direct = m.codesStride >= m.blocks*kern.bytes
	switch m.format {
	case num.NVFP4:
		m.scalesStride = 16 // of neighbours inside a band of 32 rows
	case num.Q4G64, num.Q5G64, num.Q6G64, num.Q8G32:
		m.scalesStride = m.planes.ScaleStride
	}
	return m
}

// order is the order of the activations it reads.
func (m *matrix) order() order {
	if m.plain {
		return natural
	}
	return m.kern.order
}

// scratchSize is the number of float32 values that multiply needs as scratch.
func (m *matrix) scratchSize() int {
	if m.plain {
		return m.k
	}
	return tileRows*m.padded + 4*m.padded + 16
}

const (
	tileRows = 16 // rows of weights decoded together for many rows of activations
	pairRows = 6  // rows of activations up to which decoding for each pair is faster than decoding to memory
)

// activations are rows of float32 in one order. idx, if not nil, picks the rows.
type activations struct {
	data []float32
	ld   int
	idx  []int32
	rows int
}

func (x *activations) row(r int) []float32 {
	if x.idx != nil {
		r = int(x.idx[r])
	}
	return x.data[r*x.ld:][:x.ld]
}

// multiply computes out[r*ldo+n] for rows r of x and weight rows n in [first, end). scratch has scratchSize values. Nothing about an
// output depends on the other rows or on the range.
func (m *matrix) multiply(l Level, x *activations, out []float32, ldo, first, end int, scratch []float32) {
	switch {
	case first == end:
		return
	case m.plain:
		line := scratch[:m.k]
		for n := first; n < end; n++ {
			m.w.Decode32(line, n)
			for r := range x.rows {
				out[r*ldo+n] = l.inner(line, x.row(r)[:m.k])
			}
		}
		return
	case x.rows == 1:
		m.vectors(x, 0, 1, out, ldo, first, end, scratch)
	case x.rows <= pairRows && m.kern.gemv[1] != nil:
		for n := first; n < end; n += tileRows { // the second pair finds the weights in the cache
			for r := 0; r < x.rows; r += 2 {
				m.vectors(x, r, min(2, x.rows-r), out, ldo, n, min(end, n+tileRows), scratch)
			}
		}
	default:
		m.tiles(x, out, ldo, first, end, scratch)
	}
	m.finish(x.rows, out, ldo, first, end)
}

// run is a run of weight rows whose planes lie at constant strides.
type run struct {
	codes, high, scales []byte
	rows                int
}

// at returns the run that begins at row n and ends before end at the latest.
func (m *matrix) at(n, end int) run {
	abs := m.w.First + n
	r := run{rows: end - n, codes: m.codes[abs*m.codesStride:]}
	if m.high != nil {
		r.high = m.high[abs*m.highStride:]
	}
	switch {
	case m.format == num.NVFP4:
		e, i := abs/m.expertRows, abs%m.expertRows
		r.scales = m.scales[e*m.planes.ExpertScales+num.Swizzle(i, 0, m.k):]
		r.rows = min(r.rows, 32-i%32)
	case m.scalesStride > 0:
		r.scales = m.scales[abs*m.scalesStride:]
	}
	return r
}

func ptr(b []byte) *byte {
	if len(b) == 0 {
		return nil
	}
	return &b[0]
}

func float(b []byte) *float32 { return (*float32)(unsafe.Pointer(unsafe.SliceData(b))) } // the kernels need no alignment

// bytesOf views scratch as bytes.
func bytesOf(f []float32) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(f))), 4*len(f))
}

// vectors multiplies rows r0 and, if rows is 2, r0+1 of activations.
func (m *matrix) vectors(x *activations, r0, rows int, out []float32, ldo, first, end int, scratch []float32) {
	k := m.kern
	gemv := k.gemv[rows-1]
	x0, x1 := &x.row(r0)[:m.padded][0], (*float32)(nil)
	if rows == 2 {
		x1 = &x.row(r0 + 1)[:m.padded][0]
	}
	out = out[r0*ldo:]
	single := scratch[:8]
	for n := first; n < end; {
		r := m.at(n, end)
		quads := r.rows / 4
		if !m.direct {
			quads = min(quads, 1)
			m.pad(&r, max(1, 4*quads), scratch[16:])
		}
		if quads == 0 { // a row alone: the same quad four times
			gemv(&single[0], 4, x0, x1, ptr(r.codes), ptr(r.high), ptr(r.scales), 0, 0, 0, 0, 0, 0, m.blocks, 1)
			for i := range rows {
				out[i*ldo+n] = single[4*i]
			}
			n++
			continue
		}
		stride := m.codesStride
		if !m.direct {
			stride = m.blocks * k.bytes
		}
		_ = out[(rows-1)*ldo+n+4*quads-1]
		gemv(&out[n], ldo, x0, x1, ptr(r.codes), ptr(r.high), ptr(r.scales), stride, m.highStride, m.scalesStride,
			4*stride-m.blocks*k.bytes, 4*m.highStride-m.blocks*k.high, 4*m.scalesStride-m.blocks*k.scales, m.blocks, quads)
		n += 4 * quads
	}
}

// pad copies rows whose length is no multiple of a block to where their last block may be read. Zero words are zero values.
func (m *matrix) pad(r *run, rows int, scratch []float32) {
	stride := m.blocks * m.kern.bytes
	to := bytesOf(scratch)[:rows*stride]
	for i := range rows {
		n := copy(to[i*stride:(i+1)*stride], r.codes[i*m.codesStride:][:m.codesStride])
		clear(to[i*stride+n : (i+1)*stride])
	}
	r.codes = to
}

// tiles multiplies several rows of activations: weights are decoded once, tileRows at a time.
func (m *matrix) tiles(x *activations, out []float32, ldo, first, end int, scratch []float32) {
	k := m.kern
	tile := scratch[:tileRows*m.padded]
	rest := scratch[tileRows*m.padded:]
	for n := first; n < end; {
		rows := min(tileRows, end-n)
		w, stride := &tile[0], 4*m.padded
		if k.decode == nil && m.direct {
			w, stride = float(m.at(n, end).codes), m.codesStride
		} else {
			for i := range rows {
				r := m.at(n+i, end)
				if !m.direct {
					m.pad(&r, 1, rest[16:])
				}
				if k.decode == nil {
					copy(bytesOf(tile[i*m.padded:][:m.padded]), r.codes)
				} else {
					k.decode(&tile[i*m.padded], ptr(r.codes), ptr(r.high), ptr(r.scales), m.blocks)
				}
			}
		}
		dots(k.dot, x, out[n:], ldo, w, stride, m.padded, rows, rest)
		n += rows
	}
}

// dots computes out[r*ldo+n] for float32 weight rows n < rows that lie stride bytes apart, k (a multiple of 16) columns each. scratch
// has room for 12 values.
func dots(dot *[3]dotFunc, x *activations, out []float32, ldo int, w *float32, stride, k, rows int, scratch []float32) {
	quads := rows / 4
	for r := 0; r < x.rows; {
		c := min(3, x.rows-r)
		var xs [3]*float32
		for i := range c {
			xs[i] = &x.row(r + i)[0]
		}
		if quads > 0 {
			_ = out[(r+c-1)*ldo+4*quads-1]
			dot[c-1](&out[r*ldo], ldo, xs[0], xs[1], xs[2], w, stride, 4*stride-4*k, k/16, quads)
		}
		for n := 4 * quads; n < rows; n++ {
			dot[c-1](&scratch[0], 4, xs[0], xs[1], xs[2], (*float32)(unsafe.Add(unsafe.Pointer(w), n*stride)), 0, 0, k/16, 1)
			for i := range c {
				out[(r+i)*ldo+n] = scratch[4*i]
			}
		}
		r += c
	}
}

// finish applies the factor of each weight row.
func (m *matrix) finish(rows int, out []float32, ldo, first, end int) {
	le := binary.LittleEndian
	switch m.format {
	case num.FP8:
		for r := range rows {
			line := out[r*ldo+first : r*ldo+end]
			for i := range line {
				line[i] *= fp8Factor
			}
		}
	case num.FP8RowBF16:
		s := m.scales[2*(m.w.First+first):]
		for r := range rows {
			for i, v := range out[r*ldo+first : r*ldo+end] {
				out[r*ldo+first+i] = v * (fp8Factor * num.FromBF16(le.Uint16(s[2*i:])))
			}
		}
	case num.FP8RowFP32:
		s := m.scales[4*(m.w.First+first):]
		for r := range rows {
			for i, v := range out[r*ldo+first : r*ldo+end] {
				out[r*ldo+first+i] = v * (fp8Factor * math.Float32frombits(le.Uint32(s[4*i:])))
			}
		}
	case num.NVFP4:
		for n := first; n < end; {
			e := (m.w.First + n) / m.expertRows
			last := min(end, (e+1)*m.expertRows-m.w.First)
			d := m.w.T.Divisor(e)
			for r := range rows {
				line := out[r*ldo+n : r*ldo+last]
				for i := range line {
					line[i] /= d
				}
			}
			n = last
		}
	}
}

// pack copies rows of k values to rows of padded values in the given order, zeros behind.
func pack(o order, dst []float32, padded int, src []float32, ld, k, rows int) {
	source := orders[o]
	for r := range rows {
		x, to := src[r*ld:][:k], dst[r*padded:][:padded]
		if o == natural {
			clear(to[copy(to, x):])
			continue
		}
		n := len(source)
		for len(x) >= n {
			t, from := to[:n], x[:n]
			for i, c := range source {
				t[i] = from[c]
			}
			x, to = x[n:], to[n:]
		}
		clear(to)
		if len(x) > 0 {
			for i, c := range source {
				if int(c) < len(x) {
					to[i] = x[c]
				}
			}
		}
	}
}
