package artifact

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"ninfer/internal/mmap"
)

// Framing of the container (docs/format.md 1.1). All of it has reached disk
// and cannot change.
const (
	entryMagic = "NINFER\x00\x03"
	v2Magic    = "NINFER\x00\x02"
	partMagic  = "NINPRT\x00\x03"
	headerSize = 32   // magic, U64, artifact id
	idOffset   = 16   // of the artifact id in both headers
	partStart  = 4096 // first payload byte of a part
	pageSize   = 4096
)

// maxDirectory bounds the directory that Open accepts; those of the largest
// models have less than 1 MiB.
const maxDirectory = 1 << 30

// File is an open artifact. All methods may be called concurrently, Close
// only after everything else is done, views included.
type File struct {
	path  string
	id    [16]byte
	text  []byte // all json_bytes bytes
	dir   *parsed
	index map[string]int // object id to its place in dir.Objects
	start int64          // first payload byte of the entry (S)
	total int64          // payload bytes
	parts []*part        // one for every file record; parts[0] is the entry

	mu sync.Mutex // guards the lazily set fields of parts
}

// part is one file of the set.
type part struct {
	path  string
	start int64 // first payload byte in the file
	base  int64 // logical payload offset of that byte
	bytes int64 // payload bytes

	file *os.File   // nil until needed
	mem  *mmap.File // nil until needed; of an artifact in memory instead of file
}

// reader is what the part is read through, or nil if it is not open.
func (p *part) reader() io.ReaderAt {
	switch {
	case p.file != nil:
		return p.file
	case p.mem != nil:
		return bytes.NewReader(p.mem.Bytes())
	}
	return nil
}

func up(x, align int64) int64 { return (x + align - 1) / align * align }

// Open opens an entry file and checks rows R1 to R14 of the rejection table.
// Parts are looked for in the same directory when they are first needed, and
// neither the payload nor the formats of objects are looked at. A file that is
// not a valid entry gives a *FormatError.
func Open(path string) (*File, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("artifact: %w", err)
	}
	a, err := openFile(path, f)
	if err != nil {
		f.Close()
		return nil, err
	}
	return a, nil
}

// OpenBytes opens an entry file that is in memory, and has no parts, like Open. name stands for its path in messages. Tensors
// and spans are views of data, which must not change while they are used.
func OpenBytes(name string, data []byte) (*File, error) {
	a, err := open(name, bytes.NewReader(data), int64(len(data)))
	switch {
	case err != nil:
		return nil, err
	case len(a.parts) > 1:
		return nil, fmt.Errorf("artifact: %s continues in %d further files: one in memory must be whole", name, len(a.parts)-1)
	}
	a.parts[0].mem = mmap.Of(name, data)
	return a, nil
}

// header is the first 32 bytes of an entry or a part.
type header struct {
	magic string
	n     uint64 // json_bytes or part index
	id    [16]byte
}

func readHeader(r io.ReaderAt) (header, error) {
	var b [headerSize]byte
	if _, err := r.ReadAt(b[:], 0); err != nil {
		return header{}, err
	}
	return header{string(b[:8]), binary.LittleEndian.Uint64(b[8:16]), [16]byte(b[idOffset:])}, nil
}

// entryFraming checks R1 to R4 and gives the header and the directory text.
func entryFraming(path string, f io.ReaderAt, length int64) (header, []byte, error) {
	if length < headerSize {
		return header{}, nil, reject(path, 1, "%d bytes, the header alone has %d", length, headerSize)
	}
	h, err := readHeader(f)
	if err != nil {
		return header{}, nil, fmt.Errorf("artifact: reading the header of %s: %w", path, err)
	}
	switch h.magic {
	case entryMagic:
	case v2Magic:
		return header{}, nil, reject(path, 2, "this program runs version 3; convert it first: %s", upgradeCommand(path))
	case partMagic:
		return header{}, nil, reject(path, 3, "this is continuation file %d of an artifact; name the entry file instead", h.n)
	default:
		return header{}, nil, reject(path, 3, "the file begins with % x", h.magic)
	}
	if h.n == 0 || h.n > uint64(length-headerSize) {
		return header{}, nil, reject(path, 4, "json_bytes is %d, the file has %d bytes after the header", h.n, length-headerSize)
	}
	if h.n > maxDirectory {
		return header{}, nil, reject(path, 4, "json_bytes is %d, more than the %d this program reads", h.n, maxDirectory)
	}
	text := make([]byte, h.n)
	if _, err := f.ReadAt(text, headerSize); err != nil {
		return header{}, nil, fmt.Errorf("artifact: reading the directory of %s: %w", path, err)
	}
	return h, text, nil
}

// upgradeCommand is what the user must type to convert a version 2 file.
func upgradeCommand(path string) string {
	out := strings.TrimSuffix(path, ".ninfer") + ".v3.ninfer"
	return "ninfer upgrade " + shellQuote(path) + " " + shellQuote(out)
}

