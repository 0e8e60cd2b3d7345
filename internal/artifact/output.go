package artifact

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"ninfer/internal/direct"
)

// output is the set of files that a Writer fills and publishes. While it is
// written every file is a hidden temporary beside its final name.
type output struct {
	dir   string
	entry string
	files []outFile
	lock  *lock
	hooks hooks

	sparse  bool // disk space is not reserved
	renamed bool // published by renaming, as hard links are not available
}

type outFile struct {
	name     string // final name
	temp     string // name of the temporary
	length   int64
	start    int64 // first payload byte in the file
	base     int64 // logical payload offset of that byte
	file     *os.File
	direct   *direct.File // nil where the system or the file system has no such thing
	edges    *edges       // of a file with direct
	made     bool         // the temporary exists and is ours
	official bool         // the final name exists and is ours
}

func (f *outFile) close() error {
	err := f.direct.Close()
	if err2 := f.file.Close(); err == nil {
		err = err2
	}
	f.file, f.direct = nil, nil
	return err
}

func (o *output) path(name string) string { return filepath.Join(o.dir, name) }

// createOutput locks the output, reclaims, refuses existing files and creates
// temporaries of the final lengths.
func createOutput(path string, records []FileRecord, payloadStart int64, sparse bool, h hooks) (*output, error) {
	o := &output{dir: filepath.Dir(path), entry: filepath.Base(path), sparse: sparse, hooks: h}
	if o.hooks.writeAt == nil {
		o.hooks.writeAt = (*os.File).WriteAt
	}
	if o.hooks.link == nil {
		o.hooks.link = os.Link
	}
	if o.hooks.step == nil {
		o.hooks.step = func(string) {}
	}
	var token [8]byte
	rand.Read(token[:])
	for i, r := range records {
		f := outFile{name: r.Path, start: partStart, length: partStart + r.PayloadBytes}
		if i == 0 {
			f.name, f.start, f.length = o.entry, payloadStart, payloadStart+r.PayloadBytes
		} else {
			last := o.files[i-1]
			f.base = last.base + last.length - last.start
		}
		f.temp = tempName(o.entry, hex.EncodeToString(token[:]), i)
		o.files = append(o.files, f)
	}
	l, err := takeLock(o.dir, o.entry)
	if err != nil {
		return nil, err
	}
	o.lock = l
	if err := l.reclaim(); err != nil {
		return nil, also(err, l.leave())
	}
	for _, f := range o.files {
		_, err := os.Lstat(o.path(f.name))
		if err == nil {
			err = fmt.Errorf("artifact: %w: %s is never overwritten", ErrExists, o.path(f.name))
		} else if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		return nil, also(err, l.release())
	}
	if err := o.createTemporaries(); err != nil {
		return nil, also(err, o.discard())
	}
	return o, nil
}

// also adds a second failure to a first one, on one line.
func also(err, second error) error {
	if second == nil {
		return err
	}
	return fmt.Errorf("%w (and then: %v)", err, second)
}

func (o *output) createTemporaries() error {
	// The journal names every temporary before it exists, so that none can
	// be orphaned.
	if err := o.lock.begin(o.files); err != nil {
		return err
	}
	for i := range o.files {
		f := &o.files[i]
		o.hooks.step("create " + f.temp)
		var err error
		f.file, err = os.OpenFile(o.path(f.temp), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o666)
		if err != nil {
			return fmt.Errorf("artifact: %w", err)
		}
		f.made = true
		if f.direct = direct.OpenWrite(o.path(f.temp)); f.direct != nil {
			f.edges = &edges{pages: map[int64]*edge{}}
		}
	}
	for i := range o.files {
		f := &o.files[i]
		size := allocate
		if o.sparse {
			size = (*os.File).Truncate
		}
		if err := size(f.file, f.length); err != nil {
			return fmt.Errorf("artifact: reserving %d bytes for %s, of %d for the whole output: %w", f.length, o.path(f.name), o.length(), cause(err))
		}
	}
	return nil
}

// length is the number of bytes of all files.
func (o *output) length() int64 {
	n := int64(0)
	for i := range o.files {
		n += o.files[i].length
	}
	return n
}

// cause strips the name of the temporary from an error, which would only
// confuse beside the final name.
func cause(err error) error {
	var p *fs.PathError
	if errors.As(err, &p) {
		return p.Err
	}
	return err
}

func (o *output) writeFile(i int, p []byte, off int64) error {
	f := &o.files[i]
	if _, err := o.hooks.writeAt(f.file, p, off); err != nil {
		return fmt.Errorf("%s at %d: %w", o.path(f.name), off, cause(err))
	}
	return nil
}

// pieces is File.pieces for files that are being written.
func (o *output) pieces(off, n int64, each func(i int, at, n int64) error) error {
	for i := range o.files {
		f := &o.files[i]
		end := f.base + f.length - f.start
		if n == 0 || off >= end {
			continue
		}
		k := min(n, end-off)
		if err := each(i, f.start+off-f.base, k); err != nil {
			return err
		}
		off, n = off+k, n-k
	}
	return nil
}

