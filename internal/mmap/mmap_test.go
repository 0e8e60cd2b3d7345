package mmap

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unsafe"
)

func write(t *testing.T, content []byte) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(path, content, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestOpen(t *testing.T) {
	page := os.Getpagesize()
	for _, size := range []int{0, 1, page - 1, page, 3*page + 7} {
		content := make([]byte, size)
		for i := range content {
			content[i] = byte(i*7 + i/page)
		}
		f, err := Open(write(t, content))
		if err != nil {
			t.Fatalf("%d bytes: %v", size, err)
		}
		if !bytes.Equal(f.Bytes(), content) {
			t.Errorf("%d bytes: contents differ", size)
		}
		for off := int64(0); off <= int64(size); off += 1 + int64(size)/3 {
			if err := f.Random(off, int64(size)-off); err != nil {
				t.Errorf("%d bytes: advice at %d: %v", size, off, err)
			}
		}
		if !bytes.Equal(f.Bytes(), content) {
			t.Errorf("%d bytes: contents differ after advice", size)
		}
		for range 2 {
			if err := f.Close(); err != nil {
				t.Errorf("%d bytes: close: %v", size, err)
			}
		}
		if f.Bytes() != nil {
			t.Errorf("%d bytes: bytes after close", size)
		}
	}
}

func TestRandomErrors(t *testing.T) {
	f, err := Open(write(t, make([]byte, 100)))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	const maxInt64 = 1<<63 - 1
	for _, r := range [][2]int64{{-1, 1}, {0, -1}, {101, 0}, {0, 101}, {50, 51}, {1, maxInt64}, {maxInt64, maxInt64}} {
		if err := f.Random(r[0], r[1]); err == nil {
			t.Errorf("advice on %d bytes at %d of 100 accepted", r[1], r[0])
		}
	}
	if err := f.Random(100, 0); err != nil {
		t.Errorf("empty range at the end: %v", err)
	}
}

func TestOpenErrors(t *testing.T) {
	dir := t.TempDir()
	if _, err := Open(filepath.Join(dir, "absent")); !errors.Is(err, fs.ErrNotExist) || !strings.Contains(err.Error(), "absent") {
		t.Errorf("absent file: %v", err)
	}
	if _, err := Open(dir); err == nil || !strings.Contains(err.Error(), dir) {
		t.Errorf("folder: %v", err)
	}
}

// The mapping is of the file, not of the name: replacing a file by renaming,
// as writers of artifacts do, leaves open mappings as they were.
func TestReplaceWhileMapped(t *testing.T) {
	path := write(t, []byte("before"))
	f, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	next := write(t, []byte("after!"))
	if err := os.Rename(next, path); err != nil {
		t.Skipf("this system cannot replace a mapped file: %v", err)
	}
	if got := string(f.Bytes()); got != "before" {
		t.Errorf("got %q, want %q", got, "before")
	}
}

func TestOf(t *testing.T) {
	page := os.Getpagesize()
	content := make([]byte, 2*page+5)
	for i := range content {
		content[i] = byte(i * 7)
	}
	for shift := range 4 {
		f := Of("memory", append(make([]byte, shift), content...)[shift:])
		if !bytes.Equal(f.Bytes(), content) {
			t.Errorf("shift %d: contents differ", shift)
		}
		if at := uintptr(unsafe.Pointer(unsafe.SliceData(f.Bytes()))); at%uintptr(page) != 0 {
			t.Errorf("shift %d: begins at %#x", shift, at)
		}
		if err := f.Random(1, 5); err != nil {
			t.Error(err)
		}
		if err := f.Random(0, int64(len(content))+1); err == nil {
			t.Error("advice beyond the end passed")
		}
		if err := f.Close(); err != nil || f.Bytes() != nil {
			t.Errorf("close: %v", err)
		}
	}
	if f := Of("memory", nil); len(f.Bytes()) != 0 {
		t.Error("bytes out of nothing")
	}
}

// Far more than there is memory: only what is written costs anything.
func TestReserve(t *testing.T) {
	const n = 1 << 38
	f, err := Reserve("room", n)
	if err != nil {
		t.Fatal(err)
	}
	b := f.Bytes()
	if len(b) != n || b[0] != 0 || b[n/2] != 0 {
		t.Fatalf("%d bytes, the first %d", len(b), b[0])
	}
	b[0], b[n-1] = 1, 2
	if b[0] != 1 || b[1] != 0 || b[n-1] != 2 || b[n-2] != 0 {
		t.Error("what was written is not there, or more")
	}
	if err := f.Close(); err != nil || f.Bytes() != nil {
		t.Errorf("close: %v", err)
	}
	for _, bad := range []int64{0, -1} {
		if _, err := Reserve("room", bad); err == nil {
			t.Errorf("%d bytes reserved", bad)
		}
	}
}
