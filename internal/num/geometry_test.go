package num

import (
	"errors"
	"math"
	"slices"
	"testing"
)

// The sizes of docs/format.md 3.2 to 3.7.
var sizes = []struct {
	f     Format
	l     Layout
	shape []int
	want  int64
}{
	{Int32, Contiguous, []int{3}, 12},
	{FP32, Contiguous, nil, 4},
	{BF16, Contiguous, []int{2, 3, 5}, 60},
	{Int64, Contiguous, []int{7}, 56},
	{FP8, Contiguous, []int{320001536, 160}, 320001536 * 160},
	{Q4G64, RowSplitK128, []int{2, 130}, 272},
	{Q5G64, RowSplitK128, []int{2, 130}, 528},
	{Q6G64, RowSplitK128, []int{2, 130}, 528},
	{Q8G32, RowSplitK128, []int{2, 130}, 544},
	{Q4G64, RowSplitK128, []int{147456, 2560}, 200540160},
	{Q6G64, RowSplitK128, []int{1152, 1536}, 1382400},
	{Q4G64, RowSplitK128, []int{3456, 1152}, 2115072},
	{Q5G64, RowSplitK128, []int{1152, 1152}, 870912},
	{Q4G64, RowSplitK128, []int{4304, 1152}, 2634048},
	{Q5G64, RowSplitK128, []int{1152, 4304}, 3290112},
	{Q8G32, RowSplitK128, []int{4608, 4608}, 22560768},
	{Q8G32, RowSplitK128, []int{2560, 4608}, 12533760},
	{Q4G64, RowSplitK128, []int{7168, 5120}, 19496960},
	{NVFP4, BlockScale, []int{128, 64}, 4096 + 512 + 4},
	{NVFP4, ExpertBlockScale, []int{512, 1280, 2560}, 943720448},
	{NVFP4, ExpertBlockScale, []int{512, 2560, 640}, 471861248},
	{NVFP4, ExpertBlockScale, []int{2, 128, 64}, 9224},
	{FP8RowBF16, RowScale, []int{2, 3}, 260},
	{FP8RowFP32, RowScaleFP32, []int{2, 3}, 264},
	{FP8RowBF16, RowScale, []int{12288, 2560}, 31481856},
	{FP8RowBF16, RowScale, []int{512, 2560}, 1311744},
	{FP8RowBF16, RowScale, []int{320, 10240}, 3277440},
	{FP8RowBF16, RowScale, []int{10240, 320}, 3297280},
	{FP8RowBF16, RowScale, []int{2560, 6144}, 15733760},
	{FP8RowBF16, RowScale, []int{248320, 2560}, 636195840},
	{FP8RowFP32, RowScaleFP32, []int{13312, 2560}, 34131968},
	{FP8RowFP32, RowScaleFP32, []int{16384, 2560}, 42008576},
	{FP8RowFP32, RowScaleFP32, []int{2560, 6144}, 15738880},
	{U4Z8G16, PackedU4, []int{2500012, 160}, 250001264},
	{U4Z8G16, PackedU4, []int{2, 32}, 264},
}

func TestEncodedSize(t *testing.T) {
	for _, c := range sizes {
		got, err := EncodedSize(c.f, c.l, c.shape)
		if err != nil || got != c.want {
			t.Errorf("%s %s %v: got %d, %v; want %d", c.f, c.l, c.shape, got, err, c.want)
		}
	}
}

