package direct_test

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"ninfer/internal/direct"
)

// fresh is a file of n bytes and a direct handle of it; tests skip where there is no such thing.
func fresh(t *testing.T, data []byte, open func(string) *direct.File) (*os.File, *direct.File) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "f")
	if err := os.WriteFile(path, data, 0o666); err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	d := open(path)
	t.Cleanup(func() {
		f.Close()
		d.Close()
	})
	if d == nil {
		t.Skipf("no direct transfers in %s", path)
	}
	return f, d
}

func noise(n int) []byte {
	r := rand.New(rand.NewPCG(1, uint64(n)))
	p := make([]byte, n)
	for i := range p {
		p[i] = byte(r.Uint32())
	}
	return p
}

// write writes what both ways can: the pages that are p's alone in three runs, directly, and the rest through f.
func write(f *os.File, d *direct.File, p []byte, off int64) (taken int, err error) {
	begin, end := (off+direct.Align-1)&^(direct.Align-1), (off+int64(len(p)))&^(direct.Align-1)
	at := begin
	if begin < end {
		whole := p[begin-off : end-off]
		cut := len(whole) / 3 &^ (direct.Align - 1)
		runs := [][]byte{whole[:cut], nil, whole[cut:]}
		taken = d.WriteAt((*os.File).WriteAt, begin, runs...)
		at += int64(taken)
		if len(runs[0]) != cut || len(runs[2]) != len(whole)-cut {
			return 0, errors.New("the caller's list has changed")
		}
	}
	begin = min(begin, off+int64(len(p)))
	if _, err := f.WriteAt(p[:begin-off], off); err != nil {
		return taken, err
	}
	_, err = f.WriteAt(p[max(at, begin)-off:], max(at, begin))
	return taken, err
}

// TestWrite writes a file in runs of all alignments, side by side, and reads it back through the ordinary handle.
func TestWrite(t *testing.T) {
	want := noise(29<<20 + 777)
	f, d := fresh(t, make([]byte, len(want)), direct.OpenWrite)
	r := rand.New(rand.NewPCG(3, 4))
	var wg sync.WaitGroup
	var direct atomic.Int64
	for at := 0; at < len(want); {
		n := min(1+r.IntN(10<<20), len(want)-at)
		p, off := want[at:at+n], int64(at)
		wg.Go(func() {
			n, err := write(f, d, p, off)
			if err != nil {
				t.Error(err)
			}
			direct.Add(int64(n))
		})
		at += n
	}
	wg.Wait()
	got, err := os.ReadFile(f.Name())
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Error("other bytes than were written")
	}
	if n := int(direct.Load()); n < len(want)/2 {
		t.Errorf("only %d of %d bytes went the direct way", n, len(want))
	}
}

// TestRead reads runs of all alignments, also across the end.
func TestRead(t *testing.T) {
	want := noise(19<<20 + 4097)
	f, d := fresh(t, want, direct.OpenRead)
	var c unix.Cachestat_t
	all := unix.CachestatRange{}
	known := unix.Cachestat(uint(f.Fd()), &all, &c, 0) == nil
	if n := d.ReadAt(make([]byte, 1<<20), 0); n != 0 && known {
		t.Error("what has just been written was read from the disk")
	}
	if err := f.Sync(); err != nil {
		t.Fatal(err)
	}
	if err := unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED); err != nil {
		t.Fatal(err)
	}
	if known && unix.Cachestat(uint(f.Fd()), &all, &c, 0) == nil && c.Cache > 0 {
		t.Skip("the file stays in memory: its system has no disk")
	}
	r := rand.New(rand.NewPCG(5, 6))
	for range 20 {
		off := r.IntN(len(want))
		p := make([]byte, 200_000+r.IntN(len(want)))
		n := d.ReadAt(p, int64(off))
		if need := min(len(p), len(want)-off); n != need {
			t.Fatalf("%d bytes at %d: got %d, need %d", len(p), off, n, need)
		}
		if !bytes.Equal(p[:n], want[off:off+n]) {
			t.Fatalf("%d bytes at %d: other bytes", len(p), off)
		}
	}
	if n := d.ReadAt(make([]byte, 1<<20), int64(len(want))+5000); n != 0 {
		t.Errorf("%d bytes beyond the end", n)
	}
	if n := d.ReadAt(make([]byte, 1000), 0); n != 0 {
		t.Error("a short read went the direct way")
	}
}

// TestRefused is a file system that takes the flag and then refuses: nothing is lost, and it is not asked again.
func TestRefused(t *testing.T) {
	_, d := fresh(t, make([]byte, 12<<20), direct.OpenWrite)
	calls := 0
	n := d.WriteAt(func(f *os.File, p []byte, off int64) (int, error) {
		if calls++; calls == 2 {
			return 512, syscall.EINVAL
		}
		return f.WriteAt(p, off)
	}, 0, make([]byte, 12<<20))
	if n != 8<<20 || calls != 2 {
		t.Errorf("%d bytes in %d calls, need the %d before the refusal", n, calls, 8<<20)
	}
	if n := d.WriteAt((*os.File).WriteAt, 0, make([]byte, 8<<20)); n != 0 {
		t.Errorf("took %d bytes after a refusal", n)
	}
}

// TestNil: a nil File takes nothing.
func TestNil(t *testing.T) {
	var d *direct.File
	if n := d.WriteAt((*os.File).WriteAt, 0, make([]byte, 1<<20)); n != 0 {
		t.Errorf("a nil file writes %d bytes", n)
	}
	if n := d.ReadAt(make([]byte, 1<<20), 0); n != 0 {
		t.Errorf("a nil file reads %d bytes", n)
	}
	if err := d.Close(); err != nil {
		t.Error(err)
	}
	if d := direct.OpenRead(filepath.Join(t.TempDir(), "absent")); d != nil {
		t.Error("an absent file is open")
	}
}
