package device

import (
	"errors"
	"runtime"
	"sync/atomic"
	"time"
	"unsafe"

	"ninfer/internal/backend"
	"ninfer/internal/backend/cuda/device/kernels"
	"ninfer/internal/backend/cuda/driver"
	"ninfer/internal/num"
)

// hash returns the table rows of a token. before holds the tokens ahead of it, oldest first, at least ngram-1 of them.
func hash(w *backend.PLEWeights, before []int32, token int32, rows []int64) {
	mixed := int64(token) * w.Multipliers[0]
	gone := false // the n-gram has reached over a reset
	for n := 1; n < len(w.Multipliers); n++ {
		t := before[len(before)-n]
		if gone = gone || t == w.Reset; gone {
			t = w.Reset
		}
		mixed ^= int64(t) * w.Multipliers[n]
		for j := (n - 1) * w.HeadsPerNgram; j < n*w.HeadsPerNgram; j++ {
			rows[j] = w.Offsets[j] + (mixed%w.Sizes[j]+w.Sizes[j])%w.Sizes[j]
		}
	}
}

var tableFormats = map[num.Format]kernels.Format{num.BF16: kernels.BF16, num.FP8: kernels.FP8, num.U4Z8G16: kernels.U4}

// table is a step's n-gram table, which stays on the host: rows are hashed and gathered there while the GPU works on the first layer, into
// pinned memory that a kernel reads, after a number that says for which launch they are.
type table struct {
	w      *backend.PLEWeights
	k      kernels.TableParams
	heads  int
	staged []byte // the number, then rows
	spare  []byte // another of its size, of a step for many rows
	early  *early
	ids    []int64
	before []int32
}

// ahead is the bytes of the staging memory before its rows.
const ahead = 16

func (s *step) preparePLEStart(c *driver.Context, op backend.PLEStart) (func(*pass) error, error) {
	l := &loader{s: s, c: c}
	t := &op.W.Table
	f, ok := tableFormats[t.Format]
	l.check(ok, "no kernels for a table of format %v", t.Format)
	heads := len(op.W.Sizes)
	l.check(heads == op.W.HeadsPerNgram*(len(op.W.Multipliers)-1) && s.program.Bufs[op.Out].Width == heads*t.Width, "%d heads of %d", heads, t.Width)
	if l.err != nil {
		return nil, l.err
	}
	if s.table != nil {
		return nil, errors.New("a second n-gram table")
	}
	// Whole requests of 16 bytes for rows of any size, and a block's shared memory. Of several blocks one after the other reads the host's memory.
	const least, room = 16, 48 << 10
	tableRows := 4 * least
	if tableRows*t.RowBytes > room {
		tableRows = least
	}
	l.check(tableRows*t.RowBytes <= room, "rows of %d bytes in the n-gram table, at most %d", t.RowBytes, room/least)
	if l.err != nil {
		return nil, l.err
	}
	staged, err := s.pinned(c, ahead+s.program.Pass.Rows*heads*t.RowBytes)
	if err != nil {
		return nil, err
	}
	at := driver.Ptr(uintptr(unsafe.Pointer(&staged[0])))
	s.table = &table{
		w: op.W, heads: heads, staged: staged, ids: make([]int64, s.program.Pass.Rows*heads),
		k: kernels.TableParams{
			Raw: at + ahead, Ready: at, Number: s.block, Out: s.bufs[op.Out], Width: uint32(t.Width), RowBytes: uint32(t.RowBytes), Format: uint32(f),
			Multiplier: float32(t.Multiplier), Rows: uint32(tableRows),
		},
	}
	s.d.enter(t.Source)
	return nil, nil // the join launches it, when the first layer is done
}

// enter begins to make reading a table's rows cheaper, once for each table: steps have it in common.
func (d *Device) enter(source backend.RowSource) {
	e, ok := source.(backend.Enterer)
	if !ok || d.entering.Load() {
		return
	}
	d.entering.Store(true)
	d.entered.Go(func() { e.Enter(func() bool { return !d.entering.Load() }) })
}

// leave ends what enter has begun.
func (d *Device) leave() {
	d.entering.Store(false)
	d.entered.Wait()
}

