//go:build unix

package artifact

import (
	"os"
	"syscall"
)

// diskBytes is the disk space of a file, holes not counted.
func diskBytes(path string) (int64, bool) {
	info, err := os.Stat(path)
	if err != nil {
		return 0, false
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return 0, false
	}
	return st.Blocks * 512, true
}
