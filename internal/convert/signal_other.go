//go:build !unix

package convert

// ignoreFileSizeSignal does nothing: this system has no such signal.
func ignoreFileSizeSignal() (restore func()) { return func() {} }
