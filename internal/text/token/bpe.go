package token

import "container/heap"

// shortPiece is the length up to which a linear search for the next merge beats
// a heap. Almost every piece is shorter.
const shortPiece = 48

// merge appends the ids of one piece: its bytes as one-byte tokens, then the merge
// of the lowest rank again and again, the leftmost first among equals.
func (t *Tokenizer) merge(dst []int32, piece string) []int32 {
	if t.whole {
		if id, ok := t.ids[spell(piece)]; ok {
			return append(dst, id)
		}
	}
	switch {
	case len(piece) == 1:
		return append(dst, t.alphabet[piece[0]])
	case len(piece) <= shortPiece:
		return t.mergeShort(dst, piece)
	}
	return t.mergeLong(dst, piece)
}

// none is a rank and result that no merge has.
const none = ^uint64(0)

// pair returns rank<<32|result of the merge of two ids, or none.
func (t *Tokenizer) pair(left, right int32) uint64 {
	if m, ok := t.merges[uint64(uint32(left))<<32|uint64(uint32(right))]; ok {
		return m
	}
	return none
}

func (t *Tokenizer) mergeShort(dst []int32, piece string) []int32 {
	var symbols [shortPiece]int32
	var pairs [shortPiece]uint64 // pairs[i] joins symbols i and i+1
	n := len(piece)
	for i := range n {
		symbols[i] = t.alphabet[piece[i]]
	}
	for i := range n - 1 {
		pairs[i] = t.pair(symbols[i], symbols[i+1])
	}
	for n > 1 {
		best := 0
		for i := 1; i < n-1; i++ {
			if pairs[i]>>32 < pairs[best]>>32 {
				best = i
			}
		}
		if pairs[best] == none {
			break
		}
		symbols[best] = int32(uint32(pairs[best]))
		copy(symbols[best+1:n-1], symbols[best+2:n])
		copy(pairs[best:n-2], pairs[best+1:n-1])
		n--
		if best > 0 {
			pairs[best-1] = t.pair(symbols[best-1], symbols[best])
		}
		if best < n-1 {
			pairs[best] = t.pair(symbols[best], symbols[best+1])
		}
	}
	return append(dst, symbols[:n]...)
}

// candidate is a merge of the symbol at pos with its right neighbour.
type candidate struct {
	merge uint64 // rank<<32|result
	pos   int32
}

// candidates is a heap by rank, then position.
type candidates []candidate

func (c candidates) Len() int { return len(c) }
func (c candidates) Less(i, j int) bool {
	a, b := c[i], c[j]
	if a.merge>>32 != b.merge>>32 {
		return a.merge>>32 < b.merge>>32
	}
	return a.pos < b.pos
}
func (c candidates) Swap(i, j int) { c[i], c[j] = c[j], c[i] }
func (c *candidates) Push(x any)   { *c = append(*c, x.(candidate)) }
func (c *candidates) Pop() any {
	old := *c
	x := old[len(old)-1]
	*c = old[:len(old)-1]
	return x
}

// mergeLong is mergeShort with a heap and a linked list, n log n for long pieces.
func (t *Tokenizer) mergeLong(dst []int32, piece string) []int32 {
	n := int32(len(piece))
	symbols := make([]int32, n)
	prev, next := make([]int32, n), make([]int32, n) // next == n ends the list
	for i := range n {
		symbols[i] = t.alphabet[piece[i]]
		prev[i], next[i] = i-1, i+1
	}
	const dead = -1
	var queue candidates
	for i := range n - 1 {
		if m := t.pair(symbols[i], symbols[i+1]); m != none {
			queue = append(queue, candidate{m, i})
		}
	}
	heap.Init(&queue)
	for len(queue) > 0 {
		c := heap.Pop(&queue).(candidate)
		i := c.pos
		if symbols[i] == dead || next[i] == n {
			continue
		}
		j := next[i]
		if t.pair(symbols[i], symbols[j]) != c.merge {
			continue // one of the two has changed since
		}
		symbols[i], symbols[j] = int32(uint32(c.merge)), dead
		next[i] = next[j]
		if next[i] < n {
			prev[next[i]] = i
			if m := t.pair(symbols[i], symbols[next[i]]); m != none {
				heap.Push(&queue, candidate{m, i})
			}
		}
		if p := prev[i]; p >= 0 {
			if m := t.pair(symbols[p], symbols[i]); m != none {
				heap.Push(&queue, candidate{m, p})
			}
		}
	}
	for i := int32(0); i < n; i = next[i] {
		dst = append(dst, symbols[i])
	}
	return dst
}
