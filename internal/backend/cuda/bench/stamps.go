package main

import (
	"encoding/binary"
	"fmt"
	"os"
	"slices"
)

// stamps prints, for every kernel tag of a debug build, the median clocks between its stamps.
func (b *bench) stamps() {
	for _, source := range []string{"stream", "hyper", "router", "expert", "expert_down"} {
		p, n, err := b.set.Global(b.c, source, "stamps")
		if err != nil {
			fmt.Fprintln(os.Stderr, "no stamps in", source, err)
			continue
		}
		raw := b.download(p, int(n))
		word := func(i int) uint64 { return binary.LittleEndian.Uint64(raw[8*i:]) }
		byTag := map[uint64][][]uint64{}
		for at := 0; at+16 <= len(raw)/8; at += 16 {
			if word(at+1) == 0 {
				continue
			}
			var v []uint64
			for i := 2; i < 16; i++ {
				if w := word(at + i); w != 0 {
					v = append(v, w-word(at+1))
				} else {
					v = append(v, 0)
				}
			}
			byTag[word(at)] = append(byTag[word(at)], v)
		}
		var tags []uint64
		for t := range byTag {
			tags = append(tags, t)
		}
		slices.Sort(tags)
		for _, t := range tags {
			fmt.Fprintf(os.Stderr, "stamps %s tag %d, %d launches:", source, t, len(byTag[t]))
			for i := range 14 {
				var v []uint64
				for _, l := range byTag[t] {
					v = append(v, l[i])
				}
				slices.Sort(v)
				if m := v[len(v)/2]; m != 0 {
					fmt.Fprintf(os.Stderr, " %d:%d", i+1, m)
				}
			}
			fmt.Fprintln(os.Stderr)
		}
	}
}
