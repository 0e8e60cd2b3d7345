package artifact

import (
	"errors"
	"fmt"

	"ninfer/internal/mmap"
	"ninfer/internal/num"
)

// lookup is row R15.
func (a *File) lookup(id string) (*Object, error) {
	i, ok := a.index[id]
	if !ok {
		return nil, reject(a.path, 15, "there is no object %s", quote(id))
	}
	return &a.dir.Objects[i], nil
}

// Check checks format, layout, shape, size and alignment of an object (rows
// R15 to R20) without touching its bytes.
func (a *File) Check(id string) error {
	o, err := a.lookup(id)
	if err != nil {
		return err
	}
	if o.Resource {
		return checkResource(a.path, o)
	}
	_, _, err = checkTensor(a.path, o)
	return err
}

func checkResource(path string, o *Object) error {
	if o.Encoding != resourceEncoding {
		return reject(path, 20, "resource %s has encoding %s, only %s can be read", quote(o.ID), quote(o.Encoding), resourceEncoding)
	}
	return nil
}

// checkTensor is R16 to R19.
func checkTensor(path string, o *Object) (num.Format, num.Layout, error) {
	f, l, size, err := encodedSize(path, o)
	if err != nil {
		return 0, 0, err
	}
	if o.Bytes != size {
		return 0, 0, reject(path, 18, "tensor %s has %d bytes, %s %v needs %d", quote(o.ID), o.Bytes, o.Format, o.Shape, size)
	}
	if o.Offset%num.Alignment != 0 {
		return 0, 0, reject(path, 19, "tensor %s begins at %d, not at a multiple of %d", quote(o.ID), o.Offset, num.Alignment)
	}
	return f, l, nil
}

// encodedSize is the size that format, layout and shape demand.
func encodedSize(path string, o *Object) (num.Format, num.Layout, int64, error) {
	f, ok := num.ParseFormat(o.Format)
	if !ok {
		return 0, 0, 0, reject(path, 16, "tensor %s: unknown format %s", quote(o.ID), quote(o.Format))
	}
	l, ok := num.ParseLayout(o.Layout)
	if !ok {
		return 0, 0, 0, reject(path, 16, "tensor %s: unknown layout %s", quote(o.ID), quote(o.Layout))
	}
	size, err := num.EncodedSize(f, l, o.Shape)
	if err != nil {
		rule := 17
		switch {
		case errors.Is(err, num.ErrPair):
			rule = 16
		case errors.Is(err, num.ErrSize):
			rule = 18
		}
		return 0, 0, 0, &FormatError{Path: path, Rule: rule, Class: classes[rule], Detail: "tensor " + quote(o.ID), Err: err}
	}
	return f, l, size, nil
}

// Tensor gives a tensor after checking rows R15 to R19, and R21 to R23 for the
// files it lies in. Its bytes are a view of a mapping where the object lies in
// one file at its natural alignment, else a private copy; for an object too
// large to copy use Spans. The words are not checked.
func (a *File) Tensor(id string) (num.Tensor, error) {
	o, err := a.lookup(id)
	if err != nil {
		return num.Tensor{}, err
	}
	if o.Resource {
		return num.Tensor{}, fmt.Errorf("artifact %s: %s is a resource, not a tensor", a.path, quote(id))
	}
	f, l, err := checkTensor(a.path, o)
	if err != nil {
		return num.Tensor{}, err
	}
	data, err := a.objectBytes(o)
	if err != nil {
		return num.Tensor{}, err
	}
	t, err := num.NewTensor(f, l, o.Shape, data)
	if err != nil {
		return num.Tensor{}, fmt.Errorf("artifact %s: tensor %s: %w", a.path, quote(id), err)
	}
	return t, nil
}

// Resource gives a copy of a resource's bytes after checking R15 and R20.
func (a *File) Resource(id string) ([]byte, error) {
	o, err := a.lookup(id)
	if err != nil {
		return nil, err
	}
	if !o.Resource {
		return nil, fmt.Errorf("artifact %s: %s is a tensor, not a resource", a.path, quote(id))
	}
	if err := checkResource(a.path, o); err != nil {
		return nil, err
	}
	return a.copyOf(o)
}

// Spans gives the object's bytes as views of mappings, one for every file
// that holds a share of it, in order. Nothing is copied, so this also serves
// objects larger than memory.
func (a *File) Spans(id string) ([][]byte, error) {
	o, err := a.lookup(id)
	if err != nil {
		return nil, err
	}
	return a.spans(o)
}

func (a *File) spans(o *Object) ([][]byte, error) {
	var out [][]byte
	err := a.pieces(o.Offset, o.Bytes, func(i int, from, n int64) error {
		v, err := a.view(i, from, n)
		out = append(out, v)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("%s %s: %w", o.kind(), quote(o.ID), err)
	}
	return out, nil
}

// Random tells the system that single places of an object will be read through its spans, so that it fetches no more than their pages.
func (a *File) Random(id string) error { return a.advise(id, (*mmap.File).Random) }

// Enter tells the system that what is in memory of an object will be read through its spans, as mmap.File.Enter does.
func (a *File) Enter(id string, stop func() bool) error {
	return a.advise(id, func(m *mmap.File, off, n int64) error { return m.Enter(off, n, stop) })
}

// advise gives the system the same advice on each piece of an object.
func (a *File) advise(id string, advice func(m *mmap.File, off, n int64) error) error {
	o, err := a.lookup(id)
	if err != nil {
		return err
	}
	return a.pieces(o.Offset, o.Bytes, func(i int, from, n int64) error {
		if _, err := a.view(i, from, n); err != nil {
			return err
		}
		return advice(a.parts[i].mem, a.parts[i].start+from, n)
	})
}

// ReadObjectAt reads bytes of one object like ReadAt; a range that is not
// inside the object is an error and reads nothing.
func (a *File) ReadObjectAt(id string, p []byte, off int64) error {
	o, err := a.lookup(id)
	if err != nil {
		return err
	}
	if off < 0 || int64(len(p)) > o.Bytes || off > o.Bytes-int64(len(p)) {
		return fmt.Errorf("artifact %s: read [%d,%d) outside the %d bytes of %s", a.path, off, off+int64(len(p)), o.Bytes, quote(id))
	}
	if _, err := a.ReadAt(p, o.Offset+off); err != nil {
		return fmt.Errorf("%s %s: %w", o.kind(), quote(id), err)
	}
	return nil
}

// objectBytes is a view where one file holds the object, else a copy. A view
// is only given where the position in the file keeps the payload's alignment,
// which every artifact split at multiples of 4096 does.
func (a *File) objectBytes(o *Object) ([]byte, error) {
	p := a.parts[a.locate(o.Offset)]
	from := o.Offset - p.base
	if p.bytes-from < o.Bytes || (p.start+from)%num.Alignment != 0 {
		return a.copyOf(o)
	}
	spans, err := a.spans(o)
	if err != nil {
		return nil, err
	}
	return spans[0], nil
}

func (a *File) copyOf(o *Object) ([]byte, error) {
	// Touch the files first: a missing part must not cost an allocation.
	if err := a.pieces(o.Offset, o.Bytes, func(i int, _, _ int64) error {
		_, err := a.opened(i)
		return err
	}); err != nil {
		return nil, fmt.Errorf("%s %s: %w", o.kind(), quote(o.ID), err)
	}
	b := make([]byte, o.Bytes)
	if _, err := a.ReadAt(b, o.Offset); err != nil {
		return nil, fmt.Errorf("%s %s: %w", o.kind(), quote(o.ID), err)
	}
	return b, nil
}
