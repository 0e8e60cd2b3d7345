package hf

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"unicode"

	"ninfer/internal/direct"
	"ninfer/internal/mmap"
)

// File names of a checkpoint folder.
const (
	ConfigName = "config.json"
	indexName  = "model.safetensors.index.json"
	singleName = "model.safetensors"
)

// Checkpoint is an open checkpoint folder.
type Checkpoint struct {
	dir     string
	shards  []shard
	index   map[string]int32 // into tensors
	tensors []tensor

	without func(name string) bool // tensors of the index that do not exist for us; may be nil
	sorted  func() []string
}

type shard struct {
	name string
	file *os.File
	long *direct.File // for long reads; nil where there is no such thing
	mem  *mmap.File
	data int64 // offset of the byte after the header
}

type tensor struct {
	entry
	name  string
	shard int32
	found bool
}

// Tensor is one tensor of a checkpoint. Words are little-endian, the last axis varies fastest. A scalar has an empty shape.
type Tensor struct {
	Name  string
	DType string // BF16, F16, F32, I32, I64, U8 or F8_E4M3
	Shape []int  // not to be changed
	File  string // name of the shard, for messages
	Data  []byte // view of the mapped shard, read-only

	shard *shard
	off   int64
}

// Size is the number of bytes of the tensor.
func (t Tensor) Size() int64 { return int64(len(t.Data)) }

// ReadAt fills p with the tensor's bytes from off on, through the file and, if they are many, past the page cache. A range outside the tensor is an
// error, as is a file that has become shorter.
func (t Tensor) ReadAt(p []byte, off int64) (int, error) { return t.readAt(p, off, t.shard.long) }

// ReadKept is ReadAt for bytes that will be read again: it leaves them in the page cache, where ReadAt finds them. KeepBytes says for how many that
// is good.
func (t Tensor) ReadKept(p []byte, off int64) (int, error) { return t.readAt(p, off, nil) }

// KeepBytes is how much of a checkpoint memory has room for that nobody uses now; 0 where all reads go through the page cache.
func KeepBytes() int64 { return direct.Spare() }

func (t Tensor) readAt(p []byte, off int64, long *direct.File) (int, error) {
	if off < 0 || off > t.Size() || int64(len(p)) > t.Size()-off {
		return 0, fmt.Errorf("%s: tensor %q: %d bytes at %d are outside its %d", t.File, t.Name, len(p), off, t.Size())
	}
	n := long.ReadAt(p, t.off+off)
	k, err := t.shard.file.ReadAt(p[n:], t.off+off+int64(n))
	if n += k; n == len(p) {
		return n, nil
	}
	if err == io.EOF {
		err = io.ErrUnexpectedEOF
	}
	return n, fmt.Errorf("%s: tensor %q: %w", t.File, t.Name, err)
}

// Open reads a checkpoint folder, which is one if it has a config.json: the index (or the only shard), and all headers. Every tensor the index names is
// checked to lie whole inside its shard. Errors name the file and the tensor; those of the file system keep their cause.
func Open(dir string) (*Checkpoint, error) { return OpenWithout(dir, nil) }

// OpenWithout is Open for a caller that does not want every tensor: those of the index for which without is true do not exist, and
// shards that hold nothing else need not be there.
func OpenWithout(dir string, without func(name string) bool) (*Checkpoint, error) {
	c := &Checkpoint{dir: dir, without: without}
	if _, err := os.Stat(filepath.Join(dir, ConfigName)); err != nil {
		return nil, fmt.Errorf("hf: %w", err)
	}
	if err := c.open(); err != nil {
		c.Close()
		return nil, fmt.Errorf("hf: %w", err)
	}
	c.sorted = sync.OnceValue(func() []string { return slices.Sorted(maps.Keys(c.index)) })
	return c, nil
}

