package chunk

import (
	"errors"
	"fmt"

	"ninfer/internal/backend/cuda/chunk/kernels"
	"ninfer/internal/backend/cuda/driver"
)

// AttentionShape is the size of a sparse attention with its indexer: a row attends to the tokens of the Blocks best complete blocks of Ratio
// tokens before it, and to those after the last complete block.
type AttentionShape struct{ Heads, KVHeads, HeadDim, IndexHeads, IndexDim, Rotary, Ratio, Blocks int }

// Fits says whether there are kernels for the shape.
func (a AttentionShape) Fits() error {
	if a.HeadDim != 256 || a.IndexDim != 128 || a.IndexHeads != 4 || a.Rotary != 64 || a.Ratio != 4 {
		return fmt.Errorf("chunk: attention with heads of %d, %d index heads of %d, %d rotated values, blocks of %d: only 256, 4, 128, 64, 4", a.HeadDim, a.IndexHeads, a.IndexDim, a.Rotary, a.Ratio)
	}
	if a.KVHeads < 1 || a.Heads < a.KVHeads || a.Heads%a.KVHeads != 0 || a.Heads/a.KVHeads > 16 {
		return fmt.Errorf("chunk: attention with %d heads and %d key heads: needs at most 16 a key head", a.Heads, a.KVHeads)
	}
	if a.Blocks < 1 || a.Blocks > 1024 {
		return fmt.Errorf("chunk: selection of %d blocks: at most 1024", a.Blocks)
	}
	return nil
}

// tile is how many rows share a block of the attention kernel, with all queries of a key head of them: at most 48 queries, twice 64 in the wide one.
func (a AttentionShape) tile(wide bool) int {
	if wide {
		return 2 * min(7, 64/(a.Heads/a.KVHeads))
	}
	return min(8, 48/(a.Heads/a.KVHeads))
}

// Cache is a lane's planes in the page pool: pages of 64 tokens, in every plane under the same page number.
type Cache struct {
	Keys, Values           driver.Ptr // [pages][64][KVHeads][256]: BF16, or E4M3 with scales
	KeyScales, ValueScales driver.Ptr // BF16 [pages][64][KVHeads], or 0
	Raw                    driver.Ptr // BF16 [pages][64][128]: raw index keys
	Positions              driver.Ptr // uint32 [pages][64][3]
	BlockKeys              driver.Ptr // BF16 [pages][16][128]
	Pages                  driver.Ptr // uint32: page numbers of the lane
}

const (
	attendShared        = 48*512 + 2*64*512 + 48*128 + 4*48*4 + 2*192 + 2*64*4
	attendWideShared    = 6 * 64 * 512
	attendWideFP8Shared = attendWideShared + 2*64*256
	scoreWideShared     = 64*1024 + 3*64*256
)

// attend launches attention of the rows over the listed blocks of each tile, or over all blocks where list is 0.
func (s *Set) attend(c *driver.Context, st driver.Stream, a *Attend, list, count driver.Ptr, listLd int) error {
	wide := s.takesWide(a)
	tile := a.tile(wide)
	p := kernels.AttendParams{
		Q: a.Q, Keys: a.Keys, Values: a.Values, KeyScales: a.KeyScales, ValueScales: a.ValueScales, Pages: a.Pages, List: list, Count: count, Qg: a.Qg, Out: a.Out,
		Rows: uint32(a.Rows), Base: uint32(a.Base), Heads: uint32(a.Heads), Kv: uint32(a.KVHeads), Tile: uint32(tile), ListLd: uint32(listLd), QgLd: uint32(a.QgLd), OutLd: uint32(a.OutLd),
	}
	k, shared := kernels.AttendRows, attendShared
	switch {
	case wide && a.KeyScales != 0:
		k, shared = kernels.AttendWideFp8, attendWideFP8Shared
	case wide:
		k, shared = kernels.AttendWide, attendWideShared
	case a.KeyScales != 0:
		k = kernels.AttendRowsFp8
	}
	return run(s, c, st, k, tiles(a.Rows, tile), a.KVHeads, shared, &p)
}

func (s *Set) takesWide(a *Attend) bool { return s.wide && !a.Plain }

