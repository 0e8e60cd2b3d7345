package artifact

import (
	"bytes"
	"encoding/json/v2"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// lock is the lock file beside an output. The operating system holds the lock
// itself, so it ends with the process however that ends; the file's content is
// a journal of what the writer was about to create, one JSON value a line, by
// which the next writer of the same output reclaims what a dead one left.
//
// What may be removed is proved, never guessed. Temporaries have a random
// token in their names, which the journal holds before they exist. A published
// part is removed only if the journal says that publishing had begun, the
// entry's temporary is still there and was never published (so no artifact can
// refer to the part), and the part is the same file as its temporary, to which
// it is a hard link. Where files are renamed instead, the part must have the
// header, length and modification time that the journal recorded.
type lock struct {
	dir, entry string
	path       string
	file       *os.File
}

// journalLine is one line of the journal. Lines only ever add to what earlier
// ones say.
type journalLine struct {
	Version int           `json:"ninfer_output,omitzero"` // on the first line: 1
	Entry   string        `json:"entry,omitzero"`
	Files   []journalFile `json:"files,omitzero"`

	ID     string  `json:"publishing,omitzero"` // the artifact id: final names are about to appear
	Stamps []int64 `json:"stamps,omitzero"`     // modification times, Unix nanoseconds

	Renaming  bool `json:"renaming,omitzero"`  // final names are made by renaming
	Published bool `json:"published,omitzero"` // the entry has its final name
}

type journalFile struct {
	Name   string `json:"name"`
	Temp   string `json:"temp"`
	Length int64  `json:"length"`
}

func lockName(entry string) string { return "." + entry + ".lock" }

func tempName(entry, token string, i int) string {
	return fmt.Sprintf(".%s.%s-%d.tmp", entry, token, i)
}

// takeLock creates the lock file if needed and locks it without waiting.
func takeLock(dir, entry string) (*lock, error) {
	l := &lock{dir: dir, entry: entry, path: filepath.Join(dir, lockName(entry))}
	for range 100 {
		f, err := os.OpenFile(l.path, os.O_RDWR|os.O_CREATE, 0o666)
		if err != nil {
			if lockHeld(err) {
				return nil, l.held()
			}
			return nil, fmt.Errorf("artifact: %w", err)
		}
		if err := lockFile(f); err != nil {
			f.Close()
			if lockHeld(err) {
				return nil, l.held()
			}
			return nil, fmt.Errorf("artifact: locking %s: %w", l.path, err)
		}
		// Another writer may have removed the file between our opening and
		// locking it; then the lock protects nothing.
		mine, err1 := f.Stat()
		there, err2 := os.Lstat(l.path)
		if err1 == nil && err2 == nil && os.SameFile(mine, there) {
			l.file = f
			return l, nil
		}
		f.Close()
		if err2 != nil && !errors.Is(err2, fs.ErrNotExist) {
			return nil, fmt.Errorf("artifact: %w", err2)
		}
	}
	return nil, fmt.Errorf("artifact: cannot lock %s: it is not a plain file or keeps being replaced", l.path)
}

func (l *lock) held() error {
	return fmt.Errorf("artifact: %w: %s is locked", ErrLocked, l.path)
}

// append adds a line and makes it durable.
func (l *lock) append(line journalLine) error {
	b, err := json.Marshal(line)
	if err == nil {
		_, err = l.file.Write(append(b, '\n'))
	}
	if err == nil {
		err = l.file.Sync()
	}
	if err != nil {
		return fmt.Errorf("artifact: lock file %s: %w", l.path, cause(err))
	}
	return nil
}

func (l *lock) begin(files []outFile) error {
	line := journalLine{Version: 1, Entry: l.entry}
	for _, f := range files {
		line.Files = append(line.Files, journalFile{f.name, f.temp, f.length})
	}
	if err := l.append(line); err != nil {
		return err
	}
	if err := syncDir(l.dir); err != nil {
		return fmt.Errorf("artifact: %s: %w", l.dir, cause(err))
	}
	return nil
}

func (l *lock) publishing(id [16]byte, stamps []int64) error {
	return l.append(journalLine{ID: FormatID(id), Stamps: stamps})
}

func (l *lock) renaming() error  { return l.append(journalLine{Renaming: true}) }
func (l *lock) published() error { return l.append(journalLine{Published: true}) }

// release removes the lock file and then unlocks.
func (l *lock) release() error {
	return removeLocked(l.file, l.path)
}

// leave unlocks and keeps the file with its journal.
func (l *lock) leave() error { return l.file.Close() }

// reclaim removes what the journal of a dead writer proves to be its own, and
// empties the journal.
func (l *lock) reclaim() error {
	text, err := io.ReadAll(io.LimitReader(l.file, 1<<26))
	if err != nil {
		return fmt.Errorf("artifact: lock file %s: %w", l.path, cause(err))
	}
	j, err := readJournal(text, l.entry)
	if err != nil {
		return fmt.Errorf("artifact: lock file %s is not one of this program's (%w); remove it if it is not yours", l.path, err)
	}
	if j != nil {
		if err := j.reclaim(l.dir); err != nil {
			return fmt.Errorf("artifact: reclaiming what an interrupted writer left: %w", err)
		}
	}
	if err := l.file.Truncate(0); err != nil {
		return fmt.Errorf("artifact: lock file %s: %w", l.path, cause(err))
	}
	_, err = l.file.Seek(0, io.SeekStart)
	return err
}

// readJournal joins the lines of a journal. A last line without its end was
// being written when the writer died, before it did what the line announces.
// It is nil if the writer had not announced anything.
func readJournal(text []byte, entry string) (*journalLine, error) {
	var j *journalLine
	for {
		line, rest, found := bytes.Cut(text, []byte{'\n'})
		if !found {
			break
		}
		text = rest
		var next journalLine
		if err := json.Unmarshal(line, &next, json.RejectUnknownMembers(true)); err != nil {
			return nil, oneLine(err)
		}
		if j == nil {
			if next.Version != 1 || next.Entry != entry || len(next.Files) == 0 {
				return nil, errors.New("its first line is no journal of this output")
			}
			j = &next
			continue
		}
		if next.ID != "" {
			j.ID, j.Stamps = next.ID, next.Stamps
		}
		j.Renaming = j.Renaming || next.Renaming
		j.Published = j.Published || next.Published
	}
	if j == nil {
		const start = `{"ninfer_output":1,`
		if !strings.HasPrefix(start, string(text)) && !bytes.HasPrefix(text, []byte(start)) {
			return nil, errors.New("unknown content")
		}
		return nil, nil
	}
	for i, f := range j.Files {
		final := entry
		if i > 0 {
			final = partName(entry, i)
		}
		if f.Name != final || f.Temp != filepath.Base(f.Temp) ||
			!strings.HasPrefix(f.Temp, "."+entry+".") || !strings.HasSuffix(f.Temp, fmt.Sprintf("-%d.tmp", i)) {
			return nil, fmt.Errorf("file %d of its journal has unexpected names", i)
		}
	}
	if j.ID != "" && len(j.Stamps) != len(j.Files) {
		return nil, errors.New("its journal is inconsistent")
	}
	return j, nil
}

func (j *journalLine) reclaim(dir string) error {
	entryTemp := filepath.Join(dir, j.Files[0].Temp)
	if j.ID != "" && !j.Published && unpublished(entryTemp) {
		for i := len(j.Files) - 1; i > 0; i-- {
			f := j.Files[i]
			final := filepath.Join(dir, f.Name)
			if j.owns(dir, i) {
				if err := os.Remove(final); err != nil {
					return err
				}
			}
		}
	}
	// The entry's temporary goes last, as in removeTemporaries.
	for _, f := range slices.Backward(j.Files) {
		if err := os.Remove(filepath.Join(dir, f.Temp)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}

// unpublished tells whether the entry's temporary is there and has no other
// name.
func unpublished(entryTemp string) bool {
	info, err := os.Lstat(entryTemp)
	if err != nil || !info.Mode().IsRegular() {
		return false
	}
	n, err := linkCount(entryTemp)
	return err == nil && n == 1
}

// owns tells whether part i's final name is proved to be the dead writer's.
func (j *journalLine) owns(dir string, i int) bool {
	f := j.Files[i]
	final := filepath.Join(dir, f.Name)
	info, err := os.Lstat(final)
	if err != nil || !info.Mode().IsRegular() {
		return false
	}
	temp, err := os.Lstat(filepath.Join(dir, f.Temp))
	if err == nil {
		return os.SameFile(info, temp)
	}
	if !j.Renaming || !errors.Is(err, fs.ErrNotExist) {
		return false
	}
	if info.Size() != f.Length || info.ModTime().UnixNano() != j.Stamps[i] {
		return false
	}
	file, err := os.Open(final)
	if err != nil {
		return false
	}
	defer file.Close()
	h, err := readHeader(file)
	return err == nil && h.magic == partMagic && h.n == uint64(i) && FormatID(h.id) == j.ID
}
