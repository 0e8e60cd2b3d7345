package artifact

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"unicode"
)

// ErrExists reports that the entry or a part of an output is there already;
// it is never overwritten.
var ErrExists = errors.New("output exists")

// ErrLocked reports that another process is writing the same output.
var ErrLocked = errors.New("another process is writing this output")

// A FormatError says why a file, or one object in it, is not a valid
// artifact.
type FormatError struct {
	Path string // the file that is at fault: the entry or a part
	// Rule is the number of the row in the reader's rejection table
	// (docs/format.md 1.3, R1 to R23).
	Rule   int
	Class  string // short name of the kind of fault, such as "bad directory"
	Detail string // what is wrong and where
	Err    error  // cause, or nil
}

// Error gives one line naming file, class and detail.
func (e *FormatError) Error() string {
	return plain("artifact " + e.Path + ": " + e.reason())
}

// plain writes control characters as escapes: names of parts, and whatever a
// manifest holds, may have line breaks, and a message is one line.
func plain(s string) string {
	if !strings.ContainsFunc(s, unicode.IsControl) {
		return s
	}
	var b strings.Builder
	for _, r := range s {
		if unicode.IsControl(r) {
			b.WriteString(strings.Trim(strconv.QuoteRune(r), "'"))
		} else {
			b.WriteRune(r)
		}
	}
	return b.String()
}

// reason is the text without the file's name.
func (e *FormatError) reason() string {
	s := e.Class
	if e.Detail != "" {
		s += ": " + e.Detail
	}
	if e.Err != nil {
		s += ": " + e.Err.Error()
	}
	return s
}

// Unwrap gives the cause.
func (e *FormatError) Unwrap() error { return e.Err }

// classes of the rejection table.
var classes = [...]string{
	1:  "truncated header",
	2:  "container version 2",
	3:  "not a version 3 entry file",
	4:  "bad directory length in the header",
	5:  "bad directory",
	6:  "directory schema",
	7:  "directory schema (files)",
	8:  "directory schema (objects)",
	9:  "directory ranges",
	10: "directory reference (components)",
	11: "directory reference (bindings)",
	12: "directory reference (uses)",
	13: "directory schema (metadata)",
	14: "wrong length",
	15: "unknown object",
	16: "unsupported format",
	17: "bad shape",
	18: "bad object size",
	19: "misaligned object",
	20: "unsupported resource encoding",
	21: "missing or truncated part",
	22: "wrong part header",
	23: "wrong part length",
}

func reject(path string, rule int, format string, args ...any) *FormatError {
	return &FormatError{Path: path, Rule: rule, Class: classes[rule], Detail: fmt.Sprintf(format, args...)}
}
