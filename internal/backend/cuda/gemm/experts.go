package gemm

import (
	"fmt"

	"ninfer/internal/backend/cuda/driver"
	"ninfer/internal/backend/cuda/gemm/kernels"
)

// Layout says how a bank of experts lies in memory.
type Layout uint32

// The layouts.
const (
	Tiles16 Layout = iota // cuda/kernels' Repack: NVFP4 in tiles of 16 rows, of gate/up 8 gate rows with their 8 up rows
	Tiles8                // down in tiles of 8 rows
	Stored                // NVFP4 as artifacts have it: codes row by row, scales in tiles of 128 rows by 4 groups
	Plain16               // BF16, row by row
)

// Bank is the weights of one half of all experts, [E][N][K].
type Bank struct {
	Data     driver.Ptr
	Scales   driver.Ptr // Stored only
	Divisors driver.Ptr // FP32 [E], not for Plain16
	Layout   Layout
}

// Mixture is a mixture of experts without its router and its shared expert.
type Mixture struct {
	Experts, TopK, Hidden, Inter int
	GateUp                       Bank // N = 2 Inter, K = Hidden; in Stored and Plain16 the gate's rows come first
	Down                         Bank // N = Hidden, K = Inter
	Normalize                    bool // divide the chosen weights by their sum
}

// Fits says whether there are kernels for the mixture.
func (m Mixture) Fits() error {
	fits := func(b Bank, n, k int, up bool) bool {
		switch b.Layout {
		case Tiles16:
			return n%16 == 0 && k%128 == 0 && b.Divisors != 0
		case Tiles8:
			return !up && n%16 == 0 && k%128 == 0 && b.Divisors != 0
		case Stored:
			return n%128 == 0 && k%64 == 0 && b.Divisors != 0 && b.Scales != 0
		case Plain16:
			return n%16 == 0 && k%64 == 0
		}
		return false
	}
	packed := func(b Bank) bool { return b.Layout == Tiles16 || b.Layout == Tiles8 }
	if packed(m.GateUp) != packed(m.Down) || m.Experts < 1 || m.Experts > kernels.MaxExpert || m.TopK < 1 || m.TopK > min(kernels.MaxTop, m.Experts) || m.Inter%8 != 0 ||
		!fits(m.GateUp, 2*m.Inter, m.Hidden, true) || !fits(m.Down, m.Hidden, m.Inter, false) {
		return fmt.Errorf("cuda: no kernels for %d experts, top %d, of %d by %d in layouts %d and %d", m.Experts, m.TopK, m.Inter, m.Hidden, m.GateUp.Layout, m.Down.Layout)
	}
	return nil
}

func (m Mixture) items(rows int) int {
	return rows*m.TopK/kernels.TileRows + min(m.Experts, rows*m.TopK)
}

// Bytes is the workspace that Experts needs for up to rows rows.
func (m Mixture) Bytes(rows int) uint64 {
	r, pairs := uint64(rows), uint64(rows)*uint64(m.TopK)
	runs := (r + kernels.RunRows - 1) / kernels.RunRows
	return 2*r*uint64(m.Hidden) + 2*pairs*uint64(m.Inter) + 2*pairs*uint64(m.Hidden) + 8*pairs + 4*runs*uint64(m.Experts) + 4*uint64(m.Experts) +
		16*uint64(m.items(rows)) + 16*256
}

// Route chooses experts: of each of rows rows of logits (FP32 [rows][Experts]) the TopK largest, of equal ones the lower id, as chosen (uint32
// [rows][TopK], largest first), and their weights (FP32 likewise).
func (s *Set) Route(c *driver.Context, st driver.Stream, m Mixture, logits driver.Ptr, rows int, chosen, weight driver.Ptr) error {
	if err := m.Fits(); err != nil {
		return err
	}
	q := kernels.RouteParams{Logits: logits, Chosen: chosen, Weight: weight, M: uint32(rows), Experts: uint32(m.Experts), Topk: uint32(m.TopK)}
	if m.Normalize {
		q.Normalize = 1
	}
	return launch(s, c, st, kernels.Route, [3]uint32{(q.M + 7) / 8, 1, 1}, 0, &q)
}

