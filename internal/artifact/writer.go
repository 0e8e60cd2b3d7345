package artifact

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"sync"
)

// Writer writes one artifact. WriteAt may be called by any number of
// goroutines at once; exactly one of Finish and Abort must be called in the
// end, and Abort may always be called again. Until Finish publishes, only
// hidden temporaries and a lock file exist beside the output.
type Writer struct {
	plan    *Plan
	out     *output
	regions []*region // objects and holes in payload order
	byID    map[string]*region
	holes   []*region
	id      *[16]byte // explicit id, or nil

	// gate is held for reading during a write and for writing while the
	// outcome is decided, so that Finish never sees a write halfway.
	gate sync.RWMutex
	over bool // guarded by gate

	mu     sync.Mutex
	failed error // first failed write; guarded by mu
}

// region is an object or a hole while it is written.
type region struct {
	id          string // empty for a hole
	kind        string
	off, length int64

	mu      sync.Mutex
	written []span // disjoint, sorted, merged; guarded by mu
	hash    hash.Hash
	hashed  int64 // bytes that entered hash, from the start; guarded by mu
	digest  [sha256.Size]byte
}

type span struct{ begin, end int64 }

func (r *region) name() string {
	if r.id == "" {
		return fmt.Sprintf("unreferenced bytes at %d", r.off)
	}
	return r.kind + " " + quote(r.id)
}

// reserve enters [begin,end) into the written spans; it reports false if a
// byte of it is there already.
func (r *region) reserve(begin, end int64) bool {
	i, _ := slices.BinarySearchFunc(r.written, begin, func(s span, at int64) int {
		if s.end < at {
			return -1
		}
		return 1
	})
	// written[i] is the first span that ends at or after begin.
	j := i
	for ; j < len(r.written) && r.written[j].begin <= end; j++ {
		s := r.written[j]
		if s.begin < end && begin < s.end {
			return false
		}
	}
	for _, s := range r.written[i:j] { // touching spans
		begin, end = min(begin, s.begin), max(end, s.end)
	}
	r.written = slices.Replace(r.written, i, j, span{begin, end})
	return true
}

func (r *region) complete() error {
	if len(r.written) == 1 && r.written[0] == (span{0, r.length}) {
		return nil
	}
	missing, at := int64(0), int64(-1)
	end := int64(0)
	for _, s := range append(slices.Clone(r.written), span{r.length, r.length}) {
		if s.begin > end {
			missing += s.begin - end
			if at < 0 {
				at = end
			}
		}
		end = s.end
	}
	return fmt.Errorf("%s is incomplete: %d of %d bytes were not written, the first at %d", r.name(), missing, r.length, at)
}

// WriterOptions change how an artifact is written. The zero value is right
// for converters.
type WriterOptions struct {
	// ID is an id to stamp instead of the one derived from the content.
	ID *[16]byte
	// NoReserve leaves the files sparse instead of reserving their disk space
	// at once: for outputs that are mostly holes, and where space becomes
	// free only while the output is written.
	NoReserve bool

	hooks hooks
}

// hooks replace system calls in tests.
type hooks struct {
	writeAt func(f *os.File, p []byte, off int64) (int, error)
	link    func(from, to string) error
	// step is called before every change of what the directory shows.
	step func(what string)
}

// Create begins to write an artifact at path, whose base name must be the
// plan's entry. It takes the lock beside the output (ErrLocked if another
// process has it), removes what a killed earlier writer of the same output
// left, refuses if the entry or a part exists (ErrExists), and reserves disk
// space for all files.
func Create(path string, p *Plan, o WriterOptions) (*Writer, error) {
	if base := filepath.Base(path); base != p.Entry {
		return nil, fmt.Errorf("artifact: %s was planned as %s", path, p.Entry)
	}
	w := &Writer{plan: p, byID: map[string]*region{}, id: o.ID}
	for i := range p.Directory.Objects {
		b := &p.Directory.Objects[i]
		r := &region{id: b.ID, kind: b.kind(), off: b.Offset, length: b.Bytes}
		w.regions = append(w.regions, r)
		w.byID[b.ID] = r
	}
	for _, h := range p.Holes {
		r := &region{off: h.Offset, length: h.Bytes}
		w.regions = append(w.regions, r)
		w.holes = append(w.holes, r)
	}
	slices.SortStableFunc(w.regions, func(a, b *region) int {
		if a.off < b.off {
			return -1
		}
		return 1
	})
	for _, r := range w.regions {
		r.hash = sha256.New()
	}

	var err error
	if w.out, err = createOutput(path, p.Directory.Files, p.PayloadStart, o.NoReserve, o.hooks); err != nil {
		return nil, err
	}
	if err := w.writeFraming(); err != nil {
		return nil, also(err, w.out.discard())
	}
	return w, nil
}

