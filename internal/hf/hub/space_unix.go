//go:build unix

package hub

import (
	"errors"
	"math"
	"os"

	"golang.org/x/sys/unix"
)

// freeSpace is how many bytes an ordinary user may still write below a folder.
func freeSpace(dir string) (int64, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return 0, err
	}
	if free := float64(st.Bavail) * float64(st.Bsize); free >= math.MaxInt64 {
		return math.MaxInt64, nil
	}
	return int64(st.Bavail) * int64(st.Bsize), nil
}

// lockFile holds a lock that ends with the process.
func lockFile(path string) (unlock func(), err error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o666)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		if errors.Is(err, unix.EWOULDBLOCK) {
			err = errors.New(path + " is locked")
		}
		return nil, err
	}
	return func() { f.Close() }, nil
}