func TestEncodedSizeErrors(t *testing.T) {
	big := math.MaxInt
	for _, c := range []struct {
		f     Format
		l     Layout
		shape []int
		want  error
	}{
		{Q4G64, Contiguous, []int{2, 2}, ErrPair},
		{BF16, RowSplitK128, []int{2, 2}, ErrPair},
		{FP8, RowScale, []int{2, 2}, ErrPair},
		{FP8RowBF16, RowScaleFP32, []int{2, 2}, ErrPair},
		{FP8RowFP32, RowScale, []int{2, 2}, ErrPair},
		{NVFP4, PackedU4, []int{128, 64}, ErrPair},
		{U4Z8G16, BlockScale, []int{128, 64}, ErrPair},
		{Invalid, Contiguous, []int{1}, ErrPair},
		{BF16, NoLayout, []int{1}, ErrPair},
		{BF16, numLayouts, []int{1}, ErrPair},
		{numFormats, Contiguous, []int{1}, ErrPair},
		{BF16, Contiguous, make([]int, 17), ErrShape},
		{BF16, Contiguous, []int{0}, ErrShape},
		{BF16, Contiguous, []int{2, -1}, ErrShape},
		{Q4G64, RowSplitK128, []int{2}, ErrShape},
		{Q4G64, RowSplitK128, []int{2, 2, 2}, ErrShape},
		{NVFP4, BlockScale, []int{127, 64}, ErrShape},
		{NVFP4, BlockScale, []int{128, 32}, ErrShape},
		{NVFP4, BlockScale, []int{1, 128, 64}, ErrShape},
		{NVFP4, ExpertBlockScale, []int{128, 64}, ErrShape},
		{NVFP4, ExpertBlockScale, []int{2, 64, 64}, ErrShape},
		{NVFP4, ExpertBlockScale, []int{2, 128, 16}, ErrShape},
		{FP8RowBF16, RowScale, []int{4}, ErrShape},
		{U4Z8G16, PackedU4, []int{2, 24}, ErrShape},
		{U4Z8G16, PackedU4, []int{32}, ErrShape},
		{BF16, Contiguous, []int{big}, ErrSize},
		{FP8, Contiguous, []int{big, 2}, ErrSize},
		{Int64, Contiguous, []int{big, big, big}, ErrSize},
		{Q4G64, RowSplitK128, []int{1, big}, ErrSize},
		{Q4G64, RowSplitK128, []int{big, 1}, ErrSize},
		{NVFP4, BlockScale, []int{1 << 40, 1 << 40}, ErrSize},
		{NVFP4, ExpertBlockScale, []int{1 << 30, 1 << 30, 1 << 30}, ErrSize},
		{FP8RowBF16, RowScale, []int{big, 1}, ErrSize},
		{U4Z8G16, PackedU4, []int{1 << 59, 16}, ErrSize},
	} {
		if n, err := EncodedSize(c.f, c.l, c.shape); !errors.Is(err, c.want) || n != 0 {
			t.Errorf("%s %s %v: got %d, %v; want %v", c.f, c.l, c.shape, n, err, c.want)
		}
	}
}

func TestNames(t *testing.T) {
	for f := BF16; f < numFormats; f++ {
		if got, ok := ParseFormat(f.String()); !ok || got != f {
			t.Errorf("ParseFormat(%q) = %v, %v", f.String(), got, ok)
		}
	}
	for l := Contiguous; l < numLayouts; l++ {
		if got, ok := ParseLayout(l.String()); !ok || got != l {
			t.Errorf("ParseLayout(%q) = %v, %v", l.String(), got, ok)
		}
	}
	for _, s := range []string{"", "invalid", "none", "raw_bytes_v1", "BF16", "f32"} {
		if f, ok := ParseFormat(s); ok {
			t.Errorf("ParseFormat(%q) = %v", s, f)
		}
		if l, ok := ParseLayout(s); ok {
			t.Errorf("ParseLayout(%q) = %v", s, l)
		}
	}
	for _, c := range sizes {
		if got := LayoutOf(c.f, len(c.shape)); got != c.l {
			t.Errorf("LayoutOf(%s, %d) = %s, want %s", c.f, len(c.shape), got, c.l)
		}
	}
}

func TestPlaneOffsets(t *testing.T) {
	for _, c := range []struct {
		f                       Format
		shape                   []int
		high, scales, divisors  int64
		codeLen, highLen, scLen int64
	}{
		{Q4G64, []int{2, 130}, 0, 256, 0, 256, 0, 16},
		{Q5G64, []int{2, 130}, 256, 512, 0, 256, 64, 16},
		{Q6G64, []int{2, 130}, 256, 512, 0, 256, 128, 16},
		{Q8G32, []int{2, 130}, 0, 512, 0, 512, 0, 32},
		{NVFP4, []int{2, 128, 64}, 0, 8192, 9216, 8192, 0, 1024},
		{FP8RowBF16, []int{2, 3}, 0, 256, 0, 6, 0, 4},
		{U4Z8G16, []int{2500012, 160}, 0, 200001024, 0, 200000960, 0, 50000240},
		{U4Z8G16, []int{2, 32}, 0, 256, 0, 32, 0, 8},
	} {
		g, err := NewGeometry(c.f, LayoutOf(c.f, len(c.shape)), c.shape)
		if err != nil {
			t.Fatal(err)
		}
		got := []int64{g.High.Off, g.Scales.Off, g.Divisors.Off, g.Codes.Len, g.High.Len, g.Scales.Len}
		if want := []int64{c.high, c.scales, c.divisors, c.codeLen, c.highLen, c.scLen}; !slices.Equal(got, want) {
			t.Errorf("%s %v: got %v, want %v", c.f, c.shape, got, want)
		}
	}
}