// Prep norms and rotates queries and keys of a pass and appends what attention keeps: keys, values, raw index keys, positions, and the index
// keys of the blocks that the pass completes, whose first tokens may be older.
type Prep struct {
	AttentionShape
	Cache
	Rows, Base int        // Base: position of the first row in its sequence
	RowTable   driver.Ptr // kernels.Row [Rows]; only rotary positions are read

	Qg      driver.Ptr // BF16 [Rows][QgLd]: 256 query and 256 gate values a head; 0 appends only
	Key     driver.Ptr // BF16 [Rows][KeyLd]
	Value   driver.Ptr // BF16 [Rows][ValueLd]
	Index   driver.Ptr // BF16 [Rows][IndexLd]: four queries and a key
	QgLd    int
	KeyLd   int
	ValueLd int
	IndexLd int

	QueryNorm, KeyNorm, IndexQueryNorm, IndexKeyNorm driver.Ptr // FP32, used as 1 + w
	Inverse                                          driver.Ptr // FP32 [32] inverse frequencies, then uint32 [32] the axis of each
	Eps                                              float32

	Q  driver.Ptr // BF16 [Rows][Heads*256], written
	Iq driver.Ptr // BF16 [Rows][4*128], written
}

// Prep launches a.
func (s *Set) Prep(c *driver.Context, st driver.Stream, a *Prep) error {
	err := errors.Join(a.Fits(), checkRows(a.Rows), checkPiece("queries", a.Qg, a.QgLd), checkPiece("keys", a.Key, a.KeyLd), checkPiece("values", a.Value, a.ValueLd), checkPiece("index rows", a.Index, a.IndexLd))
	if err != nil {
		return err
	}
	p := kernels.PrepRowsParams{
		Rows: a.RowTable, Qg: a.Qg, Key: a.Key, Value: a.Value, Index: a.Index, QNorm: a.QueryNorm, KNorm: a.KeyNorm, IqNorm: a.IndexQueryNorm, IkNorm: a.IndexKeyNorm,
		Inverse: a.Inverse, Q: a.Q, Iq: a.Iq, Keys: a.Keys, Values: a.Values, KeyScales: a.KeyScales, ValueScales: a.ValueScales, Raw: a.Raw, Positions: a.Positions,
		BlockKeys: a.BlockKeys, Pages: a.Pages, Base: uint32(a.Base), Heads: uint32(a.Heads), Kv: uint32(a.KVHeads), QgLd: uint32(a.QgLd), KeyLd: uint32(a.KeyLd),
		ValueLd: uint32(a.ValueLd), IndexLd: uint32(a.IndexLd), Eps: a.Eps,
	}
	return run(s, c, st, kernels.PrepRows, a.Rows, 1, 0, &p)
}

// Attend is the attention of the rows of a pass over what they select, times the output gate. Prep of all of them comes before.
type Attend struct {
	AttentionShape
	Cache
	Rows, Base int        // Base: position of the first row in its sequence
	Q, Iq      driver.Ptr // of Prep
	Qg         driver.Ptr // BF16 [Rows][QgLd], gates after the 256 query values of each head
	QgLd       int
	Out        driver.Ptr // BF16 [Rows][OutLd]
	OutLd      int
	Work       driver.Ptr // Workspace(Rows, Base+Rows) bytes
	Plain      bool       // use the kernels that every GPU has

	// Forced is 0, or for each row the tokens it attends to, ascending: uint32 [Rows][ForcedLd], how many in ForcedCount, where ^0 lets the row
	// select itself. They are taken as whole blocks, of which a row sees what is not after it: so are a model's selections.
	Forced, ForcedCount driver.Ptr
	ForcedLd            int
	// Seen is 0, or where the tokens that each row attends to are written, ascending: uint32 [Rows][SeenLd], how many to SeenCount.
	Seen, SeenCount driver.Ptr
	SeenLd          int
}

// selection is how a pass selects: pieces of rows, whose scores share scratch memory.
type selection struct {
	rows, ld     int // of a piece; pitch of scores
	words        int // of bits of a row's blocks
	listLd       int
	scores, bits driver.Ptr // of a piece
	list, count  driver.Ptr
	bytes        uint64
}

// scoreBytes bounds the scores of a piece. More of them would stay in the cache, but every row is a block of the selection, and a few hundred rows
// are needed to fill a GPU.
const (
	scoreBytes = 160 << 20
	scoreRows  = 64      // of a block of the score kernel
	maxContext = 4 << 17 // tokens, as many as a list's entry can name blocks
)

