package artifact

import (
	"bytes"
	"encoding/binary"
	"encoding/json/jsontext"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"ninfer/internal/num"
)

// mixedDirectory has tensors of every layout and two resources, one of an odd
// length, so that there are gaps; with a limit of 12,288 the objects cross
// files in every way.
func mixedDirectory() *Directory {
	d := tinyDirectory()
	d.Objects = append(d.Objects,
		Object{ID: "w.q5", Shape: []int{4, 200}, Format: "q5_g64_fp16", Layout: "row_split_k128_v1"},
		Object{ID: "w.q8", Shape: []int{3, 130}, Format: "q8_g32_fp16", Layout: "row_split_k128_v1"},
		Object{ID: "bank", Shape: []int{2, 128, 64}, Format: "nvfp4", Layout: "expert_block_scale_k16_m128x4_v1"},
		Object{ID: "matrix", Shape: []int{128, 128}, Format: "nvfp4", Layout: "block_scale_k16_m128x4_v1"},
		Object{ID: "row16", Shape: []int{5, 70}, Format: "fp8_e4m3fn_row_bf16", Layout: "row_scale_v1"},
		Object{ID: "row32", Shape: []int{5, 70}, Format: "fp8_e4m3fn_row_fp32", Layout: "row_scale_fp32_v1"},
		Object{ID: "table", Shape: []int{100, 160}, Format: "fp8_e4m3fn", Layout: "contiguous_le_v1"},
		Object{ID: "shard", Shape: []int{100, 160}, Format: "u4z8_g16_fp16", Layout: "packed_u4_g16_v1"},
		Object{ID: "scalar", Shape: []int{}, Format: "int64", Layout: "contiguous_le_v1"},
	)
	d.Provenance = jsontext.Value(`{"recipe":"test"}`)
	return d
}

// mixedObjects makes content whose words are all valid: random codes, scales
// and divisors of one.
func mixedObjects(t testing.TB, d *Directory, seed uint64) map[string][]byte {
	t.Helper()
	rng := rand.New(rand.NewPCG(seed, 1))
	out := map[string][]byte{}
	for _, o := range d.Objects {
		if o.Resource {
			b := make([]byte, o.Bytes)
			for i := range b {
				b[i] = byte(rng.Uint32())
			}
			out[o.ID] = b
			continue
		}
		f, _ := num.ParseFormat(o.Format)
		l, _ := num.ParseLayout(o.Layout)
		g, err := num.NewGeometry(f, l, o.Shape)
		if err != nil {
			t.Fatal(err)
		}
		b := make([]byte, g.Bytes)
		codes := b[g.Codes.Off:][:g.Codes.Len]
		if g.PaddedCols == g.Cols { // padded lanes must stay zero
			for i := range codes {
				codes[i] = byte(rng.Uint32())
				if f == num.FP8 || f == num.FP8RowBF16 || f == num.FP8RowFP32 {
					codes[i] &= 0xfe
				}
			}
		}
		one := map[num.Format][]byte{
			num.NVFP4: {0x38}, num.FP8RowBF16: {0x80, 0x3f}, num.FP8RowFP32: {0, 0, 0x80, 0x3f}, num.U4Z8G16: {0, 0x3c},
		}[f]
		if one != nil {
			copy(b[g.Scales.Off:][:g.Scales.Len], bytes.Repeat(one, int(g.Scales.Len)/len(one)))
		}
		for i := range g.Divisors.Len / 4 {
			binary.LittleEndian.PutUint32(b[g.Divisors.Off+4*i:], 0x3f800000)
		}
		out[o.ID] = b
	}
	return out
}

// logical assembles the logical payload from the files by the framing alone.
func logical(t testing.TB, path string, files []string) []byte {
	t.Helper()
	var out []byte
	for i, name := range files {
		b, err := os.ReadFile(filepath.Join(filepath.Dir(path), name))
		if err != nil {
			t.Fatal(err)
		}
		start := 4096
		if i == 0 {
			start = int(up(32+int64(binary.LittleEndian.Uint64(b[8:])), 4096))
		}
		out = append(out, b[start:]...)
	}
	return out
}

