package convert

import (
	"fmt"
	"sync"

	"ninfer/internal/arch"
	"ninfer/internal/hf"
	"ninfer/internal/num"
)

// encodedTable is an n-gram table that is re-encoded under one multiplier (docs/format.md 2.7). The multiplier follows from the largest magnitude of
// all shards, so the table is read twice. The first pass is S14 and S15 for it.
type encodedTable struct {
	object string

	mu   sync.Mutex
	amax float32 // guarded by mu

	multiplier uint16 // BF16 word; from settle on
	encoder    *num.FP8Table
}

// needsTable tells whether an object can only be made once a table has been measured.
func needsTable(s *arch.Source) bool { return s.Op == arch.OpEncodeTable || s.Op == arch.OpTableScale }

// measuring gives a job for each table that is re-encoded. Such a job makes no bytes. It runs beside jobs that write other objects, since
// many disks move more when they read and write at once.
func (c *conversion) measuring() ([]*job, error) {
	c.tables = map[string]*encodedTable{}
	var jobs []*job
	for i := range c.specs {
		s := &c.specs[i].Source
		if s.Op != arch.OpEncodeTable {
			continue
		}
		t := &encodedTable{object: c.specs[i].ID}
		c.tables[s.Name] = t
		j := newJob(i, nil)
		room := hf.KeepBytes() // what fits in memory need not be read from the disk again
		for x := range s.Tensors() {
			tensor, err := c.tensor(x.Name)
			if err != nil {
				return nil, err
			}
			for _, list := range cuts(c.chunk(), 2, tensor) { // no piece of two tensors, so that an error can name one
				r := list[0]
				read := tensor.ReadAt
				if room -= int64(r.n); room >= 0 {
					read = tensor.ReadKept
				}
				j.pieces = append(j.pieces, piece{make: func(b *buffer) ([]byte, error) {
					p := sized(&b.source, r.n)
					if _, err := read(p, r.off); err != nil {
						return nil, classify(Source, err)
					}
					return nil, t.measure(r, p)
				}})
			}
		}
		jobs = append(jobs, j)
	}
	return jobs, nil
}

// measure takes a run of the table into account.
func (t *encodedTable) measure(r cut, p []byte) error {
	m, err := num.MaxAbsBF16(p)
	if err != nil {
		return encodeError(r.t, t.object, fmt.Errorf("from value %d on: %w", r.off/2, err))
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.amax = max(t.amax, m)
	return nil
}

// settle fixes the multipliers of all tables once they have been measured.
func (c *conversion) settle() error {
	for _, t := range c.tables {
		var err error
		if t.multiplier, err = num.FP8TableMultiplier(t.amax); err == nil {
			t.encoder, err = num.NewFP8Table(t.multiplier)
		}
		if err != nil {
			return fail(Encode, "%s: n-gram table %s: %w", c.Model, t.object, err)
		}
	}
	return nil
}
