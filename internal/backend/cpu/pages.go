package cpu

import (
	"math"

	"ninfer/internal/backend"
	"ninfer/internal/num"
)

// plane is the memory of a PerToken or PerBlock state: a row for each token, or for each block of ratio tokens, in pages. A block lies
// in the page of its last token.
type plane[T value] struct {
	width int // values of a row
	ratio int // tokens of a row
	rows  int // of a page
	group int // values that share a scale in FP8
	form  backend.Cache

	// The rows, in the first one that is not nil. The oracle has all forms in full, rounded; the fast device in their own.
	full   []T
	half   []uint16
	codes  []byte
	scales []uint16 // [row][width/group]
}

// shape sets everything but the memory.
func (p *plane[T]) shape(s backend.State, kv backend.Cache) {
	p.width, p.ratio, p.group = s.Width, 1, s.Group
	if s.Kind == backend.PerBlock {
		p.ratio = s.Ratio
	}
	p.rows = (backend.PageTokens-1)/p.ratio + 1
	switch {
	case s.Store == backend.StoreKV:
		p.form = kv
	case s.Store == backend.StoreIndex && kv != backend.CacheFull:
		p.form = backend.CacheBF16
	}
}

// newPlane makes the memory of a state for so many pages, packed to what its form takes or not.
func newPlane[T value](s backend.State, kv backend.Cache, pages int, packed bool) *plane[T] {
	p := &plane[T]{}
	p.shape(s, kv)
	n := pages * p.rows * p.width
	switch {
	case !packed || p.form == backend.CacheFull:
		p.full = make([]T, n)
	case p.form == backend.CacheBF16:
		p.half = make([]uint16, n)
	default:
		p.codes, p.scales = make([]byte, n), make([]uint16, n/max(p.group, 1))
	}
	return p
}

// commit makes the operating system give all memory of the plane now, not when it is first written.
func (p *plane[T]) commit() {
	touch(p.full)
	touch(p.half)
	touch(p.codes)
	touch(p.scales)
}

// touch writes a value in every memory page of at least 4 KiB.
func touch[E any](s []E) {
	var zero E
	const step = 512 // of at most 8 bytes
	for i := 0; i < len(s); i += step {
		s[i] = zero
	}
}

// at is where row i of an image lies among all rows.
func (p *plane[T]) at(table []int32, i int) int {
	t := (i+1)*p.ratio - 1
	return int(table[t/backend.PageTokens])*p.rows + t%backend.PageTokens/p.ratio
}

// run is where row i of an image lies, and how many rows from there on, most at the most, follow it in memory.
func (p *plane[T]) run(table []int32, i, most int) (first, n int) {
	first = p.at(table, i)
	if backend.PageTokens%p.ratio != 0 { // rows of a page leave gaps
		for n = 1; n < most && p.at(table, i+n) == first+n; n++ {
		}
		return first, n
	}
	n = p.rows - i%p.rows
	for page := i / p.rows; n < most && table[page+1] == table[page]+1; page++ {
		n += p.rows
	}
	return first, min(n, most)
}

// row is row i of an image, of a plane in full.
func (p *plane[T]) row(table []int32, i int) []T { return p.full[p.at(table, i)*p.width:][:p.width] }

// copy copies a page.
func (p *plane[T]) copy(dst, src int32) {
	n := p.rows * p.width
	d, s := int(dst)*n, int(src)*n
	switch {
	case p.full != nil:
		copy(p.full[d:d+n], p.full[s:])
	case p.half != nil:
		copy(p.half[d:d+n], p.half[s:])
	default:
		copy(p.codes[d:d+n], p.codes[s:])
		copy(p.scales[d/p.group:(d+n)/p.group], p.scales[s/p.group:])
	}
}

// hadamard multiplies x by the normalised Hadamard matrix of its length, a power of two: entry (i, j) is (-1)^(bits of i and j) / sqrt(n).
func hadamard[T value](x []T) {
	for h := 1; h < len(x); h *= 2 {
		for i := 0; i < len(x); i += 2 * h {
			a, b := x[i:i+h], x[i+h:i+2*h]
			for j, v := range a {
				a[j], b[j] = v+b[j], v-b[j]
			}
		}
	}
	s := T(1 / math.Sqrt(float64(len(x))))
	for i := range x {
		x[i] *= s
	}
}

// fp8Scale is the BF16 word of the scale of values in E4M3: their largest magnitude / 448, or 0 of zeros.
func fp8Scale[T value](x []T) uint16 {
	var most T
	for _, v := range x {
		most = max(most, v, -v) // NaN stays
	}
	if most == 0 {
		return 0
	}
	return max(num.ToBF16(float32(most/num.MaxE4M3)), 1)
}

// fp8Code is the E4M3 word of x under a scale.
func fp8Code[T value](x T, scale float32) byte {
	if scale == 0 {
		return 0
	}
	return num.ToE4M3(float32(x / T(scale)))
}
