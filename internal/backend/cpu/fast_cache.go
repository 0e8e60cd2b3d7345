package cpu

import (
	"ninfer/internal/backend"
	"ninfer/internal/num"
)

// keep writes row i of an image in the form of its plane. Keys in FP8 are turned before.
func (f *fast) keep(p *plane[float32], table []int32, i int, x []float32) {
	at := p.at(table, i)
	switch p.form {
	case backend.CacheFull:
		copy(p.full[at*p.width:][:p.width], x)
	case backend.CacheBF16:
		f.level.shrinkBF16(p.half[at*p.width:][:p.width], x)
	case backend.CacheFP8:
		codes, scales := p.codes[at*p.width:][:p.width], p.scales[at*p.width/p.group:]
		for g := range p.width / p.group {
			part := x[g*p.group:][:p.group]
			scales[g] = fp8Scale(part)
			scale := num.FromBF16(scales[g])
			for c, v := range part {
				codes[g*p.group+c] = fp8Code(v, scale)
			}
		}
	}
}

// read returns columns [col, col+d) of n rows that follow each other in memory, the first of them at first, and how far apart they
// lie. Columns of FP8 begin with a group, and are one. What is not float32 already is written to tmp.
func (f *fast) read(p *plane[float32], first, n, col, d int, tmp []float32) (rows []float32, stride int) {
	from := first*p.width + col
	switch p.form {
	case backend.CacheFull:
		return p.full[from:], p.width
	case backend.CacheBF16:
		if d == p.width {
			f.level.expandBF16(tmp[:n*d], p.half[from:])
			return tmp, d
		}
		for i := range n {
			f.level.expandBF16(tmp[i*d:][:d], p.half[from+i*p.width:])
		}
	case backend.CacheFP8:
		for i := range n {
			at := from + i*p.width
			f.level.expandFP8(tmp[i*d:][:d], p.codes[at:], num.FromBF16(p.scales[at/p.group]))
		}
	}
	return tmp, d
}
