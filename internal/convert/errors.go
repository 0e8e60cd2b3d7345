package convert

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"

	"ninfer/internal/artifact"
)

// Class says whose fault a failed conversion is (docs/format.md 5.7).
type Class string

// The classes. Usage ends a command with status 2, all others with 1.
const (
	Usage     Class = "usage"     // an option
	Config    Class = "config"    // config.json
	Source    Class = "source"    // the rest of the checkpoint, or the ranking file
	Encode    Class = "encode"    // values that the chosen format cannot hold
	Exists    Class = "exists"    // the output is there already, or is being written
	IO        Class = "io"        // the file system
	Cancelled Class = "cancelled" // the context ended
)

// Error is the error of Run: one line, with its class.
type Error struct {
	Class Class
	Err   error
}

func (e *Error) Error() string { return e.Err.Error() }

func (e *Error) Unwrap() error { return e.Err }

// ExitCode is the exit status a command should end with.
func (e *Error) ExitCode() int {
	if e.Class == Usage {
		return 2
	}
	return 1
}

func fail(c Class, format string, args ...any) error {
	return &Error{c, fmt.Errorf(format, args...)}
}

// classify gives an error a class unless it has one: c, but IO for what the file system said, and Cancelled for the end of the
// context. A file that is too short says something about the checkpoint, not about the file system.
func classify(c Class, err error) error {
	var e *Error
	var path *fs.PathError
	switch {
	case err == nil || errors.As(err, &e):
		return err
	case errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded):
		c = Cancelled
	case errors.Is(err, artifact.ErrExists) || errors.Is(err, artifact.ErrLocked):
		c = Exists
	case errors.Is(err, io.ErrUnexpectedEOF):
	case errors.As(err, &path):
		c = IO
	}
	return &Error{c, err}
}
