package convert

import (
	"fmt"
	"os"
	"strings"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// processTime is what the process has used of all cores.
func processTime() time.Duration {
	u := usage()
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// peakMemory is the largest resident size of the process so far, in bytes. Pages of mapped files count.
func peakMemory() int64 { return usage().Maxrss << 10 }

func syncAll() { syscall.Sync() }

func usage() (u syscall.Rusage) {
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &u)
	return u
}

// diskBytes is how many bytes the process has had moved to and from disks so far.
func diskBytes() (sum int64) {
	text, _ := os.ReadFile("/proc/self/io")
	for line := range strings.Lines(string(text)) {
		var n int64
		if k, _ := fmt.Sscanf(line, "read_bytes: %d", &n); k == 0 {
			_, _ = fmt.Sscanf(line, "write_bytes: %d", &n)
		}
		sum += n
	}
	return sum
}

// openPast opens a file past the page cache, or ordinarily where that is refused.
func openPast(path string, flag int) (*os.File, error) {
	if f, err := os.OpenFile(path, flag|unix.O_DIRECT, 0o666); err == nil {
		return f, nil
	}
	return os.OpenFile(path, flag&^os.O_EXCL, 0o666) // a refused open may have made the file
}

// reserve gives a file n bytes of disk, where its file system can.
func reserve(f *os.File, n int64) { _ = unix.Fallocate(int(f.Fd()), 0, 0, n) }

// pages are n bytes, in huge pages if there are any.
func pages(n int) (b []byte, free func()) {
	const huge = 2 << 20
	m, err := unix.Mmap(-1, 0, n+huge, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		panic(err)
	}
	_ = unix.Madvise(m, unix.MADV_HUGEPAGE)
	skip := int(-uintptr(unsafe.Pointer(unsafe.SliceData(m))) & (huge - 1))
	return m[skip:][:n], func() { _ = unix.Munmap(m) }
}