func TestSwizzle(t *testing.T) {
	for _, c := range []struct{ n, g, k, want int }{
		{0, 0, 64, 0},
		{0, 3, 64, 3},
		{1, 0, 64, 16},
		{31, 0, 64, 496},
		{32, 0, 64, 4},
		{33, 2, 64, 22},
		{127, 3, 64, 511},
		{0, 0, 2560, 0},
		{0, 3, 2560, 3},
		{1, 0, 2560, 16},
		{31, 0, 2560, 496},
		{32, 0, 2560, 4},
		{33, 2, 2560, 22},
		{127, 3, 2560, 511},
		{0, 4, 128, 512},
		{0, 4, 2560, 512},
		{128, 0, 2560, 20480},
		{200, 5, 2560, 21129},
		{1279, 159, 2560, 204799},
		{130, 21, 640, 7713},
		{2559, 39, 640, 102399},
	} {
		if got := Swizzle(c.n, c.g, c.k); got != c.want {
			t.Errorf("Swizzle(%d, %d, %d) = %d, want %d", c.n, c.g, c.k, got, c.want)
		}
	}
	for _, s := range [][2]int{{128, 64}, {1280, 2560}, {2560, 640}} {
		seen := make([]bool, s[0]*s[1]/16)
		for n := range s[0] {
			for g := range s[1] / 16 {
				o := Swizzle(n, g, s[1])
				if seen[o] {
					t.Fatalf("%v: offset %d used twice", s, o)
				}
				seen[o] = true
			}
		}
	}
}

func TestRowSpans(t *testing.T) {
	for _, c := range []struct {
		f      Format
		shape  []int
		r0, r1 int
		want   RowSpans
		ok     bool
	}{
		{U4Z8G16, []int{2500012, 160}, 7, 8, RowSpans{Codes: Span{560, 80}, Scales: Span{200001024 + 140, 20}}, true},
		{FP8, []int{320001536, 160}, 320001535, 320001536, RowSpans{Codes: Span{320001535 * 160, 160}}, true},
		{BF16, []int{320001536, 160}, 1, 3, RowSpans{Codes: Span{320, 640}}, true},
		{Q5G64, []int{2, 130}, 1, 2, RowSpans{Span{128, 128}, Span{256 + 32, 32}, Span{512 + 8, 8}}, true},
		{Q8G32, []int{2, 130}, 0, 2, RowSpans{Codes: Span{0, 512}, Scales: Span{512, 32}}, true},
		{FP8RowBF16, []int{2, 3}, 1, 2, RowSpans{Codes: Span{3, 3}, Scales: Span{258, 2}}, true},
		{FP8RowFP32, []int{2, 3}, 1, 2, RowSpans{Codes: Span{3, 3}, Scales: Span{260, 4}}, true},
		{NVFP4, []int{2, 256, 64}, 384, 512, RowSpans{Codes: Span{384 * 32, 4096}, Scales: Span{16384 + 1536, 512}}, true},
		{NVFP4, []int{2, 256, 64}, 0, 64, RowSpans{}, false},
		{FP8RowBF16, []int{2, 3}, 1, 3, RowSpans{}, false},
		{FP8RowBF16, []int{2, 3}, -1, 1, RowSpans{}, false},
		{FP8RowBF16, []int{2, 3}, 2, 1, RowSpans{}, false},
	} {
		g, err := NewGeometry(c.f, LayoutOf(c.f, len(c.shape)), c.shape)
		if err != nil {
			t.Fatal(err)
		}
		got, err := g.RowSpans(c.r0, c.r1)
		if (err == nil) != c.ok || got != c.want {
			t.Errorf("%s %v rows [%d,%d): got %v, %v; want %v", c.f, c.shape, c.r0, c.r1, got, err, c.want)
		}
	}
}
