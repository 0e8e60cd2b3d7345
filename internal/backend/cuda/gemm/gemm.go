// Package gemm multiplies many rows at once: what a prompt needs.
//
// Dense products go to cuBLASLt where it is found, whose algorithm is chosen once for each shape, and otherwise to kernels of this package, which
// also take what the library does not: E4M3 weights of few rows, NVFP4 experts, hyper-connections. Weights are taken exactly as decoding keeps
// them. Nothing here allocates device memory after Load: callers give a workspace. All calls belong on the goroutine that owns the GPU.
//
// A result's row depends on the same row of the input only. The same call gives the same bits: sums have a fixed order, there are no atomics on
// floats. How many rows a call has may change bits, through the library's choice of an algorithm (for up to 512 rows every 64, up to 2,048 every 256,
// then every 1,024) or the number of shares that K is cut into (few rows); the experts' sums and the hyper-connection's do not depend on it.
package gemm

import (
	"fmt"
	"io/fs"

	"ninfer/internal/backend/cuda/driver"
	"ninfer/internal/backend/cuda/dynlib"
	"ninfer/internal/backend/cuda/gemm/kernels"
)

// Options says what to load.
type Options struct {
	Library string // file of cuBLASLt; "" looks where NINFER_CUBLASLT says, then in the usual places; "none" goes without
	Code    fs.FS  // folder with a subfolder fatbin to use instead of the built-in machine code
	Loader  dynlib.Loader
	// Portable says that Code was compiled without warpgroup instructions (-DNINFER_PORTABLE): to try on sm_90 what other GPUs run.
	Portable bool
}

// Set is the loaded kernels of one context, and the library.
type Set struct {
	kernels *kernels.Set
	lib     *library
	without error // why there is no library
	sms     int
	wide    bool // packed experts have warpgroup kernels

	// Trace, if set, is told of every launch after it was made: a benchmark can record an event there.
	Trace func(kernel string)
}

// launch starts a kernel of this package, all of which wait for what was launched before.
func launch[P any](s *Set, c *driver.Context, st driver.Stream, k kernels.ID, grid [3]uint32, shared uint32, params *P) error {
	err := s.kernels.Run(c, st, k, grid, shared, params, true)
	if s.Trace != nil {
		s.Trace(k.Name())
	}
	return err
}

// Load loads kernels and library. A library that is missing or does not work is no error: see Library.
func Load(c *driver.Context, o Options) (*Set, error) {
	k, err := kernels.Load(c, o.Code)
	if err != nil {
		return nil, err
	}
	if o.Loader == nil {
		o.Loader = dynlib.System{}
	}
	s := &Set{kernels: k, sms: c.Device.SMs, wide: c.Device.Major == 9 && !o.Portable}
	s.lib, s.without = openLibrary(o.Loader, o.Library)
	return s, nil
}

// Close frees what Load took.
func (s *Set) Close(c *driver.Context) error {
	if s.lib != nil {
		s.lib.close()
	}
	return s.kernels.Unload(c)
}

// Library is a sentence that says which library multiplies, or why none does.
func (s *Set) Library() string {
	if s.lib == nil {
		return fmt.Sprintf("%v; prompts use ninfer's own kernels, which are slower", s.without)
	}
	return fmt.Sprintf("cuBLASLt %s of %s", s.lib.version(), s.lib.path)
}

// Format is a stored format of a dense matrix.
type Format uint32

// The formats. E4M3 has one scale a row.
const (
	BF16 Format = iota
	E4M3
)

// Matrix is stored weights [N][K], row-major without gaps.
type Matrix struct {
	Data     driver.Ptr // 16-byte aligned
	Scale    driver.Ptr // E4M3: [N] BF16, or FP32 with ScaleF32
	Format   Format
	ScaleF32 bool
	N, K     int // K % 8 = 0; E4M3: 16
}

// Epilogue is a function of a product's elements; the numbers are those of common.cuh.
type Epilogue uint32

// The functions: v, silu(factor v), 2 sigmoid(factor v).
const (
	Plain Epilogue = iota
	Silu
	Sigmoid2
)

// Product is a matrix and where its results go.
type Product struct {
	W        Matrix
	Out      driver.Ptr // [rows][OutLd], BF16, or FP32 with OutF32
	OutLd    int
	OutF32   bool
	Epilogue Epilogue
	Factor   float32 // of the argument of the function; 0 means 1
}

func (p Product) factor() float32 {
	if p.Factor == 0 {
		return 1
	}
	return p.Factor
}

// Workspace is device memory that calls may overwrite; one stream uses it at a time. At is 256-byte aligned.
type Workspace struct {
	At    driver.Ptr
	Bytes uint64
}

// cut takes bytes off the front.
func (w *Workspace) cut(what string, bytes uint64) (driver.Ptr, error) {
	bytes = (bytes + 255) &^ 255
	if bytes > w.Bytes {
		return 0, fmt.Errorf("cuda: %s needs %d bytes of workspace, %d are left", what, bytes, w.Bytes)
	}
	p := w.At
	w.At, w.Bytes = w.At+driver.Ptr(bytes), w.Bytes-bytes
	return p, nil
}

