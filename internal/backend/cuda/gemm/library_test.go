package gemm

import (
	"errors"
	"strings"
	"testing"
)

// linker is a dynamic linker that has one library, with some of its functions.
type linker struct {
	name   string
	lacks  string
	status uintptr
	calls  []uintptr
}

func (l *linker) Open(names ...string) (uintptr, error) {
	for _, n := range names {
		if n == l.name {
			return 1, nil
		}
	}
	return 0, errors.New("no such file")
}

func (l *linker) Symbol(_ uintptr, name string) uintptr {
	for i, n := range libraryNames {
		if n == name && n != l.lacks {
			return uintptr(i + 1)
		}
	}
	return 0
}

func (l *linker) Call(fn uintptr, _ []uintptr) uintptr {
	l.calls = append(l.calls, fn)
	if fn == fVersion+1 {
		return 130100
	}
	return l.status
}

// A library that is missing, damaged or switched off is a sentence, not a failure; one that works is asked for its number.
func TestLibrary(t *testing.T) {
	t.Setenv(LibraryVariable, "")
	t.Setenv("CUDA_HOME", "/cuda")
	for _, q := range []struct {
		l    linker
		path string
		want string
	}{
		{linker{}, "", "cuBLASLt was not found: install the CUDA toolkit's library, or set NINFER_CUBLASLT to its file"},
		{linker{}, "/x/libcublasLt.so.13", "cuBLASLt of /x/libcublasLt.so.13 cannot be used: no such file"},
		{linker{name: "libcublasLt.so.13"}, "none", "cuBLASLt is switched off"},
		{linker{name: "libcublasLt.so.12", lacks: "cublasLtMatmul"}, "", "cuBLASLt of libcublasLt.so.12 has no cublasLtMatmul"},
		{linker{name: "/cuda/lib64/libcublasLt.so.13", status: 1}, "", "cuBLASLt of /cuda/lib64/libcublasLt.so.13 does not start: status 1"},
	} {
		_, err := openLibrary(&q.l, q.path)
		if err == nil || err.Error() != q.want {
			t.Errorf("got %v, want %q", err, q.want)
		}
	}
	for _, name := range places() {
		l, err := openLibrary(&linker{name: name}, "")
		if err != nil || l.path != name || l.version() != "13.1.0" {
			t.Errorf("%s: %v %+v", name, err, l)
		}
	}
	s := &Set{}
	_, s.without = openLibrary(&linker{}, "")
	if got := s.Library(); !strings.HasSuffix(got, "prompts use ninfer's own kernels, which are slower") {
		t.Error(got)
	}
	t.Setenv(LibraryVariable, "/somewhere/lib.so")
	if l, err := openLibrary(&linker{name: "/somewhere/lib.so"}, ""); err != nil || l.path != "/somewhere/lib.so" {
		t.Error(err)
	}
}

// All row counts of a bucket share an algorithm, and a bucket is not larger than what it stands for by more than a quarter.
func TestBuckets(t *testing.T) {
	for rows := 1; rows < 20000; rows++ {
		b := bucket(rows)
		if b < rows || bucket(b) != b || b-rows >= 64 && b-rows > rows/2 {
			t.Fatalf("%d rows: %d", rows, b)
		}
	}
}

// What own kernels cannot take is an error, not a launch; splits leave work for every share and stay inside the workspace.
func TestPlans(t *testing.T) {
	s := &Set{sms: 132}
	for rows := 1; rows <= 8192; rows += 37 {
		for _, m := range []struct{ n, k int }{{48, 2560}, {320, 10240}, {10240, 320}, {2560, 6144}, {16384, 2560}, {1, 8}} {
			tile, tiles, splits := s.split(rows, m.n, m.k)
			if tile*((tiles-1)/((m.n+127)/128)) >= rows+tile || splits < 1 || splits > (m.k+63)/64 || splits > 1 && 4*splits*rows*m.n > partialBytes {
				t.Errorf("%d rows, %v: %d %d %d", rows, m, tile, tiles, splits)
			}
		}
	}
	good := Product{W: Matrix{Data: 256, N: 8, K: 32}, Out: 512, OutLd: 8}
	if err := good.check(256, 32, 1); err != nil {
		t.Error(err)
	}
	for name, f := range map[string]func(*Product){
		"no rows": func(p *Product) { p.W.N = 0 }, "odd k": func(p *Product) { p.W.K = 33 }, "unaligned": func(p *Product) { p.W.Data = 8 },
		"no scale": func(p *Product) { p.W.Format = E4M3 }, "short rows": func(p *Product) { p.OutLd = 7 }, "no result": func(p *Product) { p.Out = 0 },
		"format": func(p *Product) { p.W.Format = 2 }, "epilogue": func(p *Product) { p.Epilogue = 3 },
	} {
		p := good
		f(&p)
		if p.check(256, 40, 1) == nil {
			t.Errorf("%s: no error", name)
		}
	}
	for _, m := range []Mixture{
		{Experts: 513, TopK: 10, Hidden: 2560, Inter: 640},
		{Experts: 512, TopK: 17, Hidden: 2560, Inter: 640},
		{Experts: 8, TopK: 2, Hidden: 100, Inter: 128},
		{Experts: 8, TopK: 9, Hidden: 128, Inter: 128},
		{Experts: 8, TopK: 2, Hidden: 128, Inter: 128, GateUp: Bank{Layout: Tiles8}},
	} {
		m.GateUp.Divisors, m.Down.Divisors = 16, 16
		if m.Fits() == nil {
			t.Errorf("%+v: no error", m)
		}
	}
}
