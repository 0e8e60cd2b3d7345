package convert

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"time"

	"ninfer/internal/artifact"
)

const (
	// chunk is how many source bytes a worker holds at a time, unless one expert needs more. With the rest of the pages that it begins and
	// ends in it is four megabytes: as much as a disk takes in one request, where a page more would be a second one.
	chunk      = 4<<20 - 4096
	minWorkers = 16
	// maxWorkers bounds memory: the real model's largest piece is 6.6 MB of source and as much again.
	maxWorkers = 32
)

// piece is a run of bytes of an object: what one worker makes and writes at a time.
type piece struct {
	bytes int64
	// after says that the piece can only be made when all pieces of the object before it have been.
	after bool
	// make returns the bytes. They may lie in b, and are valid until b is used again.
	make func(b *buffer) ([]byte, error)
}

// buffer is the memory of one worker, kept from piece to piece.
type buffer struct{ source, out, scales []byte }

// sized returns *b with n bytes, grown if needed. Contents are undefined.
func sized(b *[]byte, n int) []byte {
	if cap(*b) < n {
		*b = make([]byte, n)
	}
	return (*b)[:n]
}

// job is an object in work. Its pieces are taken in order by any workers; their bytes enter the object's digest in order too, but
// are made and written to disk side by side.
type job struct {
	index  int
	object *artifact.Object // nil if the pieces only read
	pieces []piece

	// Guarded by the queue's mutex.
	taken   int   // pieces given to workers
	busy    int   // of these, the ones not yet written
	written int   // pieces on disk
	at      int64 // offset of the first piece not taken

	mu      sync.Mutex // guards the members below
	moved   *sync.Cond
	turn    int // the piece that enters the digest next
	stopped bool
}

func newJob(index int, object *artifact.Object) *job {
	j := &job{index: index, object: object}
	j.moved = sync.NewCond(&j.mu)
	return j
}

// wait blocks until it is piece k's turn; it reports false if the work has failed elsewhere.
func (j *job) wait(k int) bool {
	j.mu.Lock()
	defer j.mu.Unlock()
	for j.turn != k && !j.stopped {
		j.moved.Wait()
	}
	return !j.stopped
}

func (j *job) advance() {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.turn++
	j.moved.Broadcast()
}

func (j *job) stop() {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.stopped = true
	j.moved.Broadcast()
}

// queue gives out pieces, those of the first object first. So that one large object, whose digest is a single chain, does not make all
// workers wait for each other, only some may be busy with it; the others begin with what follows.
type queue struct {
	c     *conversion
	ctx   context.Context
	limit int // workers on one object as long as there are others
	start time.Time
	all   int64

	mu    sync.Mutex // guards the members below, and calls of Progress
	next  []int      // objects not begun
	live  []*job     // begun, in order
	err   error      // of the first piece among those that failed
	first [2]int     // which one that is
	done  int64      // bytes on disk
	ended int        // finished objects
	told  time.Time  // of the last unfinished step
}

// errStopped ends workers after an error elsewhere.
var errStopped = errors.New("stopped")

// write makes and writes all objects.
func (c *conversion) write(ctx context.Context) error {
	n := c.workers()
	q := &queue{c: c, ctx: ctx, limit: max(2, n/2), start: time.Now()}
	q.told = q.start
	for _, o := range c.plan.Directory.Objects {
		q.all += o.Bytes
	}
	var first, second []int
	for i := range c.specs {
		if needsTable(&c.specs[i].Source) {
			second = append(second, i)
		} else {
			first = append(first, i)
		}
	}
	var err error
	if q.live, err = c.measuring(); err != nil {
		return err
	}
	if err := q.run(n, first); err != nil {
		return err
	}
	if err := c.settle(); err != nil {
		return err
	}
	return q.run(n, second)
}

// run works on what is live and on further objects until all is done.
func (q *queue) run(n int, objects []int) error {
	q.next = objects
	var wg sync.WaitGroup
	for range n {
		wg.Go(q.work)
	}
	wg.Wait()
	return q.err
}

