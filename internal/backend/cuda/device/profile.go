package device

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"ninfer/internal/backend"
	"ninfer/internal/backend/cuda/driver"
)

// OpTime is how long the GPU worked on one operation of a launch, with the gap to the next one.
type OpTime struct {
	Op           string
	Microseconds float64
}

// profile collects events between the operations of a launch.
type profile struct {
	names  []string
	events []driver.Event
}

// Profile runs f, which launches steps and waits for them, and returns the time of every operation in order. Steps run kernel by kernel
// meanwhile: where the host launches too slowly, its time shows instead.
func (d *Device) Profile(f func() error) ([]OpTime, error) {
	d.profile = &profile{}
	p := d.profile
	ferr := f()
	d.profile = nil
	var list []OpTime
	err := d.do("profile", func(c *driver.Context) error {
		err := c.Synchronize()
		for i, e := range p.events {
			if err == nil && i+1 < len(p.events) && p.names[i] != "" {
				var us float64
				if us, err = c.Elapsed(e, p.events[i+1]); err == nil {
					list = append(list, OpTime{p.names[i], us})
				}
			}
		}
		for _, e := range p.events {
			err = errors.Join(err, c.DestroyEvent(e))
		}
		return err
	})
	return list, errors.Join(ferr, err)
}

// stamp notes when the GPU arrives at an operation, if somebody asked.
func (d *Device) stamp(c *driver.Context, name string) error {
	if d.profile == nil {
		return nil
	}
	e, err := c.NewEvent(true)
	if err != nil {
		return err
	}
	d.profile.names = append(d.profile.names, name)
	d.profile.events = append(d.profile.events, e)
	return c.Record(e, d.stream)
}

// watch counts the kernels of a launch list and leaves one kind of them out, or all but those from first up to end, if that is not zero.
type watch struct {
	op, skip string
	nth      int
	first    int
	end      int
	order    []string // each kernel's name
	names    []string // in order of their first launch
	counts   map[string]int
	inside   func(op string) // called where an operation begins; for tests
}

// enter begins an operation; its kind is its name's first word, or all of it without a number.
func (w *watch) enter(op string) {
	w.op, w.nth = strings.TrimRight(op, " 0123456789"), 0
	if w.inside != nil {
		w.inside(op)
	}
}

// passes says whether the next kernel is to be launched.
func (w *watch) passes(kernel string) bool {
	name := fmt.Sprintf("%s %d %s", w.op, w.nth, kernel)
	w.nth++
	if w.counts[name]++; w.counts[name] == 1 {
		w.names = append(w.names, name)
	}
	w.order = append(w.order, name)
	return name != w.skip && (w.end == 0 || len(w.order) > w.first && len(w.order) <= w.end)
}

// KernelTime is what a kind of kernel costs a step: all its launches together.
type KernelTime struct {
	Name     string `json:"name"` // operation, place in it, kernel
	Launches int    `json:"launches"`
	// Microseconds is how much later a chain ends that goes on with such a kernel than one that ends before it: of all kernels they make up the step.
	Microseconds float64 `json:"us"`
	// Without is what a step takes less without this kind: what overlaps with others counts for none of them.
	Without float64 `json:"us_less_without"`
}

// Kernels launches a step and then measures where its time goes. Each kernel is charged with what it adds to the chain up to it, and each kind of
// kernel is left out once. whole is the time of a replay with everything. Nothing is committed, but the states of the lanes are worthless
// afterwards: Reset or Fill them. Without each only whole is measured.
func (d *Device) Kernels(st backend.Step, ctl *backend.Control, replays int, each bool) (list []KernelTime, whole float64, err error) {
	s, ok := st.(*step)
	if !ok || s.d != d || d.closed {
		return nil, 0, errors.New("cuda: kernels: step of another device, or device closed")
	}
	p := &s.pass
	d.seq++
	if err := p.begin(ctl); err != nil {
		return nil, 0, fmt.Errorf("cuda: kernels: %w", err)
	}
	err = d.do("kernels", func(c *driver.Context) (err error) {
		p.c = c
		if err := p.launch(0); err != nil {
			return err
		}
		defer func() { d.watch = nil }()
		l := &lists{p: p, replays: replays}
		defer func() { err = errors.Join(err, l.free()) }()
		all, exec, err := l.capture(watch{})
		if err != nil {
			return err
		}
		l.step = exec
		if whole, err = l.median(exec, false); err != nil || !each {
			return err
		}
		charged, err := l.charge(all)
		if err != nil {
			return err
		}
		for _, name := range all.names {
			_, exec, err := l.capture(watch{skip: name})
			if err != nil {
				return err
			}
			less, err := l.median(exec, false)
			if err = errors.Join(err, c.DestroyExec(exec)); err != nil {
				return err
			}
			list = append(list, KernelTime{name, all.counts[name], charged[name], whole - less})
		}
		return nil
	})
	return list, whole, err
}

