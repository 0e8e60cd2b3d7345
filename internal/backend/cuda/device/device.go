// Package device runs programs on one NVIDIA GPU: a backend.Device with every operation of text.
//
// It follows the machine of backend/cpu: the same images, the same checks, the same order of lengths, cuts and moves. Activations that
// the stored oracle rounds to BF16 are BF16 here, rounded at the same points; index keys, windows and streams are BF16,
// keys and values BF16 or E4M3 with a scale, delta-net matrices FP32 or BF16. Tokens, positions of carried rows and the n-gram history stay on the host, which knows
// them: it hashes and gathers the n-gram table's rows itself and sends them along with the launch.
//
// A verify pass leaves fixed states alone and records its rows; the next pass of the lane folds the kept ones first, inside the same
// kernels. Moving an image folds them before. A decoding step leaves a record instead of most delta-net matrices:
// each is brought forward and written in every StepsBehind-th step only, by the same operations and so to the same bits as if each step did.
//
// Where shape and format allow it the tuned matrix kernels of cuda/kernels are used, and everywhere else the plain ones of the folder
// below. In the plain ones every reduction has an order that depends on its own row only: with Options.Plain results do not depend on
// batch, chunk or company in a single bit. The tuned ones may add in another order for another number of rows.
//
// A Device belongs to one goroutine. Launch returns when the work is queued; it waits for the launch before it to have read its control
// block. Prompts of more than some rows go through kernels for many rows: prefill.go.
package device

import (
	"errors"
	"fmt"
	"io/fs"
	"sync"
	"sync/atomic"

	"ninfer/internal/backend"
	"ninfer/internal/backend/cuda/device/kernels"
	"ninfer/internal/backend/cuda/driver"
	tuned "ninfer/internal/backend/cuda/kernels"
	files "ninfer/internal/backend/cuda/loader"
)

// Options size a device; the members that cpu.Options has too mean the same.
type Options struct {
	States []backend.State
	Lanes  int
	Saved  int
	Tokens int
	Verify int
	Carry  int
	Pages  int // Unstocked leaves the pool to Stock

	KV        backend.Cache // BF16 unless it is CacheFP8
	BF16State bool          // keep delta-net matrices in BF16 instead of FP32

	Ordinal int    // which GPU
	Plain   bool   // use the plain kernels only: slower, and the same bits whatever the rows of a pass
	Reserve uint64 // bytes of GPU memory that stay free for other programs, now and later
	NoGraph bool   // launch every kernel by itself instead of replaying captured steps
	// Code is where compiled kernels come from; nil is what was built in.
	Code  fs.FS
	Tuned fs.FS // the same of the tuned kernels
	Gemm  fs.FS // and of those for many rows: products
	Chunk fs.FS // and sequences
	// Library is the cuBLASLt that multiplies the matrices of prompts: a path, "" to look for one, "none" for kernels of our own.
	Library string
	Few     int // most rows of a prompt that go the way of decoding; 0 is the default, negative none
	// Driver is the driver to use; nil is the system's. Tests put one that fails here.
	Driver *driver.Driver
	// Made says of which random words a tensor with these bytes is to consist, for weights that nobody has: they are made on the GPU and
	// data is not looked at. Not ok means that data is what it seems. Nil makes nothing.
	Made func(data []byte) (planes []Plane, ok bool)
	// Loaded, if not nil, is told after each tensor how many encoded bytes of weights are on the GPU.
	Loaded func(bytes uint64)
}

// Unstocked as a number of pages opens a device without a pool.
const Unstocked = -1

