package convert

import (
	"fmt"
	"os"
	"strings"
	"syscall"
	"time"
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
