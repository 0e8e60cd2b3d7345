package device

import "slices"

// early are rows of the n-gram table that are being fetched for a pass that is likely to come: the next chunk of a prompt, while the GPU works on
// this one.
type early struct {
	lane, base int
	before     []int32 // the tokens ahead of it
	tokens     []int32
	staged     []byte
	err        error
	done       chan struct{}
}

// foresee begins to fetch the table's rows for tokens that may follow in a lane.
func (s *step) foresee(lane int, tokens []int32) {
	t, img := s.table, &s.d.images[lane]
	if t == nil || t.spare == nil || len(tokens) == 0 {
		return
	}
	tokens = tokens[:min(len(tokens), s.program.Pass.Rows)]
	s.forget()
	e := &early{lane: lane, base: img.length, before: slices.Clone(img.history), tokens: slices.Clone(tokens), staged: t.spare, done: make(chan struct{})}
	t.early = e
	go func() {
		defer close(e.done)
		ids, before := make([]int64, len(e.tokens)*t.heads), slices.Clone(e.before)
		for i, token := range e.tokens {
			hash(t.w, before, token, ids[i*t.heads:(i+1)*t.heads])
			before = append(before, token)
		}
		e.err = s.d.rows(&t.w.Table, ids, e.staged[ahead:])
	}()
}

// forget waits for what is being fetched and drops it.
func (s *step) forget() {
	if s.table != nil && s.table.early != nil {
		<-s.table.early.done
		s.table.early = nil
	}
}

// staged is where the table's rows for a wide pass lie: fetched early, or now.
func (p *pass) staged() ([]byte, error) {
	s, in := p.s, &p.in[0]
	t, img := s.table, &s.d.images[in.Lane]
	if e := t.early; e != nil {
		s.forget()
		n := len(in.Tokens)
		if e.err == nil && e.lane == in.Lane && e.base == img.length && n <= len(e.tokens) && slices.Equal(e.tokens[:n], in.Tokens) && slices.Equal(e.before, img.history) {
			t.staged, t.spare = e.staged, t.staged // the GPU reads one of them while the other is filled
			return t.staged[ahead:], nil
		}
	}
	if err := p.gather(uint32(s.d.seq)); err != nil {
		return nil, err
	}
	return t.staged[ahead:], nil
}
