package convert

import (
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
