//go:build unix && !linux

package artifact

import (
	"errors"
	"os"
)

// allocate gives a new file its length.
func allocate(f *os.File, size int64) error { return f.Truncate(size) }

// beginWriteback leaves the moment of writing to the system.
func beginWriteback(*os.File, int64, int64) {}

// renameNoReplace is not offered here.
func renameNoReplace(from, to string) error {
	return errors.New("this file system has no hard links, and renaming without overwriting is not available on this system")
}
