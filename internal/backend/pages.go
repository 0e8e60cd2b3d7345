package backend

import (
	"fmt"
	"slices"
)

// PageTokens is the number of tokens of a page: what an image takes from a device's pool at a time, in all its PerToken and PerBlock
// states together.
const PageTokens = 64

// PagesOf is the number of pages that hold so many tokens.
func PagesOf(tokens int) int { return (tokens + PageTokens - 1) / PageTokens }

// Paged is a device whose images share a pool of pages.
type Paged interface {
	// Pages tells how many pages images hold, shared ones once, and how many there are.
	Pages() (used, all int)
}

// Pool hands out pages and counts the images that hold each. An image has a table of the pages that its tokens lie in, in order. A page that several images
// hold is never written: it has only rows that neither clock will reach again.
type Pool struct {
	free []int32 // taken from the end
	held []int32 // by how many images
}

// NewPool returns a pool of so many pages, numbered from 0.
func NewPool(pages int) Pool {
	p := Pool{free: make([]int32, pages), held: make([]int32, pages)}
	for i := range p.free {
		p.free[i] = int32(pages - 1 - i)
	}
	return p
}

// Pages tells how many pages are held, and how many there are.
func (p *Pool) Pages() (used, all int) { return len(p.held) - len(p.free), len(p.held) }

// Grow gives a table pages for so many tokens, or none at all.
func (p *Pool) Grow(table []int32, tokens int) ([]int32, error) {
	need := PagesOf(tokens) - len(table)
	if need > len(p.free) {
		return table, fmt.Errorf("%d pages are needed and %d of %d are free", need, len(p.free), len(p.held))
	}
	for range need {
		page := p.free[len(p.free)-1]
		p.free = p.free[:len(p.free)-1]
		p.held[page] = 1
		table = append(table, page)
	}
	return table, nil
}

// Shrink takes back the pages of a table beyond those of so many tokens.
func (p *Pool) Shrink(table []int32, tokens int) []int32 {
	keep := min(PagesOf(tokens), len(table))
	for _, page := range slices.Backward(table[keep:]) { // so that the next ones to be taken follow each other again
		if p.held[page]--; p.held[page] == 0 {
			p.free = append(p.free, page)
		}
	}
	return table[:keep]
}

// Copy makes dst the table of a copy of src at a length: both hold the pages of the whole ones among the first `past` tokens, and the rest
// are new pages, whose rows are to be copied: from shared on. If the pool has too few dst is empty.
func (p *Pool) Copy(dst, src []int32, past, length int) (table []int32, shared int, err error) {
	shared = past / PageTokens
	for _, page := range src[:shared] {
		p.held[page]++
	}
	table = append(p.Shrink(dst, 0), src[:shared]...)
	if table, err = p.Grow(table, length); err != nil {
		return p.Shrink(table, 0), 0, err
	}
	return table, shared, nil
}
