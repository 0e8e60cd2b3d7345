package direct

import (
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

func open(path string, flag int) *os.File {
	f, err := os.OpenFile(path, flag|unix.O_DIRECT, 0)
	if err != nil {
		return nil
	}
	return f
}

// cached tells whether at least half of a range is in the page cache. Kernels before 6.5 cannot say.
func cached(f *os.File, off, n int64) bool {
	var c unix.Cachestat_t
	err := unix.Cachestat(uint(f.Fd()), &unix.CachestatRange{Off: uint64(off), Len: uint64(n)}, &c, 0)
	return err == nil && int64(c.Cache)*int64(os.Getpagesize()) >= n/2
}

// Spare is how many bytes of files could stay in memory that nobody uses now: half of it.
func Spare() int64 {
	var s unix.Sysinfo_t
	if unix.Sysinfo(&s) != nil {
		return 0
	}
	return int64(s.Freeram) / 2 * int64(s.Unit)
}

const hugePage = 2 << 20

// newBuffer maps a buffer on the border of a huge page. Where that fails, any aligned one will do.
func newBuffer() buffer {
	m, err := unix.Mmap(-1, 0, bufferBytes+hugePage, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return buffer{b: aligned(make([]byte, bufferBytes+Align), Align)}
	}
	b := aligned(m, hugePage)
	_ = unix.Madvise(b, unix.MADV_HUGEPAGE)
	return buffer{b: b, mapped: m}
}

// aligned is the part of m that begins at a multiple of a power of two.
func aligned(m []byte, to uintptr) []byte {
	shift := -uintptr(unsafe.Pointer(unsafe.SliceData(m))) & (to - 1) // only the address is asked about
	return m[shift:][:bufferBytes:bufferBytes]
}

func (b buffer) free() {
	if b.mapped != nil {
		_ = unix.Munmap(b.mapped)
	}
}
