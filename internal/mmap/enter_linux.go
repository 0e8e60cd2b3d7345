package mmap

import (
	"os"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// enter works in pieces, and where a system that will not say what is in memory has the disk read them, gives up after some.
const (
	piece   = 4 << 20
	reading = 10 * time.Millisecond // of a piece that came from a disk: one in memory takes 0.1
	most    = 8
)

func enter(data []byte, all bool, stop func() bool) error {
	page := os.Getpagesize()
	in := make([]byte, piece/page)
	slow := 0
	for ; len(data) > 0 && !stop() && slow < most; data = data[min(piece, len(data)):] {
		part := data[:min(piece, len(data))]
		start := time.Now()
		if all {
			if err := unix.Madvise(part, unix.MADV_POPULATE_READ); err != nil {
				return err
			}
			continue
		}
		if _, _, e := unix.Syscall(unix.SYS_MINCORE, uintptr(unsafe.Pointer(&part[0])), uintptr(len(part)), uintptr(unsafe.Pointer(&in[0]))); e != 0 {
			return e
		}
		pages := (len(part) + page - 1) / page
		for first := 0; first < pages; {
			end := first
			for end < pages && in[end]&1 != 0 {
				end++
			}
			if end > first {
				if err := unix.Madvise(part[first*page:min(end*page, len(part))], unix.MADV_POPULATE_READ); err != nil {
					return err
				}
			}
			first = end + 1
		}
		if time.Since(start) > reading {
			slow++
		}
	}
	return nil
}