func (a AttentionShape) selection(at driver.Ptr, rows, context, tile int) selection {
	blocks := tiles(context, 4)
	v := selection{ld: tiles(blocks, 64) * 64, words: tiles(blocks, 64) * 2, listLd: min(blocks, tile*(a.Blocks+1))}
	piece := scoreRows / tile * tile
	v.rows = min(tiles(rows, piece), max(1, scoreBytes/(4*v.ld*piece))) * piece
	s := scratch{at: at}
	v.scores, v.bits = s.take(4*v.rows*v.ld), s.take(v.rows*v.ld/8)
	n := tiles(rows, tile)
	v.list, v.count = s.take(4*n*v.listLd), s.take(4*n)
	v.bytes = s.size
	return v
}

// Workspace is the bytes that Attend needs for at most so many rows, the last of which sees at most context tokens.
func (a AttentionShape) Workspace(rows, context int) uint64 {
	most := uint64(0)
	for _, wide := range []bool{false, true} {
		v := a.selection(0, rows, context, a.tile(wide))
		// Shorter contexts have more rows a piece, within scoreBytes.
		scores := min(4*(rows+scoreRows)*v.ld, max(scoreBytes, 4*scoreRows*v.ld))
		most = max(most, v.bytes+uint64(scores+scores/32)-uint64(4*v.rows*v.ld+v.rows*v.ld/8)+512)
	}
	return most
}

// Attend launches a.
func (s *Set) Attend(c *driver.Context, st driver.Stream, a *Attend) error {
	if err := errors.Join(a.Fits(), checkRows(a.Rows), checkPiece("gates", a.Qg, a.QgLd), checkPiece("outputs", a.Out, a.OutLd)); err != nil {
		return err
	}
	context := a.Base + a.Rows
	if context > maxContext {
		return fmt.Errorf("chunk: attention over %d tokens, at most %d", context, maxContext)
	}
	if context/4 <= a.Blocks && a.Forced == 0 && a.Seen == 0 {
		return s.attend(c, st, a, 0, 0, 0)
	}
	if a.Forced != 0 && a.ForcedLd > 4*a.Blocks+4 {
		return fmt.Errorf("chunk: forced selections of %d tokens, room for %d", a.ForcedLd, 4*a.Blocks+4)
	}
	tile := a.tile(s.takesWide(a))
	v := a.selection(a.Work, a.Rows, context, tile)
	for first := 0; first < a.Rows; first += v.rows {
		rows := min(v.rows, a.Rows-first)
		base := a.Base + first
		if (base+rows)/4 > a.Blocks {
			p := kernels.ScoreRowsParams{
				Iq: a.Iq + driver.Ptr(2*first*4*a.IndexDim), Keys: a.BlockKeys, Pages: a.Pages, Scores: v.scores, Rows: uint32(rows), Base: uint32(base), Most: uint32(a.Blocks), Ld: uint32(v.ld),
			}
			k, shared := kernels.ScoreRows, 0
			if s.wide && !a.Plain {
				k, shared = kernels.ScoreWide, scoreWideShared
			}
			across := tiles(rows, scoreRows)
			if err := run(s, c, st, k, min(tiles((base+rows)/4, 64), max(1, tiles(4*s.sms, across))), across, shared, &p); err != nil {
				return err
			}
		}
		p := kernels.SelectRowsParams{Scores: v.scores, Bits: v.bits, Base: uint32(base), Most: uint32(a.Blocks), Ld: uint32(v.ld), Words: uint32(v.words)}
		if a.Forced != 0 {
			p.Forced, p.ForcedCount, p.ForcedLd = a.Forced+driver.Ptr(4*first*a.ForcedLd), a.ForcedCount+driver.Ptr(4*first), uint32(a.ForcedLd)
		}
		if a.Seen != 0 {
			p.Seen, p.SeenCount, p.SeenLd = a.Seen+driver.Ptr(4*first*a.SeenLd), a.SeenCount+driver.Ptr(4*first), uint32(a.SeenLd)
		}
		if err := run(s, c, st, kernels.SelectRows, rows, 1, 8*v.words, &p); err != nil {
			return err
		}
		u := kernels.UniteRowsParams{
			Bits: v.bits, List: v.list + driver.Ptr(4*(first/tile)*v.listLd), Count: v.count + driver.Ptr(4*(first/tile)), Rows: uint32(rows), Tile: uint32(tile), ListLd: uint32(v.listLd),
			Words: uint32(v.words),
		}
		if err := run(s, c, st, kernels.UniteRows, tiles(rows, tile), 1, 0, &u); err != nil {
			return err
		}
	}
	return s.attend(c, st, a, v.list, v.count, v.listLd)
}
