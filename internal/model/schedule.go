package model

import (
	"fmt"

	"ninfer/internal/backend"
)

// Program returns the order of operations of a pass. With taps, every layer's streams go to the trace as "layer N".
func (m *Model) Program(p backend.Pass, taps bool) (*backend.Program, error) {
	s := &schedule{m: m, p: &backend.Program{Pass: p}}
	t := &m.Config.Text
	s.x = backend.Streams{X: s.buf("streams", t.StreamWidth()), Inject: s.buf("inject", t.Streams)}
	s.mix, s.y = s.buf("mix", t.HiddenSize), s.buf("block output", t.HiddenSize)
	switch p.Kind {
	case backend.Prefill, backend.Decode, backend.Verify:
		s.target(taps)
	case backend.Draft, backend.Seed:
		if m.mtp == nil {
			return nil, fmt.Errorf("model: %v pass without a drafter", p.Kind)
		}
		s.draft(p.Kind == backend.Seed)
	default:
		return nil, fmt.Errorf("model: no schedule for %v", p.Kind)
	}
	return s.p, nil
}

// schedule writes a program.
type schedule struct {
	m      *Model
	p      *backend.Program
	x      backend.Streams
	mix, y backend.Buf
}

func (s *schedule) buf(name string, width int) backend.Buf {
	s.p.Bufs = append(s.p.Bufs, backend.BufSpec{Name: name, Width: width})
	return backend.Buf(len(s.p.Bufs) - 1)
}

func (s *schedule) add(ops ...backend.Op) { s.p.Ops = append(s.p.Ops, ops...) }

// target is the decoder: embedding, layers, final mixer, head.
func (s *schedule) target(taps bool) {
	m := s.m
	s.add(backend.Embed{W: m.embed, X: s.x})
	gathered := map[int]backend.Buf{}
	for i, l := range m.layers {
		if l.ple != nil {
			gathered[i] = s.buf("n-gram embedding", m.Config.Text.PLEEmbedDim)
			s.add(backend.PLEStart{W: l.ple, History: l.pleHistory, Out: gathered[i]})
		}
	}
	for i, l := range m.layers {
		if l.ple != nil {
			s.add(backend.PLEJoin{W: l.ple, In: gathered[i], X: s.x, History: l.pleHistory, Window: l.plePrevious})
		}
		s.layer(i, l)
		if taps {
			s.add(backend.Tap{Name: fmt.Sprintf("layer %d", i), X: s.x})
		}
	}
	if m.mtp != nil {
		s.add(backend.Carry{X: s.x, Out: m.mtp.carry, Positions: m.mtp.stood})
	}
	s.add(backend.Mix{W: m.mixer, X: s.x, Out: s.mix}, backend.Head{W: m.head, In: s.mix})
}

// draft is the MTP head: stem, one layer, mixer, head. To seed its planes the layer's keys and values are enough.
func (s *schedule) draft(seed bool) {
	d := s.m.mtp
	s.add(backend.Stem{W: d.stem, Carry: d.carry, Positions: d.stood, X: s.x})
	if seed {
		s.add(backend.Mix{W: d.layer.attnHC, X: s.x, Out: s.mix}, s.attention(len(s.m.layers), d.layer, true))
		return
	}
	s.layer(len(s.m.layers), d.layer)
	s.add(backend.Carry{X: s.x, Out: d.carry, Positions: d.stood}, backend.Mix{W: d.mixer, X: s.x, Out: s.mix}, backend.Head{W: d.head, In: s.mix})
}

// layer is attention or delta net, then experts, each between a mix and a deferred injection.
func (s *schedule) layer(i int, l layer) {
	s.add(backend.Mix{W: l.attnHC, X: s.x, Out: s.mix})
	if l.gdn != nil {
		s.add(backend.GDN{Layer: i, W: l.gdn, In: s.mix, Out: s.y, Matrix: l.matrix, Window: l.window})
	} else {
		s.add(s.attention(i, l, false))
	}
	s.add(
		backend.Defer{X: s.x, Y: s.y},
		backend.Mix{W: l.mlpHC, X: s.x, Out: s.mix},
		backend.MoE{Layer: i, W: l.moe, In: s.mix, Out: s.y},
		backend.Defer{X: s.x, Y: s.y},
	)
}

func (s *schedule) attention(i int, l layer, appendOnly bool) backend.Op {
	return backend.QSA{
		Layer: i, W: l.qsa, In: s.mix, Out: s.y, AppendOnly: appendOnly,
		Keys: l.planes.keys, Values: l.planes.values, RawIndex: l.planes.rawIndex, IndexKeys: l.planes.indexKeys, Positions: l.planes.positions,
	}
}
