package cpu

// operand is the input of products: rows of k values, in whichever orders the matrices of a job want it. Orders are packed when
// first needed and live as long as the arena they come from.
type operand struct {
	src     []float32
	ld, k   int
	rows    int
	packed  [numOrders][]float32
	padding [numOrders]int
}

// newOperand is an operand of rows of k values that lie ld apart.
func newOperand(src []float32, ld, k, rows int) operand {
	return operand{src: src, ld: ld, k: k, rows: rows}
}

// in returns all rows as m wants them.
func (o *operand) in(a *arena, m *matrix) activations {
	ord := m.order()
	if ord == natural && m.padded <= o.k {
		return activations{data: o.src, ld: o.ld, rows: o.rows}
	}
	if o.padding[ord] < m.padded {
		// The widest padding that any kernel asks for, so that one packing serves all.
		padded := (o.k + 63) &^ 63
		o.packed[ord], o.padding[ord] = a.take(o.rows*padded), padded
		pack(ord, o.packed[ord], padded, o.src, o.ld, o.k, o.rows)
	}
	return activations{data: o.packed[ord], ld: o.padding[ord], rows: o.rows}
}

// product is one matrix of a job: out[r*ldo+n] = matrix row n times row r of x.
type product struct {
	m   matrix
	x   activations
	out []float32
	ldo int

	unit  int // rows of the matrix a unit computes
	first int // its first unit
}

// job is a set of products that run together.
type job struct {
	f        *fast
	products []product
	units    int
	work     int // multiplications
}

// add appends a product over all rows of x.
func (j *job) add(m *matrix, x *operand, out []float32, ldo int) {
	j.addRows(*m, x.in(&j.f.arena, m), out, ldo)
}

// addRows appends a product over chosen rows.
func (j *job) addRows(m matrix, x activations, out []float32, ldo int) {
	if x.rows == 0 || m.n == 0 {
		return
	}
	j.products = append(j.products, product{m: m, x: x, out: out, ldo: ldo})
	j.work += m.n * m.k * x.rows
}

// sub is rows [first, first+n) of m.
func (m *matrix) sub(first, n int) matrix {
	s := *m
	s.w, s.n = m.w.Rows(first, n), n
	return s
}

// inline is the number of multiplications below which waking other workers costs more than it gains.
const inline = 64 << 10

// run computes all products and empties the job.
func (j *job) run() {
	workers := j.f.pool.workers
	share := max(inline, j.work/(8*workers)) // of a unit
	j.units = 0
	for i := range j.products {
		p := &j.products[i]
		// Units are multiples of 32 rows where that divides the work finely enough: bands of the NVFP4 scale layout.
		p.unit = max(1, share/(p.m.k*p.x.rows))
		if p.unit >= 32 {
			p.unit &^= 31
		} else {
			p.unit = (p.unit + 3) &^ 3
		}
		p.first = j.units
		j.f.weighed += int64(p.m.n) * int64(p.m.bytes)
		j.units += (p.m.n + p.unit - 1) / p.unit
	}
	if j.work <= inline {
		for u := range j.units {
			j.do(0, u)
		}
	} else {
		j.f.pool.run(j, j.units)
	}
	j.products, j.work = j.products[:0], 0
}

func (j *job) do(worker, unit int) {
	lo, hi := 0, len(j.products)
	for hi-lo > 1 {
		if mid := (lo + hi) / 2; j.products[mid].first <= unit {
			lo = mid
		} else {
			hi = mid
		}
	}
	p := &j.products[lo]
	n := (unit - p.first) * p.unit
	p.m.multiply(j.f.level, &p.x, p.out, p.ldo, n, min(p.m.n, n+p.unit), j.f.scratch(worker, p.m.scratchSize()))
}

// arena is float32 memory for the activations inside one operation. It grows to what the largest operation needs and then allocates
// nothing.
type arena struct {
	mem  []float32
	used int
	more int // taken beyond mem since the last reset
}

// reset makes all memory free again.
func (a *arena) reset() {
	if a.more > 0 {
		a.mem, a.more = make([]float32, a.used+a.more), 0
	}
	a.used = 0
}

// take returns n values of whatever was there before, or fresh ones, aligned to a cache line relative to each other.
func (a *arena) take(n int) []float32 {
	size := (n + 15) &^ 15
	if a.used+size > len(a.mem) {
		a.more += size
		return make([]float32, n)
	}
	v := a.mem[a.used : a.used+n : a.used+n]
	a.used += size
	return v
}