// TestRangeReads reads around every file boundary and object end.
func TestRangeReads(t *testing.T) {
	path := filepath.Join(t.TempDir(), "m.ninfer")
	d := mixedDirectory()
	objects := mixedObjects(t, d, 1)
	r := write(t, path, d, objects, PlanOptions{Limit: 12288}, WriterOptions{})
	payload := logical(t, path, r.Files)
	a, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	if a.PayloadBytes() != int64(len(payload)) || len(a.parts) < 6 {
		t.Fatalf("payload %d of %d bytes, %d files", a.PayloadBytes(), len(payload), len(a.parts))
	}
	var marks []int64
	for _, p := range a.parts {
		marks = append(marks, p.base, p.base+p.bytes)
	}
	for _, o := range a.Directory().Objects {
		marks = append(marks, o.Offset, o.end())
	}
	slices.Sort(marks)
	marks = slices.Compact(marks)
	buf := make([]byte, len(payload)+10)
	read := func(off, n int64) {
		k, err := a.ReadAt(buf[:n], off)
		switch {
		case off < 0 || off > int64(len(payload)):
			if err == nil || errors.Is(err, io.EOF) || k != 0 {
				t.Fatalf("read of %d at %d: %d, %v, want an error and nothing", n, off, k, err)
			}
		case off+n > int64(len(payload)):
			if err != io.EOF || !bytes.Equal(buf[:k], payload[off:]) {
				t.Fatalf("read of %d at %d beyond the end: %d, %v", n, off, k, err)
			}
		case err != nil || !bytes.Equal(buf[:k], payload[off:off+n]):
			t.Fatalf("read of %d at %d: %d, %v", n, off, k, err)
		}
	}
	for _, m := range marks {
		for _, e := range marks {
			for delta := int64(-2); delta <= 2; delta++ {
				if m+delta <= e {
					read(m+delta, e-m-delta)
				}
				read(m+delta, 0)
				read(m+delta, 3)
			}
		}
	}
	for _, o := range a.Directory().Objects {
		spans, err := a.Spans(o.ID)
		if err != nil || !bytes.Equal(bytes.Join(spans, nil), objects[o.ID]) {
			t.Errorf("spans of %s: %v", o.ID, err)
		}
		if o.Resource {
			continue
		}
		x, err := a.Tensor(o.ID)
		if err != nil || !bytes.Equal(x.Data, objects[o.ID]) {
			t.Errorf("tensor %s: %v", o.ID, err)
		}
		got := make([]byte, o.Bytes-1)
		if err := a.ReadObjectAt(o.ID, got, 1); err != nil || !bytes.Equal(got, objects[o.ID][1:]) {
			t.Errorf("read of %s: %v", o.ID, err)
		}
		for _, off := range []int64{-1, 2} {
			if err := a.ReadObjectAt(o.ID, got, off); err == nil {
				t.Errorf("read of %s at %d outside it succeeded", o.ID, off)
			}
		}
	}
	// w.a, 24,000 bytes from 256 on, lies in files of 8,192: three spans.
	if spans, _ := a.Spans("w.a"); len(spans) != 3 {
		t.Errorf("w.a lies in %d files, want 3", len(spans))
	}
	// A part that shrinks while open is an error that names it.
	p := a.parts[2]
	if err := os.Truncate(p.path, p.start+p.bytes-1); err != nil {
		t.Fatal(err)
	}
	_, err = a.ReadAt(make([]byte, p.bytes), p.base)
	if !errors.Is(err, io.ErrUnexpectedEOF) || !strings.Contains(err.Error(), p.path) {
		t.Errorf("read of a shortened part: %v", err)
	}
}