// Device is a GPU with room for images and the weights of the programs compiled so far.
type Device struct {
	opt    Options
	owner  *driver.Owner
	set    *kernels.Set
	tuned  *tuned.Set // nil with Options.Plain
	stream driver.Stream
	failed error // a device error ends the device
	closed bool

	images    []image // lanes, then saved
	states    []plane
	pages     backend.Pool
	pool      driver.Ptr // the planes of states that grow
	tables    driver.Ptr // [lanes][tablePages] pages of the lanes' tokens
	binds     []func()   // to call when there is a pool
	scratch   map[scratchKey]scratch
	weights   map[*byte]driver.Ptr // stored tensors by their first byte
	vectors   map[vectorKey]driver.Ptr
	banks     map[*byte]bank
	rotaries  map[backend.Rotary]driver.Ptr
	folders   map[backend.StateID]func(*Device, *driver.Context, driver.Ptr) error
	chain     driver.Ptr  // [lanes][width] streams after a lane's last draft row
	chained   int         // their width
	spare     driver.Ptr  // a lane's control block, to fold outside a pass
	temp      driver.Ptr  // room to compact carried rows
	ring      *files.Ring // for large tensors, while a program is compiled
	steps     []*step
	seq       backend.Seq
	last      *step
	arms      sync.Mutex    // armed: the owner looks at it when it has nothing to do
	armed     armed         // what waits on the GPU; zero if nothing does
	like      armed         // what would be for a launch like the last one, if it was a decoding step
	reluctant int           // launches that nothing is armed for
	bytes     uint64        // allocated on the device
	reserved  uint64        // of that, for images
	cuda      string        // the driver's version of CUDA
	stored    uint64        // bytes of the tensors that it holds, in whatever form
	gathered  atomic.Uint64 // rows of n-gram tables
	missed    atomic.Uint64
	entering  atomic.Bool // pages of an n-gram table, until they are or the device is closed
	entered   sync.WaitGroup
	wide      *wide // nil before the first step for many rows
	profile   *profile
	watch     *watch
	seed      uint32 // of words
}

// plane is the device memory of one state, all images of it, or all pages. States of integers that the host keeps have none.
type plane struct {
	at      driver.Ptr
	element uint64 // bytes of a value
	values  uint64 // of an image; of a state that grows, of a page
	records driver.Ptr
	scales  driver.Ptr // of a plane in FP8: BF16, one for each group values
	group   uint64
}

func (d *Device) slotBytes(id backend.StateID) uint64 {
	return d.states[id].values * d.states[id].element
}

// image is what the host knows of a sequence image.
type image struct {
	table   []int32 // the pages of its tokens
	told    int     // how many of them the GPU knows, of a lane
	length  int     // tokens committed by the target
	carried int     // rows waiting for the drafter
	first   int     // the first of them in the plane
	keep    int     // recorded rows that the next pass folds
	steps   int     // steps in a row that may have left records for delta-net matrices; above 7 less a multiple of StepsBehind
	from    int     // in the ring of delta-net matrices the place behind those records, where those begin that the next pass folds
	chained int     // draft rows appended since the last target pass
	drafted bool
	stood   [3]int32
	verify  *step // the last step that recorded

	positions [][3]int32 // of the carried rows
	history   []int32    // the last tokens, without the recorded ones
	recorded  []int32    // tokens of the recorded rows

	launched backend.Seq
}

// Open takes a GPU and reserves the images. Its errors are those of the driver package: no driver, no device, wrong architecture, memory.
func Open(opt Options) (*Device, error) {
	drv := opt.Driver
	if drv == nil {
		var err error
		if drv, err = driver.Open(); err != nil {
			return nil, err
		}
	}
	owner, err := driver.StartOwner(drv, opt.Ordinal)
	if err != nil {
		return nil, err
	}
	d := &Device{
		opt: opt, owner: owner, weights: map[*byte]driver.Ptr{}, vectors: map[vectorKey]driver.Ptr{}, banks: map[*byte]bank{}, rotaries: map[backend.Rotary]driver.Ptr{},
		folders: map[backend.StateID]func(*Device, *driver.Context, driver.Ptr) error{}, scratch: map[scratchKey]scratch{},
	}
	if err := owner.Do(d.reserve); err != nil {
		_ = d.Close()
		return nil, err
	}
	owner.Idle(d.disarm)
	d.reserved, d.cuda = d.bytes, drv.Version().String()
	return d, nil
}

// Absent says that an error of Open means that this machine has no GPU to use: no driver, an old one, no device, or one that this program
// has no code for.
func Absent(err error) bool {
	var none *driver.NoDriverError
	var old *driver.OldDriverError
	var missing *driver.NoDeviceError
	var arch *driver.ArchError
	return errors.As(err, &none) || errors.As(err, &old) || errors.As(err, &missing) || errors.As(err, &arch)
}

// Name is the GPU's name; Bytes is what the device has allocated on it, and Stored the encoded size of the tensors among that.
func (d *Device) Name() string   { return d.owner.Device().Name }
func (d *Device) Bytes() uint64  { return d.bytes }
func (d *Device) Stored() uint64 { return d.stored }

func (d *Device) alloc(c *driver.Context, what string, bytes uint64) (driver.Ptr, error) {
	p, err := c.Alloc(what, bytes)
	if err == nil {
		d.bytes += bytes
	}
	return p, err
}