func (c *Checkpoint) open() error {
	text, err := os.ReadFile(filepath.Join(c.dir, indexName))
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return c.openSingle()
	case err != nil:
		return err
	}
	if err := c.parseIndex(text); err != nil {
		return fmt.Errorf("%s: %w", indexName, err)
	}

	// Headers in parallel: each is independent, and tensors of different shards are different elements.
	errs := make([]error, len(c.shards))
	var next sync.Mutex
	at := 0
	var wg sync.WaitGroup
	for range min(len(c.shards), runtime.GOMAXPROCS(0)) {
		wg.Go(func() {
			for {
				next.Lock()
				i := at
				at++
				next.Unlock()
				if i >= len(c.shards) {
					return
				}
				errs[i] = c.openShard(i)
			}
		})
	}
	wg.Wait()
	for i, err := range errs {
		if err != nil {
			return fmt.Errorf("%s: %w", c.shards[i].name, err)
		}
	}
	// The first absent one by name, so that the message does not depend on the order of a map or an index.
	absent := -1
	for i := range c.tensors {
		if !c.tensors[i].found && (absent < 0 || c.tensors[i].name < c.tensors[absent].name) {
			absent = i
		}
	}
	if absent >= 0 {
		t := &c.tensors[absent]
		return fmt.Errorf("%s: tensor %q: in the index, but not in this file", c.shards[t.shard].name, t.name)
	}
	return nil
}

// parseIndex fills shards, index and tensors with what the index says.
func (c *Checkpoint) parseIndex(text []byte) error {
	s := scanner{b: text}
	names := string(text) // tensor names are cut from this one string
	seen := map[string]bool{}
	shards := map[string]int32{}
	err := s.members(func(member []byte) error {
		if seen[string(member)] {
			return fmt.Errorf("duplicate member %q", member)
		}
		seen[string(member)] = true
		if string(member) != "weight_map" {
			return s.value()
		}
		const typical = 128 // bytes of one member, to size the map
		c.index = make(map[string]int32, len(text)/typical)
		c.tensors = make([]tensor, 0, len(text)/typical)
		return s.members(func(name []byte) error {
			// A name without escapes is a view of the text that ends at the colon's string; find it again in names.
			key := view(names, text, name)
			if _, ok := c.index[key]; ok {
				return fmt.Errorf("duplicate tensor %q", key)
			}
			file, err := s.str()
			if err != nil {
				return fmt.Errorf("tensor %q: %w", key, err)
			}
			if c.without != nil && c.without(key) {
				return nil
			}
			n, ok := shards[string(file)]
			if !ok {
				if !plainName(string(file)) {
					return fmt.Errorf("tensor %q: %q is not the name of a file in the same folder", key, file)
				}
				n = int32(len(c.shards))
				shards[string(file)] = n
				c.shards = append(c.shards, shard{name: string(file)})
			}
			c.index[key] = int32(len(c.tensors))
			c.tensors = append(c.tensors, tensor{name: key, shard: n})
			return nil
		})
	})
	switch {
	case err != nil:
		return err
	case s.end() != nil:
		return s.end()
	case c.index == nil:
		return errors.New("no weight_map")
	}
	return nil
}

// view returns part as a string; where part is a slice of text it is cut from whole, the same text as a string, which costs no
// memory.
func view(whole string, text, part []byte) string {
	if len(part) == 0 {
		return ""
	}
	// Slices of one array end at the same capacity distance only if part was cut from text without a new capacity.
	off := cap(text) - cap(part)
	if off >= 0 && off+len(part) <= len(text) && &text[off] == &part[0] {
		return whole[off : off+len(part)]
	}
	return string(part)
}

// plainName accepts names of files in the same folder, on every system, that a message of one line can hold.
func plainName(name string) bool {
	return name != "" && name != "." && name != ".." && !strings.ContainsAny(name, "/\\:") && !strings.ContainsFunc(name, unicode.IsControl)
}

// openSingle opens a checkpoint without an index: all tensors of the only file exist.
func (c *Checkpoint) openSingle() error {
	if _, err := os.Stat(filepath.Join(c.dir, singleName)); errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%s: neither %s nor %s is there", c.dir, indexName, singleName)
	}
	c.shards = []shard{{name: singleName}}
	c.index = map[string]int32{}
	if err := c.openShard(0); err != nil {
		return fmt.Errorf("%s: %w", singleName, err)
	}
	return nil
}