// lists measures parts of a launch list.
type lists struct {
	p       *pass
	replays int
	step    driver.Exec    // all of it
	events  []driver.Event // two a replay
}

// warming is the replays that are not counted.
const warming = 2

func (l *lists) free() (err error) {
	for _, e := range l.events {
		err = errors.Join(err, l.p.c.DestroyEvent(e))
	}
	if l.step != 0 {
		err = errors.Join(err, l.p.c.DestroyExec(l.step))
	}
	return err
}

// capture makes a graph of what w lets pass.
func (l *lists) capture(w watch) (*watch, driver.Exec, error) {
	w.counts = map[string]int{}
	l.p.s.d.watch = &w
	exec, _, err := l.p.c.Capture(l.p.s.d.stream, l.p.direct)
	return &w, exec, err
}

// median is how long a graph takes, in microseconds. The replays are queued at once, since the GPU would wait for the host between them; with
// far each is behind a whole step, so that it finds in L2 what a step finds there.
func (l *lists) median(exec driver.Exec, far bool) (float64, error) {
	c, stream := l.p.c, l.p.s.d.stream
	n := l.replays + warming
	for len(l.events) < 2*n {
		e, err := c.NewEvent(true)
		if err != nil {
			return 0, err
		}
		l.events = append(l.events, e)
	}
	for i := range n {
		if far {
			if err := c.GraphLaunch(l.step, stream); err != nil {
				return 0, err
			}
		}
		if err := c.Record(l.events[2*i], stream); err != nil {
			return 0, err
		}
		if err := c.GraphLaunch(exec, stream); err != nil {
			return 0, err
		}
		if err := c.Record(l.events[2*i+1], stream); err != nil {
			return 0, err
		}
	}
	if err := c.SyncStream(stream); err != nil {
		return 0, err
	}
	var times []float64
	for i := warming; i < n; i++ {
		us, err := c.Elapsed(l.events[2*i], l.events[2*i+1])
		if err != nil {
			return 0, err
		}
		times = append(times, us)
	}
	slices.Sort(times)
	return times[len(times)/2], nil
}

// charge measures what each kernel adds to the chain of those before it: the time up to it less the time up to the one before, of graphs that
// begin some layers ahead, where the GPU is busy as it is in a step. It returns the sums of kinds.
func (l *lists) charge(all *watch) (map[string]float64, error) {
	const together, ahead = 12, 24 // kernels that have a beginning in common, and how far ahead of them it is
	c := l.p.c
	sums := map[string]float64{}
	for first := 0; first < len(all.order); first += together {
		from := max(0, first-ahead)
		if err := c.GraphLaunch(l.step, l.p.s.d.stream); err != nil { // anew from the embedding: replays of a few layers end up anywhere
			return nil, err
		}
		before := 0.0
		for end := max(first, 1); end <= min(first+together, len(all.order)); end++ {
			_, exec, err := l.capture(watch{first: from, end: end})
			if err != nil {
				return nil, err
			}
			us, err := l.median(exec, from == 0)
			if err = errors.Join(err, c.DestroyExec(exec)); err != nil {
				return nil, err
			}
			if end > first {
				sums[all.order[end-1]] += us - before
			}
			before = us
		}
	}
	return sums, nil
}
