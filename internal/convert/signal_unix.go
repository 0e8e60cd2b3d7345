//go:build unix

package convert

import (
	"os"
	"os/signal"
	"syscall"
)

// ignoreFileSizeSignal makes a write beyond the process's limit of file sizes an ordinary error until the returned function is
// called: by default the runtime ends the program at that signal.
func ignoreFileSizeSignal() (restore func()) {
	ch := make(chan os.Signal, 1)
	signal.Notify(ch, syscall.SIGXFSZ)
	return func() { signal.Stop(ch) }
}
