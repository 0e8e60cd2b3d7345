package convert

import (
	"context"
	"encoding/binary"
	"encoding/json/v2"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"ninfer/internal/arch"
	"ninfer/internal/hf"
)

// speedVar names a folder with room for 15 GB; it turns TestSpeed on. speedToVar may name another for what is written, on another disk.
const (
	speedVar   = "NINFER_CONVERT_SPEED"
	speedToVar = "NINFER_CONVERT_SPEED_TO"
)

// TestSpeed measures conversions of a generated checkpoint of 4 GiB or a little more, made of real shapes with fewer layers and experts, beside plain
// reading and writing of the same bytes on the same disks in the same run.
func TestSpeed(t *testing.T) {
	root := os.Getenv(speedVar)
	if root == "" {
		t.Skipf("%s names no folder", speedVar)
	}
	for _, o := range []Options{
		{Profile: "radixark"},
		{Profile: "swift", PLEFormat: "fp8_e4m3fn", ProjectionFormat: "fp8_e4m3fn_row_bf16", MTPExpertFormat: "nvfp4"},
		{Profile: "mixed"},
	} {
		v, err := arch.ParseVariant(o.Profile, o.PLEFormat, o.ProjectionFormat, o.MTPExpertFormat)
		if err != nil {
			t.Fatal(err)
		}
		t.Run(v.OutputName(), func(t *testing.T) {
			dir, err := os.MkdirTemp(root, "ninfer-speed-")
			if err != nil {
				t.Fatal(err)
			}
			defer os.RemoveAll(dir)
			to := dir
			if other := os.Getenv(speedToVar); other != "" {
				if to, err = os.MkdirTemp(other, "ninfer-speed-"); err != nil {
					t.Fatal(err)
				}
				defer os.RemoveAll(to)
			}
			o.Model, o.Out = filepath.Join(dir, "model"), filepath.Join(to, v.OutputName())
			source, table := generate(t, o.Model, v)
			if v.Profile == arch.Mixed {
				o.PLE = filepath.Join(o.Model, packedFolder)
			}
			dropCaches(t)
			read := rate(source, func() { readAll(t, o.Model) })
			plain := func() float64 {
				path := filepath.Join(to, "plain")
				defer os.Remove(path)
				dropCaches(t)
				return rate(source, func() { writePlain(t, path, source) })
			}
			write := plain()
			// Reading and writing at once, as a conversion does: some disks do one after the other.
			dropCaches(t)
			path := filepath.Join(to, "both")
			both := rate(source, func() {
				var wg sync.WaitGroup
				wg.Go(func() { readAll(t, o.Model) })
				wg.Go(func() { writePlain(t, path, source) })
				wg.Wait()
			})
			os.Remove(path)
			dropCaches(t)
			var r *Report
			cpu, moved, start := processTime(), diskBytes(), time.Now()
			if r, err = Run(context.Background(), o); err != nil {
				t.Fatal(err)
			}
			took := time.Since(start).Seconds()
			cpu, moved = processTime()-cpu, diskBytes()-moved
			converted := float64(source) / took
			write = (write + plain()) / 2 // before and after: others may use the disk
			twice := int64(0)
			if v.FP8PLE && hf.KeepBytes() < table {
				twice = table
			}
			path = filepath.Join(to, "copy")
			dropCaches(t)
			same := rate(source, func() { copyAll(t, o.Model, path, twice, r.FileBytes) })
			os.Remove(path)
			t.Logf("source %.2f GB, artifact %.2f GB, read twice %.2f GB: read %.0f MB/s, write and sync %.0f MB/s, both at once %.0f MB/s each, copier of the same bytes %.0f MB/s of source",
				float64(source)/1e9, float64(r.FileBytes)/1e9, float64(twice)/1e9, read/1e6, write/1e6, both/1e6, same/1e6)
			t.Logf("convert %.0f MB/s of source (%.2f of the slower, %.2f of both at once, %.2f of the copier), %.0f MB/s to and from the disk, %.2f ns of processor a byte on %d cores, peak memory %d MiB",
				converted/1e6, converted/min(read, write), converted/both, converted/same, float64(moved)/took/1e6,
				float64(cpu.Nanoseconds())/float64(source), runtime.GOMAXPROCS(0), peakMemory()>>20)
		})
	}
}

func rate(n int64, f func()) float64 {
	start := time.Now()
	f()
	return float64(n) / time.Since(start).Seconds()
}

// dropCaches forgets file contents, where that is allowed: then everything comes from the disk. What is not written yet cannot be forgotten.
func dropCaches(t *testing.T) {
	syncAll()
	if err := os.WriteFile("/proc/sys/vm/drop_caches", []byte("3"), 0); err != nil {
		t.Logf("file contents may be cached: %v", err)
	}
}

func readAll(t *testing.T, dir string) {
	b := make([]byte, 4<<20)
	err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		f, err := os.Open(path)
		if err != nil {
			return err
		}
		defer f.Close()
		_, err = io.CopyBuffer(struct{ io.Writer }{io.Discard}, struct{ io.Reader }{f}, b)
		return err
	})
	if err != nil {
		t.Error(err)
	}
}

