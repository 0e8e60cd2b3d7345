package synth

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"ninfer/internal/arch"
	"ninfer/internal/artifact"
)

// Step is how far Write has come.
type Step struct {
	Done, All int64 // bytes of objects
	Elapsed   time.Duration
}

// Rate is the mean speed so far in bytes per second.
func (s Step) Rate() float64 { return float64(s.Done) / max(s.Elapsed.Seconds(), 1e-9) }

// chunk is how much a worker makes at a time.
const chunk = 4 << 20

// Write writes the artifact of a plan to path; specs are the plan's objects, resources the content of the six files by object id.
// Each core makes one object at a time, so memory does not grow with the model. With Options.SparseTable the table's zeros are left as
// holes in the files and disk space is not reserved beforehand. The id is derived from the content like a converter's, which with a
// sparse table means that its zeros are hashed, not written. On failure nothing is left.
func Write(ctx context.Context, path string, plan *artifact.Plan, specs []arch.Spec, c *arch.Config, resources map[string][]byte, o Options, progress func(Step)) (*artifact.Receipt, error) {
	objects := make([]*Object, len(specs))
	all := int64(0)
	for i := range specs {
		all += plan.Directory.Objects[i].Bytes
		if specs[i].Resource {
			continue
		}
		var err error
		if objects[i], err = NewObject(c, &specs[i], o); err != nil {
			return nil, err
		}
	}
	w, err := artifact.Create(path, plan, artifact.WriterOptions{NoReserve: o.SparseTable})
	if err != nil {
		return nil, err
	}
	defer w.Abort()
	start := time.Now()
	var done, next atomic.Int64
	var mu sync.Mutex // guards calls of progress and told
	var told time.Time
	advance := func(n int64) {
		d := done.Add(n)
		if progress == nil {
			return
		}
		mu.Lock()
		defer mu.Unlock()
		if now := time.Now(); d == all || now.Sub(told) >= 100*time.Millisecond {
			told = now
			progress(Step{d, all, now.Sub(start)})
		}
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var wg sync.WaitGroup
	for range runtime.GOMAXPROCS(0) {
		wg.Go(func() {
			buf := make([]byte, chunk)
			for ctx.Err() == nil {
				i := int(next.Add(1)) - 1
				if i >= len(specs) {
					return
				}
				id := specs[i].ID
				var err error
				if specs[i].Resource {
					err = w.WriteAt(id, 0, resources[id])
					advance(int64(len(resources[id])))
				} else {
					err = objects[i].write(ctx, w, buf, advance)
				}
				if err != nil {
					cancel(err)
				}
			}
		})
	}
	wg.Wait()
	if err := context.Cause(ctx); err != nil {
		if errors.Is(err, context.Canceled) {
			return nil, fmt.Errorf("synth: %s: %w", path, err)
		}
		return nil, err
	}
	return w.Finish()
}

func (x *Object) write(ctx context.Context, w *artifact.Writer, buf []byte, advance func(int64)) error {
	for off := int64(0); off < x.Bytes(); {
		if err := ctx.Err(); err != nil {
			return err
		}
		n := min(int64(len(buf)), x.Bytes()-off)
		var err error
		if x.Zero(off, n) {
			err = w.WriteZerosAt(x.id, off, n)
		} else {
			x.Fill(buf[:n], off)
			err = w.WriteAt(x.id, off, buf[:n])
		}
		if err != nil {
			return err
		}
		advance(n)
		off += n
	}
	return nil
}
