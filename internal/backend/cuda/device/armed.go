package device

import (
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"time"
	"unsafe"

	"ninfer/internal/backend"
	"ninfer/internal/backend/cuda/driver"
)

// armed is a launch whose beginning has been queued before anyone asked for it, behind a decoding step like it: the kernels up to the first product, which
// touch no states. The first of them waits for the launch's number in the control block, so that neither launching a graph nor the time until the GPU has
// taken it up lies between two steps; the rest of the launch is queued while the beginning runs, with the next one's at its end. If something else comes
// instead, that kernel is told so, and what the others compute is never looked at.
type armed struct {
	step *step
	key  shape
	seq  backend.Seq // the launch that it is the beginning of
}

// reluctance is how many launches nothing is armed for behind one that was for nothing.
const reluctance = 16

// called is the second word of a control block: the number of a launch that does not come.
func (s *step) called() *uint32 { return (*uint32)(unsafe.Pointer(&s.slots[0].control[4])) }

// disarm tells the GPU that the launch which it waits for does not come. Whatever waits for the stream or the device must do so before.
func (d *Device) disarm() {
	d.arms.Lock()
	defer d.arms.Unlock()
	if s := d.armed.step; s != nil {
		atomic.StoreUint32(s.called(), uint32(d.armed.seq))
		d.armed, d.reluctant = armed{}, reluctance
	}
}

// begun gives a launch to the GPU if that waits for it, on the goroutine that asks for it and before anything is put on the stream.
func (d *Device) begun(p *pass, depth int) bool {
	d.arms.Lock()
	defer d.arms.Unlock()
	s := p.s
	if d.armed.step != s || d.armed.seq != d.seq || depth > 0 || s.behind != nil || !p.plain || d.failed != nil || !s.over() || d.armed.key != p.shape() {
		return false
	}
	for i := range p.lanes {
		l := &p.lanes[i]
		img := &d.images[l.Slot]
		if img.keep > 0 || img.steps > 0 && !slices.Equal(img.verify.fixed, s.fixed) || s.carries && img.first+img.carried+int(l.Rows) > d.opt.Carry {
			return false
		}
		for _, row := range p.in[i].Media {
			if row != nil {
				return false
			}
		}
		l.Carry = uint32(img.first + img.carried)
	}
	p.write()
	d.armed = armed{}
	if !s.waited() {
		d.reluctant = reluctance
		return false
	}
	return true
}

// waited says whether the GPU has still waited for the launch whose number has just been written: where the process was stopped it gives up.
func (s *step) waited() bool {
	number := uint32(s.d.seq)
	words := (*[4]uint32)(unsafe.Pointer(&s.slots[0].control[0]))
	if atomic.LoadUint32(&words[2]) != number {
		return true
	}
	for end := time.Now().Add(time.Second); time.Now().Before(end); { // it says at once what it has seen
		switch atomic.LoadUint32(&words[3]) {
		case number:
			return true
		case ^number:
			return false
		}
	}
	return false // the GPU is gone, as the next call will say
}

// arm queues the beginning of a launch like this one behind it, if the one before was like it too.
func (p *pass) arm() error {
	s, d, c := p.s, p.s.d, p.c
	if p.s.program.Pass.Kind != backend.Decode || s.depth > 0 || s.behind != nil || !p.plain || p.logits || d.watch != nil || d.profile != nil || runtime.GOMAXPROCS(0) <= 2 {
		d.like = armed{}
		return nil
	}
	like := armed{s, p.shape(), d.seq + 1}
	again := d.like == armed{like.step, like.key, d.seq}
	if d.like = like; !again || p.begun { // which has its own at its end
		return nil
	}
	if d.reluctant > 0 {
		d.reluctant--
		return nil
	}
	g := s.graphs[like.key]
	if g == nil || g.exec == 0 || g.whole {
		return nil
	}
	if g.head == 0 {
		if err := p.split(g); err != nil || g.whole {
			return err
		}
	}
	if err := c.GraphLaunch(g.head, d.stream); err != nil {
		return err
	}
	p.hold()
	return nil
}

// hold notes that the beginning of a launch like this one is on the stream behind it.
func (p *pass) hold() {
	d := p.s.d
	d.arms.Lock()
	d.armed = armed{p.s, p.shape(), d.seq + 1}
	d.arms.Unlock()
}

// split captures a launch in two, where its first mixer has made its first product.
func (p *pass) split(g *graph) (err error) {
	s, d := p.s, p.s.d
	defer func() { d.watch, p.arming, p.bring = nil, false, 0 }()
	capture := func(w watch) (*watch, driver.Exec, error) {
		w.counts = map[string]int{}
		d.watch = &w
		exec, _, err := p.c.Capture(d.stream, p.direct)
		return &w, exec, err
	}
	all, exec, err := capture(watch{})
	if err != nil {
		return err
	}
	if err := p.c.DestroyExec(exec); err != nil {
		return err
	}
	n := 0
	for n < len(all.order) && !strings.HasPrefix(all.order[n], "gdn 0 ") {
		if op, _, _ := strings.Cut(strings.TrimSpace(all.order[n]), " "); n > 0 && op != "embed" && op != "mix" {
			n = len(all.order)
		}
		n++
	}
	if n++; n >= len(all.order) { // it begins in another way
		g.whole = true
		return nil
	}
	if p.bring, err = s.bringing(p.c, len(p.rows)); err != nil {
		return err
	}
	p.arming = true
	if _, g.head, err = capture(watch{end: n}); err != nil {
		return err
	}
	g.next, _, err = p.c.Capture(d.stream, func() error {
		d.watch, p.arming = &watch{counts: map[string]int{}, first: n, end: len(all.order)}, false
		if err := p.direct(); err != nil {
			return err
		}
		d.watch, p.arming = &watch{counts: map[string]int{}, end: n}, true
		return p.direct()
	})
	return err
}

// bringBytes is what is brought into L2 of each block's share of the first product while the beginning waits.
const bringBytes = 112 << 10

// bringing describes that on the device, for so many rows; 0 is nothing.
func (s *step) bringing(c *driver.Context, rows int) (driver.Ptr, error) {
	if len(s.ahead) == 0 {
		return 0, nil
	}
	format, _, g, ok := s.d.streams(int(s.ahead[0][0].M.K), rows, s.ahead[0])
	if !ok {
		return 0, nil
	}
	a := g.Ahead(format, bringBytes)
	if a.N == 0 || uint64(a.N)*uint64(a.Bytes) > uint64(s.d.owner.Device().L2) {
		return 0, nil
	}
	at, err := s.d.upload(c, bytesOf(&a))
	if err == nil {
		s.taken = append(s.taken, at)
	}
	return at, err
}
