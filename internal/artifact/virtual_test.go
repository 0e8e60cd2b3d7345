package artifact

import (
	"bytes"
	"errors"
	"testing"
)

// What is written into a virtual artifact is read from it by every way, and all else is zero.
func TestVirtual(t *testing.T) {
	objects := tinyObjects()
	p, err := NewPlan("made.ninfer", tinyDirectory(), PlanOptions{})
	if err != nil {
		t.Fatal(err)
	}
	var ids []string
	f, err := Virtual(p, func(o *Object, data []byte) error {
		ids = append(ids, o.ID)
		if o.ID == "w.a" || o.Resource {
			copy(data, objects[o.ID])
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(ids) != len(p.Directory.Objects) {
		t.Errorf("asked for %v", ids)
	}
	if f.PayloadBytes() != p.PayloadBytes || f.PayloadStart() != p.PayloadStart || f.Path() != "made.ninfer" {
		t.Errorf("payload of %d bytes at %d of %s", f.PayloadBytes(), f.PayloadStart(), f.Path())
	}
	for _, o := range f.Directory().Objects {
		want := make([]byte, o.Bytes)
		if o.ID == "w.a" || o.Resource {
			copy(want, objects[o.ID])
		}
		got := make([]byte, o.Bytes)
		if err := f.ReadObjectAt(o.ID, got, 0); err != nil || !bytes.Equal(got, want) {
			t.Errorf("%s: other bytes, %v", o.ID, err)
		}
		if o.Resource {
			continue
		}
		x, err := f.Tensor(o.ID)
		if err != nil || !bytes.Equal(x.Data, want) {
			t.Errorf("%s: another tensor, %v", o.ID, err)
		}
	}
	if err := f.Close(); err != nil {
		t.Error(err)
	}
	no := errors.New("no")
	if _, err := Virtual(p, func(*Object, []byte) error { return no }); !errors.Is(err, no) {
		t.Errorf("error of write: %v", err)
	}
	p.Directory.Files = append(p.Directory.Files, FileRecord{})
	if _, err := Virtual(p, func(*Object, []byte) error { return nil }); err == nil {
		t.Error("a plan of two files is accepted")
	}
}
