package hf

import (
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"sync"
)

// OpenFile reads one safetensors file that belongs to no checkpoint folder, such as recorded results. Its Config is empty.
func OpenFile(path string) (*Checkpoint, error) {
	c := &Checkpoint{dir: filepath.Dir(path), shards: []shard{{name: filepath.Base(path)}}, index: map[string]int32{}}
	if err := c.openShard(0); err != nil {
		c.Close()
		return nil, fmt.Errorf("hf: %s: %w", path, err)
	}
	c.sorted = sync.OnceValue(func() []string { return slices.Sorted(maps.Keys(c.index)) })
	return c, nil
}