// TestZeroCopy: a tensor in one file is a view, one in several a copy.
func TestZeroCopy(t *testing.T) {
	path := filepath.Join(t.TempDir(), "m.ninfer")
	d := mixedDirectory()
	write(t, path, d, mixedObjects(t, d, 1), PlanOptions{Limit: 12288}, WriterOptions{})
	a, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	for _, o := range a.Directory().Objects {
		if o.Resource {
			continue
		}
		x, err := a.Tensor(o.ID)
		if err != nil {
			t.Fatal(err)
		}
		y, _ := a.Tensor(o.ID)
		spans, _ := a.Spans(o.ID)
		if same := &x.Data[0] == &y.Data[0]; same != (len(spans) == 1) {
			t.Errorf("%s in %d files: view %v", o.ID, len(spans), same)
		}
	}
}

// TestZeroCopyBoundary: objects that end just before, at and just after the
// end of a file.
func TestZeroCopyBoundary(t *testing.T) {
	for _, n := range []int{8191, 8192, 8193} {
		path := filepath.Join(t.TempDir(), "b.ninfer")
		d := &Directory{Components: []Component{{ID: "text"}}, Objects: []Object{
			{ID: "w", Shape: []int{n}, Format: "fp8_e4m3fn", Layout: "contiguous_le_v1"},
			{ID: "v", Shape: []int{300}, Format: "fp8_e4m3fn", Layout: "contiguous_le_v1"},
		}}
		objects := mixedObjects(t, d, uint64(n))
		write(t, path, d, objects, PlanOptions{Limit: 12288}, WriterOptions{})
		a, err := Open(path)
		if err != nil {
			t.Fatal(err)
		}
		for id, want := range objects {
			if x, err := a.Tensor(id); err != nil || !bytes.Equal(x.Data, want) {
				t.Errorf("%d bytes: %s: %v", n, id, err)
			}
		}
		a.Close()
	}
}

