package kernels

import "fmt"

// Format is a stored weight format of the streaming kernels.
type Format uint32

// The formats; the numbers are those of stream.cu.
const (
	FormatBF16 Format = iota
	FormatE4M3
	FormatQ4
)

// Flags of a Part.
const (
	PartOutF32   = 1 // out is FP32, not BF16
	PartScaleF32 = 2 // row scales are FP32, not BF16
)

const (
	warps     = 12 // warps of the hyper-connection kernels
	gemvWarps = 10 // consumer warps of the streaming kernels
	expWarps  = 8  // of the router and expert kernels
	tileRows  = 16 // rows of a tensor tile
	// MaxRows is how many activation rows one launch takes; more are looped over.
	MaxRows = 8
)

// rowBytes is the stored bytes of a weight row without scales.
func (f Format) rowBytes(k uint32) uint32 {
	switch f {
	case FormatBF16:
		return 2 * k
	case FormatE4M3:
		return k
	}
	return k / 2
}

// Streams says whether the streaming kernel takes rows of k weights; the naive kernel takes any.
func (f Format) Streams(k uint32) bool {
	if f == FormatQ4 {
		return k > 0 && k%512 == 0 // a row's scales travel in 16-byte pieces
	}
	return k > 0 && f.rowBytes(k)%64 == 0
}

// Tuning overrides a plan's choices; zero fields keep them.
type Tuning struct {
	Stages  uint32 // of Q4's ring
	Blocks  uint32
	Window  uint32 // rows summed up at a time
	Variant Variant
	// Trigger says when the next kernel may start: 0 at once, 1 after this one's wait (R3), 2 when the activations have been read.
	Trigger uint32
}

// Variant is a shape of the streaming kernels' blocks.
type Variant int

// The variants: 10 warps with 9 KB each on their way, 8 with 12, 10 with 18, which takes an SM for itself, and 8 with 4
// where shared memory is short. Auto chooses.
const (
	Auto Variant = iota
	Ten
	Eight
	Deep
	Small
)

var variants = [...]struct {
	bf16, e4m3   ID
	warps, depth uint32
}{
	{},
	{GemvBf16, GemvE4m3, 10, 9},
	{GemvBf16W8, GemvE4m3W8, 8, 12},
	{GemvBf16Deep, GemvE4m3Deep, 10, 18},
	{GemvBf16Small, GemvE4m3Small, 8, 4},
}

// Gemv plans a streaming launch over parts (at most 8) that share x: r rows (1..8) of k. The first parts are in format f, from index
// bf16From on they are BF16 (pass len(parts) when there are none). The caller fills X, XLd, Best and ValidRows.
func (l Limits) Gemv(f Format, r, k uint32, parts []Part, bf16From int, t Tuning) (Plan, GemvParams, error) {
	if t != (Tuning{}) {
		return l.gemv(f, r, k, parts, bf16From, t, false)
	}
	if f != FormatQ4 {
		t.Variant = Eight
		switch total := uint64(f.rowBytes(k)) * rowsOf(parts); {
		case total > 256<<20:
			// with room for two blocks on an SM, some SMs get two of a launch and others none, which a long kernel pays for
			t.Variant = Deep
		case total > uint64(l.SMs)*(160<<10):
			t.Variant, t.Blocks = Ten, 2*l.SMs
		default: // short: the next kernel's weights must not stand in the way of this one's activations
			t.Trigger = 2
		}
	}
	return l.gemv(f, r, k, parts, bf16From, t, true)
}

