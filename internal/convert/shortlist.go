package convert

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"io"
	"os"
	"slices"

	"ninfer/internal/arch"
	"ninfer/internal/hf"
	"ninfer/internal/num"
)

// choose fills chosen: which tokens the proposal head keeps (docs/format.md 2.9), and S16.
func (c *conversion) choose(ctx context.Context) error {
	if c.variant.Profile == arch.Mixed {
		return nil
	}
	ids := c.tokenizer.Count()
	var counts []int64
	if c.DraftRanking != "" {
		var err error
		if counts, c.ranking, err = readRanking(c.DraftRanking, c.config.Text.VocabSize); err != nil {
			return classify(Source, err)
		}
	}
	head, err := c.model.Tensor(arch.LMHead)
	if err != nil {
		return &Error{Source, err}
	}
	norms, err := c.norms(ctx, head, ids)
	if err != nil {
		return err
	}
	rows := 0
	for _, s := range c.specs {
		if s.ID == arch.ProposalIDs {
			rows = s.Shape[0]
		}
	}
	c.chosen, err = shortlist(rows, ids, c.tokenizer.SpecialIDs(), counts, norms)
	if err != nil {
		return fail(Source, "%s: %w", c.Model, err)
	}
	return nil
}

// readRanking reads row 0 of a ranking file: rows of vocab little-endian int64 counts, the first the total. It returns the file's
// SHA-256 as well. A file of another size is an error.
func readRanking(path string, vocab int) ([]int64, string, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, "", fail(Source, "draft ranking: %w", err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, "", fmt.Errorf("draft ranking: %w", err)
	}
	row := 8 * int64(vocab)
	if !info.Mode().IsRegular() {
		return nil, "", fail(Source, "draft ranking %s is not a file", path)
	}
	if info.Size() == 0 || info.Size()%row != 0 {
		return nil, "", fail(Source, "draft ranking %s has %d bytes, need rows of %d (8 for each of the %d ids of vocab_size)", path, info.Size(), row, vocab)
	}
	h := sha256.New()
	data := make([]byte, row)
	r := io.TeeReader(f, h)
	if _, err := io.ReadFull(r, data); err != nil {
		return nil, "", fmt.Errorf("draft ranking %s: %w", path, err)
	}
	if _, err := io.Copy(io.Discard, r); err != nil {
		return nil, "", fmt.Errorf("draft ranking %s: %w", path, err)
	}
	counts := make([]int64, vocab)
	for i := range counts {
		counts[i] = int64(binary.LittleEndian.Uint64(data[8*i:]))
	}
	return counts, hex.EncodeToString(h.Sum(nil)), nil
}

// norms gives the sum of squares of each of the first n rows. The squares are exact in binary64 and are summed there, in column
// order, and rounded once: a rank must not depend on the machine.
func (c *conversion) norms(ctx context.Context, head hf.Tensor, n int) ([]float32, error) {
	norms := make([]float32, n)
	cols := head.Shape[1]
	step := max(1, c.chunk()/(2*cols))
	err := c.parallel(ctx, (n+step-1)/step, func(i int) error {
		first := i * step
		src := make([]byte, 2*cols*min(step, n-first))
		if _, err := head.ReadAt(src, int64(2*cols)*int64(first)); err != nil {
			return classify(Source, err)
		}
		for r := range len(src) / (2 * cols) {
			var sum float64
			for k := range cols {
				x := float64(num.FromBF16(binary.LittleEndian.Uint16(src[2*(r*cols+k):])))
				if x-x != 0 {
					return encodeError(head, arch.ProposalWeight, fmt.Errorf("row %d column %d: source value %v is not finite", first+r, k, x))
				}
				sum += x * x
			}
			norms[first+r] = float32(sum)
		}
		return nil
	})
	return norms, err
}

// shortlist chooses n of the given number of token ids: those with the best sum of their ranks by count and by norm, the special
// ones in any case. counts is nil where there is no ranking; then all counts are equal. Row r of the head stands for result[r].
func shortlist(n, ids int, special []int32, counts []int64, norms []float32) ([]int32, error) {
	forced := make([]bool, ids)
	var last []int32
	for _, id := range special {
		if int(id) < ids && !forced[id] {
			forced[id] = true
			last = append(last, id)
		}
	}
	slices.Sort(last)
	if len(last) > n || n > ids {
		return nil, fmt.Errorf("proposal head of %d rows cannot hold %d special tokens of %d ids", n, len(last), ids)
	}
	all := make([]int32, ids)
	for i := range all {
		all[i] = int32(i)
	}
	score := make([]int, ids)
	rank := func(better func(a, b int32) int) {
		order := slices.Clone(all)
		slices.SortStableFunc(order, better)
		for r, id := range order {
			score[id] += r
		}
	}
	rank(func(a, b int32) int {
		if counts == nil {
			return 0
		}
		return cmp.Compare(counts[b], counts[a])
	})
	rank(func(a, b int32) int { return cmp.Compare(norms[b], norms[a]) })
	byScore := func(a, b int32) int { return cmp.Compare(score[a], score[b]) }
	slices.SortStableFunc(all, byScore)
	all = slices.DeleteFunc(all, func(id int32) bool { return forced[id] })
	list := append(all[:n-len(last):n-len(last)], last...)
	slices.SortStableFunc(list, byScore)
	return list, nil
}
