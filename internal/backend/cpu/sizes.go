package cpu

import "ninfer/internal/backend"

// Sizes are bytes of memory of a fast device.
type Sizes struct {
	Page  int64 // a page of the pool, in all states that grow
	Image int64 // an image without its pages
	Lane  int64 // what a lane has beside its image: the records of a Verify pass
}

// Sizes tells what a fast device with these options takes, apart from weights and the activations of its steps. Pages and Lanes count
// for nothing here.
func (o Options) Sizes() Sizes {
	var s Sizes
	f := &fast{}
	for _, state := range o.States {
		w := int64(state.Width)
		switch state.Kind {
		case backend.PerToken, backend.PerBlock:
			s.Page += planeBytes(state, o.KV)
		case backend.Carried:
			s.Image += 4 * w * int64(o.Carry)
		case backend.Fixed:
			size := int64(4)
			if o.BF16State && state.Store == backend.StoreMatrix {
				size = 2
			}
			s.Image += size * w * int64(state.Rows)
			s.Lane += 4 * int64(o.Verify) * int64(f.recorded(state))
		}
	}
	return s
}

// planeBytes is what a page takes in one state.
func planeBytes(s backend.State, kv backend.Cache) int64 {
	p := &plane[float32]{}
	p.shape(s, kv)
	n := int64(p.rows) * int64(p.width)
	switch p.form {
	case backend.CacheBF16:
		return 2 * n
	case backend.CacheFP8:
		return n + 2*n/int64(max(p.group, 1))
	}
	return 4 * n
}