func (d *Device) reserve(c *driver.Context) (err error) {
	c.Reserve = d.opt.Reserve
	m, err := d.load(c, d.opt.Code, d.opt.Tuned)
	if err != nil {
		return err
	}
	d.set, d.tuned = m.set, m.tuned
	if d.stream, err = c.NewStream(); err != nil {
		return err
	}
	slots := uint64(d.opt.Lanes + d.opt.Saved)
	d.images = make([]image, slots)
	for _, s := range d.opt.States {
		p := plane{element: 2}
		switch s.Kind {
		case backend.PerToken:
			p.values = uint64(backend.PageTokens * s.Width)
		case backend.PerBlock:
			p.values = uint64(pageRows(s) * s.Width)
		case backend.Carried:
			p.values = uint64(d.opt.Carry * s.Width)
			if s.Store != backend.StoreInt {
				d.chained = max(d.chained, s.Width)
			}
		case backend.Fixed:
			p.values = uint64(s.Rows * s.Width)
		}
		switch {
		case hosted(s):
			d.states = append(d.states, plane{})
			continue
		case s.Store == backend.StoreInt || s.Store == backend.StoreMatrix && !d.opt.BF16State:
			p.element = 4
		case s.Store == backend.StoreKV && d.opt.KV == backend.CacheFP8:
			if s.Group < 1 || s.Width%s.Group != 0 {
				return fmt.Errorf("cuda: state %q: a cache in fp8 needs values that share a scale", s.Name)
			}
			p.element, p.group = 1, uint64(s.Group)
		}
		if s.Kind == backend.Fixed && s.Initial != 0 {
			return fmt.Errorf("cuda: state %q begins at %d: only integers may", s.Name, s.Initial)
		}
		if !grows(s) {
			if p.at, err = d.alloc(c, "state "+s.Name, slots*p.values*p.element); err != nil {
				return err
			}
		}
		if s.Kind == backend.Fixed {
			if p.records, err = d.alloc(c, "records of "+s.Name, uint64(d.opt.Lanes*d.records(s)*recorded(s))*max(p.element, recordBytes(s))); err != nil {
				return err
			}
		}
		d.states = append(d.states, p)
	}
	if d.tables, err = d.alloc(c, "tables of pages", uint64(4*d.opt.Lanes*d.tablePages())); err != nil {
		return err
	}
	if n := d.opt.Pages; n != Unstocked {
		if n == 0 {
			n = int(slots) * d.tablePages()
		}
		if err := d.stock(c, n); err != nil {
			return err
		}
	}
	if d.chain, err = d.alloc(c, "chained streams", uint64(d.opt.Lanes*d.chained*2)); err != nil {
		return err
	}
	if d.temp, err = d.alloc(c, "carried rows", uint64(d.opt.Carry*d.chained*2)); err != nil {
		return err
	}
	if d.spare, err = d.alloc(c, "control", 256); err != nil {
		return err
	}
	for i := range d.images {
		if err := d.empty(c, i); err != nil {
			return err
		}
	}
	return c.SyncStream(d.stream)
}

// hosted says that the host keeps a state: the n-gram history, and where carried rows stood.
func hosted(s backend.State) bool {
	return s.Store == backend.StoreInt && (s.Kind == backend.Fixed || s.Kind == backend.Carried)
}

// recordBytes is the least size of a recorded value: those of a matrix are FP32 whatever it is kept in.
func recordBytes(s backend.State) uint64 {
	if s.Store == backend.StoreMatrix {
		return 4
	}
	return 2
}

// records is for how many rows of a lane there are records. Those of a delta-net matrix are a ring: a pass leaves its own behind those that it
// brings the matrix forward by.
func (d *Device) records(s backend.State) int {
	if s.Store == backend.StoreMatrix {
		return d.recordRing()
	}
	return d.opt.Verify
}

func (d *Device) recordRing() int { return max(StepsBehind-1, d.opt.Verify) + max(1, d.opt.Verify) }

// StepsBehind is in how many decoding steps a delta-net matrix is written once, kEvery of delta.cu. In a step it is brought forward by 1.5 records of one on
// average: 50 KB for 48 heads, whose matrices have 3.1 MB.
const StepsBehind = 4

// turn is the step in which a delta-net matrix is written: the matrices of a model take turns, so that all steps take the same time.
func (d *Device) turn(id backend.StateID) (n uint32) {
	for _, s := range d.opt.States[:id] {
		if s.Store == backend.StoreMatrix {
			n++
		}
	}
	return n % StepsBehind
}