// gemv plans with a given tuning; auto says that Gemv chose it and that it may be bettered.
func (l Limits) gemv(f Format, r, k uint32, parts []Part, bf16From int, t Tuning, auto bool) (Plan, GemvParams, error) {
	p := GemvParams{R: r, K: k, Parts: uint32(len(parts)), FirstParts: uint32(bf16From)}
	if t.Variant == Auto {
		t.Variant = Eight
	}
	v := variants[t.Variant]
	plan := Plan{Kernel: []ID{v.bf16, v.e4m3, GemvQ4}[f]}
	if r < 1 || r > MaxRows || len(parts) > len(p.Part) || len(parts) == 0 || !f.Streams(k) || k > 1<<17 || t.Window%tileRows != 0 ||
		t.Window*r > 128 || bf16From < len(parts) && f != FormatE4M3 {
		return plan, p, fmt.Errorf("cuda: no streaming plan for %d rows of %d in %d parts", r, k, len(parts))
	}
	copy(p.Part[:], parts)
	row := f.rowBytes(k)
	p.Window = max(tileRows, 64/r/tileRows*tileRows)
	if t.Window != 0 {
		p.Window = t.Window
	}
	if f == FormatQ4 {
		p.Piece = row
		stage := tileRows * (p.Piece + 32 + k/32)
		fixed := 256 + 32 + 2*gemvWarps*r*tileRows*4 + r*(2*k+32) + 128
		limit := l.SharedPerBlock // one block an SM, as for Deep
		p.Stages = t.Stages
		if p.Stages == 0 {
			p.Stages = min(16, (limit-min(limit, fixed))/stage)
		}
		if p.Stages < 2 || fixed+p.Stages*stage > l.SharedPerBlock {
			return plan, p, fmt.Errorf("cuda: no streaming plan for %d rows of %d: %d bytes of shared memory", r, k, l.SharedPerBlock)
		}
		plan.Shared = fixed + p.Stages*stage
	} else {
		plan.Shared = 2*v.warps*r*p.Window*4 + r*(2*k+32) + 128 + v.warps*v.depth*1024
		if plan.Shared > l.SharedPerBlock && t.Variant != Small {
			if t.Variant == Deep {
				t.Variant = Ten
			} else {
				t.Variant = Small
			}
			return l.gemv(f, r, k, parts, bf16From, t, auto)
		}
		if auto && plan.Shared > l.Half() {
			t.Blocks, t.Trigger = 0, 0 // the activations of many rows leave no room for a second block, nor for a neighbour
		}
		if plan.Shared > l.SharedPerBlock {
			return plan, p, fmt.Errorf("cuda: no streaming plan for %d rows of %d: %d bytes of shared memory", r, k, l.SharedPerBlock)
		}
	}
	plan.Grid = l.SMs
	if t.Blocks != 0 {
		plan.Grid = t.Blocks
	}
	var first, rest uint64
	for i, part := range parts {
		if i < bf16From {
			first += uint64(part.Rows) * uint64(row)
		} else {
			rest += uint64(part.Rows) * uint64(2*k)
		}
	}
	p.FirstBlocks = plan.Grid
	if rest > 0 {
		own := max(1, uint32((rest*uint64(plan.Grid)+(first+rest)-1)/(first+rest)))
		p.FirstBlocks = plan.Grid - own
		if p.FirstBlocks == 0 {
			return plan, p, fmt.Errorf("cuda: no streaming plan on %d blocks", plan.Grid)
		}
	}
	p.Trigger = t.Trigger
	return plan, p, nil
}

func rowsOf(parts []Part) (n uint64) {
	for _, p := range parts {
		n += uint64(p.Rows)
	}
	return n
}

// HcDown plans the first half of a hyper-connection site. The caller fills the addresses.
func (l Limits) HcDown(fp8 bool, r, h, low uint32) (Plan, HcDownParams, error) {
	groups := max((low+tileRows-1)/tileRows, l.SMs/4-1) // one block a stream more makes the injection rows
	p := HcDownParams{R: r, H: h, L: low, Groups: min(groups, low), Trigger: 2}
	plan := Plan{Kernel: HcDownBf16, Grid: 4 * (p.Groups + 1)}
	rows := max(4, (low+p.Groups-1)/p.Groups) // a block's rows; the inject block has four in BF16
	operand := 2 * r * (2*h + 32)
	weights := rows * (2*h + 64)
	if fp8 {
		plan.Kernel = HcDownE4m3
		weights = max(rows*(h+64), 4*(2*h+64))
	}
	plan.Shared = 16 + warps*max(8, r)*tileRows*4 + warps*r*4 + 16 + operand + 128 + weights
	if r < 1 || r > MaxRows || h%64 != 0 || h > 3072 || low%2 != 0 || plan.Shared > l.SharedPerBlock {
		return plan, p, fmt.Errorf("cuda: no hyper-connection plan for %d rows of %d, rank %d", r, h, low)
	}
	return plan, p, nil
}

// HcUp plans the second half.
func (l Limits) HcUp(fp8 bool, r, h, low uint32) (Plan, HcUpParams, error) {
	p := HcUpParams{R: r, H: h, L: low, Trigger: 2}
	plan := Plan{Kernel: HcUpMixBf16, Grid: max(min(l.SMs, h/4), (h/4+warps-1)/warps)} // at most a tile a warp
	pitch := 2 * low
	if fp8 {
		plan.Kernel, pitch = HcUpMixE4m3, low
	}
	tiles := (h/4 + max(1, plan.Grid) - 1) / max(1, plan.Grid)
	plan.Shared = 16 + 16*r + 2*r*(2*low+32) + 128 + 16*tiles*pitch
	if r < 1 || r > MaxRows || h%4 != 0 || pitch%64 != 0 || plan.Shared > l.SharedPerBlock {
		return plan, p, fmt.Errorf("cuda: no hyper-connection plan for %d rows of %d, rank %d", r, h, low)
	}
	return plan, p, nil
}

