package mmap

import (
	"bytes"
	"encoding/binary"
	"errors"
	"os"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// present counts the pages of data in the process's page table: bit 63 of an entry of its pagemap (Linux, admin-guide/mm/pagemap).
func present(t *testing.T, data []byte) (n int) {
	t.Helper()
	f, err := os.Open("/proc/self/pagemap")
	if err != nil {
		t.Skip(err)
	}
	defer f.Close()
	page := os.Getpagesize()
	entries := make([]byte, 8*(len(data)/page))
	if _, err := f.ReadAt(entries, 8*int64(uintptr(unsafe.Pointer(&data[0]))/uintptr(page))); err != nil {
		t.Skip(err)
	}
	for ; len(entries) > 0; entries = entries[8:] {
		n += int(binary.LittleEndian.Uint64(entries) >> 63)
	}
	return n
}

// Pages that are in memory are entered, in the range alone and until it is stopped, and hold what they held.
func TestEnter(t *testing.T) {
	page := os.Getpagesize()
	content := bytes.Repeat([]byte("entered "), 3<<20)
	path := write(t, content)
	pages := len(content) / page
	for name, open := range map[string]func() (*File, error){
		"file": func() (*File, error) { return Open(path) },
		"room": func() (*File, error) { return Reserve("room", int64(len(content))) },
	} {
		for _, c := range []struct{ off, n, looks, want int }{
			{0, len(content), 1000, pages},
			{0, len(content), 0, 0},
			{0, len(content), 1, piece / page},
			{len(content)/2 + 5, len(content)/2 - 5, 1000, pages / 2},
			{7, 1, 1000, 1},
		} {
			f, err := open()
			if err != nil {
				t.Fatal(err)
			}
			looks := c.looks
			err = f.Enter(int64(c.off), int64(c.n), func() bool { looks--; return looks < 0 })
			if errors.Is(err, unix.EINVAL) {
				t.Skip("this system enters no pages")
			} else if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			most := c.want
			if name == "file" && most > 0 {
				most += 4 << 20 / page // a file system may hold pages together that are entered together, up to 2 MB
			}
			if got := present(t, f.Bytes()); got < c.want || got > most {
				t.Errorf("%s, %d bytes at %d, stopped after %d looks: %d pages of %d, want %d to %d", name, c.n, c.off, c.looks, got, pages, c.want, most)
			}
			if name == "file" && !bytes.Equal(f.Bytes(), content) {
				t.Errorf("%s: contents differ", name)
			}
			f.Close()
		}
	}
}

func TestEnterErrors(t *testing.T) {
	f, err := Open(write(t, make([]byte, 100)))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for _, r := range [][2]int64{{-1, 1}, {0, 101}, {101, 0}} {
		if err := f.Enter(r[0], r[1], func() bool { return false }); err == nil {
			t.Errorf("%d bytes at %d of 100 accepted", r[1], r[0])
		}
	}
	if err := Of("memory", make([]byte, 10)).Enter(0, 10, func() bool { return false }); err != nil {
		t.Error(err)
	}
}
