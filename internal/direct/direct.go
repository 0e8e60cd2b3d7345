// Package direct moves long runs of file bytes past the page cache, where the system and the file system allow it.
//
// Checkpoints and artifacts are larger than memory and pass through a program once. Through the page cache every byte costs a page that must
// be found, copied and thrown away again: several times the processor time of a digest. What is in the cache already, from a download just
// before, comes from there nevertheless: reading it from the disk might even write it first. A File is a second handle beside an ordinary one:
// what it does not take, the caller does through the ordinary handle. Writes take whole pages; both ways must not write the same page
// at the same time.
//
// Transfers go through buffers that lie in huge pages. A disk takes a request in a limited number of contiguous pieces, 254 in virtio's
// case: of four megabytes in small pages that makes four requests, and less than half the speed.
//
// A nil File takes nothing, so systems without direct transfers need no other code. A File may be used by many goroutines.
package direct

import (
	"os"
	"slices"
	"sync"
	"sync/atomic"
)

const (
	// Align is what offsets, lengths and addresses are multiples of. Disks ask for 512 or 4096.
	Align = 4096
	// least is from which length on a direct read is worth its trouble: below, reading ahead wins.
	least = 128 << 10
	// bufferBytes is the longest single transfer. Callers move four megabytes at a time, some up to seven, and the pages that these begin
	// and end in come along: a second transfer for the last page would wait behind everybody's first.
	bufferBytes = 8 << 20
)

// File is an open file.
type File struct {
	f       *os.File
	refused atomic.Bool // the file system has no direct transfers after all
}

// OpenRead opens a file for ReadAt, or returns nil if that cannot be done.
func OpenRead(path string) *File { return wrap(open(path, os.O_RDONLY)) }

// OpenWrite opens an existing file for WriteAt, or returns nil if that cannot be done.
func OpenWrite(path string) *File { return wrap(open(path, os.O_WRONLY)) }

func wrap(f *os.File) *File {
	if f == nil {
		return nil
	}
	buffers.hold()
	return &File{f: f}
}

// Close releases the handle.
func (d *File) Close() error {
	if d == nil {
		return nil
	}
	buffers.release()
	return d.f.Close()
}

// WriteAt writes runs of whole pages one after another with write, which is os.File.WriteAt outside tests. It returns how many bytes are written.
// The others the file system did not take like this: write them through the ordinary handle, whose errors are the ones to tell.
func (d *File) WriteAt(write func(*os.File, []byte, int64) (int, error), off int64, runs ...[]byte) int {
	runs = slices.Clone(runs)
	left := 0
	for _, r := range runs {
		left += len(r)
	}
	if d == nil || left == 0 || d.refused.Load() {
		return 0
	}
	buf := buffers.get()
	defer buffers.put(buf)
	done := 0
	for left > 0 {
		n := 0
		for n < len(buf.b) && len(runs) > 0 {
			k := copy(buf.b[n:], runs[0])
			n += k
			if runs[0] = runs[0][k:]; len(runs[0]) == 0 {
				runs = runs[1:]
			}
		}
		if k, err := write(d.f, buf.b[:n], off+int64(done)); err != nil || k < n {
			d.refused.Store(true)
			break
		}
		done += n
		left -= n
	}
	return done
}

// ReadAt fills as much of p as it can and returns how much that is: nothing for short reads and for what is cached, less than all at the end
// of the file or where the file system refuses. The rest is to be read through the ordinary handle, whose errors are the ones to tell.
func (d *File) ReadAt(p []byte, off int64) int {
	if d == nil || len(p) < least || d.refused.Load() || cached(d.f, off, int64(len(p))) {
		return 0
	}
	buf := buffers.get()
	defer buffers.put(buf)
	b := buf.b
	done := 0
	for done < len(p) {
		at := off + int64(done)
		begin := at &^ (Align - 1)
		end := min((off+int64(len(p))+Align-1)&^(Align-1), begin+bufferBytes)
		n, err := d.f.ReadAt(b[:end-begin], begin)
		if n <= int(at-begin) {
			if err != nil {
				d.refused.Store(true)
			}
			break
		}
		done += copy(p[done:], b[at-begin:n])
		if n < int(end-begin) {
			break // the end of the file, or an error that the ordinary handle will meet too
		}
	}
	return done
}

// pool keeps buffers as long as any File is open.
type pool struct {
	mu    sync.Mutex // guards the members below
	users int
	free  []buffer
}

type buffer struct {
	b      []byte // aligned, bufferBytes long
	mapped []byte // the memory that b lies in, if it is not the garbage collector's
}

var buffers pool

func (p *pool) hold() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.users++
}

func (p *pool) release() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.users--; p.users > 0 {
		return
	}
	for _, b := range p.free {
		b.free()
	}
	p.free = nil
}

func (p *pool) get() buffer {
	p.mu.Lock()
	defer p.mu.Unlock()
	if n := len(p.free); n > 0 {
		b := p.free[n-1]
		p.free = p.free[:n-1]
		return b
	}
	return newBuffer()
}

func (p *pool) put(b buffer) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.free = append(p.free, b)
}
