package device

import (
	"ninfer/internal/backend"
	plain "ninfer/internal/backend/cuda/device/kernels"
	"ninfer/internal/backend/cuda/driver"
	"ninfer/internal/backend/cuda/kernels"
	"ninfer/internal/num"
)

// bf16MoE prepares a mixture whose routed experts are in BF16, as a drafter's are unless convert has encoded them anew; nil if the kernels do
// not take it. The router and the shared expert's first half are as in tunedMoE.
func (s *step) bf16MoE(l *loader, op backend.MoE) func(*pass) error {
	d, w := s.d, op.W
	h := s.program.Bufs[op.In].Width
	whole := func(b backend.Weight) bool { return b.T.Format == num.BF16 && b.First == 0 && b.N == b.T.Rows() }
	if d.tuned == nil || w.Inter != w.SharedInter || !whole(w.GateUp) || !whole(w.Down) || w.SharedDown.T.Format != num.BF16 || w.SharedVector.T.Format != num.BF16 ||
		h%8 != 0 || h > 2560 || w.Inter%8 != 0 || w.Experts > 512 || w.TopK > 16 || 2*(w.TopK+1)*w.Inter > d.owner.Device().SharedPerBlock-1024 {
		return nil
	}
	router, gate, up, ok := routerMatrices(l, w)
	if !ok {
		return nil
	}
	type plan struct {
		launch kernels.Plan
		p      kernels.RouterParams
	}
	var plans [kernels.MaxRows + 1]plan
	for r := 1; r <= min(kernels.MaxRows, s.program.Pass.Rows); r++ {
		var err error
		if plans[r].launch, plans[r].p, err = d.tuned.Limits.Router(router.format == kernels.FormatE4M3, uint32(r), uint32(h), uint32(w.Experts), uint32(w.Inter)); err != nil {
			return nil
		}
	}
	vector, _ := tunedMatrix(l.matrix(w.SharedVector))
	logits, sharedLogit := l.rows("router logits", 4*w.Experts), l.rows("shared logit", 4)
	shared, forced := l.rows("shared hidden", 2*w.Inter), l.rows("forced experts", 4*w.TopK)
	route := plain.RouteParams{
		Logits: logits, Chosen: l.rows("experts", 4*w.TopK), Weight: l.rows("expert weights", 4*w.TopK), Experts: uint32(w.Experts), Topk: uint32(w.TopK),
	}
	if w.Normalize {
		route.Normalize = 1
	}
	first := plain.ExpertUpParams{
		X: s.bufs[op.In], Chosen: route.Chosen, Hidden: l.rows("expert hidden", 2*w.TopK*w.Inter), Bank: l.matrix(w.GateUp),
		Topk: route.Topk, Inter: uint32(w.Inter), SharedInter: uint32(w.Inter), H: uint32(h),
	}
	second := plain.ExpertDownParams{
		Chosen: route.Chosen, Weight: route.Weight, Gate: sharedLogit, Hidden: first.Hidden, Shared: shared, Out: s.bufs[op.Out],
		Bank: l.matrix(w.Down), Down: l.matrix(w.SharedDown), Topk: route.Topk, Inter: first.Inter, SharedInter: first.Inter, H: first.H,
	}
	if l.err == nil && (int(first.Bank.Stride) != 2*h || int(second.Bank.Stride) != 2*w.Inter || int(second.Down.Stride) != 2*w.Inter ||
		first.Bank.Codes%16 != 0 || second.Bank.Codes%16 != 0 || second.Down.Codes%16 != 0 || second.Down.First != 0) {
		return nil
	}
	sms := d.owner.Device().SMs
	return func(p *pass) error {
		for r := p.from; r < len(p.rows); r += kernels.MaxRows {
			at := driver.Ptr(r)
			q := plans[min(kernels.MaxRows, len(p.rows)-r)]
			q.p.X, q.p.Router, q.p.RouterScale, q.p.Gate, q.p.GateScale = first.X+at*driver.Ptr(2*h), router.w, router.scale, gate.w, gate.scale
			q.p.Up, q.p.UpScale, q.p.Shared, q.p.Logits, q.p.Hidden = up.w, up.scale, vector.w, logits+at*driver.Ptr(4*w.Experts), shared+at*driver.Ptr(2*w.Inter)
			q.p.SharedLogit, q.p.ScaleF32 = sharedLogit+at*4, router.flags&kernels.PartScaleF32/kernels.PartScaleF32
			if err := tunedRun(p, q.launch, &q.p); err != nil {
				return err
			}
		}
		at, rows := driver.Ptr(p.from), len(p.rows)-p.from
		route, first, second := route, first, second
		route.Logits += at * driver.Ptr(4*w.Experts)
		first.X += at * driver.Ptr(2*h)
		second.Gate += at * 4
		second.Shared += at * driver.Ptr(2*w.Inter)
		second.Out += at * driver.Ptr(2*h)
		if err := p.route(op, plain.RouteWide, rows, route, forced); err != nil {
			return err
		}
		if err := start(p, plain.ExpertUpWide, 2*sms, rows, 1, 0, &first); err != nil {
			return err
		}
		return start(p, plain.ExpertDownWide, tiles(h, 20), rows, 1, uint32(2*(w.TopK+1)*w.Inter), &second)
	}
}
