package hf

import (
	"testing"

	"golang.org/x/sys/unix"
)

// TestReadKept: what is read with ReadKept stays in memory, what is read with ReadAt does not.
func TestReadKept(t *testing.T) {
	const n = 16 << 20 // the header is mapped, and up to 2 MiB stay with it
	const text = `{"a":{"dtype":"U8","shape":[16777216],"data_offsets":[0,16777216]}}`
	dir := files(t, map[string][]byte{"config.json": []byte("{}"), singleName: shardOf(text, n)})
	c, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	a, err := c.Tensor("a")
	if err != nil {
		t.Fatal(err)
	}
	s := &c.shards[0]
	if s.long == nil {
		t.Skip("no direct transfers here")
	}
	forget := func() {
		if err := s.file.Sync(); err != nil {
			t.Fatal(err)
		}
		if err := unix.Fadvise(int(s.file.Fd()), 0, 0, unix.FADV_DONTNEED); err != nil {
			t.Fatal(err)
		}
	}
	fromDisk := func() int { return s.long.ReadAt(make([]byte, n), s.data) }
	forget()
	if fromDisk() != n {
		t.Skip("files here stay in memory, or the system cannot tell")
	}
	for _, c := range []struct {
		name string
		read func(p []byte, off int64) (int, error)
		want int
	}{{"ReadAt", a.ReadAt, n}, {"ReadKept", a.ReadKept, 0}} {
		forget()
		if k, err := c.read(make([]byte, n), 0); err != nil || k != n {
			t.Fatalf("%s: %d bytes, %v", c.name, k, err)
		}
		if got := fromDisk(); got != c.want {
			t.Errorf("after %s %d bytes come from the disk, want %d", c.name, got, c.want)
		}
	}
}
