package artifact

import (
	"fmt"
	"os"
)

// Releaser gives the disk space of a version 2 file back to the system while
// an upgrade reads it. The file keeps its length and is destroyed: it begins
// with zeros from the first call on, by which OpenV2 recognises it.
type Releaser struct {
	file *os.File
	done int64
}

// Releaser opens the file for releasing. It fails where the system cannot
// punch holes.
func (a *V2) Releaser() (*Releaser, error) {
	if !canPunch {
		return nil, fmt.Errorf("artifact: the space of %s cannot be released on this system", a.Path())
	}
	f, err := os.OpenFile(a.Path(), os.O_WRONLY, 0)
	if err != nil {
		return nil, fmt.Errorf("artifact: %w", err)
	}
	mine, err1 := f.Stat()
	open, err2 := a.file.parts[0].file.Stat()
	if err1 != nil || err2 != nil || !os.SameFile(mine, open) {
		f.Close()
		return nil, fmt.Errorf("artifact: %s was replaced while it was open", a.Path())
	}
	return &Releaser{file: f}, nil
}

// Release gives up the whole pages of the bytes before an offset in the file.
func (r *Releaser) Release(before int64) error {
	before -= before % pageSize
	if before <= r.done {
		return nil
	}
	if err := punchHole(r.file, r.done, before-r.done); err != nil {
		return fmt.Errorf("artifact: releasing the space of %s: %w", r.file.Name(), err)
	}
	r.done = before
	return nil
}

// Close closes the file.
func (r *Releaser) Close() error { return r.file.Close() }