// TestWriterConcurrent writes random chunks in random order from several
// goroutines; files and receipt equal those of a sequential writer.
func TestWriterConcurrent(t *testing.T) {
	d := mixedDirectory()
	objects := mixedObjects(t, d, 2)
	one, two := filepath.Join(t.TempDir(), "m.ninfer"), filepath.Join(t.TempDir(), "m.ninfer")
	want := write(t, one, d, objects, PlanOptions{Limit: 12288}, WriterOptions{})

	p, err := NewPlan("m.ninfer", d, PlanOptions{Limit: 12288})
	if err != nil {
		t.Fatal(err)
	}
	w, err := Create(two, p, WriterOptions{})
	if err != nil {
		t.Fatal(err)
	}
	type chunk struct {
		id       string
		from, to int
	}
	var chunks []chunk
	rng := rand.New(rand.NewPCG(3, 4))
	for id, b := range objects {
		for at := 0; at < len(b); {
			to := min(len(b), at+1+rng.IntN(3000))
			chunks = append(chunks, chunk{id, at, to})
			at = to
		}
	}
	rng.Shuffle(len(chunks), func(i, j int) { chunks[i], chunks[j] = chunks[j], chunks[i] })
	var wg sync.WaitGroup
	for g := range 4 {
		wg.Go(func() {
			for i := g; i < len(chunks); i += 4 {
				c := chunks[i]
				if err := w.WriteAt(c.id, int64(c.from), objects[c.id][c.from:c.to]); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	got, err := w.Finish()
	if err != nil {
		t.Fatal(err)
	}
	if got.ID != want.ID || got.DirectorySHA256 != want.DirectorySHA256 || got.FileBytes != want.FileBytes {
		t.Errorf("receipts differ: %+v, %+v", got, want)
	}
	var fileBytes int64
	for _, name := range want.Files {
		a, _ := os.ReadFile(filepath.Join(filepath.Dir(one), name))
		b, err := os.ReadFile(filepath.Join(filepath.Dir(two), name))
		if err != nil || !bytes.Equal(a, b) {
			t.Errorf("%s differs, %v", name, err)
		}
		fileBytes += int64(len(b))
	}
	if got.FileBytes != fileBytes {
		t.Errorf("receipt counts %d bytes, the files have %d", got.FileBytes, fileBytes)
	}
	for id, b := range objects {
		if s, _ := got.ObjectSHA256.Lookup(id); s != sha(b) {
			t.Errorf("digest of %s: %s, want %s", id, s, sha(b))
		}
	}
	if err := w.Abort(); err != nil {
		t.Error(err)
	}
	if n := len(listing(t, filepath.Dir(two))); n != len(want.Files) {
		t.Errorf("%d files after Abort that followed Finish, want %d", n, len(want.Files))
	}
}

// TestWriterInTurn: chunks made by two goroutines, each entering after its predecessor while that one is still being written, leave
// nothing to read back.
func TestWriterInTurn(t *testing.T) {
	objects := tinyObjects() // halves of the larger one are more than a page
	p, err := NewPlan("m.ninfer", tinyDirectory(), PlanOptions{})
	if err != nil {
		t.Fatal(err)
	}
	// The first write to disk waits for the second one, so both must be under way.
	second := make(chan struct{})
	var writes atomic.Int32
	w, err := Create(filepath.Join(t.TempDir(), "m.ninfer"), p, WriterOptions{hooks: hooks{writeAt: func(f *os.File, b []byte, off int64) (int, error) {
		if off >= pageSize {
			switch writes.Add(1) {
			case 1:
				<-second
			case 2:
				close(second)
			}
		}
		return f.WriteAt(b, off)
	}}})
	if err != nil {
		t.Fatal(err)
	}
	for id, b := range objects {
		half := len(b) / 2
		entered := make(chan struct{})
		var wg sync.WaitGroup
		wg.Go(func() {
			if err := w.WriteInTurn(id, 0, b[:half], func() { close(entered) }); err != nil {
				t.Error(err)
			}
		})
		wg.Go(func() {
			<-entered
			if err := w.WriteInTurn(id, int64(half), b[half:], func() {}); err != nil {
				t.Error(err)
			}
		})
		wg.Wait()
		if r := w.byID[id]; r.hashed != r.length {
			t.Errorf("%d of %d bytes of %s are in the digest", r.hashed, r.length, id)
		}
	}
	got, err := w.Finish()
	if err != nil {
		t.Fatal(err)
	}
	for id, b := range objects {
		if s, _ := got.ObjectSHA256.Lookup(id); s != sha(b) {
			t.Errorf("digest of %s: %s, want %s", id, s, sha(b))
		}
	}
	called := 0
	if err := w.WriteInTurn("none", 0, nil, func() { called++ }); err == nil || called != 1 {
		t.Errorf("unknown object: %v, entered %d times", err, called)
	}
	if err := w.WriteInTurn("w.a", 0, []byte{1}, func() { called++ }); err == nil || called != 2 {
		t.Errorf("after the end: %v, entered %d times", err, called)
	}
}

// TestWriterWholePages: chunks that end within pages reach the disk in whole pages, and in no more writes than there are chunks; the pages that
// the object does not fill follow at the end. Chunks come in any order.
func TestWriterWholePages(t *testing.T) {
	b := tinyObjects()["w.a"]
	const chunk = 5000
	for _, order := range [][]int{{0, 1, 2, 3, 4}, {4, 3, 2, 1, 0}, {3, 0, 4, 1, 2}} {
		p, err := NewPlan("m.ninfer", tinyDirectory(), PlanOptions{})
		if err != nil {
			t.Fatal(err)
		}
		var writes, pages int
		w, err := Create(filepath.Join(t.TempDir(), "m.ninfer"), p, WriterOptions{hooks: hooks{writeAt: func(f *os.File, b []byte, off int64) (int, error) {
			if writes++; off%pageSize != 0 || len(b)%pageSize != 0 {
				t.Errorf("%d bytes written at %d", len(b), off)
			}
			pages += len(b) / pageSize
			return f.WriteAt(b, off)
		}}})
		if err != nil {
			t.Fatal(err)
		}
		if w.out.files[0].direct == nil {
			t.Skip("no direct transfers here")
		}
		if err := w.WriteAt("r.hello", 0, tinyObjects()["r.hello"]); err != nil {
			t.Fatal(err)
		}
		writes, pages = 0, 0
		for _, k := range order {
			if err := w.WriteAt("w.a", int64(k*chunk), b[k*chunk:min((k+1)*chunk, len(b))]); err != nil {
				t.Fatal(err)
			}
		}
		begin, end := w.byID["w.a"].off, w.byID["w.a"].off+int64(len(b))
		if want := int(end/pageSize - (begin+pageSize-1)/pageSize); pages != want || writes > len(order) {
			t.Errorf("order %v: %d pages in %d writes, want %d in at most %d", order, pages, writes, want, len(order))
		}
		w.out.hooks.writeAt = (*os.File).WriteAt
		got, err := w.Finish()
		if err != nil {
			t.Fatal(err)
		}
		for id, b := range tinyObjects() {
			if s, _ := got.ObjectSHA256.Lookup(id); s != sha(b) {
				t.Errorf("digest of %s: %s, want %s", id, s, sha(b))
			}
		}
		file, err := os.ReadFile(filepath.Join(w.out.dir, "m.ninfer"))
		if start := len(file) - int(p.PayloadBytes); err != nil || !bytes.Equal(file[start+int(begin):start+int(end)], b) {
			t.Errorf("order %v: other bytes than were written, %v", order, err)
		}
	}
}

// TestWriterSequential: several objects at once, each in pieces.
func TestWriterSequential(t *testing.T) {
	path := filepath.Join(t.TempDir(), "tiny.ninfer")
	p, err := NewPlan("tiny.ninfer", tinyDirectory(), PlanOptions{})
	if err != nil {
		t.Fatal(err)
	}
	w, err := Create(path, p, WriterOptions{})
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for id, b := range tinyObjects() {
		wg.Go(func() {
			at := int64(0)
			for part := range slices.Chunk(b, 777) {
				if err := w.WriteAt(id, at, part); err != nil {
					t.Error(err)
				}
				at += int64(len(part))
			}
		})
	}
	wg.Wait()
	w.SetID(tinyID)
	r, err := w.Finish()
	if err != nil || r.ID != tinyID {
		t.Fatal(r, err)
	}
	b, _ := os.ReadFile(path)
	if got := sha(b); got != "004962ef19a925e421bf8edcca147a252d310e26d44d41951b264ea10ac00af5" {
		t.Errorf("sha256 %s", got)
	}
}

// TestWriterRefuses: faults of the caller and of the disk. Whatever happens,
// nothing remains, and the message is one line.
func TestWriterRefuses(t *testing.T) {
	objects := tinyObjects()
	all := func(w *Writer) error {
		for id, b := range objects {
			if err := w.WriteAt(id, 0, b); err != nil {
				return err
			}
		}
		return nil
	}
	for _, c := range []struct {
		name  string
		hooks hooks
		do    func(w *Writer) error
		says  string
	}{
		{"nothing written", hooks{}, func(w *Writer) error { return nil }, "5 of 5 bytes"},
		{"incomplete", hooks{}, func(w *Writer) error {
			w.WriteAt("r.hello", 0, objects["r.hello"])
			w.WriteAt("w.a", 0, objects["w.a"][:1000])
			return w.WriteAt("w.a", 2000, objects["w.a"][2000:])
		}, `tensor "w.a" is incomplete: 1000 of 24000 bytes were not written, the first at 1000`},
		{"unknown object", hooks{}, func(w *Writer) error { return w.WriteAt("w.b", 0, nil) }, "w.b"},
		{"unknown hole", hooks{}, func(w *Writer) error { return w.WriteHoleAt(0, 0, nil) }, "hole 0"},
		{"outside", hooks{}, func(w *Writer) error { return w.WriteAt("r.hello", 1, objects["r.hello"]) }, "outside the 5 bytes"},
		{"before", hooks{}, func(w *Writer) error { return w.WriteAt("r.hello", -1, objects["r.hello"]) }, "outside the 5 bytes"},
		{"twice", hooks{}, func(w *Writer) error {
			all(w)
			return w.WriteAt("w.a", 23999, []byte{0})
		}, "twice"},
		{"disk full", hooks{writeAt: func(f *os.File, p []byte, off int64) (int, error) {
			if off >= partStart {
				return 0, &os.PathError{Op: "write", Path: f.Name(), Err: syscall.ENOSPC}
			}
			return f.WriteAt(p, off)
		}}, all, syscall.ENOSPC.Error()},
		{"stamping fails", hooks{writeAt: func(f *os.File, p []byte, off int64) (int, error) {
			if off == idOffset {
				return 0, syscall.EIO
			}
			return f.WriteAt(p, off)
		}}, all, syscall.EIO.Error()},
		{"framing fails", hooks{writeAt: func(f *os.File, p []byte, off int64) (int, error) { return 0, syscall.EIO }}, nil, syscall.EIO.Error()},
		{"publishing the entry fails", hooks{link: func(from, to string) error {
			if strings.HasSuffix(to, "tiny.ninfer") {
				return &os.LinkError{Op: "link", Old: from, New: to, Err: syscall.EIO}
			}
			return os.Link(from, to)
		}}, all, "publishing"},
		{"no links and the name appears", hooks{link: func(from, to string) error {
			os.WriteFile(filepath.Join(filepath.Dir(to), "tiny.ninfer.part-0002"), []byte("mine"), 0o666)
			return syscall.EPERM
		}}, all, "output exists"},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			p, err := NewPlan("tiny.ninfer", tinyDirectory(), PlanOptions{Limit: 16384 - 4096})
			if err != nil {
				t.Fatal(err)
			}
			w, err := Create(filepath.Join(dir, "tiny.ninfer"), p, WriterOptions{hooks: c.hooks})
			if err == nil {
				first := c.do(w)
				_, err = w.Finish()
				if err == nil {
					t.Fatal("it was published")
				}
				if first != nil && !strings.Contains(err.Error(), first.Error()) {
					t.Errorf("Finish says %q, not the first failure %q", err, first)
				}
			}
			if err == nil || !strings.Contains(err.Error(), c.says) || strings.ContainsAny(err.Error(), "\r\n") {
				t.Errorf("got error %q, want one line with %q", err, c.says)
			}
			names := listing(t, dir)
			if c.says == "output exists" {
				names = slices.DeleteFunc(names, func(n string) bool { return n == "tiny.ninfer.part-0002" })
			}
			if len(names) > 0 {
				t.Errorf("left behind: %q", names)
			}
		})
	}
	t.Run("abort", func(t *testing.T) {
		dir := t.TempDir()
		p, _ := NewPlan("tiny.ninfer", tinyDirectory(), PlanOptions{Limit: 16384})
		w, err := Create(filepath.Join(dir, "tiny.ninfer"), p, WriterOptions{})
		if err != nil {
			t.Fatal(err)
		}
		for _, n := range listing(t, dir) {
			if !strings.HasPrefix(n, ".tiny.ninfer.") {
				t.Errorf("%s is not hidden", n)
			}
		}
		if err := w.Abort(); err != nil {
			t.Error(err)
		}
		if err := w.Abort(); err != nil {
			t.Error(err)
		}
		if names := listing(t, dir); len(names) > 0 {
			t.Errorf("left behind: %q", names)
		}
		if err := w.WriteAt("r.hello", 0, objects["r.hello"]); err == nil {
			t.Error("a write after Abort succeeded")
		}
		if _, err := w.Finish(); err == nil {
			t.Error("Finish after Abort succeeded")
		}
	})
}

// TestNeverOverwrites: an entry or part that exists, or appears while writing,
// stays as it is.
func TestNeverOverwrites(t *testing.T) {
	for _, name := range []string{"tiny.ninfer", "tiny.ninfer.part-0001", "tiny.ninfer.part-0002"} {
		for _, when := range []string{"before", "while", "dangling link"} {
			t.Run(name+"/"+when, func(t *testing.T) {
				dir := t.TempDir()
				p, _ := NewPlan("tiny.ninfer", tinyDirectory(), PlanOptions{Limit: 12288})
				if len(p.Directory.Files) != 3 {
					t.Fatalf("%d files", len(p.Directory.Files))
				}
				there := filepath.Join(dir, name)
				put := func() {
					if when == "dangling link" {
						if err := os.Symlink("nowhere", there); err != nil {
							t.Skip(err)
						}
						return
					}
					save(t, there, []byte("mine"))
				}
				if when != "while" {
					put()
				}
				w, err := Create(filepath.Join(dir, "tiny.ninfer"), p, WriterOptions{})
				if when == "while" && err == nil {
					for id, b := range tinyObjects() {
						w.WriteAt(id, 0, b)
					}
					put()
					_, err = w.Finish()
				}
				if !errors.Is(err, ErrExists) || !strings.Contains(err.Error(), there) {
					t.Errorf("got %v, want ErrExists naming %s", err, there)
				}
				if b, err := os.ReadFile(there); when != "dangling link" && (err != nil || string(b) != "mine") {
					t.Errorf("the file now holds %q, %v", b, err)
				}
				if names := listing(t, dir); len(names) != 1 {
					t.Errorf("directory holds %q", names)
				}
			})
		}
	}
}

// TestHole plans as the dialect L upgrade does: an unreferenced resource
// between two others keeps its bytes, and the id covers them.
func TestHole(t *testing.T) {
	d := &Directory{
		Objects: []Object{
			{ID: "a", Resource: true, Offset: 0, Bytes: 10},
			{ID: "b", Resource: true, Offset: 30, Bytes: 10},
			{ID: "w", Shape: []int{3}, Format: "int32", Layout: "contiguous_le_v1", Offset: 256},
			{ID: "moved", Resource: true, Offset: 512, Bytes: 20},
		},
		Components: []Component{{ID: "text"}},
	}
	fill := func(hole byte) (string, *Receipt) {
		path := filepath.Join(t.TempDir(), "h.ninfer")
		p, err := NewPlan("h.ninfer", d, PlanOptions{Upgrade: true})
		if err != nil {
			t.Fatal(err)
		}
		if want := []Region{{10, 20}, {268, 244}}; !slices.Equal(p.Holes, want) {
			t.Fatalf("holes %v, want %v", p.Holes, want)
		}
		w, err := Create(path, p, WriterOptions{})
		if err != nil {
			t.Fatal(err)
		}
		for i, o := range p.Directory.Objects {
			if err := w.WriteAt(o.ID, 0, bytes.Repeat([]byte{byte(i + 1)}, int(o.Bytes))); err != nil {
				t.Fatal(err)
			}
		}
		for i, h := range p.Holes {
			if err := w.WriteHoleAt(i, 0, bytes.Repeat([]byte{hole}, int(h.Bytes))); err != nil {
				t.Fatal(err)
			}
		}
		r, err := w.Finish()
		if err != nil {
			t.Fatal(err)
		}
		v, err := Verify(path, Options{})
		if err != nil || !v.Passed || v.IDKind != "content" {
			t.Errorf("verify: %+v, %v", v, err)
		}
		return path, r
	}
	_, one := fill(7)
	path, two := fill(8)
	if one.ID == two.ID {
		t.Error("the hole does not enter the id")
	}
	flip(t, path, 4096+15)
	v, err := Verify(path, Options{})
	if err != nil || v.Passed {
		t.Errorf("a flipped byte in a hole passed: %+v, %v", v, err)
	}
}

func flip(t testing.TB, path string, at int64) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var b [1]byte
	if _, err := f.ReadAt(b[:], at); err != nil {
		t.Fatal(err)
	}
	b[0] ^= 0x10
	if _, err := f.WriteAt(b[:], at); err != nil {
		t.Fatal(err)
	}
}