// writeFraming writes headers without the id, and the directory.
func (w *Writer) writeFraming() error {
	for i := range w.out.files {
		b := make([]byte, headerSize, headerSize+len(w.plan.Text))
		if i == 0 {
			copy(b, entryMagic)
			binary.LittleEndian.PutUint64(b[8:], uint64(len(w.plan.Text)))
			b = append(b, w.plan.Text...)
		} else {
			copy(b, partMagic)
			binary.LittleEndian.PutUint64(b[8:], uint64(i))
		}
		if err := w.out.writeFile(i, b, 0); err != nil {
			return err
		}
	}
	return nil
}

// SetID stamps an id that became known only while writing, instead of the one
// derived from the content. Call it before Finish.
func (w *Writer) SetID(id [16]byte) {
	w.gate.Lock()
	defer w.gate.Unlock()
	w.id = &id
}

// WriteAt writes bytes of an object at an offset inside it. Chunks may come in
// any order and from any goroutine, but every byte exactly once; an object
// whose chunks come in order is hashed on the way, others are read again by
// Finish. After an error the writer can only be aborted.
func (w *Writer) WriteAt(object string, off int64, p []byte) error {
	r, ok := w.byID[object]
	if !ok {
		return w.fail(fmt.Errorf("artifact: %s has no object %s to write", w.plan.Entry, quote(object)))
	}
	return w.write(r, off, p, nil)
}

// WriteInTurn is WriteAt for chunks of one object that several goroutines make
// at once. It calls entered when p has entered the object's digest, and writes
// it to disk only then: if each chunk begins when its predecessor has entered,
// writes overlap and nothing has to be read again. It always calls entered.
func (w *Writer) WriteInTurn(object string, off int64, p []byte, entered func()) error {
	r, ok := w.byID[object]
	if !ok {
		entered()
		return w.fail(fmt.Errorf("artifact: %s has no object %s to write", w.plan.Entry, quote(object)))
	}
	return w.write(r, off, p, entered)
}

// WriteHoleAt writes bytes of the plan's hole i, like WriteAt.
func (w *Writer) WriteHoleAt(i int, off int64, p []byte) error {
	if i < 0 || i >= len(w.holes) {
		return w.fail(fmt.Errorf("artifact: %s has no hole %d", w.plan.Entry, i))
	}
	return w.write(w.holes[i], off, p, nil)
}

func (w *Writer) write(r *region, off int64, p []byte, entered func()) error {
	w.gate.RLock()
	defer w.gate.RUnlock()
	err := w.enter(r, off, p)
	if entered != nil {
		entered()
	}
	if err != nil || len(p) == 0 {
		return err
	}
	if err := w.out.writePayload(r.off+off, p); err != nil {
		return w.fail(fmt.Errorf("artifact: writing %s: %w", r.name(), err))
	}
	return nil
}

// enter checks a write, notes it and takes it into the digest if its turn has
// come.
func (w *Writer) enter(r *region, off int64, p []byte) error {
	if w.over {
		return fmt.Errorf("artifact: write to %s after its end", w.plan.Entry)
	}
	if err := w.failure(); err != nil {
		return err
	}
	if off < 0 || int64(len(p)) > r.length || off > r.length-int64(len(p)) {
		return w.fail(fmt.Errorf("artifact: write [%d,%d) outside the %d bytes of %s", off, off+int64(len(p)), r.length, r.name()))
	}
	if len(p) == 0 {
		return nil
	}
	r.mu.Lock()
	ok := r.reserve(off, off+int64(len(p)))
	if ok && off == r.hashed {
		r.hash.Write(p)
		r.hashed += int64(len(p))
	}
	r.mu.Unlock()
	if !ok {
		return w.fail(fmt.Errorf("artifact: bytes of [%d,%d) of %s are written twice", off, off+int64(len(p)), r.name()))
	}
	return nil
}

