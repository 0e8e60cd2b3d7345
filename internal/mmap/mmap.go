// Package mmap maps whole files read-only, and tells the system where single
// places will be read.
//
// The caller must keep the File open while any slice of Bytes is in use:
// reading the bytes after Close faults the process. Truncating a file while it
// is mapped does so too; artifacts are therefore written under another name
// and renamed. Bytes and Random may be used from many goroutines; Close must
// come after all of them.
package mmap

import (
	"fmt"
	"math"
	"os"
	"unsafe"
)

// File is a read-only mapping of a whole file.
type File struct {
	path string
	data []byte
	held bool // by the program, not by the system: there is nothing to unmap and to advise on
	room bool // of no file
}

// Open maps the file read-only. An empty file is legal and has no bytes. It
// fails on what is not a regular file.
func Open(path string) (*File, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("mmap: %w", err)
	}
	defer f.Close() // the mapping keeps the file's contents alive
	st, err := f.Stat()
	if err != nil {
		return nil, fmt.Errorf("mmap: %w", err)
	}
	if !st.Mode().IsRegular() {
		return nil, fmt.Errorf("mmap: %s: not a regular file", path)
	}
	size := st.Size()
	if size > math.MaxInt {
		return nil, fmt.Errorf("mmap: %s: %d bytes are not addressable", path, size)
	}
	m := &File{path: path}
	if size == 0 {
		return m, nil
	}
	if m.data, err = mapFile(f, int(size)); err != nil {
		return nil, fmt.Errorf("mmap: %s: %w", path, err)
	}
	return m, nil
}

// Of gives data that is in memory already the form of a mapping: a copy that begins at a page border where data does not. path stands
// for it in messages.
func Of(path string, data []byte) *File {
	page := uintptr(os.Getpagesize())
	if uintptr(unsafe.Pointer(unsafe.SliceData(data)))%page != 0 { // only its alignment is asked about
		room := make([]byte, uintptr(len(data))+page)
		shift := -uintptr(unsafe.Pointer(unsafe.SliceData(room))) % page
		data = room[shift : shift+uintptr(copy(room[shift:], data))]
	}
	return &File{path: path, data: data, held: true}
}

// Bytes are the contents of the file. Writing to them faults the process.
func (f *File) Bytes() []byte { return f.data }

// Close removes the mapping; further calls do nothing.
func (f *File) Close() error {
	data := f.data
	f.data = nil
	if data == nil || f.held {
		return nil
	}
	if err := unmapFile(data); err != nil {
		return fmt.Errorf("mmap: %s: %w", f.path, err)
	}
	return nil
}

// Random tells the system that single places of the n bytes from off on will be
// read: a page that is not in memory is then fetched alone, and not with what lies
// around it. It never changes what is read. It fails if the range is not inside
// the file or the system refuses; systems without such a call ignore it.
func (f *File) Random(off, n int64) error {
	data, err := f.pages(off, n)
	if err != nil || data == nil {
		return err
	}
	if err := random(data); err != nil {
		return fmt.Errorf("mmap: %s: advise: %w", f.path, err)
	}
	return nil
}

// pages are what the system is told of n bytes from off on, from a page border on; nil where there is nothing to tell.
func (f *File) pages(off, n int64) ([]byte, error) {
	size := int64(len(f.data))
	if off < 0 || n < 0 || off > size || n > size-off {
		return nil, fmt.Errorf("mmap: %s: advice on %d bytes at %d, file has %d", f.path, n, off, size)
	}
	if n == 0 || f.held {
		return nil, nil
	}
	// The system wants the start on a page border. The mapping begins on one,
	// and pages are what os says they are.
	return f.data[off&^int64(os.Getpagesize()-1) : off+n], nil
}

// Enter enters those of the n bytes from off on into the process's page table that are in memory, so that the first look at each of their pages is
// no page fault: 1 to 2 microseconds each. It reads nothing from a disk, costs the page table's 0.2 percent of memory and some 50 ms a gigabyte,
// and ends early when stop says so. It fails if the range is not inside the file or the system has no such call (Linux before 5.14); other systems
// than Linux ignore it.
func (f *File) Enter(off, n int64, stop func() bool) error {
	data, err := f.pages(off, n)
	if err != nil || data == nil {
		return err
	}
	if err := enter(data, f.room, stop); err != nil {
		return fmt.Errorf("mmap: %s: enter pages: %w", f.path, err)
	}
	return nil
}

// Reserve gives n zero bytes the form of a mapping. They are private, may be written to, and cost nothing until they are: room for
// something that is mostly never looked at. path stands for it in messages.
func Reserve(path string, n int64) (*File, error) {
	if n < 1 || n > math.MaxInt {
		return nil, fmt.Errorf("mmap: %s: %d bytes are not addressable", path, n)
	}
	b, err := reserve(int(n))
	if err != nil {
		return nil, fmt.Errorf("mmap: %s: reserve %d bytes: %w", path, n, err)
	}
	return &File{path: path, data: b, room: true}, nil
}
