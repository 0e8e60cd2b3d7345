package kernels

import (
	"cmp"
	"fmt"
	"slices"

	"ninfer/internal/backend/cuda/driver"
)

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
	// of Q4's streaming kernels in stream.cu: warps, 2 KB copies on their way to each, and where shared memory is short
	q4Warps, q4Depth, q4RowsDepth, q4Small = 8, 4, 3, 2
	tileRows                               = 16 // rows of a tensor tile
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
	Stages  uint32 // of ExpertUp: tiles on their way
	Blocks  uint32
	Window  uint32 // rows summed up at a time
	Variant Variant
	// Trigger says when the next kernel may start: 0 at once, 1 after this one's wait (R3), 2 when the activations have been read.
	Trigger uint32
}

// Variant is a shape of the streaming kernels' blocks.
type Variant int

// The variants: 10 warps with 8 KB each on their way, 8 with 12, 10 with 16, which takes an SM for itself, and 8 with 4 where shared memory
// is short. Ten warps hold their activations in registers, rows of at most keptK. Auto chooses.
const (
	Auto Variant = iota
	Ten
	Eight
	Deep
	Small
)

const keptWarps, keptK = 10, 2560

var variants = [...]struct {
	bf16, e4m3   ID
	warps, depth uint32
}{
	{},
	{GemvBf16, GemvE4m3, keptWarps, 8},
	{GemvBf16W8, GemvE4m3W8, 8, 12},
	{GemvBf16Deep, GemvE4m3Deep, keptWarps, 16},
	{GemvBf16Small, GemvE4m3Small, 8, 4},
}

// smaller is what takes less shared memory than a variant.
var smaller = [...]Variant{Deep: Ten, Ten: Small, Eight: Small}

