//go:build unix

package artifact

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"
)

// lockFile takes an exclusive lock that ends with the process, without
// waiting.
func lockFile(f *os.File) error {
	for {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// lockHeld tells whether the error means that somebody else has the lock.
func lockHeld(err error) bool {
	return errors.Is(err, unix.EWOULDBLOCK) || errors.Is(err, unix.EAGAIN)
}

// removeLocked removes a lock file and unlocks it; in this order nobody can
// lock a file that is about to go.
func removeLocked(f *os.File, path string) error {
	if err := os.Remove(path); err != nil {
		return also(err, f.Close())
	}
	return f.Close()
}

// linkCount is the number of names a file has.
func linkCount(path string) (uint64, error) {
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil {
		return 0, err
	}
	return uint64(st.Nlink), nil
}

// noHardLinks tells whether a failed link may mean that the file system has
// no hard links.
func noHardLinks(err error) bool {
	for _, e := range []error{unix.EPERM, unix.EACCES, unix.EOPNOTSUPP, unix.ENOTSUP, unix.ENOSYS, unix.EMLINK, unix.EINVAL} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

// syncDir makes changes of names in a directory durable.
func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	err = d.Sync()
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOTSUP) {
		return nil // some file systems do not sync directories
	}
	return err
}