func shellQuote(s string) string {
	plain := func(r rune) bool {
		return r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune(`/._-+:=@,\`, r)
	}
	if s != "" && strings.IndexFunc(s, func(r rune) bool { return !plain(r) }) < 0 {
		return s
	}
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}

func openFile(path string, f *os.File) (*File, error) {
	info, err := f.Stat()
	if err != nil {
		return nil, fmt.Errorf("artifact: %w", err)
	}
	if !info.Mode().IsRegular() {
		return nil, fmt.Errorf("artifact: %s is not a regular file", path)
	}
	a, err := open(path, f, info.Size())
	if err != nil {
		return nil, err
	}
	a.parts[0].file = f
	return a, nil
}

// open reads what an entry of the given length says of itself. The first part has yet to get what it is read through.
func open(path string, f io.ReaderAt, length int64) (*File, error) {
	h, text, err := entryFraming(path, f, length)
	if err != nil {
		return nil, err
	}
	dir, err := parseDirectory(text, path, filepath.Base(path))
	if err != nil {
		return nil, err
	}
	a := &File{
		path: path, id: h.id, text: text, dir: dir,
		index: make(map[string]int, len(dir.Objects)),
		start: up(headerSize+int64(h.n), pageSize),
	}
	for i := range dir.Objects {
		a.index[dir.Objects[i].ID] = i
	}
	for i, r := range dir.Files {
		p := &part{path: path, start: a.start, base: a.total, bytes: r.PayloadBytes}
		if i > 0 {
			p.path, p.start = filepath.Join(filepath.Dir(path), r.Path), partStart
		}
		a.parts = append(a.parts, p)
		a.total += r.PayloadBytes
	}
	if first := a.parts[0]; length-a.start != first.bytes {
		return nil, reject(path, 14, "%d bytes; payload start %d and the %d bytes of files[0] make %d", length, a.start, first.bytes, a.start+first.bytes)
	}
	return a, nil
}

// Close unmaps and closes all files. Views given out before are dead.
func (a *File) Close() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	var errs []error
	for _, p := range a.parts {
		if p.mem != nil {
			errs = append(errs, p.mem.Close())
		}
		if p.file != nil {
			errs = append(errs, p.file.Close())
		}
		p.mem, p.file = nil, nil
	}
	return errors.Join(errs...)
}

// Path is the entry's path as given to Open.
func (a *File) Path() string { return a.path }

// ID is the artifact id; it means nothing beyond equality.
func (a *File) ID() [16]byte { return a.id }

// FormatID is the display form of an artifact id: 32 lower-case hex digits.
func FormatID(id [16]byte) string { return hex.EncodeToString(id[:]) }

// Directory gives the directory, which must not be changed.
func (a *File) Directory() *Directory { return &a.dir.Directory }

// DirectoryText is a copy of the directory as it stands in the file, json_bytes
// bytes with the padding that is counted in them.
func (a *File) DirectoryText() []byte { return slices.Clone(a.text) }

// PayloadBytes is the length of the logical payload over all files.
func (a *File) PayloadBytes() int64 { return a.total }

// PayloadStart is the offset of the first payload byte in the entry file.
func (a *File) PayloadStart() int64 { return a.start }

// FileBytes is the length that all files have together if none is missing.
func (a *File) FileBytes() int64 {
	return a.start + a.total + partStart*int64(len(a.parts)-1)
}

// Object finds an object by its id.
func (a *File) Object(id string) (Object, bool) {
	i, ok := a.index[id]
	if !ok {
		return Object{}, false
	}
	return a.dir.Objects[i], true
}

// PartStatus says whether a file of the set is there.
type PartStatus struct {
	Path  string // where it is looked for
	Bytes int64  // length that it must have, framing included
	Err   error  // nil if the file is there and well formed (R21 to R23)
	// Missing is true if there is no such file at all.
	Missing bool
}

// Parts tells for every file, the entry first, whether it is present and well
// formed. It works while parts are missing.
func (a *File) Parts() []PartStatus {
	out := make([]PartStatus, len(a.parts))
	for i, p := range a.parts {
		out[i] = PartStatus{Path: p.path, Bytes: p.start + p.bytes}
		if _, err := a.opened(i); err != nil {
			out[i].Err = err
			out[i].Missing = errors.Is(err, fs.ErrNotExist)
		}
	}
	return out
}

// opened gives what part i is read through and checks R21 to R23 when it is opened.
func (a *File) opened(i int) (io.ReaderAt, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	p := a.parts[i]
	if r := p.reader(); r != nil {
		return r, nil
	}
	if i == 0 {
		return nil, fmt.Errorf("artifact %s: %w", a.path, fs.ErrClosed)
	}
	f, err := openPart(p, i, a.id)
	if err != nil {
		return nil, err
	}
	p.file = f
	return f, nil
}

func openPart(p *part, i int, id [16]byte) (*os.File, error) {
	f, err := os.Open(p.path)
	if err != nil {
		return nil, &FormatError{Path: p.path, Rule: 21, Class: classes[21], Err: err}
	}
	if err := checkPart(f, p, i, id); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

func checkPart(f *os.File, p *part, i int, id [16]byte) error {
	info, err := f.Stat()
	if err != nil {
		return &FormatError{Path: p.path, Rule: 21, Class: classes[21], Err: err}
	}
	if !info.Mode().IsRegular() {
		return reject(p.path, 21, "not a regular file")
	}
	if info.Size() < headerSize {
		return reject(p.path, 21, "%d bytes, the header alone has %d", info.Size(), headerSize)
	}
	h, err := readHeader(f)
	switch {
	case err != nil:
		return &FormatError{Path: p.path, Rule: 21, Class: classes[21], Err: err}
	case h.magic != partMagic:
		return reject(p.path, 22, "wrong magic: the file begins with % x", h.magic)
	case h.n != uint64(i):
		return reject(p.path, 22, "it calls itself part %d, the directory lists it as part %d", h.n, i)
	case h.id != id:
		return reject(p.path, 22, "its artifact id %s differs from the entry's %s", FormatID(h.id), FormatID(id))
	case info.Size()-partStart != p.bytes:
		return reject(p.path, 23, "%d bytes, the directory demands %d", info.Size(), partStart+p.bytes)
	}
	return nil
}

// locate is the first part that holds payload bytes at or after off.
func (a *File) locate(off int64) int {
	i, found := slices.BinarySearchFunc(a.parts, off, func(p *part, off int64) int {
		switch {
		case p.base < off:
			return -1
		case p.base > off:
			return 1
		}
		return 0
	})
	if found {
		return i
	}
	return i - 1
}

// pieces calls f for every file's share of the payload range [off, off+n),
// which must lie inside the payload: part index, offset in that part's
// payload, length.
func (a *File) pieces(off, n int64, f func(i int, from, n int64) error) error {
	for i := a.locate(off); n > 0; i++ {
		p := a.parts[i]
		from := off - p.base
		k := min(n, p.bytes-from)
		if err := f(i, from, k); err != nil {
			return err
		}
		off, n = off+k, n-k
	}
	return nil
}

// ReadAt reads from the logical payload as io.ReaderAt does, whatever files
// the range lies in: a read that reaches beyond the end of the payload gives
// io.EOF with what there is. A read of no bytes is legal up to and including
// the end. A file that is missing or shorter than the directory says is an
// error that names it.
func (a *File) ReadAt(p []byte, off int64) (int, error) {
	if off < 0 || off > a.total {
		return 0, fmt.Errorf("artifact %s: read at %d outside the payload of %d bytes", a.path, off, a.total)
	}
	var eof error
	if int64(len(p)) > a.total-off {
		p, eof = p[:a.total-off], io.EOF
	}
	done := 0
	err := a.pieces(off, int64(len(p)), func(i int, from, n int64) error {
		k, err := a.readPart(p[done:done+int(n)], i, from)
		done += k
		return err
	})
	if err != nil {
		return done, err
	}
	return done, eof
}

// readPart reads payload bytes of one file.
func (a *File) readPart(p []byte, i int, from int64) (int, error) {
	f, err := a.opened(i)
	if err != nil {
		return 0, err
	}
	n, err := f.ReadAt(p, a.parts[i].start+from)
	if n == len(p) {
		return n, nil
	}
	if errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF // the length was right when the file was opened
	}
	return n, fmt.Errorf("artifact: reading %s at %d: %w", a.parts[i].path, a.parts[i].start+from+int64(n), err)
}

// view gives a read-only view of payload bytes of one file.
func (a *File) view(i int, from, n int64) ([]byte, error) {
	f, err := a.opened(i)
	if err != nil {
		return nil, err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	p := a.parts[i]
	if p.mem == nil {
		m, err := mmap.Open(p.path)
		if err != nil {
			return nil, fmt.Errorf("artifact: mapping %s: %w", plain(p.path), cause(err))
		}
		// The mapping opens the path again: it must still be the same file.
		var head [headerSize]byte
		_, err = f.ReadAt(head[:], 0)
		if b := m.Bytes(); err != nil || int64(len(b)) != p.start+p.bytes || !bytes.Equal(b[:headerSize], head[:]) {
			m.Close()
			return nil, fmt.Errorf("artifact: %s was replaced while it was open", plain(p.path))
		}
		p.mem = m
	}
	lo := p.start + from
	return p.mem.Bytes()[lo : lo+n : lo+n], nil
}
