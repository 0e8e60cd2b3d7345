package artifact

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// An artifact in memory is the one on disk: same directory, same bytes by every way of reading them, wherever the data begins.
func TestOpenBytes(t *testing.T) {
	path := filepath.Join(t.TempDir(), "t.ninfer")
	objects := tinyObjects()
	write(t, path, tinyDirectory(), objects, PlanOptions{}, WriterOptions{})
	file, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	disk, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer disk.Close()
	for shift := range 3 {
		data := append(make([]byte, shift), file...)[shift:]
		f, err := OpenBytes("built in", data)
		if err != nil {
			t.Fatal(err)
		}
		if f.ID() != disk.ID() || f.FileBytes() != int64(len(file)) || !bytes.Equal(f.DirectoryText(), disk.DirectoryText()) {
			t.Errorf("shift %d: another directory", shift)
		}
		if p := f.Parts(); len(p) != 1 || p[0].Err != nil {
			t.Errorf("shift %d: parts %+v", shift, p)
		}
		hello, err := f.Resource("r.hello")
		if err != nil || string(hello) != "hello" {
			t.Errorf("shift %d: resource %q, %v", shift, hello, err)
		}
		spans, err := f.Spans("w.a")
		if err != nil || len(spans) != 1 || !bytes.Equal(spans[0], objects["w.a"]) {
			t.Errorf("shift %d: spans differ: %v", shift, err)
		}
		w, err := f.Tensor("w.a")
		if err != nil {
			t.Fatal(err)
		}
		if got := w.Planes().Codes; !bytes.Equal(got, objects["w.a"]) || &got[0] != &spans[0][0] {
			t.Errorf("shift %d: the tensor is no view of the data, or another", shift)
		}
		part := make([]byte, 8)
		if err := f.ReadObjectAt("w.a", part, 400); err != nil || !bytes.Equal(part, objects["w.a"][400:408]) {
			t.Errorf("shift %d: read % x, %v", shift, part, err)
		}
		if err := f.Close(); err != nil {
			t.Error(err)
		}
		if _, err := f.Resource("r.hello"); err == nil {
			t.Errorf("shift %d: read after close", shift)
		}
	}
}

func TestOpenBytesRefuses(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "t.ninfer")
	write(t, path, tinyDirectory(), tinyObjects(), PlanOptions{}, WriterOptions{})
	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	split := filepath.Join(dir, "s.ninfer")
	write(t, split, tinyDirectory(), tinyObjects(), PlanOptions{Limit: 16384}, WriterOptions{})
	entry, err := os.ReadFile(split)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		data []byte
		want string
	}{
		{nil, "the header alone has 32"},
		{whole[:31], "the header alone has 32"},
		{whole[:len(whole)-1], "payload start"},
		{entry, "one in memory must be whole"},
	} {
		if _, err := OpenBytes("built in", c.data); err == nil || !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(), "built in") {
			t.Errorf("%d bytes: %v, want %q", len(c.data), err, c.want)
		}
	}
}
