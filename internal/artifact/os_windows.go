package artifact

import (
	"errors"
	"io/fs"
	"os"

	"golang.org/x/sys/windows"
)

// allocate gives a new file its length.
func allocate(f *os.File, size int64) error { return f.Truncate(size) }

// beginWriteback leaves the moment of writing to the system.
func beginWriteback(*os.File, int64, int64) {}

// lockFile takes an exclusive lock that ends with the process, without
// waiting. The locked range lies far beyond the content, so that the journal
// stays readable for whoever looks at it.
func lockFile(f *os.File) error {
	at := &windows.Overlapped{OffsetHigh: 0x40000000}
	return windows.LockFileEx(windows.Handle(f.Fd()), windows.LOCKFILE_EXCLUSIVE_LOCK|windows.LOCKFILE_FAIL_IMMEDIATELY, 0, 1, 0, at)
}

// lockHeld tells whether the error means that somebody else has the lock.
func lockHeld(err error) bool {
	return errors.Is(err, windows.ERROR_LOCK_VIOLATION) || errors.Is(err, windows.ERROR_IO_PENDING) ||
		errors.Is(err, windows.ERROR_SHARING_VIOLATION)
}

// removeLocked unlocks and removes a lock file. A writer that opened it in
// between keeps it from being removed, which is as well.
func removeLocked(f *os.File, path string) error {
	if err := f.Truncate(0); err != nil {
		f.Close()
		return err
	}
	if err := f.Close(); err != nil {
		return err
	}
	if err := os.Remove(path); err != nil && !lockHeld(err) {
		return err
	}
	return nil
}

// linkCount is the number of names a file has.
func linkCount(path string) (uint64, error) {
	f, err := os.Open(path)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	var info windows.ByHandleFileInformation
	if err := windows.GetFileInformationByHandle(windows.Handle(f.Fd()), &info); err != nil {
		return 0, err
	}
	return uint64(info.NumberOfLinks), nil
}

// noHardLinks tells whether a failed link may mean that the file system has
// no hard links.
func noHardLinks(err error) bool {
	return errors.Is(err, windows.ERROR_INVALID_FUNCTION) || errors.Is(err, windows.ERROR_NOT_SUPPORTED) ||
		errors.Is(err, fs.ErrPermission)
}

// renameNoReplace renames a file, failing with fs.ErrExist if the new name is
// taken.
func renameNoReplace(from, to string) error {
	a, err := windows.UTF16PtrFromString(from)
	if err != nil {
		return err
	}
	b, err := windows.UTF16PtrFromString(to)
	if err != nil {
		return err
	}
	err = windows.MoveFileEx(a, b, windows.MOVEFILE_WRITE_THROUGH)
	if errors.Is(err, windows.ERROR_ALREADY_EXISTS) || errors.Is(err, windows.ERROR_FILE_EXISTS) {
		return fs.ErrExist
	}
	return err
}

// syncDir does nothing: directories cannot be synced here.
func syncDir(string) error { return nil }