func writePlain(t *testing.T, path string, n int64) {
	f, err := os.Create(path)
	if err != nil {
		t.Error(err)
		return
	}
	defer f.Close()
	b := make([]byte, 4<<20)
	for ; n > 0 && err == nil; n -= int64(len(b)) {
		_, err = f.Write(b[:min(int64(len(b)), n)])
	}
	if err == nil {
		err = f.Sync()
	}
	if err != nil {
		t.Error(err)
	}
}

// copyAll moves the bytes that a conversion moves and does nothing else: it reads the first bytes of a folder's files, as many as a conversion
// reads twice, then all of them while it writes as many as the artifact has. It does so in pieces of 4 MiB, 32 at a time, past the page cache
// where the file systems allow it, into reserved space, and syncs.
func copyAll(t *testing.T, dir, path string, twice, out int64) {
	const size, page = 4 << 20, 4096
	type piece struct {
		f   *os.File
		off int64
		n   int
	}
	var pieces []piece
	err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		info, err := e.Info()
		if err != nil {
			return err
		}
		f, err := openPast(path, os.O_RDONLY)
		for off := int64(0); err == nil && off < info.Size(); off += size {
			pieces = append(pieces, piece{f, off, int(min(size, info.Size()-off))})
		}
		return err
	})
	defer func() {
		for _, p := range pieces {
			p.f.Close()
		}
	}()
	if err != nil {
		t.Error(err)
		return
	}
	dst, err := openPast(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL)
	if err != nil {
		t.Error(err)
		return
	}
	defer dst.Close()
	reserve(dst, out)
	each := func(n int, f func(i int, b []byte) error) {
		var next atomic.Int64
		var wg sync.WaitGroup
		for range 32 {
			wg.Go(func() {
				b, free := pages(size)
				defer free()
				for i := int(next.Add(1)) - 1; i < n; i = int(next.Add(1)) - 1 {
					if err := f(i, b); err != nil {
						t.Error(err)
						return
					}
				}
			})
		}
		wg.Wait()
	}
	read := func(i int, b []byte) error {
		n, err := pieces[i].f.ReadAt(b, pieces[i].off)
		if n >= pieces[i].n {
			err = nil
		}
		return err
	}
	each(int(twice/size), read)
	begin := func(i int) int64 { return int64(float64(out)*float64(i)/float64(len(pieces))) / page * page }
	each(len(pieces), func(i int, b []byte) error {
		if err := read(i, b); err != nil {
			return err
		}
		_, err := dst.WriteAt(b[:begin(i+1)-begin(i)], begin(i))
		return err
	})
	if err := dst.Sync(); err != nil {
		t.Error(err)
	}
}

// generate writes a checkpoint of real shapes and returns its size and that of the n-gram table in it.
func generate(t *testing.T, dir string, v arch.Variant) (all, table int64) {
	t.Helper()
	rows := map[arch.Profile]int{arch.Radixark: 710_000, arch.Swift: 400_000, arch.Mixed: 1_270_000}[v.Profile] // of one head: gives 4 GiB
	if err := os.Mkdir(dir, 0o777); err != nil {
		t.Fatal(err)
	}
	for _, r := range arch.Resources() {
		if err := os.WriteFile(filepath.Join(dir, r.Role), read(t, filepath.Join(micro, r.Role)), 0o666); err != nil {
			t.Fatal(err)
		}
	}
	text := strings.NewReplacer(
		`"num_hidden_layers": 48`, `"num_hidden_layers": 4`, `"num_experts": 512`, `"num_experts": 64`, `"vocab_size": 248320`, `"vocab_size": 16384`,
		`"ngram_vocab_size_base": 20000000`, fmt.Sprintf(`"ngram_vocab_size_base": %d`, rows), `"split_ngram_parts": 128`, `"split_ngram_parts": 16`,
		`"eos_token_id": 248044`, `"eos_token_id": 6`, `"bos_token_id": 248044`, `"bos_token_id": 6`, `"depth": 27`, `"depth": 2`,
		`"image_token_id": 248056`, `"image_token_id": 4`, `"video_token_id": 248057`, `"video_token_id": 5`,
		`"vision_start_token_id": 248053`, `"vision_start_token_id": 2`, `"vision_end_token_id": 248054`, `"vision_end_token_id": 3`,
		`"language_model_only": false,`, map[arch.Profile]string{
			arch.Mixed: `"quantization_config": {"quant_method": "compressed-tensors"},`,
		}[v.Profile]+map[bool]string{true: `"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"},`}[v.Profile != arch.Mixed],
		`"use_cache": true,`, map[bool]string{true: `"ple_embedding_dtype": "float8_e4m3fn",`}[v.Profile == arch.Radixark],
	).Replace(string(read(t, "../arch/official.json")))
	if err := os.WriteFile(filepath.Join(dir, "config.json"), []byte(text), 0o666); err != nil {
		t.Fatal(err)
	}
	c, err := arch.ParseConfig([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	specs, err := arch.Inventory(c, v, 256)
	if err != nil {
		t.Fatal(err)
	}
	g := c.Text.Ngram(0)
	w := &generator{t: t, dir: dir, index: map[string]string{}}
	index := map[string][]int64{}
	for i, x := range c.IndexTensors() {
		index[x.Name] = [][]int64{g.Multipliers, g.Offsets, g.Sizes}[i]
	}
	for _, x := range arch.SourceTensors(specs) {
		if c.IsTableShard(x.Name) {
			table += sizeOf(x)
		}
		w.tensor(x, index[x.Name])
	}
	w.flush("")
	out, err := json.Marshal(map[string]any{"weight_map": w.index}, json.Deterministic(true))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "model.safetensors.index.json"), out, 0o666); err != nil {
		t.Fatal(err)
	}
	if v.Profile == arch.Mixed {
		w.dir = filepath.Join(dir, packedFolder)
		if err := os.Mkdir(w.dir, 0o777); err != nil {
			t.Fatal(err)
		}
		meta := fmt.Sprintf(`{"layout": %q, "shards": 16, "rows": %d, "width": %d}`, packedLayout, g.Rows, g.HeadWidth)
		if err := os.WriteFile(filepath.Join(w.dir, packedMeta), []byte(meta), 0o666); err != nil {
			t.Fatal(err)
		}
		for i := range 16 {
			n := int(g.Rows) / 16
			w.tensor(arch.SourceTensor{Name: packedCodes, DType: "U8", Shape: []int{n, g.HeadWidth / 2}}, nil)
			w.tensor(arch.SourceTensor{Name: packedScales, DType: "F16", Shape: []int{n, g.HeadWidth / 16}}, nil)
			w.flush(fmt.Sprintf("shard_%d.safetensors", i))
		}
	}
	return w.total, table
}

