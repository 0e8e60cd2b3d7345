package artifact

import (
	"errors"
	"fmt"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"
)

// allocate gives a new file its length and, where the file system can, its
// disk space, so that a full disk shows at once and not hours later.
func allocate(f *os.File, size int64) error {
	for {
		err := unix.Fallocate(int(f.Fd()), 0, 0, size)
		switch {
		case err == nil:
			return nil
		case errors.Is(err, unix.EINTR):
			continue
		case errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.ENOSYS):
			return f.Truncate(size)
		}
		return err
	}
}

// beginWriteback starts the transfer of written bytes to the disk, so that
// the disk works while the next bytes are made and not only at the end. What
// fails here shows when the file is synchronized.
func beginWriteback(f *os.File, off, n int64) {
	_ = unix.SyncFileRange(int(f.Fd()), off, n, unix.SYNC_FILE_RANGE_WRITE)
}

// renameNoReplace renames a file, failing with fs.ErrExist if the new name is
// taken.
func renameNoReplace(from, to string) error {
	err := unix.Renameat2(unix.AT_FDCWD, from, unix.AT_FDCWD, to, unix.RENAME_NOREPLACE)
	switch {
	case errors.Is(err, unix.EEXIST):
		return fs.ErrExist
	case errors.Is(err, unix.EINVAL), errors.Is(err, unix.ENOSYS):
		return fmt.Errorf("this file system has neither hard links nor renaming without overwriting: %w", err)
	}
	return err
}