// workers is how many pieces are in work at once: four for each core, since of the four steps of a piece, reading, making, digesting and
// writing, two wait for disks and one for its turn; and not few on a small machine, since a disk is faster the more it has to do.
func (c *conversion) workers() int {
	if c.Options.workers > 0 {
		return c.Options.workers
	}
	return min(max(minWorkers, 4*runtime.GOMAXPROCS(0)), maxWorkers)
}

func (q *queue) work() {
	b := new(buffer)
	for {
		j, k, off := q.take()
		if j == nil {
			return
		}
		if err := q.piece(j, k, off, b); err != nil {
			q.fail(j, k, err)
			return
		}
		q.wrote(j, k)
	}
}

// take gives out a piece and its offset, or nil where there is nothing left to begin.
func (q *queue) take() (*job, int, int64) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for q.err == nil {
		var some *job
		for _, j := range q.live {
			if j.taken == len(j.pieces) {
				continue
			}
			if some == nil {
				some = j
			}
			if j.busy < q.limit {
				return j.take()
			}
		}
		if len(q.next) == 0 {
			if some == nil {
				return nil, 0, 0
			}
			return some.take()
		}
		q.begin()
	}
	return nil, 0, 0
}

// take needs the queue's mutex.
func (j *job) take() (*job, int, int64) {
	k, off := j.taken, j.at
	j.taken++
	j.busy++
	j.at += j.pieces[k].bytes
	return j, k, off
}

// begin opens the next object; it needs the mutex.
func (q *queue) begin() {
	i := q.next[0]
	q.next = q.next[1:]
	j := newJob(i, &q.c.plan.Directory.Objects[i])
	q.live = append(q.live, j)
	var err error
	if j.pieces, err = q.c.pieces(i); err == nil {
		var n int64
		for _, p := range j.pieces {
			n += p.bytes
		}
		if n != j.object.Bytes {
			err = fmt.Errorf("%q: %d bytes are made for %d", j.object.ID, n, j.object.Bytes)
		}
	}
	if err != nil {
		q.failed(j, 0, err)
	}
}

// piece makes and writes one piece.
func (q *queue) piece(j *job, k int, off int64, b *buffer) error {
	if err := q.ctx.Err(); err != nil {
		return err
	}
	p := &j.pieces[k]
	if p.after && !j.wait(k) {
		return errStopped
	}
	data, err := p.make(b)
	if err != nil || j.object == nil {
		return err
	}
	if q.c.fault != nil {
		if err := q.c.fault(j.object.ID, off); err != nil {
			return classify(IO, fmt.Errorf("writing %q: %w", j.object.ID, err))
		}
	}
	if !j.wait(k) {
		return errStopped
	}
	return classify(IO, q.c.writer.WriteInTurn(j.object.ID, off, data, j.advance))
}

// wrote notes a finished piece and tells of progress: of every object, and once a second of one that takes long.
func (q *queue) wrote(j *job, k int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.done += j.pieces[k].bytes
	j.busy--
	j.written++
	whole := j.written == len(j.pieces)
	if whole {
		q.live = slices.DeleteFunc(q.live, func(o *job) bool { return o == j })
	}
	if j.object == nil {
		return
	}
	if whole {
		q.ended++
	}
	if q.c.Progress == nil || !whole && time.Since(q.told) < time.Second {
		return
	}
	q.told = time.Now()
	s := Step{Index: q.ended, Total: len(q.c.specs), Name: j.object.ID, Bytes: j.object.Bytes, Done: q.done, All: q.all, Elapsed: time.Since(q.start)}
	if !whole {
		s.Partial = true
	}
	q.c.Progress(s)
}

func (q *queue) fail(j *job, k int, err error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.failed(j, k, err)
}

// failed keeps the error of the first piece and stops all work; it needs the mutex.
func (q *queue) failed(j *job, k int, err error) {
	if at := [2]int{j.index, k}; !errors.Is(err, errStopped) && (q.err == nil || at[0] < q.first[0] || at[0] == q.first[0] && at[1] < q.first[1]) {
		q.err, q.first = err, at
	}
	for _, j := range q.live {
		j.stop()
	}
}
