package hub

import (
	"context"
	"crypto/sha1"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json/v2"
	"errors"
	"fmt"
	"hash"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// stateDir holds incomplete files and what is known about complete ones, inside the output folder.
const stateDir = ".ninfer-pull"

// Summary is what a pull did.
type Summary struct {
	Repo    string   `json:"repository"`
	Commit  string   `json:"commit"`
	Out     string   `json:"folder"`
	Files   int      `json:"files"`
	Bytes   int64    `json:"bytes"`
	Fetched int64    `json:"fetched_bytes"` // in this run, of content that was kept
	Present int      `json:"files_present"` // complete at the start
	Unhash  []string `json:"unchecked"`     // files for which the hub gives no digest: only their length was checked
	Seconds float64  `json:"seconds"`
}

// puller is one run of Pull.
type puller struct {
	*client
	list  *Listing
	root  *os.Root
	start time.Time

	slots chan struct{} // one for each request at a time

	fetched, done atomic.Int64
	total         int64

	mu       sync.Mutex // guards known, the record file and calls of Progress
	known    map[string]record
	reported time.Time
}

// record says that a file was complete, by what it can be recognised and what it was compared with.
type record struct {
	Size     int64  `json:"size"`
	Modified int64  `json:"modified"` // Unix nanoseconds
	OID      string `json:"oid"`
}

// Pull fetches the selected files of a repository into a folder. It fails before it fetches anything if a file is there that
// differs, or if the disk has too little room for what is missing. When it fails or is killed later, complete files stay, and
// the next Pull into the same folder goes on.
func Pull(ctx context.Context, o Options) (*Summary, error) {
	start := time.Now()
	if o.Out == "" {
		return nil, errors.New("hub: no output folder")
	}
	c, err := newClient(o)
	if err != nil {
		return nil, err
	}
	defer c.close()
	p := &puller{client: c, start: start, known: map[string]record{}, slots: make(chan struct{}, c.o.Jobs)}
	if p.list, err = c.list(ctx); err != nil { // before anything is left here
		return nil, err
	}
	if err := os.MkdirAll(filepath.Join(o.Out, stateDir), 0o777); err != nil {
		return nil, fmt.Errorf("hub: %w", err)
	}
	unlock, err := lockFile(filepath.Join(o.Out, stateDir, "lock"))
	if err != nil {
		return nil, fmt.Errorf("hub: %s is in use by another pull: %w", o.Out, err)
	}
	defer unlock()
	// Names from the hub are only ever resolved below this root, symbolic links included.
	if p.root, err = os.OpenRoot(o.Out); err != nil {
		return nil, fmt.Errorf("hub: %w", err)
	}
	defer p.root.Close()
	p.readRecords()
	s := &Summary{Repo: p.list.Repo, Commit: p.list.Commit, Out: o.Out, Files: len(p.list.Files), Unhash: []string{}}
	missing, err := p.survey(ctx, s)
	if err != nil {
		return nil, err
	}
	if err := p.fetchAll(ctx, missing); err != nil {
		return nil, err
	}
	s.Fetched, s.Bytes, s.Seconds = p.fetched.Load(), p.total, time.Since(start).Seconds()
	return s, nil
}

const recordName = stateDir + "/complete.json"

// readRecords reads what is known of complete files; without it they are hashed again.
func (p *puller) readRecords() {
	if b, err := p.root.ReadFile(recordName); err == nil {
		if json.Unmarshal(b, &p.known) != nil || p.known == nil {
			p.known = map[string]record{}
		}
	}
}

func (p *puller) remember(f *File) error {
	info, err := p.root.Stat(f.Path)
	if err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.known[f.Path] = record{info.Size(), info.ModTime().UnixNano(), f.oid()}
	b, err := json.Marshal(p.known, json.Deterministic(true))
	if err != nil {
		return err
	}
	return p.replace(recordName, b)
}

// replace writes a small file whole.
func (p *puller) replace(name string, b []byte) error {
	temp := name + ".tmp"
	if err := p.root.WriteFile(temp, b, 0o666); err != nil {
		return err
	}
	return p.root.Rename(temp, name)
}

// survey finds out what is missing, and whether there is room for it.
func (p *puller) survey(ctx context.Context, s *Summary) ([]*transfer, error) {
	var missing []*transfer
	need := int64(0)
	for i := range p.list.Files {
		f := &p.list.Files[i]
		p.total += f.Size
		if f.oid() == "" {
			s.Unhash = append(s.Unhash, f.Path)
		}
		there, err := p.present(ctx, f)
		if err != nil {
			return nil, fmt.Errorf("hub: %w", err)
		}
		if there {
			s.Present++
			p.done.Add(f.Size)
			continue
		}
		t := p.resume(f)
		p.done.Add(t.have())
		need += f.Size - t.have()
		missing = append(missing, t)
	}
	free, err := p.o.space(p.o.Out)
	if err != nil {
		return nil, fmt.Errorf("hub: %s: free space: %w", p.o.Out, err)
	}
	if need > free {
		return nil, fmt.Errorf("hub: %s: %d bytes are still to fetch, the disk has room for %d", p.o.Out, need, free)
	}
	return missing, nil
}

// present tells whether a file is there and right. One that is there and differs is an error.
func (p *puller) present(ctx context.Context, f *File) (bool, error) {
	info, err := p.root.Lstat(f.Path)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	at := filepath.Join(p.o.Out, filepath.FromSlash(f.Path))
	if !info.Mode().IsRegular() {
		return false, fmt.Errorf("%s is in the way: it is not a plain file", at)
	}
	if info.Size() != f.Size {
		return false, fmt.Errorf("%s has %d bytes, %s at %s has %d; it is not overwritten, move it away", at, info.Size(), p.list.Repo, p.list.Commit, f.Size)
	}
	if k, ok := p.known[f.Path]; ok && k == (record{info.Size(), info.ModTime().UnixNano(), f.oid()}) {
		return true, nil
	}
	if f.oid() != "" {
		file, err := p.root.Open(f.Path)
		if err != nil {
			return false, err
		}
		defer file.Close()
		got, err := digest(ctx, f, file)
		if err != nil {
			return false, fmt.Errorf("%s: %w", at, err)
		}
		if got != f.oid() {
			return false, fmt.Errorf("%s differs from %s at %s; it is not overwritten, move it away", at, p.list.Repo, p.list.Commit)
		}
	}
	return true, p.remember(f)
}

// digest computes the digest that the list has of a file: SHA-256, or git's SHA-1 of a blob.
func digest(ctx context.Context, f *File, r io.Reader) (string, error) {
	var h hash.Hash
	if f.SHA256 != "" {
		h = sha256.New()
	} else {
		h = sha1.New()
		fmt.Fprintf(h, "blob %d\x00", f.Size)
	}
	buf := make([]byte, 1<<20)
	for {
		if err := ctx.Err(); err != nil {
			return "", err
		}
		n, err := r.Read(buf)
		h.Write(buf[:n])
		if err == io.EOF {
			return hex.EncodeToString(h.Sum(nil)), nil
		}
		if err != nil {
			return "", err
		}
	}
}

// fetchAll fetches the missing files, several at a time. The first failure stops all.
func (p *puller) fetchAll(ctx context.Context, missing []*transfer) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	work := make(chan *transfer)
	errs := make([]error, min(p.o.Jobs, len(missing)))
	var wg sync.WaitGroup
	for i := range errs {
		wg.Go(func() {
			for t := range work {
				if err := t.run(ctx); err != nil {
					errs[i] = err
					cancel()
					return
				}
			}
		})
	}
	for _, t := range missing {
		select {
		case work <- t:
			continue
		case <-ctx.Done():
		}
		break
	}
	close(work)
	wg.Wait()
	// What went wrong first made the others stop.
	slices.SortStableFunc(errs, func(a, b error) int {
		return boolInt(errors.Is(a, context.Canceled)) - boolInt(errors.Is(b, context.Canceled))
	})
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return ctx.Err()
}

func boolInt(b bool) int {
	if b {
		return 1
	}
	return 0
}

// acquire waits for the right to make a request.
func (p *puller) acquire(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	select {
	case p.slots <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// advance counts bytes; n is negative where bytes turned out to be worthless.
func (p *puller) advance(n int64) {
	p.fetched.Add(n)
	done := p.done.Add(n)
	if p.o.Progress == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if now := time.Now(); done == p.total || now.Sub(p.reported) >= 100*time.Millisecond {
		p.reported = now
		p.o.Progress(Progress{Done: done, Total: p.total, Fetched: p.fetched.Load(), Elapsed: now.Sub(p.start)})
	}
}

// publish gives a complete file its name.
func (p *puller) publish(f *File, part string) error {
	if dir := path.Dir(f.Path); dir != "." {
		if err := p.root.MkdirAll(dir, 0o777); err != nil {
			return err
		}
	}
	// Nothing was there at the start; what appeared since is not overwritten.
	if _, err := p.root.Lstat(f.Path); !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%s appeared in the meantime", f.Path)
	}
	if err := p.root.Rename(part, f.Path); err != nil {
		return err
	}
	return p.remember(f)
}
