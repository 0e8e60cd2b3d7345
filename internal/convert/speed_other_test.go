//go:build !linux

package convert

import (
	"os"
	"time"
)

func processTime() time.Duration { return 0 }

func peakMemory() int64 { return 0 }

func syncAll() {}

func diskBytes() int64 { return 0 }

func openPast(path string, flag int) (*os.File, error) { return os.OpenFile(path, flag, 0o666) }

func reserve(*os.File, int64) {}

func pages(n int) ([]byte, func()) { return make([]byte, n), func() {} }