// fail remembers the first error: what was written is not to be published.
func (w *Writer) fail(err error) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.failed == nil {
		w.failed = err
	}
	return err
}

func (w *Writer) failure() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.failed
}

// Receipt tells what was published.
type Receipt struct {
	ID              [16]byte
	Files           []string    // file names, the entry first
	FileBytes       int64       // all files with their framing
	PayloadBytes    int64       // logical payload
	ObjectSHA256    Map[string] // object id to lower-case hex, in order
	DirectorySHA256 string      // of the json_bytes bytes of the directory as written, hex
}

// Finish checks that every object is complete, stamps the id into all headers,
// makes the files durable and publishes the parts first and the entry last.
// It never overwrites. On failure nothing with a final name remains.
func (w *Writer) Finish() (*Receipt, error) {
	w.gate.Lock()
	defer w.gate.Unlock()
	if w.over {
		return nil, fmt.Errorf("artifact: %s is finished already", w.plan.Entry)
	}
	w.over = true
	r, err := w.finish()
	if err != nil {
		return nil, also(err, w.out.discard())
	}
	return r, nil
}

func (w *Writer) finish() (*Receipt, error) {
	if err := w.failure(); err != nil {
		return nil, fmt.Errorf("artifact: %s is not published after a failed write: %w", w.plan.Entry, err)
	}
	for _, r := range w.regions {
		if err := r.complete(); err != nil {
			return nil, fmt.Errorf("artifact: %w", err)
		}
	}
	if err := w.out.writeEdges(); err != nil {
		return nil, fmt.Errorf("artifact: writing %w", err)
	}
	if err := w.digests(); err != nil {
		return nil, err
	}
	text := sha256.Sum256(w.plan.Text)
	receipt := &Receipt{
		Files:           []string{w.plan.Entry},
		PayloadBytes:    w.plan.PayloadBytes,
		DirectorySHA256: hex.EncodeToString(text[:]),
	}
	for _, f := range w.plan.Directory.Files[1:] {
		receipt.Files = append(receipt.Files, f.Path)
	}
	digests := make([][sha256.Size]byte, len(w.regions))
	for i, r := range w.regions {
		digests[i] = r.digest
	}
	for i := range w.plan.Directory.Objects {
		id := w.plan.Directory.Objects[i].ID
		receipt.ObjectSHA256.Set(id, hex.EncodeToString(w.byID[id].digest[:]))
	}
	receipt.ID = contentID(w.plan.Content, digests)
	if w.id != nil {
		receipt.ID = *w.id
	}
	for i := range w.out.files {
		receipt.FileBytes += w.out.files[i].length
		if err := w.out.writeFile(i, receipt.ID[:], idOffset); err != nil {
			return nil, err
		}
	}
	return receipt, w.out.publish(receipt.ID)
}

// digests completes the digest of every region; those whose chunks came out of
// order are read back.
func (w *Writer) digests() error {
	var wg sync.WaitGroup
	next := make(chan *region)
	errs := make([]error, max(1, runtime.GOMAXPROCS(0)))
	for i := range errs {
		wg.Go(func() {
			var buf []byte
			for r := range next {
				if r.hashed < r.length && buf == nil {
					buf = make([]byte, 1<<20)
				}
				for r.hashed < r.length && errs[i] == nil {
					b := buf[:min(int64(len(buf)), r.length-r.hashed)]
					if err := w.out.readPayload(r.off+r.hashed, b); err != nil {
						errs[i] = fmt.Errorf("artifact: reading back %s: %w", r.name(), err)
						break
					}
					r.hash.Write(b)
					r.hashed += int64(len(b))
				}
				r.hash.Sum(r.digest[:0])
			}
		})
	}
	for _, r := range w.regions {
		next <- r
	}
	close(next)
	wg.Wait()
	return errors.Join(errs...)
}

// Abort gives up: temporaries and the lock file are removed. It does nothing
// after Finish or Abort.
func (w *Writer) Abort() error {
	w.gate.Lock()
	defer w.gate.Unlock()
	if w.over {
		return nil
	}
	w.over = true
	return w.out.discard()
}

// partName is the file name of part i of an entry (docs/format.md 1.5).
func partName(entry string, i int) string {
	s := strconv.Itoa(i)
	for len(s) < 4 {
		s = "0" + s
	}
	return entry + ".part-" + s
}