// generator writes random tensors into shards of about half a gigabyte.
type generator struct {
	t     *testing.T
	dir   string
	index map[string]string
	total int64

	words map[string][]byte // random words of a dtype
	list  []arch.SourceTensor
	data  [][]byte // of those that are not random
	size  int64
	files int
}

func (w *generator) tensor(x arch.SourceTensor, values []int64) {
	if w.size > 1<<29 {
		w.flush("")
	}
	var data []byte
	for _, n := range values {
		data = binary.LittleEndian.AppendUint64(data, uint64(n))
	}
	if x.DType == "F32" && num64(x.Shape) == 1 {
		data = scalar(1)
	}
	w.list, w.data = append(w.list, x), append(w.data, data)
	w.size += sizeOf(x)
}

func sizeOf(x arch.SourceTensor) int64 {
	return int64(num64(x.Shape)) * map[string]int64{"BF16": 2, "F16": 2, "F32": 4, "I64": 8, "U8": 1, "F8_E4M3": 1}[x.DType]
}

// random are 16 MB of legal words of a dtype.
func (w *generator) random(dtype string) []byte {
	if w.words == nil {
		w.words = map[string][]byte{}
	}
	if p := w.words[dtype]; p != nil {
		return p
	}
	r := rand.New(rand.NewPCG(1, 2))
	p := make([]byte, 16<<20)
	for i := 0; i < len(p); i += 8 {
		binary.LittleEndian.PutUint64(p[i:], r.Uint64())
	}
	switch dtype {
	case "BF16": // magnitudes from 2^-9 to 2^-5
		for i := 1; i < len(p); i += 2 {
			p[i] = p[i]&0x80 | 0x3b + p[i]&1
		}
	case "F16", "F32":
		for i := 1; i < len(p); i += 2 {
			p[i] = 0x2c + p[i]&3
		}
	case "F8_E4M3":
		for i := range p {
			p[i] = 0x20 + p[i]&0x1f
		}
	}
	w.words[dtype] = p
	return p
}

func (w *generator) flush(name string) {
	if len(w.list) == 0 {
		return
	}
	if name == "" {
		w.files++
		name = fmt.Sprintf("model-%05d.safetensors", w.files)
	}
	header := map[string]any{}
	off := int64(0)
	for _, x := range w.list {
		shape := x.Shape
		if shape == nil {
			shape = []int{}
		}
		header[x.Name] = map[string]any{"dtype": x.DType, "shape": shape, "data_offsets": []int64{off, off + sizeOf(x)}}
		off += sizeOf(x)
		w.index[x.Name] = name
	}
	h, err := json.Marshal(header, json.Deterministic(true))
	if err != nil {
		w.t.Fatal(err)
	}
	f, err := os.Create(filepath.Join(w.dir, name))
	if err != nil {
		w.t.Fatal(err)
	}
	defer f.Close()
	write := func(p []byte) {
		if _, err := f.Write(p); err != nil {
			w.t.Fatal(err)
		}
		w.total += int64(len(p))
	}
	write(slices.Concat(binary.LittleEndian.AppendUint64(nil, uint64(len(h))), h))
	for i, x := range w.list {
		if w.data[i] != nil {
			write(w.data[i])
			continue
		}
		p := w.random(x.DType)
		for n := sizeOf(x); n > 0; {
			k := min(n, int64(len(p)))
			write(p[:k])
			n -= k
		}
	}
	w.list, w.data, w.size = nil, nil, 0
}
