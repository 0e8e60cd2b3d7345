package convert

import (
	"encoding/binary"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"ninfer/internal/arch"
	"ninfer/internal/convert/converttest"
)

// TestShortlist: cases worked out by hand from docs/format.md 2.9.
func TestShortlist(t *testing.T) {
	counts := []int64{5, 1, 9, 9, 0, 2}  // order 2 3 0 5 1 4
	norms := []float32{1, 6, 2, 2, 5, 0} // order 1 4 2 3 0 5
	for _, tt := range []struct {
		n       int
		special []int32
		counts  []int64
		want    []int32
	}{
		{3, nil, counts, []int32{2, 1, 3}},                     // scores 6 4 2 4 6 8
		{4, []int32{5, 0, 5, 99}, counts, []int32{2, 1, 0, 5}}, // both forced, 99 is beyond the ids
		{3, []int32{1}, counts, []int32{2, 3, 1}},              // a forced id comes after an unforced one of equal score
		{6, []int32{3}, counts, []int32{2, 1, 3, 0, 4, 5}},
		{3, nil, nil, []int32{1, 0, 2}}, // scores 4 1 4 6 5 10
		{2, []int32{4, 5}, nil, []int32{4, 5}},
		{1, []int32{4, 5}, nil, nil},
		{7, nil, nil, nil},
	} {
		got, err := shortlist(tt.n, 6, tt.special, tt.counts, norms)
		if !slices.Equal(got, tt.want) || (tt.want == nil) != (err != nil) {
			t.Errorf("%d of 6 with %v: %v %v, want %v", tt.n, tt.special, got, err, tt.want)
		}
	}
}

// TestRankingFile: the counts of row 0 decide, and the report names the file.
func TestRankingFile(t *testing.T) {
	const vocab = 512
	rng := rand.New(rand.NewPCG(1, 2))
	var data []byte
	counts := make([]int64, vocab)
	for row := range 3 {
		for i := range vocab {
			n := rng.Int64N(100) // many ties
			if row == 0 {
				counts[i] = n
			}
			data = binary.LittleEndian.AppendUint64(data, uint64(n))
		}
	}
	path := filepath.Join(t.TempDir(), "ranking.train.counts.i64")
	if err := os.WriteFile(path, data, 0o666); err != nil {
		t.Fatal(err)
	}
	r, f := convert(t, Options{Model: micro, Out: filepath.Join(t.TempDir(), output), DraftRanking: path})
	checkContent(t, micro, arch.Variant{Profile: arch.Radixark}, f, 256, counts)
	if r.ProposalShortlist != "frequency-rank-plus-lm-head-norm-rank" || r.DraftRanking == nil || r.DraftRanking.SHA256 != digest(data) {
		t.Errorf("report: %s %+v", r.ProposalShortlist, r.DraftRanking)
	}
	_, g := convert(t, Options{Model: micro, Out: filepath.Join(t.TempDir(), output)})
	if f.ID() == g.ID() {
		t.Error("the ranking does not enter the id")
	}
}

// TestMemory: an object much larger than everything else passes through in chunks. All that is ever allocated bounds the peak.
func TestMemory(t *testing.T) {
	dir := converttest.Clone(t, micro)
	m := converttest.Tensors(t, micro)
	const table = "model.language_model.layers.1.ple.ple_embedding."
	for name := range m {
		if strings.HasPrefix(name, table+"ngram_embedding.shard_") || m[name].DType == "I64" {
			delete(m, name)
		}
	}
	// 16 primes from 250,000 on, padded to 128, in four shards of zeros.
	editJSON(t, filepath.Join(dir, "config.json"), "250000", "text_config", "ngram_vocab_size_base")
	rows := 0
	for n, found := 250000, 0; found < 16; n++ {
		prime := true
		for d := 2; d*d <= n && prime; d++ {
			prime = n%d != 0
		}
		if prime {
			rows, found = rows+n, found+1
		}
	}
	rows = (rows + 127) / 128 * 128
	zeros := make([]byte, rows/4*16)
	for _, i := range []string{"0", "1", "2", "3"} {
		m[table+"ngram_embedding.shard_"+i+".weight"] = converttest.Raw{DType: "F8_E4M3", Shape: []int{rows / 4, 16}, Data: zeros}
	}
	converttest.Save(t, dir, m)

	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	r, err := Run(t.Context(), Options{Model: dir, Out: filepath.Join(t.TempDir(), output), MaxFileBytes: 25 << 20, workers: 4})
	if err != nil {
		t.Fatal(err)
	}
	runtime.ReadMemStats(&after)
	const allowed = 24 << 20
	got := after.TotalAlloc - before.TotalAlloc
	t.Logf("%d MiB written in %d files, %d MiB allocated", r.FileBytes>>20, len(r.Files), got>>20)
	if r.FileBytes < 2*allowed || got > allowed {
		t.Errorf("%d bytes allocated for an artifact of %d", got, r.FileBytes)
	}
}