// openShard maps shard i and enters what its header says into the tensors that the index expects of it; without an index it adds
// them.
func (c *Checkpoint) openShard(i int) error {
	s := &c.shards[i]
	path := filepath.Join(c.dir, s.name)
	var err error
	if s.mem, err = mmap.Open(path); err != nil {
		if errors.Is(err, fs.ErrNotExist) && c.tensors != nil {
			return errors.New("in the index, but no such file")
		}
		return err
	}
	if s.file, err = os.Open(path); err != nil {
		return err
	}
	s.long = direct.OpenRead(path)
	raw := s.mem.Bytes()
	if len(raw) < 8 {
		return fmt.Errorf("%d bytes are too short for a safetensors file", len(raw))
	}
	n := binary.LittleEndian.Uint64(raw)
	if n > uint64(len(raw)-8) {
		return fmt.Errorf("header of %d bytes does not fit in a file of %d", n, len(raw))
	}
	s.data = 8 + int64(n)
	all := c.tensors == nil // there is no index
	strays := map[string]bool{}
	return parseHeader(raw[8:s.data], int64(len(raw))-s.data, func(name []byte, e entry) error {
		k, ok := c.index[string(name)]
		switch {
		case all && (c.without == nil || !c.without(string(name))):
			if ok {
				return fmt.Errorf("tensor %q: duplicate", name)
			}
			t := tensor{name: string(name), entry: e, found: true}
			c.index[t.name] = int32(len(c.tensors))
			c.tensors = append(c.tensors, t)
		case ok && c.tensors[k].shard == int32(i):
			t := &c.tensors[k]
			if t.found {
				return fmt.Errorf("tensor %q: duplicate", name)
			}
			t.entry, t.found = e, true
		default: // not in the index, or not wanted: does not exist for us, but the header must be sound
			if strays[string(name)] {
				return fmt.Errorf("tensor %q: duplicate", name)
			}
			strays[string(name)] = true
		}
		return nil
	})
}

// Close releases files and mappings; every Tensor.Data is dead after it.
func (c *Checkpoint) Close() error {
	var errs []error
	for i := range c.shards {
		s := &c.shards[i]
		if s.mem != nil {
			errs = append(errs, s.mem.Close())
		}
		if s.file != nil {
			errs = append(errs, s.file.Close())
		}
		errs = append(errs, s.long.Close())
		s.mem, s.file, s.long = nil, nil, nil
	}
	return errors.Join(errs...)
}

// Names are all tensor names, sorted. The caller must not change the slice.
func (c *Checkpoint) Names() []string { return c.sorted() }

// Len is the number of tensors.
func (c *Checkpoint) Len() int { return len(c.tensors) }

// Has reports whether the checkpoint has a tensor of this name, whatever its dtype.
func (c *Checkpoint) Has(name string) bool { _, ok := c.index[name]; return ok }

// DTypes counts the tensors of each dtype.
func (c *Checkpoint) DTypes() map[string]int {
	out := map[string]int{}
	for i := range c.tensors {
		out[c.tensors[i].dtype]++
	}
	return out
}

// Files are the names of the shards, in the order the index first mentions them.
func (c *Checkpoint) Files() []string {
	out := make([]string, len(c.shards))
	for i := range c.shards {
		out[i] = c.shards[i].name
	}
	return out
}

// Tensor returns a tensor by name. It fails if there is none, and if its dtype is not one this program reads.
func (c *Checkpoint) Tensor(name string) (Tensor, error) {
	k, ok := c.index[name]
	if !ok {
		return Tensor{}, fmt.Errorf("%s: tensor %q is missing", c.dir, name)
	}
	t := &c.tensors[k]
	s := &c.shards[t.shard]
	if _, ok := wordSizes[t.dtype]; !ok {
		return Tensor{}, fmt.Errorf("%s: tensor %q: unsupported dtype %q", s.name, name, t.dtype)
	}
	begin, end := s.data+t.begin, s.data+t.end
	return Tensor{
		Name: t.name, DType: t.dtype, Shape: t.shape, File: s.name, Data: s.mem.Bytes()[begin:end:end], shard: s, off: begin,
	}, nil
}