// streamShared is the shared memory of a block of a streaming kernel of BF16 or E4M3: sums of so many windows, activations, what is on its way.
func (v Variant) streamShared(r, k, window, windows uint32) uint32 {
	w := variants[v]
	n := windows*w.warps*r*(window+4)*4 + 128 + w.warps*w.depth*1024
	if w.warps != keptWarps {
		n += r * (2*k + 64)
	}
	return n
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
		case k > keptK:
			t.Trigger = 2
		case total > 256<<20:
			// with room for two blocks on an SM, some SMs get two of a launch and others none, which a long kernel pays for
			t.Variant = Deep
		case total > uint64(l.SMs)*(160<<10):
			t.Variant, t.Blocks, t.Trigger = Ten, 2*l.SMs, 2
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
	if r < 1 || r > MaxRows || len(parts) > len(p.Part) || len(parts) == 0 || !f.Streams(k) || k > 1<<17 || t.Window != 0 && 64%t.Window != 0 || t.Window%tileRows != 0 ||
		t.Window*r > 128 || bf16From < len(parts) && f != FormatE4M3 || f != FormatQ4 && k > keptK && variants[t.Variant].warps == keptWarps {
		return Plan{}, p, fmt.Errorf("cuda: no streaming plan for %d rows of %d in %d parts", r, k, len(parts))
	}
	// As many warps for any number of rows, which is one order of sums.
	for t.Variant != Small && f != FormatQ4 {
		most := r
		if variants[t.Variant].warps == keptWarps {
			most = MaxRows
		}
		if t.Variant.streamShared(most, k, tileRows, 2) <= l.SharedPerBlock {
			break
		}
		t.Variant = smaller[t.Variant]
	}
	v := variants[t.Variant]
	plan := Plan{Kernel: []ID{v.bf16, v.e4m3, GemvQ4}[f]}
	copy(p.Part[:], parts)
	row := f.rowBytes(k)
	if f == FormatQ4 {
		depth := uint32(q4Depth)
		if t.Blocks = 2 * l.SMs; r > MaxRows/2 { // more rows than a pass takes
			plan.Kernel, depth = GemvQ4Rows, q4RowsDepth
		}
		shared := func() uint32 {
			p.Stages, p.Piece = depth, 2+(depth-1)/(k/256)
			return r*(2*k+64) + r*k/16 + 640 + q4Warps*(depth*2048+p.Piece*(16+k/2))
		}
		if t.Blocks != 0 && shared() > l.Half() {
			t.Blocks = 0
		}
		if shared() > l.SharedPerBlock {
			depth = q4Small
		}
		if plan.Shared = shared(); plan.Shared > l.SharedPerBlock {
			return plan, p, fmt.Errorf("cuda: no streaming plan for %d rows of %d: %d bytes of shared memory", r, k, l.SharedPerBlock)
		}
	} else if auto && t.Variant.streamShared(r, k, tileRows, 2) > l.Half() {
		t.Blocks, t.Trigger = 0, 0 // the activations of many rows leave no room for a second block, nor for a neighbour
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
	if f == FormatQ4 {
		return plan, p, nil
	}
	// sums of all of a block's rows, or of two windows in turn
	share := func(parts []Part, blocks uint32) (each, more uint32) {
		n := rowsOf(parts)
		return uint32(n / max(1, uint64(blocks))), uint32(n % max(1, uint64(blocks)))
	}
	each, more := share(parts[:bf16From], p.FirstBlocks)
	if each > 0xffff || more > 0xffff {
		return plan, p, fmt.Errorf("cuda: no streaming plan for %d rows on %d blocks", rowsOf(parts), plan.Grid)
	}
	p.Piece = each<<16 | more
	others, one := share(parts[bf16From:], plan.Grid-p.FirstBlocks)
	slab := max(each+min(1, more), others+min(1, one))
	room, most := l.SharedPerBlock, uint32(64)
	if t.Blocks > l.SMs {
		room = l.Half()
	}
	if v.warps == keptWarps {
		most = 64 * MaxRows // a thread adds up one or two columns
	}
	for p.Window = 64; ; p.Window /= 2 {
		if p.Stages = 2; slab <= p.Window {
			p.Stages = 1
		}
		plan.Shared = t.Variant.streamShared(r, k, p.Window, p.Stages)
		if p.Window == t.Window || p.Window == tileRows || t.Window == 0 && p.Window*r <= most && plan.Shared <= room {
			break
		}
	}
	if plan.Shared > l.SharedPerBlock {
		return plan, p, fmt.Errorf("cuda: no streaming plan for %d rows of %d: %d bytes of shared memory", r, k, l.SharedPerBlock)
	}
	return plan, p, nil
}

// Ahead plans what a kernel that runs before a streaming launch with parameters p brings into L2 of its first parts, in format f: the first bytes of
// about every block's share, as far as they lie in the two longest stretches of memory.
func (p *GemvParams) Ahead(f Format, bytes uint32) (a Ahead) {
	type stretch struct{ at, before, bytes uint64 } // before: bytes of the parts ahead of it
	var all []stretch
	var total uint64
	for _, part := range p.Part[:p.FirstParts] {
		n := uint64(part.Rows) * uint64(f.rowBytes(p.K))
		if i := len(all) - 1; i >= 0 && all[i].at+all[i].bytes == uint64(part.W) {
			all[i].bytes += n
		} else {
			all = append(all, stretch{uint64(part.W), total, n})
		}
		total += n
	}
	slices.SortStableFunc(all, func(a, b stretch) int { return cmp.Compare(b.bytes, a.bytes) })
	share := total / max(1, uint64(p.FirstBlocks)) / 16 * 16
	a.Bytes, a.Pitch = min(bytes, uint32(share)), uint32(share)
	if f == FormatQ4 || share == 0 {
		return Ahead{}
	}
	for i, s := range all[:min(2, len(all))] {
		skip := (s.before+share-1)/share*share - s.before // to the first share that begins here
		if s.bytes < skip+uint64(a.Bytes) {
			continue
		}
		a.At[i] = driver.Ptr(s.at + skip)
		n := uint32((s.bytes-skip-uint64(a.Bytes))/share) + 1
		if a.N += n; i == 0 {
			a.First = n
		}
	}
	return a
}

func rowsOf(parts []Part) (n uint64) {
	for _, p := range parts {
		n += uint64(p.Rows)
	}
	return n
}

// Sizes of the kernels that keep their weights in shared memory: hyper.cu, router.cu.
const (
	maxHidden  = 2560 // H
	maxRank    = 320
	downRows   = 32   // weight rows of a warp of hc_down: two tiles of the tensor instruction
	downSlice  = 128  // k of such a warp
	hyperWarps = 10   // of a block
	downTwo    = 2    // rows up to which its warps have a slice of k each, of BF16 weights upFew; with more two share one
	downCell   = 320  // bytes of its shared memory for a slice of an activation row
	downStatic = 3072 // bytes of its shared memory that are not in the plan, at most
	// HyperParts is how many sums hc_down makes of a row for each of its results, at most, and its squares.
	HyperParts  = 16
	upColumns   = 24 // columns of a block of hc_up_mix
	upTwo       = 2  // rows whose operands pairs of blocks make, of E4M3 weights
	upFew       = 4  // blocks that share the work before the product, with two to four rows
	upCluster   = 8  // the same with more
	routerUnits = 7  // pairs of rows of a block of the router
)

// weightPitch is the bytes from a row of the router's weights in shared memory to the next, operandPitch the same for a tensor operand.
func weightPitch(fp8 bool, k uint32) uint32 {
	if fp8 {
		return k + 32
	}
	return 2*k + 64
}
func operandPitch(k uint32) uint32 { return 2*k + 64 }

// HcDown plans the first half of a hyper-connection site. The caller fills the addresses. Where shared memory is short several rows may
// be too many for a launch.
func (l Limits) HcDown(fp8 bool, r, h, low uint32) (Plan, HcDownParams, error) {
	p := HcDownParams{R: r, H: h, L: low}
	if r < 1 || r > MaxRows || h < 32 || h%16 != 0 || h > maxHidden || low == 0 || low%16 != 0 || low > maxRank {
		return Plan{}, p, fmt.Errorf("cuda: no hyper-connection plan for %d rows of %d, rank %d", r, h, low)
	}
	// A block has half of a stream's k, or a quarter of twice as many weight rows; one a part more makes the injection rows. Fewer blocks of more rows read the
	// activations less often, but take longer to get 16-bit weights.
	teams := uint32(1)
	if r > upFew || r > downTwo && fp8 {
		teams = 2
	}
	parts, slices := 8*teams, hyperWarps/teams
	p.Groups = (low + teams*downRows - 1) / (teams * downRows)
	if most := l.SMs/parts - 1; !fp8 && (r == 1 || r > upFew) {
		p.Groups = max(p.Groups, min(low, most))
	} else if 2*p.Groups <= most {
		p.Groups *= 2
	}
	rows := (low + p.Groups - 1) / p.Groups
	// the weights, and cells for each slice; of E4M3 the sums need room behind the inject rows, which are BF16
	half, whole := slices*downSlice+32, 2*slices*downSlice+64
	plan := Plan{Kernel: []ID{HcDownBf16, HcDownTwoBf16, HcDownFewBf16}[min(r, 3)-1], Grid: parts * (p.Groups + 1)}
	if r > upFew {
		plan.Kernel = HcDownRowsBf16
	}
	both := slices * (2*r*downCell + 64)
	plan.Shared = 128 + max(rows, 4)*whole + both
	if r > upFew { // sums of its warps
		plan.Shared = 128 + max(rows, 4)*whole + 4*hyperWarps*MaxRows*(2*downRows+4)
	}
	if fp8 {
		sums, cells := 4*whole, slices*r*downCell
		if r > downTwo {
			sums, cells = sums+slices*MaxRows*(teams*downRows+4)*4, both
		}
		plan.Kernel = []ID{HcDownE4m3, HcDownTwoE4m3, HcDownRowsE4m3}[min(r, 3)-1]
		plan.Shared = 128 + max(max(rows*half, sums)+cells, sums+both)
	}
	// Where the kernel before ends early on an SM, two blocks must not come to stand there; with few rows it gains more beside that kernel.
	if r > upFew || r > downTwo && !fp8 {
		plan.Shared = max(plan.Shared, l.Half()+128)
	}
	// Many 16-bit weights that come beside the experts' delay them by more than they gain.
	if beside := l.Half() + 14<<10; r > upFew && !fp8 && beside+downStatic <= l.SharedPerBlock {
		plan.Shared = max(plan.Shared, beside)
	}
	if plan.Shared+downStatic > l.SharedPerBlock {
		return plan, p, fmt.Errorf("cuda: no hyper-connection plan for %d rows of %d: %d bytes of shared memory", r, h, l.SharedPerBlock)
	}
	return plan, p, nil
}

// HcUp plans the second half.
func (l Limits) HcUp(fp8 bool, r, h, low uint32) (Plan, HcUpParams, error) {
	p := HcUpParams{R: r, H: h, L: low, Trigger: 2}
	if r < 1 || r > MaxRows || h < 32 || h%16 != 0 || h > maxHidden || low == 0 || low%16 != 0 || low > maxRank {
		return Plan{}, p, fmt.Errorf("cuda: no hyper-connection plan for %d rows of %d, rank %d", r, h, low)
	}
	plan := Plan{Kernel: HcUpMixBf16, Grid: max(min(l.SMs, h), (h+upColumns-1)/upColumns)}
	bytes := 2 * low
	if fp8 {
		plan.Kernel, bytes = HcUpMixE4m3, low
	}
	if r > 1 {
		n, kernels := uint32(upFew), [2]ID{HcUpMixFewBf16, HcUpMixFewE4m3}
		if r > upFew {
			n, kernels = upCluster, [2]ID{HcUpMixRowsBf16, HcUpMixRowsE4m3}
		}
		plan.Kernel = kernels[0]
		if fp8 {
			plan.Kernel = kernels[1]
		}
		// As few as can be, since a GPU does not hold as many blocks in clusters as it has SMs: the last would start when others are over.
		plan.Grid = (h + n*upColumns - 1) / (n * upColumns) * n
		if r == upTwo && fp8 { // a pair of blocks finds two SMs anywhere
			plan.Kernel, plan.Grid = HcUpMixTwoE4m3, max(min(l.SMs, h)/2, (h+2*upColumns-1)/(2*upColumns))*2
		}
	}
	run := (h + plan.Grid - 1) / plan.Grid * bytes
	plan.Shared = 128 + 4*((run+127)/128*128+64) + 2*r*operandPitch(maxRank)
	if r == 1 || r == upTwo && fp8 { // hc_down leaves SMs empty, where two blocks must not come to stand
		plan.Shared = max(plan.Shared, l.Half()+128)
	}
	return plan, p, nil
}

// routerFixed is the bytes of a router block's shared memory that are not in the plan, at most.
const routerFixed = 10752

// Router plans the router and the shared expert's first half.
func (l Limits) Router(fp8 bool, r, k, experts, inner uint32) (Plan, RouterParams, error) {
	p := RouterParams{R: r, K: k, XLd: k, Experts: experts, Inner: inner}
	units := (experts+1)/2 + inner
	plan := Plan{Kernel: RouterSharedBf16}
	if fp8 {
		plan.Kernel = RouterSharedE4m3
	}
	plan.Grid = max(l.SMs, (units+routerUnits-1)/routerUnits)
	for ; ; plan.Grid++ { // with little shared memory more blocks of fewer rows
		most, least := (units+plan.Grid-1)/plan.Grid*2, units/plan.Grid*2
		// the last block, which has the fewest, has the shared gate vector too; a warp reads up to 160 k of a row that is shorter
		plan.Shared = 128 + r*operandPitch(maxHidden) + max(most*weightPitch(fp8, k), least*weightPitch(fp8, k)+2*k) + 256
		if most == 2 || plan.Shared+routerFixed <= l.SharedPerBlock {
			break
		}
	}
	p.Shares = units/plan.Grid<<16 | units%plan.Grid // of a block, and how many blocks have one more
	if r < 1 || r > MaxRows || k == 0 || k%16 != 0 || k > maxHidden || plan.Shared+routerFixed > l.SharedPerBlock {
		return plan, p, fmt.Errorf("cuda: no router plan for %d rows of %d", r, k)
	}
	return plan, p, nil
}

// Sizes of expert.cu.
const (
	maxExperts, maxTop = 512, 16

	pairBytes = 1152 // 128 k of a gate/up tile
	halfBytes = 576  // 128 k of a down tile
	choice    = 848  // what experts are chosen with
	upWarps   = 10
	upFixed   = 640 + choice
	upPairs   = 20
	upSlots   = 3 // tiles on their way: with expert_down's weights beside them they fit on an SM (R5)
	downWarps = 16
	downTiles = 3 // of a block at most
	downFixed = 144 + choice + downWarps*downTiles*8*4 + 96

	// for several rows
	upRowsFixed   = 688 + choice + 2*4*upWarps*256 + 128
	upRowsSlots   = 4
	upRowsShared  = 24 // rows of the shared expert's second half a block has at most
	upRowsLeft    = 10 // tiles of a block that are still to be asked for when expert_down may start, whose weights are to come behind them
	downRowsTiles = 5  // of a window
	downRowsMost  = 64 // tiles of a block
	downWindows   = 32 // windows of a block
	downRowsSlots = 6  // experts' windows on their way, asked for before the wait
	downRowsFixed = 160 + choice + 2*4*downWarps*8*4 + downRowsMost*8*4 + 384 + 128
)

// ExpertUp plans the routed first half, and for several rows the shared expert's second. k is the hidden width, inner the experts' width;
// t.Stages is the number of tiles on their way.
func (l Limits) ExpertUp(r, k, experts, topk, inner uint32, t Tuning) (Plan, ExpertUpParams, error) {
	p := ExpertUpParams{R: r, K: k, XLd: k, Experts: experts, Topk: topk, Inner: inner, Slots: upSlots}
	items := (topk*inner/8 + l.SMs - 1) / l.SMs
	tile := k / 128 * pairBytes
	rows := (k + l.SMs - 1) / l.SMs
	if r > 1 && tile > 0 {
		p.Slots = min(upRowsSlots, (l.SharedPerBlock-min(l.SharedPerBlock, upRowsFixed))/tile)
	}
	if t.Stages != 0 {
		p.Slots = min(t.Stages, 8)
	}
	plan := Plan{Kernel: ExpertGateUp, Grid: l.SMs, Shared: upFixed + items*upWarps*256 + 128 + p.Slots*tile}
	if r > 1 { // two of its blocks on an SM would leave another without
		least := r * topk * inner / 8 / l.SMs
		p.Trigger = least - min(least, upRowsLeft)
		plan.Kernel, plan.Shared = ExpertGateUpRows, max(upRowsFixed+p.Slots*tile, min(l.Half()+1024, l.SharedPerBlock))
	}
	if r < 1 || r > MaxRows || k == 0 || k%128 != 0 || k/128 > upPairs || inner == 0 || inner%32 != 0 || experts > maxExperts || topk > maxTop || topk == 0 ||
		topk > experts || plan.Shared > l.SharedPerBlock || r > 1 && (l.SMs < MaxRows || rows > upRowsShared || rows*(2*inner+64) > (p.Slots-1)*tile) {
		return plan, p, fmt.Errorf("cuda: no expert plan for %d rows of %d, top %d of %d", r, k, topk, experts)
	}
	return plan, p, nil
}

// ExpertDown plans the routed second half, and for a single row the shared expert's: h is the hidden width. early says that the kernel before it
// triggered after its own wait, so that what the router wrote may be read in the prologue (R3).
func (l Limits) ExpertDown(r, h, experts, topk, inner uint32, early bool) (Plan, ExpertDownParams, error) {
	p := ExpertDownParams{R: r, H: h, Experts: experts, Topk: topk, Inner: inner}
	if early {
		p.Early = downRowsSlots
	}
	blocks := max(1, min(l.SMs, h/8))
	tiles := (h/8 + blocks - 1) / blocks
	units, most := tiles*inner/128, uint32(downWarps)
	plan := Plan{Kernel: ExpertDown, Grid: blocks, Shared: downFixed + topk*inner*2 + 128 + tiles*8*(2*inner+64) + topk*tiles*inner/128*halfBytes}
	if r > 1 { // a row has blocks of its own
		plan.Kernel, plan.Grid, p.Window = ExpertDownRows, r*max(1, min(l.SMs/r, h/8)), downRowsTiles
		shared := func() uint32 { return downRowsFixed + topk*inner*2 + downRowsSlots*p.Window*inner/128*halfBytes }
		for p.Window > 1 && (shared() > l.SharedPerBlock || (p.Window+1)/2*(inner/128) > downWarps-1) {
			p.Window--
		}
		plan.Shared, tiles, units, most = shared(), 0, (p.Window+1)/2*(inner/128), downWarps-1
		if own := (h/8 + plan.Grid/r - 1) / (plan.Grid / r); own > min(downRowsMost, downWindows*p.Window) {
			units = most + 1
		}
	}
	if r < 1 || r > MaxRows || h == 0 || h%16 != 0 || inner == 0 || inner%128 != 0 || experts > maxExperts || topk > maxTop || topk == 0 || topk > experts ||
		r > 1 && l.SMs < MaxRows || tiles > downTiles || units > most || plan.Shared > l.SharedPerBlock {
		return plan, p, fmt.Errorf("cuda: no expert plan for %d rows of %d, top %d of %d", r, h, topk, experts)
	}
	return plan, p, nil
}

// Repack plans the reordering of count experts of a bank [.., n, k] from artifact layout to tiles: paired for gate/up, else for down.
func Repack(n, k, count uint32) Plan {
	threads := uint64(count) * uint64(n/16) * uint64(k/64) * 32
	return Plan{Kernel: ExpertRepack, Grid: uint32((threads + 255) / 256)}
}
