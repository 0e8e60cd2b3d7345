package convert

import (
	"context"
	"fmt"
	"sync"

	"ninfer/internal/arch"
	"ninfer/internal/hf"
	"ninfer/internal/num"
)

// encodedTable is an n-gram table that is re-encoded under one multiplier (artifact.md 2.7).
type encodedTable struct {
	amax       float32
	multiplier uint16 // BF16 word
	encoder    *num.FP8Table
}

// measureTables is the first pass over the tables that are re-encoded: the multiplier follows from the largest magnitude of all
// shards. It is S14 and S15 for them.
func (c *conversion) measureTables(ctx context.Context) error {
	c.tables = map[string]*encodedTable{}
	for i := range c.specs {
		s := &c.specs[i].Source
		if s.Op != arch.OpEncodeTable {
			continue
		}
		var list []hf.Tensor
		for x := range s.Tensors() {
			t, err := c.tensor(x.Name)
			if err != nil {
				return err
			}
			list = append(list, t)
		}
		amax, err := c.largest(ctx, c.specs[i].ID, list)
		if err != nil {
			return err
		}
		t := &encodedTable{amax: amax}
		if t.multiplier, err = num.FP8TableMultiplier(amax); err == nil {
			t.encoder, err = num.NewFP8Table(t.multiplier)
		}
		if err != nil {
			return fail(Encode, "%s: n-gram table %s: %w", c.Model, c.specs[i].ID, err)
		}
		c.tables[s.Name] = t
	}
	return nil
}

// largest is the largest magnitude of BF16 tensors.
func (c *conversion) largest(ctx context.Context, object string, tensors []hf.Tensor) (float32, error) {
	var list []cut
	for _, t := range tensors { // no piece of two tensors, so that an error can name one
		for _, one := range cuts(c.chunk(), 2, t) {
			list = append(list, one...)
		}
	}
	kept := make([]bool, len(list)) // as many as memory has room for, so that writing need not read them from the disk again
	for i, room := 0, hf.KeepBytes(); i < len(list) && room >= int64(list[i].n); i++ {
		kept[i] = true
		room -= int64(list[i].n)
	}
	var mu sync.Mutex // guards most
	var most float32
	buffers := sync.Pool{New: func() any { return new(buffer) }}
	err := c.parallel(ctx, len(list), func(i int) error {
		b := buffers.Get().(*buffer)
		defer buffers.Put(b)
		r := list[i]
		p := sized(&b.source, r.n)
		read := r.t.ReadAt
		if kept[i] {
			read = r.t.ReadKept
		}
		if _, err := read(p, r.off); err != nil {
			return classify(Source, err)
		}
		m, err := num.MaxAbsBF16(p)
		if err != nil {
			return encodeError(r.t, object, fmt.Errorf("from value %d on: %w", r.off/2, err))
		}
		mu.Lock()
		defer mu.Unlock()
		most = max(most, m)
		return nil
	})
	return most, err
}