// Router plans the router and the shared expert's first half.
func (l Limits) Router(fp8 bool, r, k, experts, inner uint32) (Plan, RouterParams, error) {
	p := RouterParams{R: r, K: k, XLd: k, Experts: experts, Inner: inner, Trigger: 1}
	units := (experts+1)/2 + inner + 1
	plan := Plan{Kernel: RouterSharedBf16, Grid: max(l.SMs, (units+7)/8)}
	row := 2 * k
	if fp8 {
		plan.Kernel, row = RouterSharedE4m3, k
		plan.Grid = max(l.SMs, (units+6)/8+1)
	}
	plan.Shared = 16 + expWarps*r*tileRows*4 + r*(2*k+32) + 128 + tileRows*(row+64)
	if fp8 {
		plan.Shared = max(plan.Shared, 16+expWarps*r*tileRows*4+r*(2*k+32)+128+9*(2*k+64))
	}
	if r < 1 || r > MaxRows || row%64 != 0 || plan.Shared > l.SharedPerBlock {
		return plan, p, fmt.Errorf("cuda: no router plan for %d rows of %d", r, k)
	}
	return plan, p, nil
}

// Bytes of the routing table in shared memory, rounded to 16: see struct Routing in expert.cu.
func routingBytes(r uint32) uint32 {
	if r == 1 {
		return 1952
	}
	return 8736
}

const maxExperts, maxTop = 512, 16

// Tile geometry of packed banks, as in expert.cu.
const (
	pairBytes = 1152 // 128 k of a tile
	upWarps   = 16
	upDepth   = 4 // pairs a warp of expert_gate_up has on their way
	downWarps = 16
	downDepth = 4 // of expert_down
)

// ExpertUp plans the routed first half. k is the hidden width, inner the experts' width.
func (l Limits) ExpertUp(r, k, experts, topk, inner uint32, t Tuning) (Plan, ExpertUpParams, error) {
	p := ExpertUpParams{R: r, K: k, XLd: k, Experts: experts, Topk: topk, Inner: inner}
	plan := Plan{Kernel: ExpertGateUp, Grid: l.SMs}
	if t.Blocks != 0 {
		plan.Grid = t.Blocks
	}
	plan.Shared = routingBytes(r) + 32 + r*(2*k+32) + 2*upWarps/4*3*r*64 + 128 + upWarps*upDepth*pairBytes
	if r < 1 || r > MaxRows || k%128 != 0 || inner%8 != 0 || experts > maxExperts || topk > maxTop || topk > experts ||
		plan.Shared > l.SharedPerBlock {
		return plan, p, fmt.Errorf("cuda: no expert plan for %d rows of %d, top %d of %d", r, k, topk, experts)
	}
	return plan, p, nil
}

// ExpertDown plans the routed and shared second half: h is the hidden width. early says that the kernel before it triggered after its own
// wait, so that the router's logits may be read in the prologue (R3).
func (l Limits) ExpertDown(r, h, experts, topk, inner uint32, early bool) (Plan, ExpertDownParams, error) {
	p := ExpertDownParams{R: r, H: h, Experts: experts, Topk: topk, Inner: inner}
	if early {
		p.Early = 1
	}
	plan := Plan{Kernel: ExpertDown, Grid: min(l.SMs, h/16)}
	plan.Shared = routingBytes(r) + 2*downWarps*r*tileRows*4 + 128 + downWarps*downDepth*pairBytes
	if r == 1 {
		plan.Shared += (topk + 1) * inner * 2
	} else {
		plan.Kernel = ExpertDownRows
	}
	if r < 1 || r > MaxRows || h%16 != 0 || inner%128 != 0 || experts > maxExperts || topk > maxTop || topk > experts ||
		plan.Shared > l.SharedPerBlock {
		return plan, p, fmt.Errorf("cuda: no expert plan for %d rows of %d, top %d of %d", r, h, topk, experts)
	}
	return plan, p, nil
}

// Repack plans the reordering of count experts of a bank [.., n, k] from artifact layout to tiles.
func Repack(n, k, count uint32) Plan {
	threads := uint64(count) * uint64(n/16) * uint64(k/64) * 32
	return Plan{Kernel: ExpertRepack, Grid: uint32((threads + 255) / 256)}
}