// behind is what a pass of some kind is told of an image's records: Fold and From of its Lane.
func (img *image) behind(kind backend.Kind) (fold, from uint32) {
	from = uint32(img.from) | uint32(img.steps)<<16
	if img.leaves(kind) {
		from |= 1 << 31
	}
	return uint32(img.keep), from
}

// leaves says whether a pass of this kind may leave records of its step. Behind a verify pass none does: matrices in BF16 would be rounded between that and
// the step if they were written.
func (img *image) leaves(kind backend.Kind) bool { return kind == backend.Decode && img.keep == 0 }

// recorded is the number of values that a Verify pass leaves for one row of a Fixed state: of a window its input, of a delta-net matrix
// for each head the key, the correction and the decay, in a multiple of 16 bytes.
func recorded(s backend.State) int {
	if s.Store == backend.StoreMatrix {
		return s.Rows / s.Width * (2*s.Width + 4)
	}
	return s.Width
}

// empty takes an image's pages and gives its Fixed states their initial values.
func (d *Device) empty(c *driver.Context, slot int) error {
	img := &d.images[slot]
	*img = image{table: d.pages.Shrink(img.table, 0), launched: img.launched}
	for id, s := range d.opt.States {
		if s.Kind != backend.Fixed {
			continue
		}
		if hosted(s) {
			for range s.Rows {
				img.history = append(img.history, s.Initial)
			}
			continue
		}
		n := d.slotBytes(backend.StateID(id))
		if err := c.Set(d.stream, d.states[id].at+driver.Ptr(uint64(slot)*n), 0, n); err != nil {
			return err
		}
	}
	return nil
}

// first is the first of errors that were joined: on a lost GPU everything after it fails too.
func first(err error) error {
	for {
		list, ok := err.(interface{ Unwrap() []error })
		if !ok {
			return err
		}
		err = list.Unwrap()[0]
	}
}

// do runs f on the owner, after the GPU no longer waits for a launch.
func (d *Device) do(what string, f func(*driver.Context) error) error {
	d.disarm()
	return d.run(what, f)
}

// run runs f on the owner. What fails there fails the device: nobody knows which states it left half written.
func (d *Device) run(what string, f func(*driver.Context) error) error {
	if d.closed {
		return fmt.Errorf("cuda: %s: device closed", what)
	}
	if d.failed != nil {
		return fmt.Errorf("cuda: %s: the device has failed: %w", what, d.failed)
	}
	if err := first(d.owner.Do(f)); err != nil {
		var host *hostError
		if !errors.As(err, &host) {
			d.failed = err
		}
		return fmt.Errorf("cuda: %s: %w", what, err)
	}
	return nil
}

// hostError is a failure before anything was launched: the device goes on.
type hostError struct{ error }

func (e *hostError) Unwrap() error { return e.error }

func (d *Device) find(i backend.Image) (int, error) {
	n, first := d.opt.Lanes, 0
	if i.Saved {
		n, first = d.opt.Saved, d.opt.Lanes
	}
	if i.Index < 0 || i.Index >= n {
		return 0, fmt.Errorf("cuda: no image %+v", i)
	}
	return first + i.Index, nil
}

// Commit keeps the first n rows of the lane's last Verify launch.
func (d *Device) Commit(lane, n int) error {
	if lane < 0 || lane >= d.opt.Lanes {
		return fmt.Errorf("cuda: commit: no lane %d", lane)
	}
	img := &d.images[lane]
	if n < 0 || n > img.keep {
		return fmt.Errorf("cuda: commit %d rows of lane %d: %d are pending", n, lane, img.keep)
	}
	cut := img.keep - n
	img.length -= cut
	img.carried = max(0, img.carried-cut)
	img.positions = img.positions[:img.carried]
	img.keep = n
	img.recorded = img.recorded[:min(n, len(img.recorded))]
	return nil
}

// Lengths tells an image's committed lengths.
func (d *Device) Lengths(i backend.Image) backend.Lengths {
	slot, err := d.find(i)
	if err != nil || d.closed {
		return backend.Lengths{}
	}
	img := &d.images[slot]
	return backend.Lengths{Target: img.length, Drafter: img.length - img.carried}
}

// Reset makes an image empty.
func (d *Device) Reset(i backend.Image) error {
	slot, err := d.find(i)
	if err != nil {
		return err
	}
	return d.do("reset", func(c *driver.Context) error { return d.empty(c, slot) })
}