// writebackBytes is from which size on a write is sent to the disk at once.
const writebackBytes = 1 << 20

// writePayload writes past the page cache, where that is possible; bytes of pages that others fill too may stay in memory until writeEdges.
func (o *output) writePayload(off int64, p []byte) error {
	return o.pieces(off, int64(len(p)), func(i int, at, n int64) error {
		q := p[:n]
		p = p[n:]
		if o.files[i].direct == nil {
			return o.writeCached(i, q, at)
		}
		return o.writePages(i, q, at)
	})
}

func (o *output) writeCached(i int, p []byte, at int64) error {
	if len(p) == 0 {
		return nil
	}
	if err := o.writeFile(i, p, at); err != nil {
		return err
	}
	if len(p) >= writebackBytes {
		beginWriteback(o.files[i].file, at, int64(len(p)))
	}
	return nil
}

func (o *output) readPayload(off int64, p []byte) error {
	return o.pieces(off, int64(len(p)), func(i int, at, n int64) error {
		_, err := o.files[i].file.ReadAt(p[:n], at)
		p = p[n:]
		return err
	})
}

// publish makes the files durable and gives them their final names.
func (o *output) publish(id [16]byte) error {
	stamps := make([]int64, len(o.files))
	for i := range o.files {
		f := &o.files[i]
		if err := f.file.Sync(); err != nil {
			return fmt.Errorf("artifact: %s: %w", o.path(f.name), cause(err))
		}
		info, err := f.file.Stat()
		if err != nil {
			return fmt.Errorf("artifact: %s: %w", o.path(f.name), cause(err))
		}
		if info.Size() != f.length {
			return fmt.Errorf("artifact: %s has %d bytes instead of %d: something else changed it", o.path(f.name), info.Size(), f.length)
		}
		stamps[i] = info.ModTime().UnixNano()
		err = f.close()
		if err != nil {
			return fmt.Errorf("artifact: %s: %w", o.path(f.name), cause(err))
		}
	}
	if err := o.lock.publishing(id, stamps); err != nil {
		return err
	}
	for i := 1; i < len(o.files); i++ {
		if err := o.officialize(i); err != nil {
			return err
		}
	}
	if len(o.files) > 1 {
		// The parts are in the directory for good before the entry is.
		if err := syncDir(o.dir); err != nil {
			return fmt.Errorf("artifact: %s: %w", o.dir, cause(err))
		}
	}
	if err := o.officialize(0); err != nil {
		return err
	}
	// From here on the artifact is published; what fails below leaves at
	// worst names that the next writer of this output reclaims.
	_ = syncDir(o.dir)
	o.hooks.step("announce " + o.entry)
	if err := o.lock.published(); err != nil {
		return nil
	}
	if o.removeTemporaries() == nil {
		_ = o.lock.release()
	}
	return nil
}

// officialize gives file i its final name without overwriting.
func (o *output) officialize(i int) error {
	f := &o.files[i]
	from, to := o.path(f.temp), o.path(f.name)
	o.hooks.step("publish " + f.name)
	err := fs.ErrInvalid
	if !o.renamed {
		err = o.hooks.link(from, to)
		if err != nil && noHardLinks(err) && !errors.Is(err, fs.ErrExist) {
			if err := o.lock.renaming(); err != nil {
				return err
			}
			o.renamed = true
		}
	}
	if o.renamed {
		if err = renameNoReplace(from, to); err == nil {
			f.made = false
		}
	}
	switch {
	case errors.Is(err, fs.ErrExist):
		return fmt.Errorf("artifact: %w: %s appeared while it was written", ErrExists, to)
	case err != nil:
		return fmt.Errorf("artifact: publishing %s: %w", to, linkCause(err))
	}
	f.official = true
	return nil
}

// linkCause strips both names from the error of a link or rename.
func linkCause(err error) error {
	var l *os.LinkError
	if errors.As(err, &l) {
		return l.Err
	}
	return cause(err)
}

// removeTemporaries removes the entry's temporary last: as long as it has no
// second link, the output counts as unpublished.
func (o *output) removeTemporaries() error {
	var first error
	for i := range slices.Backward(o.files) {
		f := &o.files[i]
		if !f.made {
			continue
		}
		o.hooks.step("remove " + f.temp)
		if err := os.Remove(o.path(f.temp)); err != nil && first == nil {
			first = err
		}
		f.made = false
	}
	return first
}

// discard removes everything that was made, final names first, and gives up
// the lock.
func (o *output) discard() error {
	var first error
	keep := func(err error) {
		if first == nil {
			first = err
		}
	}
	for i := range o.files {
		if f := &o.files[i]; f.file != nil {
			keep(f.close())
		}
	}
	for i := range slices.Backward(o.files) {
		if f := &o.files[i]; f.official {
			o.hooks.step("remove " + f.name)
			keep(os.Remove(o.path(f.name)))
			f.official = false
		}
	}
	keep(o.removeTemporaries())
	if first != nil {
		// The journal stays, so that the next writer can finish the job.
		keep(o.lock.leave())
		return first
	}
	return o.lock.release()
}
