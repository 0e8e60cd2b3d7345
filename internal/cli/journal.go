package cli

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"

	"ninfer/internal/artifact"
	"ninfer/internal/engine"
	"ninfer/internal/server"
)

// journal opens the machine log, if there is to be one. Call the function in the end.
func (c *serveCommand) journal(l *loaded, key string, log *slog.Logger) (*server.Journal, func() error, error) {
	if c.RequestLogJSONL == "" {
		return nil, func() error { return nil }, nil
	}
	file, err := openJournal(c.RequestLogJSONL, l.store.File)
	if err != nil {
		return nil, nil, err
	}
	return server.NewJournal(file, key, log), file.Close, nil
}

// started is the machine log's first record of a server that is ready.
func (c *serveCommand) started(j *server.Journal, l *loaded, address, device string) {
	j.Start(server.StartRecord{
		Version: version(), Arguments: redacted(os.Args[1:]), Model: c.ModelID, File: filepath.Base(l.store.File.Path()), Address: address, Device: device,
		MaxContext: c.MaxContext, MaxConcurrency: c.MaxConcurrency, MaxPending: c.MaxPendingRequests,
		KVPages: c.pool.pages, PageTokens: engine.PageTokens, DraftWindow: c.DraftTokens,
	})
}

// openJournal opens the file of the machine log for appending. It may hold the ids of all output, so others cannot read a new one. A
// file of the artifact is refused under any name.
func openJournal(path string, f *artifact.File) (*os.File, error) {
	info, err := os.Stat(path)
	switch {
	case err == nil && info.IsDir():
		return nil, usagef("--request-log-jsonl: %s is a folder", path)
	case err == nil:
		for _, part := range f.Parts() {
			if of, err := os.Stat(part.Path); err == nil && os.SameFile(info, of) {
				return nil, usagef("--request-log-jsonl: %s is the artifact", path)
			}
		}
	case !errors.Is(err, fs.ErrNotExist):
		return nil, fmt.Errorf("--request-log-jsonl: %w", err)
	}
	out, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("--request-log-jsonl: %w; its folder must exist", err)
	}
	return out, nil
}