// decode launches what waits for the rows and decodes them; halves leaves the multiplier out, so that they are BF16.
func (t *table) decode(p *pass, halves bool) error {
	q := t.k
	if halves {
		q.Halves = 1
	}
	q.N = uint32(len(p.rows) * t.heads)
	return decode(p, &q)
}

func decode(p *pass, q *kernels.TableParams) error {
	return start(p, kernels.Table, tiles(int(q.N), int(q.Rows)), 1, 1, q.Rows*q.RowBytes, q)
}

// gather hashes the n-grams of the rows of a launch, copies the table's rows and tells the GPU. After an error it tells the GPU too, which would
// wait.
func (p *pass) gather(number uint32) error {
	if p.s.behind != nil {
		return p.follows(number)
	}
	t := p.s.table
	if t == nil {
		return nil
	}
	n := 0
	for i := range p.in {
		img := &p.s.d.images[p.lanes[i].Slot]
		t.before = append(t.before[:0], img.history...)
		if img.keep > 0 {
			t.before = img.folded(t.before)
		}
		for _, token := range p.in[i].Tokens {
			hash(t.w, t.before, token, t.ids[n*t.heads:(n+1)*t.heads])
			t.before = append(t.before, token)
			n++
		}
	}
	err := p.s.d.rows(&t.w.Table, t.ids[:n*t.heads], t.staged[ahead:])
	t.ready(number)
	return err
}

// ready tells the GPU that the rows of a launch are there.
func (t *table) ready(number uint32) {
	atomic.StoreUint32((*uint32)(unsafe.Pointer(&t.staged[0])), number)
}

// A row in memory takes 0.2 to 0.4 microseconds, one whose page is not in the process's page table yet 1 to 2: so many and 5 more say that pages are
// entered as rows are read. slow is how long a row takes at least that is not in the page cache.
const (
	entered = 600 * time.Nanosecond
	slow    = 20 * time.Microsecond
)

// rows copies rows of a table: those of some tokens here, as long as all are in memory. Behind a row that was not all help that can, and some with many rows
// and where pages must be entered, whose faults wait for each other. They take tens of microseconds to wake, so that this goroutine goes on, and does not
// wait for who comes too late.
func (d *Device) rows(t *backend.Table, ids []int64, dst []byte) error {
	const few, each = 256, 32 // rows that one copies itself, and that one more helps with
	d.gathered.Add(uint64(len(ids)))
	one := func(i int, last *time.Time) (missed bool, err error) {
		err = t.Source.Rows(ids[i:i+1], dst[i*t.RowBytes:(i+1)*t.RowBytes])
		now := time.Now()
		if missed = now.Sub(*last) >= slow; missed {
			d.missed.Add(1)
		}
		*last = now
		return missed, err
	}
	begun := time.Now()
	last, first, missed := begun, 0, false
	for ; first < min(few, len(ids)) && !missed && last.Sub(begun) < 5*time.Microsecond+time.Duration(first)*entered; first++ {
		var err error
		if missed, err = one(first, &last); err != nil {
			return err
		}
	}
	rest := int64(len(ids) - first)
	if rest == 0 {
		return nil
	}
	var next, done atomic.Int64
	var failed atomic.Pointer[error]
	var all atomic.Bool // that may help have been asked to
	over := make(chan struct{})
	var help func()
	ask := func(n int) {
		for range min(n, int(rest)-1, runtime.GOMAXPROCS(0)-1) {
			go help()
		}
	}
	help = func() {
		last := time.Now()
		for i := next.Add(1); i <= rest; i = next.Add(1) {
			missed, err := one(first+int(i)-1, &last)
			if err != nil {
				failed.Store(&err)
			}
			if done.Add(1) == rest {
				close(over)
			}
			if missed && next.Load() < rest && all.CompareAndSwap(false, true) {
				ask(int(rest))
			}
		}
	}
	if missed {
		all.Store(true)
		ask(int(rest))
	} else {
		ask(int(rest) / each)
	}
	help()
	for range 1 << 14 { // others are at their last row, and to be woken takes longer
		if done.Load() == rest {
			break
		}
	}
	<-over
	if err := failed.Load(); err != nil {
		return *err
	}
	return nil
}

// Gathered tells how many rows of n-gram tables launches have asked for, and how many of them seem not to have been in memory.
func (d *Device) Gathered() (rows, missed uint64) { return d.gathered.Load(), d.missed.Load() }
