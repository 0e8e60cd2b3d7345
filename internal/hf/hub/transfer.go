package hub

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json/v2"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"strings"
	"sync"
	"time"
)

// transfer fetches one file into a part file, chunk by chunk.
type transfer struct {
	p    *puller
	f    *File
	part string // name of the part file below the root
	file *os.File

	mu    sync.Mutex // guards state
	state state
}

// state is what is known of an incomplete file. It is written after the chunk's bytes have reached the disk.
type state struct {
	Size  int64  `json:"size"`
	OID   string `json:"oid"`
	Tag   string `json:"etag"` // of the responses so far
	Chunk int64  `json:"chunk"`
	Done  []bool `json:"done"` // by chunk
}

func (t *transfer) stateName() string { return t.part + ".json" }

// resume finds what an earlier run has left of a file, if it is of the same content.
func (p *puller) resume(f *File) *transfer {
	t := &transfer{p: p, f: f, part: stateDir + "/" + url.PathEscape(f.Path) + ".part"}
	if len(t.part) > 200 { // a name has at most 255 bytes
		t.part = stateDir + "/" + nameDigest(f.Path) + ".part"
	}
	t.reset()
	b, err := p.root.ReadFile(t.stateName())
	if err != nil {
		return t
	}
	var old state
	info, err := p.root.Lstat(t.part)
	if err != nil || !info.Mode().IsRegular() || info.Size() != f.Size || json.Unmarshal(b, &old) != nil {
		return t
	}
	if old.Size == f.Size && old.OID == f.oid() && old.Chunk > 0 && int64(len(old.Done)) == chunks(f.Size, old.Chunk) &&
		(old.OID != "" || old.Tag != "") {
		t.state = old
	}
	return t
}

// nameDigest stands for a path that is too long for one name.
func nameDigest(path string) string {
	s := sha256.Sum256([]byte(path))
	return hex.EncodeToString(s[:])
}

func chunks(size, chunk int64) int64 {
	n := size / chunk
	if size%chunk > 0 {
		n++
	}
	return n
}

// reset forgets all progress.
func (t *transfer) reset() {
	t.state = state{Size: t.f.Size, OID: t.f.oid(), Chunk: t.p.o.Chunk, Done: make([]bool, chunks(t.f.Size, t.p.o.Chunk))}
}

// have is the number of bytes that are complete.
func (t *transfer) have() int64 {
	n := int64(0)
	for i, done := range t.state.Done {
		if done {
			n += t.length(i)
		}
	}
	return n
}

func (t *transfer) length(i int) int64 {
	return min(t.state.Chunk, t.f.Size-int64(i)*t.state.Chunk)
}

var (
	errChanged  = errors.New("the content changed on the hub")
	errNoRanges = errors.New("the server sends no ranges")
	errDigest   = errors.New("wrong digest")
)

// restarts is how often a file is fetched from its beginning again.
const restarts = 2

// run fetches what is missing, checks the digest and publishes the file.
func (t *transfer) run(ctx context.Context) error {
	wrap := func(err error) error {
		if strings.HasPrefix(err.Error(), "hub: ") {
			return err
		}
		return fmt.Errorf("hub: %s: %w", t.f.Path, err)
	}
	var err error
	t.file, err = t.p.root.OpenFile(t.part, os.O_RDWR|os.O_CREATE, 0o666)
	if err != nil {
		return wrap(err)
	}
	defer func() { t.file.Close() }()
	ranges := true
	for n := 0; ; n++ {
		if err := t.file.Truncate(t.f.Size); err != nil {
			return wrap(err)
		}
		if ranges {
			err = t.fetchChunks(ctx)
		} else {
			err = t.fetchWhole(ctx)
		}
		if err == nil {
			err = t.check(ctx)
		}
		if err == nil {
			break
		}
		// Start again from nothing where what is there cannot be trusted.
		again := errors.Is(err, errChanged) || errors.Is(err, errDigest)
		if errors.Is(err, errNoRanges) && ranges {
			ranges, again = false, true
			n--
		}
		if !again || n >= restarts {
			return wrap(err)
		}
		t.mu.Lock()
		t.p.advance(-t.have())
		t.reset()
		err = t.save()
		t.mu.Unlock()
		if err != nil {
			return wrap(err)
		}
	}
	if err := t.file.Sync(); err != nil {
		return wrap(err)
	}
	if err := t.file.Close(); err != nil {
		return wrap(err)
	}
	if err := t.p.publish(t.f, t.part); err != nil {
		return wrap(err)
	}
	t.p.root.Remove(t.stateName())
	return nil
}

// check compares the digest of the whole part file.
func (t *transfer) check(ctx context.Context) error {
	if t.f.oid() == "" {
		return nil
	}
	got, err := digest(ctx, t.f, io.NewSectionReader(t.file, 0, t.f.Size))
	if err != nil {
		return err
	}
	if got != t.f.oid() {
		return fmt.Errorf("%w: %s, the hub says %s", errDigest, got, t.f.oid())
	}
	return nil
}

// save writes the state; t.mu is held.
func (t *transfer) save() error {
	b, err := json.Marshal(&t.state)
	if err != nil {
		return err
	}
	return t.p.replace(t.stateName(), b)
}

// fetchChunks fetches the missing chunks, as many at a time as there are slots.
func (t *transfer) fetchChunks(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var wg sync.WaitGroup
	var once sync.Once
	var first error
	for i := range t.state.Done {
		if t.state.Done[i] { // only this goroutine's chunks are not done yet
			continue
		}
		if t.p.acquire(ctx) != nil {
			break
		}
		wg.Go(func() {
			defer func() { <-t.p.slots }()
			if err := t.fetchChunk(ctx, i); err != nil {
				once.Do(func() { first = err; cancel() })
			}
		})
	}
	wg.Wait()
	if first != nil {
		return first
	}
	return ctx.Err()
}