const (
	// widenFrom is the number of rows from which E4M3 weights are made BF16 for the library: with 128 rows that costs as much as own kernels lose,
	// with 256 less.
	widenFrom    = 256
	partialBytes = 32 << 20 // of partial sums
	narrow       = 16       // a matrix of fewer rows goes to kernels of its own
)

// Bytes is the workspace that Multiply needs for any of these products, addresses not looked at, with up to rows rows.
func Bytes(rows int, products []Product) uint64 {
	most := uint64(0)
	for _, p := range products {
		n := uint64(0)
		if p.W.Format == E4M3 && rows >= widenFrom {
			n += 2*uint64(p.W.N)*uint64(p.W.K) + 256
		}
		if p.Epilogue != Plain || p.factor() != 1 {
			n += 4*uint64(rows)*uint64(p.W.N) + 256
		}
		most = max(most, n)
	}
	return most + max(libraryBytes, partialBytes)
}

// check says what is wrong with a product.
func (p Product) check(x driver.Ptr, xLd, rows int) error {
	w := p.W
	unit := 8
	if w.Format == E4M3 {
		unit = 16
	}
	switch {
	case rows < 1 || w.N < 1 || w.K < 1 || w.K%unit != 0 || xLd < w.K || xLd%8 != 0 || p.OutLd < w.N:
	case x%16 != 0 || w.Data%16 != 0 || w.Data == 0 || x == 0 || p.Out == 0 || p.Out%4 != 0:
	case w.Format == E4M3 && w.Scale == 0 || w.Format > E4M3 || p.Epilogue > Sigmoid2:
	case uint64(rows)*uint64(max(xLd, w.N)) >= 1<<32-1 || uint64(w.N)*uint64(w.K) >= 1<<32-1:
	default:
		return nil
	}
	return fmt.Errorf("cuda: no kernel multiplies %d rows (stride %d) by %d x %d weights of format %d into rows of %d", rows, xLd, w.N, w.K, w.Format, p.OutLd)
}

// Multiply computes p.Out[r] = f(W x[r]) for rows rows of x [rows][xLd], BF16. From widenFrom rows on the library gets E4M3 weights as BF16, code times
// scale rounded once; everywhere else sums in FP32 are the only error before the result's rounding.
func (s *Set) Multiply(c *driver.Context, st driver.Stream, x driver.Ptr, xLd, rows int, p Product, ws Workspace) error {
	if err := p.check(x, xLd, rows); err != nil {
		return err
	}
	if s.lib != nil && s.suits(p, rows) {
		if ok, err := s.byLibrary(c, st, x, xLd, rows, p, ws); ok || err != nil {
			return err
		}
	}
	return s.own(c, st, x, xLd, rows, p, ws)
}

// suits says whether a product should go to the library, if it takes it.
func (s *Set) suits(p Product, rows int) bool {
	size := 2
	if p.OutF32 {
		size = 4
	}
	aligned := p.Out%16 == 0 && p.OutLd*size%16 == 0 && p.W.N >= narrow
	return aligned && (p.W.Format == BF16 || rows >= widenFrom)
}

func (s *Set) byLibrary(c *driver.Context, st driver.Stream, x driver.Ptr, xLd, rows int, p Product, ws Workspace) (bool, error) {
	room, err := ws.cut("cuBLASLt", libraryBytes)
	if err != nil {
		return false, err
	}
	key := planKey{rows: rows, n: p.W.N, k: p.W.K, xLd: xLd, outLd: p.OutLd, f32: p.OutF32}
	w := p.W.Data
	after := p.Epilogue != Plain || p.factor() != 1
	out := p.Out
	if after {
		key.outLd, key.f32 = p.W.N, true
		if out, err = ws.cut("a product's sums", 4*uint64(rows)*uint64(p.W.N)); err != nil {
			return false, err
		}
	}
	if p.W.Format == E4M3 {
		if w, err = ws.cut("weights in BF16", 2*uint64(p.W.N)*uint64(p.W.K)); err != nil {
			return false, err
		}
		q := kernels.WidenParams{W: p.W.Data, Scale: p.W.Scale, Out: w, N: uint32(p.W.N), K: uint32(p.W.K)}
		if p.W.ScaleF32 {
			q.ScaleF32 = 1
		}
		if err := launch(s, c, st, kernels.Widen, s.flat(uint64(p.W.N)*uint64(p.W.K)/16), 0, &q); err != nil {
			return false, err
		}
	}
	ok, err := s.lib.multiply(st, key, x, w, out, room)
	if s.Trace != nil {
		s.Trace("cublasLtMatmul")
	}
	if !ok || err != nil || !after {
		return ok, err
	}
	q := kernels.ActivateParams{In: out, Out: p.Out, M: uint32(rows), N: uint32(p.W.N), OutLd: uint32(p.OutLd), Epilogue: uint32(p.Epilogue), Factor: p.factor()}
	if p.OutF32 {
		q.OutF32 = 1
	}
	return true, launch(s, c, st, kernels.Activate, s.flat(uint64(rows)*uint64(p.W.N)), 0, &q)
}

