package artifact

import (
	"sync"

	"ninfer/internal/direct"
)

// edges keeps the bytes of pages that more than one write fills, until such a page is whole.
//
// Writes past the page cache take whole pages. The page in which one write ends and the next begins could go through the page cache, but
// Linux file systems let such a write begin only when no direct one is under way in the file, and hold back all others meanwhile:
// sixteen writers would keep the disk as busy as three.
//
// Bytes between objects are never written; pages with such bytes stay until the end, at most two for each object.
type edges struct {
	mu    sync.Mutex
	pages map[int64]*edge // by offset in the file; guarded by mu
}

type edge struct {
	b    [direct.Align]byte
	have int // bytes; no byte comes twice, so that a sum is enough
}

// add takes bytes of one page. It returns the page if they were the last, and forgets it.
func (e *edges) add(at int64, p []byte) []byte {
	start := at &^ (direct.Align - 1)
	e.mu.Lock()
	defer e.mu.Unlock()
	g := e.pages[start]
	if g == nil {
		g = new(edge)
		e.pages[start] = g
	}
	g.have += copy(g.b[at-start:], p)
	if g.have < direct.Align {
		return nil
	}
	delete(e.pages, start)
	return g.b[:]
}

// writePages writes the pages of file i that p makes whole, past the page cache, and keeps what it has of others.
func (o *output) writePages(i int, p []byte, at int64) error {
	f := &o.files[i]
	var whole [3][]byte // one after another in the file
	first := at &^ (direct.Align - 1)
	if n := int(min(-at&(direct.Align-1), int64(len(p)))); n > 0 {
		if whole[0] = f.edges.add(at, p[:n]); whole[0] == nil {
			first += direct.Align
		}
		p, at = p[n:], at+int64(n)
	}
	n := len(p) &^ (direct.Align - 1)
	whole[1] = p[:n]
	if n < len(p) {
		whole[2] = f.edges.add(at+int64(n), p[n:])
	}
	done := f.direct.WriteAt(o.hooks.writeAt, first, whole[:]...)
	for _, w := range whole { // what is not written directly, if anything
		skip := min(done, len(w))
		if err := o.writeCached(i, w[skip:], first+int64(skip)); err != nil {
			return err
		}
		done -= skip
		first += int64(len(w))
	}
	return nil
}

// writeEdges writes the pages that are not whole; nothing may be writing meanwhile. Bytes between objects are zero in the file and here.
func (o *output) writeEdges() error {
	for i := range o.files {
		f := &o.files[i]
		if f.edges == nil {
			continue
		}
		for start, g := range f.edges.pages {
			begin, end := max(start, f.start), min(start+direct.Align, f.length)
			if err := o.writeFile(i, g.b[begin-start:end-start], begin); err != nil {
				return err
			}
		}
		clear(f.edges.pages)
	}
	return nil
}