// folded is a copy of the image's history, or that itself, after the kept recorded tokens.
func (img *image) folded(history []int32) []int32 {
	return after(history, img.recorded[:min(img.keep, len(img.recorded))])
}

// after is a history, in its own memory, when tokens have followed: as many of the last ones as before.
func after(history, tokens []int32) []int32 {
	keep := len(history)
	all := append(history, tokens[max(0, len(tokens)-keep):]...)
	return all[:copy(all, all[len(all)-keep:])]
}

// flush folds an image's kept records and forgets its drafts.
func (d *Device) flush(c *driver.Context, slot int) error {
	img := &d.images[slot]
	if img.keep+img.steps > 0 {
		l := kernels.Lane{Slot: uint32(slot)}
		l.Fold, l.From = img.behind(backend.Verify)
		if err := c.ToDevice(d.stream, d.spare, bytesOf(&l)); err != nil {
			return err
		}
		for _, id := range img.verify.fixed {
			if img.keep == 0 && d.opt.States[id].Store != backend.StoreMatrix {
				continue
			}
			if err := d.folders[id](d, c, d.spare); err != nil {
				return err
			}
		}
		if err := c.SyncStream(d.stream); err != nil { // the control block is used again
			return err
		}
		img.history = img.folded(img.history)
	}
	img.keep, img.steps, img.from, img.recorded, img.verify = 0, 0, 0, nil, nil
	img.chained, img.drafted = 0, false
	return nil
}

// Move copies an image: all of it. Lanes are flushed first.
func (d *Device) Move(dst, src backend.Image) error {
	to, err := d.find(dst)
	if err != nil {
		return err
	}
	from, err := d.find(src)
	if err != nil {
		return err
	}
	return d.do("move", func(c *driver.Context) error {
		if err := d.flush(c, from); err != nil || from == to {
			return err
		}
		a, b := &d.images[from], &d.images[to]
		if err := d.copyPages(c, b, a); err != nil {
			if failed := d.empty(c, to); failed != nil {
				return failed
			}
			return err
		}
		*b = image{table: b.table, length: a.length, carried: a.carried, launched: b.launched}
		b.history = append(b.history, a.history...)
		b.positions = append(b.positions, a.positions...)
		for id, s := range d.opt.States {
			p := &d.states[id]
			if p.at == 0 || grows(s) {
				continue
			}
			n, skip := s.Rows*s.Width, 0
			if s.Kind == backend.Carried {
				n, skip = a.carried*s.Width, a.first*s.Width
			}
			if n == 0 {
				continue
			}
			base := d.slotBytes(backend.StateID(id))
			at := p.at + driver.Ptr(uint64(from)*base+uint64(skip)*p.element)
			if err := c.Copy(d.stream, p.at+driver.Ptr(uint64(to)*base), at, uint64(n)*p.element); err != nil {
				return err
			}
		}
		return nil
	})
}

// Close waits for the GPU and gives everything back.
func (d *Device) Close() error {
	if d.closed {
		return nil
	}
	d.closed = true
	d.leave()
	err := d.owner.Do(func(c *driver.Context) error {
		d.disarm()
		err := c.Synchronize()
		for _, s := range d.steps {
			err = errors.Join(err, s.free(c))
		}
		for id, p := range d.states {
			if !grows(d.opt.States[id]) {
				err = errors.Join(err, free(c, p.at), free(c, p.records))
			}
		}
		err = errors.Join(err, free(c, d.pool), free(c, d.tables))
		for _, p := range d.weights {
			err = errors.Join(err, free(c, p))
		}
		for _, b := range d.banks {
			err = errors.Join(err, free(c, b.tiles), free(c, b.divisors))
		}
		for _, p := range d.vectors {
			err = errors.Join(err, free(c, p))
		}
		for _, p := range d.rotaries {
			err = errors.Join(err, free(c, p))
		}
		err = errors.Join(err, free(c, d.chain), free(c, d.spare), free(c, d.temp))
		err = errors.Join(append(d.wide.close(c), err)...)
		if d.stream != 0 {
			err = errors.Join(err, c.DestroyStream(d.stream))
		}
		if d.set != nil {
			err = errors.Join(err, d.set.Unload(c))
		}
		if d.tuned != nil {
			err = errors.Join(err, d.tuned.Unload(c))
		}
		return err
	})
	d.owner.Close()
	if d.failed != nil {
		return nil // said when it failed
	}
	return first(err)
}

func free(c *driver.Context, p driver.Ptr) error {
	if p == 0 {
		return nil
	}
	return c.Free(p)
}