// flat is the grid of a kernel that goes over n elements, a thread each until there are enough blocks.
func (s *Set) flat(n uint64) [3]uint32 {
	return [3]uint32{uint32(min(uint64(s.sms)*16, (n+255)/256)), 1, 1}
}

// split is how own kernels cut a product: activation rows of a tile, tiles, shares of K.
func (s *Set) split(rows, n, k int) (tile, tiles, splits int) {
	tile = 128
	if rows <= 64 {
		tile = 64
	}
	tiles = (rows + tile - 1) / tile * ((n + kernels.TileCols - 1) / kernels.TileCols)
	steps := (k + kernels.TileK - 1) / kernels.TileK
	splits = max(1, min(2*s.sms/tiles, steps/4, partialBytes/(4*rows*n)))
	if tiles >= s.sms {
		splits = 1
	}
	return tile, tiles, splits
}

// own multiplies with this package's kernels.
func (s *Set) own(c *driver.Context, st driver.Stream, x driver.Ptr, xLd, rows int, p Product, ws Workspace) error {
	q := kernels.DenseParams{
		X: x, W: p.W.Data, Scale: p.W.Scale, Out: p.Out, M: uint32(rows), N: uint32(p.W.N), K: uint32(p.W.K), XLd: uint32(xLd),
		OutLd: uint32(p.OutLd), Epilogue: uint32(p.Epilogue), Splits: 1, Factor: p.factor(),
	}
	if p.OutF32 {
		q.OutF32 = 1
	}
	if p.W.ScaleF32 {
		q.ScaleF32 = 1
	}
	if p.W.N < narrow {
		kernel := [2]kernels.ID{kernels.NarrowBf16, kernels.NarrowE4m3}[p.W.Format]
		return launch(s, c, st, kernel, [3]uint32{(q.M + 7) / 8, 1, 1}, 0, &q)
	}
	tile, tiles, splits := s.split(rows, p.W.N, p.W.K)
	if q.Splits = uint32(splits); splits > 1 {
		var err error
		if q.Partial, err = ws.cut("partial sums", 4*uint64(splits)*uint64(rows)*uint64(p.W.N)); err != nil {
			return err
		}
	}
	kernel := [2][2]kernels.ID{{kernels.DenseBf16128, kernels.DenseBf1664}, {kernels.DenseE4m3128, kernels.DenseE4m364}}[p.W.Format][1-tile/128]
	if err := launch(s, c, st, kernel, [3]uint32{uint32(tiles), uint32(splits), 1}, kernels.TileShared(tile), &q); err != nil || splits == 1 {
		return err
	}
	sum := kernels.SumParams{
		Partial: q.Partial, Scale: q.Scale, Out: q.Out, M: q.M, N: q.N, OutLd: q.OutLd, Splits: q.Splits, OutF32: q.OutF32, ScaleF32: q.ScaleF32,
		Epilogue: q.Epilogue, Factor: q.Factor,
	}
	if p.W.Format == BF16 {
		sum.Scale = 0
	}
	return launch(s, c, st, kernels.DenseSum, s.flat(uint64(rows)*uint64(p.W.N)), 0, &sum)
}

// Prepare has the library choose its algorithms for these products of rows rows, xLd values apart, now, so that no prompt waits for it.
func (s *Set) Prepare(rows, xLd int, products []Product) {
	if s.lib == nil {
		return
	}
	for _, p := range products {
		if !s.suits(p, rows) {
			continue
		}
		key := planKey{rows: rows, n: p.W.N, k: p.W.K, xLd: xLd, outLd: p.OutLd, f32: p.OutF32}
		if p.Epilogue != Plain || p.factor() != 1 {
			key.outLd, key.f32 = p.W.N, true
		}
		s.lib.plan(key, false)
	}
}

// Gate computes out[r] = silu(gate[r]) * up[r] for rows of n FP32 numbers, ld apart; out is BF16 [rows][n]. n and ld are even.
func (s *Set) Gate(c *driver.Context, st driver.Stream, gate, up driver.Ptr, ld, n, rows int, out driver.Ptr) error {
	if n%2 != 0 || ld%2 != 0 || n < 1 || rows < 1 {
		return fmt.Errorf("cuda: no gate of %d rows of %d", rows, n)
	}
	return launch(s, c, st, kernels.Gate, s.flat(uint64(rows)*uint64(n)/2), 0,
		&kernels.GateParams{Gate: gate, Up: up, Out: out, M: uint32(rows), N: uint32(n), Ld: uint32(ld)})
}
