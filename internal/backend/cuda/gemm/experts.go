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

// The most rows of an expert, on average, that go in small and in middling items: measured (docs/ladders.md).
const (
	fewPairs  = 35
	somePairs = 98
)

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
			return up && n%16 == 0 && k%128 == 0 && b.Divisors != 0
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
	return rows*m.TopK/kernels.FewRows + min(m.Experts, rows*m.TopK)
}

// capacity is the room for sorted pairs, each expert's beginning at a multiple of kernels.WideAlign.
func (m Mixture) capacity(rows int) int {
	const a = kernels.WideAlign
	pairs := rows * m.TopK
	return (pairs + (a-1)*min(m.Experts, pairs) + a - 1) / a * a
}

// parts are the pieces of Experts' workspace: ordered rows, hidden values, results (and, before them, panels of activations), rows and places of
// pairs, counts, starts, items and their number.
func (m Mixture) parts(rows int) [9]int {
	pairs, room := rows*m.TopK, m.capacity(rows)
	runs := (rows + kernels.RunRows - 1) / kernels.RunRows
	return [9]int{
		2 * rows * m.Hidden, 2 * room * m.Inter, 2 * room * m.Hidden, 4 * room, 4 * pairs, 4 * runs * m.Experts, 4 * m.Experts,
		16 * m.items(rows), 4,
	}
}

// Bytes is the workspace that Experts needs for up to rows rows.
func (m Mixture) Bytes(rows int) uint64 {
	n := uint64(0)
	for _, p := range m.parts(rows) {
		n += uint64(p+255) / 256 * 256
	}
	return n
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
	var at [9]driver.Ptr
	for i, n := range m.parts(rows) {
		at[i], _ = ws.cut("experts", uint64(n)) // there is enough
	}
	items := m.items(rows)
	y := at[2]
	q := kernels.SortParams{
		Chosen: chosen, Row: at[3], Place: at[4], Counts: at[5], Start: at[6], Items: at[7], ItemCount: at[8], X: x, Ordered: at[0],
		M: uint32(rows), Experts: uint32(m.Experts), Topk: uint32(m.TopK), Blocks: uint32((rows + kernels.RunRows - 1) / kernels.RunRows), H: uint32(m.Hidden),
		Tile: kernels.TileRows, Unit: 32, Align: 1, Capacity: uint32(m.capacity(rows)),
	}
	order := kernels.Order
	up := [...]kernels.ID{Tiles16: kernels.ExpertUpTiles16, Stored: kernels.ExpertUpStored, Plain16: kernels.ExpertUpPlain}[m.GateUp.Layout]
	down := [...]kernels.ID{Tiles8: kernels.ExpertDownTiles8, Stored: kernels.ExpertDownStored, Plain16: kernels.ExpertDownPlain}[m.Down.Layout]
	upGroup, downGroup := uint32(1), uint32(1)
	shmem := kernels.TileShared(kernels.TileRows)
	if s.wide && m.GateUp.Layout == Tiles16 {
		// the results come when the panels have been used
		order, q.Ordered, q.Row, q.Align = kernels.Panel, y, 0, kernels.WideAlign
		upGroup, downGroup = 2, 5 // long enough to hide a block's beginning, short enough for the last blocks to be few
		switch pairs := rows * m.TopK; {
		case pairs <= fewPairs*m.Experts:
			up, down, q.Tile, q.Unit = kernels.ExpertUpFew, kernels.ExpertDownFew, kernels.FewRows, kernels.WideAlign
		case pairs <= somePairs*m.Experts:
			up, down, q.Tile, q.Unit = kernels.ExpertUpSome, kernels.ExpertDownSome, kernels.SomeRows, 16
		default:
			up, down, q.Tile = kernels.ExpertUpMany, kernels.ExpertDownMany, kernels.WideRows
		}
		shmem = kernels.WideShared(int(q.Tile))
	}
	type step struct {
		k              kernels.ID
		blocks, shared uint32
	}
	steps := []step{{kernels.SortCount, q.Blocks, 0}, {kernels.SortScan, 1, 0}, {kernels.SortScatter, q.Blocks, 0}}
	if rows <= kernels.SmallRows {
		steps = []step{{kernels.SortSmall, 1, kernels.SortShared}}
	}
	for _, n := range append(steps, step{order, s.flat(uint64(rows) * uint64(m.Hidden) / 8)[0], 0}) {
		if err := launch(s, c, st, n.k, [3]uint32{n.blocks, 1, 1}, n.shared, &q); err != nil {
			return err
		}
	}
	for _, half := range []struct {
		kernel kernels.ID
		bank   Bank
		group  uint32
		x, row driver.Ptr
		out    driver.Ptr
		n, k   int
	}{
		{up, m.GateUp, upGroup, q.Ordered, q.Row, at[1], 2 * m.Inter, m.Hidden},
		{down, m.Down, downGroup, at[1], 0, y, m.Hidden, m.Inter},
	} {
		g := kernels.GroupParams{
			X: half.x, Row: half.row, Bank: half.bank.Data, Scales: half.bank.Scales, Divisor: half.bank.Divisors, Items: q.Items, ItemCount: q.ItemCount, Out: half.out,
			N: uint32(half.n), K: uint32(half.k), Tiles: uint32((half.n + kernels.TileCols - 1) / kernels.TileCols), Group: half.group, Capacity: q.Capacity,
		}
		if err := launch(s, c, st, half.kernel, [3]uint32{uint32(items) * ((g.Tiles + g.Group - 1) / g.Group), 1, 1}, shmem, &g); err != nil {
			return err
		}
	}
	sum := kernels.CombineParams{
		Y: y, Place: q.Place, Weight: weight, Shared: shared, Logit: sharedLogit, Out: out, M: uint32(rows), H: uint32(m.Hidden), Topk: uint32(m.TopK),
	}
	return launch(s, c, st, kernels.Combine, s.flat(uint64(rows)*uint64(m.Hidden)/8), 0, &sum)
}
