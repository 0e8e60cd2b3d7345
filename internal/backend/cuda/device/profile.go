package device

import (
	"errors"
	"fmt"
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

// watch counts the kernels of a launch list and leaves one kind of them out.
type watch struct {
	op, skip string
	nth      int
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
	return name != w.skip
}

// KernelTime is what a kind of kernel costs a step: all its launches together.
type KernelTime struct {
	Name         string  `json:"name"` // operation, place in it, kernel
	Launches     int     `json:"launches"`
	Microseconds float64 `json:"us"`
}

// Kernels launches a step and then measures where its time goes: the step is captured without one kind of kernel after another, and what
// a replay takes less is what that kind costs in the chain. whole is the time of a replay with everything. Nothing is committed, but the
// states of the lanes are worthless afterwards: Reset or Fill them. Without each only whole is measured.
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
		time := func(skip string) (*watch, float64, error) {
			d.watch = &watch{skip: skip, counts: map[string]int{}}
			exec, _, err := c.Capture(d.stream, p.direct)
			if err != nil {
				return nil, 0, err
			}
			us, err := d.median(c, replays, 1, func() error { return c.GraphLaunch(exec, d.stream) })
			return d.watch, us, errors.Join(err, c.DestroyExec(exec))
		}
		all, full, err := time("")
		if err != nil {
			return err
		}
		whole = full
		if !each {
			return nil
		}
		for _, name := range all.names {
			_, less, err := time(name)
			if err != nil {
				return err
			}
			list = append(list, KernelTime{name, all.counts[name], full - less})
		}
		return nil
	})
	return list, whole, err
}