// Experts computes out[r] = sum over ranks of weight * expert(x[r]) + sigmoid(sharedLogit[r]) * shared[r], BF16 [rows][Hidden]. x is BF16
// [rows][Hidden]; chosen and weight are Route's, whose experts differ within a row; shared is FP32 [rows][Hidden] with sharedLogit FP32 [rows], or both 0.
func (s *Set) Experts(c *driver.Context, st driver.Stream, m Mixture, x driver.Ptr, rows int, chosen, weight, shared, sharedLogit, out driver.Ptr, ws Workspace) error {
	if err := m.Fits(); err != nil {
		return err
	}
	if rows < 1 || uint64(rows)*uint64(max(m.Hidden, m.TopK*m.Inter)) >= 1<<32-1 {
		return fmt.Errorf("cuda: no kernels for experts of %d rows", rows)
	}
	if need := m.Bytes(rows); ws.Bytes < need {
		return fmt.Errorf("cuda: experts of %d rows need %d bytes of workspace, there are %d", rows, need, ws.Bytes)
	}
	pairs := rows * m.TopK
	runs := (rows + kernels.RunRows - 1) / kernels.RunRows
	items := m.items(rows)
	var at [9]driver.Ptr
	for i, n := range []int{2 * rows * m.Hidden, 2 * pairs * m.Inter, 2 * pairs * m.Hidden, 4 * pairs, 4 * pairs, 4 * runs * m.Experts, 4 * m.Experts, 16 * items, 4} {
		at[i], _ = ws.cut("experts", uint64(n)) // there is enough
	}
	ordered, hidden, y := at[0], at[1], at[2]
	q := kernels.SortParams{
		Chosen: chosen, Row: at[3], Place: at[4], Counts: at[5], Start: at[6], Items: at[7], ItemCount: at[8], X: x, Ordered: ordered,
		M: uint32(rows), Experts: uint32(m.Experts), Topk: uint32(m.TopK), Blocks: uint32(runs), Tile: kernels.TileRows, H: uint32(m.Hidden),
	}
	upGroup, downGroup := uint32(1), uint32(1)
	shmem := kernels.TileShared(kernels.TileRows)
	if s.wide && m.GateUp.Layout == Tiles16 {
		q.Tile, q.Wide, shmem = kernels.WideRows, 1, kernels.WideShared
		upGroup, downGroup = 2, 5 // long enough to hide a block's beginning, short enough for the last blocks to be few
	}
	for _, step := range []struct {
		k    kernels.ID
		grid [3]uint32
	}{
		{kernels.SortCount, [3]uint32{q.Blocks, 1, 1}},
		{kernels.SortScan, [3]uint32{1, 1, 1}},
		{kernels.SortScatter, [3]uint32{q.Blocks, 1, 1}},
		{kernels.Order, s.flat(uint64(rows) * uint64(m.Hidden) / 8)},
	} {
		if err := launch(s, c, st, step.k, step.grid, 0, &q); err != nil {
			return err
		}
	}
	up := kernels.GroupParams{
		X: ordered, Row: q.Row, Bank: m.GateUp.Data, Scales: m.GateUp.Scales, Divisor: m.GateUp.Divisors, Items: q.Items, ItemCount: q.ItemCount, Out: hidden,
		N: uint32(2 * m.Inter), K: uint32(m.Hidden), Tiles: uint32((2*m.Inter + kernels.TileCols - 1) / kernels.TileCols), Group: upGroup,
	}
	kernel := [...]kernels.ID{Tiles16: kernels.ExpertUpTiles16, Stored: kernels.ExpertUpStored, Plain16: kernels.ExpertUpPlain}[m.GateUp.Layout]
	if err := launch(s, c, st, kernel, [3]uint32{uint32(items) * ((up.Tiles + upGroup - 1) / upGroup), 1, 1}, shmem, &up); err != nil {
		return err
	}
	down := kernels.GroupParams{
		X: hidden, Bank: m.Down.Data, Scales: m.Down.Scales, Divisor: m.Down.Divisors, Items: q.Items, ItemCount: q.ItemCount, Out: y,
		N: uint32(m.Hidden), K: uint32(m.Inter), Tiles: uint32((m.Hidden + kernels.TileCols - 1) / kernels.TileCols), Group: downGroup,
	}
	kernel = [...]kernels.ID{Tiles16: kernels.ExpertDownTiles16, Tiles8: kernels.ExpertDownTiles8, Stored: kernels.ExpertDownStored, Plain16: kernels.ExpertDownPlain}[m.Down.Layout]
	if err := launch(s, c, st, kernel, [3]uint32{uint32(items) * ((down.Tiles + downGroup - 1) / downGroup), 1, 1}, shmem, &down); err != nil {
		return err
	}
	sum := kernels.CombineParams{
		Y: y, Place: q.Place, Weight: weight, Shared: shared, Logit: sharedLogit, Out: out, M: uint32(rows), H: uint32(m.Hidden), Topk: uint32(m.TopK),
	}
	return launch(s, c, st, kernels.Combine, s.flat(uint64(rows)*uint64(m.Hidden)/8), 0, &sum)
}
