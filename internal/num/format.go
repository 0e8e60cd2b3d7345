package num

import "fmt"

// Format says what the words of a tensor mean.
type Format uint8

// The numeric formats of the container. N and K are the rows and columns of
// a matrix; K is contracted and varies fastest.
const (
	Invalid    Format = iota
	BF16              // bfloat16
	FP32              // IEEE binary32
	Int32             // two's complement, 4 bytes
	Int64             // two's complement, 8 bytes
	FP8               // E4M3FN without a scale inside the object
	Q4G64             // signed 4-bit codes, one binary16 multiplier per 64 K-values
	Q5G64             // signed 5-bit codes, one binary16 multiplier per 64 K-values
	Q6G64             // signed 6-bit codes, one binary16 multiplier per 64 K-values
	Q8G32             // signed 8-bit codes, one binary16 multiplier per 32 K-values
	NVFP4             // E2M1 codes, one E4M3FN scale per 16 K-values, one FP32 divisor per matrix
	FP8RowBF16        // E4M3FN codes, one BF16 multiplier per row
	FP8RowFP32        // E4M3FN codes, one FP32 multiplier per row
	U4Z8G16           // unsigned 4-bit codes with zero point 8, one binary16 multiplier per 16 K-values
	numFormats
)

var formatNames = [numFormats]string{
	"invalid",
	"bf16", "fp32", "int32", "int64", "fp8_e4m3fn",
	"q4_g64_fp16", "q5_g64_fp16", "q6_g64_fp16", "q8_g32_fp16",
	"nvfp4", "fp8_e4m3fn_row_bf16", "fp8_e4m3fn_row_fp32", "u4z8_g16_fp16",
}

// String gives the spelling used in artifact directories.
func (f Format) String() string {
	if f < numFormats {
		return formatNames[f]
	}
	return fmt.Sprintf("format(%d)", uint8(f))
}

// ParseFormat is the inverse of String for the legal formats.
func ParseFormat(s string) (Format, bool) {
	for f := BF16; f < numFormats; f++ {
		if formatNames[f] == s {
			return f, true
		}
	}
	return Invalid, false
}

// Group is the number of consecutive K-values that share one scale word in
// formats with scale groups, and 0 in all others.
func (f Format) Group() int {
	switch f {
	case Q4G64, Q5G64, Q6G64:
		return 64
	case Q8G32:
		return 32
	case NVFP4, U4Z8G16:
		return 16
	}
	return 0
}

// codeBits is the width of the signed codes of the grouped integer formats.
func (f Format) codeBits() int {
	switch f {
	case Q4G64:
		return 4
	case Q5G64:
		return 5
	case Q6G64:
		return 6
	case Q8G32:
		return 8
	}
	return 0
}

// wordBytes is the size of one word of a direct format, 0 for others.
func (f Format) wordBytes() int {
	switch f {
	case BF16:
		return 2
	case FP32, Int32:
		return 4
	case Int64:
		return 8
	case FP8:
		return 1
	}
	return 0
}

// Layout says where the words of a tensor lie inside its object.
type Layout uint8

// The storage layouts of the container.
const (
	NoLayout         Layout = iota
	Contiguous              // C-order words
	RowSplitK128            // base, high and scale planes, rows padded to 128 K-values
	BlockScale              // NVFP4 matrix: codes, swizzled scales, divisor
	ExpertBlockScale        // NVFP4 bank: all codes, all swizzled scales, all divisors
	RowScale                // codes, then one BF16 word per row
	RowScaleFP32            // codes, then one FP32 word per row
	PackedU4                // nibbles, then one binary16 word per 16 K-values
	numLayouts
)

var layoutNames = [numLayouts]string{
	"none",
	"contiguous_le_v1", "row_split_k128_v1", "block_scale_k16_m128x4_v1",
	"expert_block_scale_k16_m128x4_v1", "row_scale_v1", "row_scale_fp32_v1", "packed_u4_g16_v1",
}

// String gives the spelling used in artifact directories.
func (l Layout) String() string {
	if l < numLayouts {
		return layoutNames[l]
	}
	return fmt.Sprintf("layout(%d)", uint8(l))
}

// ParseLayout is the inverse of String for the legal layouts.
func ParseLayout(s string) (Layout, bool) {
	for l := Contiguous; l < numLayouts; l++ {
		if layoutNames[l] == s {
			return l, true
		}
	}
	return NoLayout, false
}

// LayoutOf gives the layout that stores a tensor of the format: every format
// has exactly one, except NVFP4, which is a matrix at rank 2 and a bank of
// experts at rank 3. It is NoLayout where there is none.
func LayoutOf(f Format, rank int) Layout {
	switch f {
	case BF16, FP32, Int32, Int64, FP8:
		return Contiguous
	case Q4G64, Q5G64, Q6G64, Q8G32:
		return RowSplitK128
	case NVFP4:
		switch rank {
		case 2:
			return BlockScale
		case 3:
			return ExpertBlockScale
		}
	case FP8RowBF16:
		return RowScale
	case FP8RowFP32:
		return RowScaleFP32
	case U4Z8G16:
		return PackedU4
	}
	return NoLayout
}

// pair tells whether the layout stores the format (docs/format.md 3.1).
func pair(f Format, l Layout) bool {
	switch l {
	case Contiguous:
		return f.wordBytes() > 0
	case RowSplitK128:
		return f.codeBits() > 0
	case BlockScale, ExpertBlockScale:
		return f == NVFP4
	case RowScale:
		return f == FP8RowBF16
	case RowScaleFP32:
		return f == FP8RowFP32
	case PackedU4:
		return f == U4Z8G16
	}
	return false
}