// fetchChunk fetches one chunk and records it. After a fault it asks for the rest only.
func (t *transfer) fetchChunk(ctx context.Context, i int) error {
	from, n := int64(i)*t.state.Chunk, t.length(i)
	got := int64(0)
	err := t.p.retry(ctx, t.f.Path, func() (bool, error) {
		k, err := t.fetchRange(ctx, from+got, n-got)
		got += k
		return k > 0, err
	})
	if err != nil {
		t.p.advance(-got)
		return err
	}
	if err := t.file.Sync(); err != nil {
		return err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.state.Done[i] = true
	return t.save()
}

func (t *transfer) address() string {
	var parts []string
	for _, s := range strings.Split(t.f.Path, "/") {
		parts = append(parts, url.PathEscape(s))
	}
	return "/" + t.p.o.Repo + "/resolve/" + t.p.list.Commit + "/" + strings.Join(parts, "/")
}

// fetchRange asks for n bytes from off on and writes what comes; it returns how many were written.
func (t *transfer) fetchRange(ctx context.Context, off, n int64) (int64, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	want := n
	r, err := t.p.get(ctx, t.address(), http.Header{"Range": {fmt.Sprintf("bytes=%d-%d", off, off+n-1)}})
	if err != nil {
		return 0, err
	}
	defer r.Body.Close()
	switch {
	case r.StatusCode == http.StatusRequestedRangeNotSatisfiable:
		return 0, fmt.Errorf("%w: it is shorter than the %d bytes listed", errChanged, t.f.Size)
	case r.StatusCode == http.StatusOK && n == t.f.Size:
		if r.ContentLength >= 0 && r.ContentLength != n {
			return 0, fmt.Errorf("%w: %d bytes, listed with %d", errChanged, r.ContentLength, n)
		}
	case r.StatusCode == http.StatusOK:
		return 0, errNoRanges
	case r.StatusCode != http.StatusPartialContent:
		if err := statusError(r); err != nil {
			return 0, err
		}
		return 0, fmt.Errorf("status %d", r.StatusCode)
	default:
		var a, b, size int64
		_, err := fmt.Sscanf(r.Header.Get("Content-Range"), "bytes %d-%d/%d", &a, &b, &size)
		if err == nil && size != t.f.Size { // whatever the range: another one may be about to give up on it
			return 0, fmt.Errorf("%w: %d bytes, listed with %d", errChanged, size, t.f.Size)
		}
		if err != nil || a != off || b < a || b >= off+n {
			return 0, transient{fmt.Errorf("asked for bytes %d to %d, the server sent %q", off, off+n-1, r.Header.Get("Content-Range"))}
		}
		n = b - a + 1 // a server may send less than it was asked for
	}
	if err := t.sameTag(tag(r)); err != nil {
		return 0, err
	}
	k, err := t.copy(cancel, off, n, r.Body)
	if err == nil && k < want {
		err = transient{io.ErrUnexpectedEOF}
	}
	return k, err
}

// sameTag checks that all responses about a file are about the same content.
func (t *transfer) sameTag(tag string) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case tag == "" || tag == t.state.Tag:
		return nil
	case t.state.Tag == "":
		t.state.Tag = tag
		return nil
	}
	return fmt.Errorf("%w: its ETag was %q and is %q", errChanged, t.state.Tag, tag)
}

// copy writes at most n bytes to the part file. It gives up when nothing comes for a while.
func (t *transfer) copy(cancel func(), off, n int64, r io.Reader) (int64, error) {
	silence := time.AfterFunc(t.p.o.idle, cancel)
	defer silence.Stop()
	buf := make([]byte, 256<<10)
	done := int64(0)
	for done < n {
		k, err := r.Read(buf[:min(int64(len(buf)), n-done)])
		if k > 0 {
			silence.Reset(t.p.o.idle)
			if _, err := t.file.WriteAt(buf[:k], off+done); err != nil {
				return done, err
			}
			done += int64(k)
			t.p.advance(int64(k))
		}
		switch {
		case err == io.EOF:
			return done, nil
		case err != nil:
			if !silence.Stop() {
				err = fmt.Errorf("nothing came for %v", t.p.o.idle)
			}
			return done, transient{err}
		}
	}
	return done, nil
}

// fetchWhole fetches a file in one response, from a server that sends no ranges. An interruption starts it from the beginning.
func (t *transfer) fetchWhole(ctx context.Context) error {
	if err := t.p.acquire(ctx); err != nil {
		return err
	}
	defer func() { <-t.p.slots }()
	err := t.p.retry(ctx, t.f.Path, func() (bool, error) {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		r, err := t.p.get(ctx, t.address(), nil)
		if err != nil {
			return false, err
		}
		defer r.Body.Close()
		if err := statusError(r); err != nil {
			return false, err
		}
		if r.ContentLength >= 0 && r.ContentLength != t.f.Size {
			return false, fmt.Errorf("%w: %d bytes, listed with %d", errChanged, r.ContentLength, t.f.Size)
		}
		if err := t.sameTag(tag(r)); err != nil {
			return false, err
		}
		n, err := t.copy(cancel, 0, t.f.Size, r.Body)
		if err == nil && n < t.f.Size {
			err = transient{io.ErrUnexpectedEOF}
		}
		if err != nil {
			t.p.advance(-n)
		}
		return false, err
	})
	if err != nil {
		return err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	for i := range t.state.Done {
		t.state.Done[i] = true
	}
	return nil
}
