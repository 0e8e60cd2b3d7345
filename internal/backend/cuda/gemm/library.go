package gemm

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"unsafe"

	"ninfer/internal/backend/cuda/driver"
	"ninfer/internal/backend/cuda/dynlib"
)

// LibraryVariable is the environment variable that names the library's file, or "none".
const LibraryVariable = "NINFER_CUBLASLT"

// libraryBytes is the workspace that the library's algorithms may use.
const libraryBytes = 32 << 20

// function indices; the order is that of libraryNames.
const (
	fVersion = iota
	fCreate
	fDestroy
	fDescCreate
	fDescDestroy
	fDescSet
	fLayoutCreate
	fLayoutDestroy
	fLayoutSet
	fPrefCreate
	fPrefDestroy
	fPrefSet
	fHeuristic
	fMatmul
	nLibrary
)

var libraryNames = [nLibrary]string{
	"cublasLtGetVersion", "cublasLtCreate", "cublasLtDestroy", "cublasLtMatmulDescCreate", "cublasLtMatmulDescDestroy",
	"cublasLtMatmulDescSetAttribute", "cublasLtMatrixLayoutCreate", "cublasLtMatrixLayoutDestroy", "cublasLtMatrixLayoutSetAttribute",
	"cublasLtMatmulPreferenceCreate", "cublasLtMatmulPreferenceDestroy", "cublasLtMatmulPreferenceSetAttribute",
	"cublasLtMatmulAlgoGetHeuristic", "cublasLtMatmul",
}

// Numbers of the library's interface (cublasLt.h).
const (
	typeF32, typeBF16                              = 0, 14
	computeF32                                     = 68
	descTransA                                     = 3
	layoutCols                                     = 3
	prefWorkspace, prefAlignA, prefAlignD, opTrans = 1, 5, 8, 1
	statusNotSupported                             = 15
)

// library is cuBLASLt.
type library struct {
	ld     dynlib.Loader
	fn     [nLibrary]uintptr
	handle uintptr
	path   string
	plans  map[planKey]*plan
	words  *libraryWords
}

// libraryWords is what calls read: one heap object that does not move.
type libraryWords struct {
	one, zero float32
	args      [16]uintptr
	cols      uint64
}

// planKey is a product as the library's choice depends on it.
type planKey struct {
	rows, n, k, xLd, outLd int
	f32                    bool
}

// plan is the library's choice for a product, made once.
type plan struct {
	ok                bool // the library takes it
	desc, w, x, y     uintptr
	algorithm         *[8]uint64
	exact             bool // for this number of rows only
	workspaceRequired uint64
}

// result is cublasLtMatmulHeuristicResult_t.
type result struct {
	algorithm [8]uint64
	workspace uint64
	state     int32
	_         float32 // waves of blocks
	_         [4]int32
}

// places lists where the library usually lies.
func places() []string {
	if runtime.GOOS == "windows" {
		list := []string{"cublasLt64_13.dll", "cublasLt64_12.dll"}
		if dir := os.Getenv("CUDA_PATH"); dir != "" {
			for _, sub := range []string{`bin\x64`, "bin"} {
				list = append(list, filepath.Join(dir, sub, "cublasLt64_13.dll"), filepath.Join(dir, sub, "cublasLt64_12.dll"))
			}
		}
		return list
	}
	names := []string{"libcublasLt.so.13", "libcublasLt.so.12"}
	list := append([]string{}, names...) // where the linker looks
	var dirs []string
	for _, v := range []string{"CUDA_HOME", "CUDA_PATH"} {
		if dir := os.Getenv(v); dir != "" {
			dirs = append(dirs, filepath.Join(dir, "lib64"), filepath.Join(dir, "lib"))
		}
	}
	target := map[string]string{"amd64": "x86_64-linux", "arm64": "sbsa-linux"}[runtime.GOARCH]
	dirs = append(dirs, "/usr/local/cuda/lib64", "/usr/local/cuda/targets/"+target+"/lib", "/opt/cuda/lib64", "/usr/lib/"+strings.TrimSuffix(target, "-linux")+"-linux-gnu")
	for _, d := range dirs {
		for _, n := range names {
			list = append(list, filepath.Join(d, n))
		}
	}
	return list
}

// openLibrary finds and starts the library. path overrides the environment variable, which overrides the usual places.
func openLibrary(ld dynlib.Loader, path string) (*library, error) {
	list := places()
	if path == "" {
		path = os.Getenv(LibraryVariable)
	}
	switch path {
	case "":
	case "none":
		return nil, errors.New("cuBLASLt is switched off")
	default:
		list = []string{path}
	}
	l := &library{ld: ld, plans: map[planKey]*plan{}, words: &libraryWords{one: 1}}
	var h uintptr
	err := errors.New("")
	for _, name := range list {
		if h, err = ld.Open(name); err == nil {
			l.path = name
			break
		}
	}
	if err != nil {
		if len(list) == 1 {
			return nil, fmt.Errorf("cuBLASLt of %s cannot be used: %w", path, err)
		}
		return nil, fmt.Errorf("cuBLASLt was not found: install the CUDA toolkit's library, or set %s to its file", LibraryVariable)
	}
	for i, name := range libraryNames {
		if l.fn[i] = ld.Symbol(h, name); l.fn[i] == 0 {
			return nil, fmt.Errorf("cuBLASLt of %s has no %s", l.path, name)
		}
	}
	if r := l.call(fCreate, dynlib.Address(&l.handle)); r != 0 {
		return nil, fmt.Errorf("cuBLASLt of %s does not start: status %d", l.path, r)
	}
	return l, nil
}

