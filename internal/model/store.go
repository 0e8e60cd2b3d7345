package model

import (
	"fmt"

	"ninfer/internal/arch"
	"ninfer/internal/artifact"
	"ninfer/internal/backend"
	"ninfer/internal/num"
)

// Artifact is the Store of an opened artifact in the dialect whose parameters have canonical names.
type Artifact struct {
	File *artifact.File
}

// Config returns the configuration that the artifact records.
func (a Artifact) Config() (*arch.Config, error) {
	d := a.File.Directory()
	text, ok := d.Component("text")
	if !ok {
		return nil, fmt.Errorf("%s: no text component", a.File.Path())
	}
	vision, ok := d.Component("vision")
	if !ok {
		return nil, fmt.Errorf("%s: no vision component", a.File.Path())
	}
	c, _, err := arch.FromComponents(text.Config, vision.Config)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", a.File.Path(), err)
	}
	return c, nil
}

// Resource returns the bytes of a text or vision resource, such as "tokenizer.json".
func (a Artifact) Resource(component, role string) ([]byte, error) {
	c, _ := a.File.Directory().Component(component)
	id, ok := c.Resources.Lookup(role)
	if !ok {
		return nil, fmt.Errorf("%s: component %q has no resource %q", a.File.Path(), component, role)
	}
	return a.File.Resource(id)
}

// object resolves a parameter to the object that it is as a whole.
func (a Artifact) object(name string) (string, error) {
	b, ok := a.File.Directory().Bindings.Lookup(name)
	switch {
	case !ok:
		return "", fmt.Errorf("%s: no parameter %q", a.File.Path(), name)
	case b.Object == "":
		return "", fmt.Errorf("%s: parameter %q is bound to parts of objects, need a whole one", a.File.Path(), name)
	}
	return b.Object, nil
}

// Has reports whether the artifact binds the parameter.
func (a Artifact) Has(name string) bool {
	_, ok := a.File.Directory().Bindings.Lookup(name)
	return ok
}

// Tensor returns a parameter, a view of the mapped file where it lies in one.
func (a Artifact) Tensor(name string) (num.Tensor, error) {
	id, err := a.object(name)
	if err != nil {
		return num.Tensor{}, err
	}
	return a.File.Tensor(id)
}

// Table returns the n-gram table's format and a reader of its rows; the table itself may be far larger than memory.
func (a Artifact) Table(name string) (num.Format, backend.RowSource, error) {
	id, err := a.object(name)
	if err != nil {
		return 0, nil, err
	}
	if err := a.File.Check(id); err != nil {
		return 0, nil, err
	}
	o, _ := a.File.Object(id)
	f, _ := num.ParseFormat(o.Format)
	spans, err := a.File.Spans(id)
	if err != nil {
		return 0, nil, err
	}
	if len(o.Shape) != 2 {
		return 0, nil, fmt.Errorf("%s: table %q has shape %v, need two dimensions", a.File.Path(), id, o.Shape)
	}
	return f, tableSpans{name: id, rows: int64(o.Shape[0]), rowBytes: o.Bytes / int64(o.Shape[0]), spans: spans}, nil
}

// tableSpans reads rows of a contiguous table that may continue from file to file.
type tableSpans struct {
	name     string
	rows     int64
	rowBytes int64
	spans    [][]byte
}

func (t tableSpans) Rows(ids []int64, dst []byte) error {
	for _, id := range ids {
		if id < 0 || id >= t.rows {
			return fmt.Errorf("table %q: row %d of %d", t.name, id, t.rows)
		}
		at, need := id*t.rowBytes, t.rowBytes
		for _, s := range t.spans {
			if at >= int64(len(s)) {
				at -= int64(len(s))
				continue
			}
			n := copy(dst[:need], s[at:])
			dst, need, at = dst[n:], need-int64(n), 0
			if need == 0 {
				break
			}
		}
	}
	return nil
}