func (l *library) call(f int, args ...uintptr) int { return int(uint32(l.ld.Call(l.fn[f], args))) }

// version is the library's own number, "13.1.0".
func (l *library) version() string {
	v := l.ld.Call(l.fn[fVersion], nil)
	if v >= 100000 {
		return fmt.Sprintf("%d.%d.%d", v/10000, v/100%100, v%100)
	}
	return fmt.Sprintf("%d.%d.%d", v/1000, v/100%10, v%100)
}

func (l *library) close() {
	for _, p := range l.plans {
		l.forget(p)
	}
	l.call(fDestroy, l.handle)
}

func (l *library) forget(p *plan) {
	for _, h := range []uintptr{p.w, p.x, p.y} {
		if h != 0 {
			l.call(fLayoutDestroy, h)
		}
	}
	if p.desc != 0 {
		l.call(fDescDestroy, p.desc)
	}
}

// bucket is the number of rows an algorithm is chosen for: all numbers that share it have the same one.
func bucket(rows int) int {
	step := 1024
	switch {
	case rows <= 512:
		step = 64
	case rows <= 2048:
		step = 256
	}
	return (rows + step - 1) / step * step
}

// plan finds the library's algorithm for a product, which is the same in every run.
func (l *library) plan(key planKey, exact bool) *plan {
	rows := key.rows
	if !exact {
		key.rows = bucket(rows)
	}
	if p := l.plans[key]; p != nil && (!exact || p.exact) {
		return p
	}
	p := l.choose(key)
	p.exact = exact
	if old := l.plans[key]; old != nil {
		l.forget(old)
	}
	l.plans[key] = p
	return p
}

// choose asks the library. The result is column-major [N][rows] = W (row-major, hence transposed) times X.
func (l *library) choose(key planKey) *plan {
	p := &plan{algorithm: new([8]uint64)}
	// nothing below keeps these addresses
	word, wide := new(int32), new(uint64)
	at, wideAt := dynlib.Address(word), dynlib.Address(wide)
	outType := uintptr(typeBF16)
	if key.f32 {
		outType = typeF32
	}
	ok := l.call(fDescCreate, dynlib.Address(&p.desc), computeF32, typeF32) == 0
	*word = opTrans
	ok = ok && l.call(fDescSet, p.desc, descTransA, at, 4) == 0
	ok = ok && l.call(fLayoutCreate, dynlib.Address(&p.w), typeBF16, uintptr(key.k), uintptr(key.n), uintptr(key.k)) == 0
	ok = ok && l.call(fLayoutCreate, dynlib.Address(&p.x), typeBF16, uintptr(key.k), uintptr(key.rows), uintptr(key.xLd)) == 0
	ok = ok && l.call(fLayoutCreate, dynlib.Address(&p.y), outType, uintptr(key.n), uintptr(key.rows), uintptr(key.outLd)) == 0
	pref := new(uintptr)
	ok = ok && l.call(fPrefCreate, dynlib.Address(pref)) == 0
	if !ok {
		return p
	}
	*wide = libraryBytes
	ok = l.call(fPrefSet, *pref, prefWorkspace, wideAt, 8) == 0
	*word = 16 // what weights and activations keep to; the library thinks of 256 otherwise
	for a := uintptr(prefAlignA); a <= prefAlignD; a++ {
		ok = l.call(fPrefSet, *pref, a, at, 4) == 0 && ok
	}
	best, n := new(result), new(int32)
	r := l.call(fHeuristic, l.handle, p.desc, p.w, p.x, p.y, p.y, *pref, 1, dynlib.Address(best), dynlib.Address(n))
	l.call(fPrefDestroy, *pref)
	p.ok = ok && r == 0 && *n > 0 && best.state == 0 && best.workspace <= libraryBytes
	*p.algorithm, p.workspaceRequired = best.algorithm, best.workspace
	runtime.KeepAlive(word)
	runtime.KeepAlive(wide)
	return p
}

// multiply launches a product on st. ok is false where the library does not take it.
func (l *library) multiply(st driver.Stream, key planKey, x, w, out, workspace driver.Ptr) (ok bool, err error) {
	for _, exact := range []bool{false, true} {
		p := l.plan(key, exact)
		if !p.ok {
			continue
		}
		v := l.words
		v.cols = uint64(key.rows)
		at := dynlib.Address(&v.cols)
		if l.call(fLayoutSet, p.x, layoutCols, at, 8) != 0 || l.call(fLayoutSet, p.y, layoutCols, at, 8) != 0 {
			continue
		}
		v.args = [16]uintptr{
			l.handle, p.desc, uintptr(unsafe.Pointer(&v.one)), uintptr(w), p.w, uintptr(x), p.x, uintptr(unsafe.Pointer(&v.zero)), uintptr(out), p.y, uintptr(out), p.y,
			uintptr(unsafe.Pointer(p.algorithm)), uintptr(workspace), libraryBytes, uintptr(st),
		}
		r := int(uint32(l.ld.Call(l.fn[fMatmul], v.args[:])))
		runtime.KeepAlive(p)
		runtime.KeepAlive(v)
		switch r {
		case 0:
			return true, nil
		case statusNotSupported:
		default:
			return false, fmt.Errorf("cuda: cublasLtMatmul of %d rows of %d by %d: status %d", key.rows, key.k, key.n, r)
		}
	}
	return false, nil
}
