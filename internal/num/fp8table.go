package num

import (
	"encoding/binary"
	"fmt"
	"math"
)

// MaxAbsBF16 is the largest magnitude among little-endian BF16 words, the
// first of the two passes over a table. It fails on a value that is not
// finite, naming its index.
func MaxAbsBF16(src []byte) (float32, error) {
	word := bf16MaxAbs(src)
	if word >= bf16Infinity {
		i := bf16NotFinite(src)
		return 0, fmt.Errorf("value %d: source value %v is not finite", i, bf16At(src, i))
	}
	return FromBF16(word), nil
}

// FP8TableMultiplier is the BF16 word of the multiplier of an FP8 table whose
// largest magnitude is amax: the smallest BF16 value that is not below
// amax/448 (binary64 quotient), so that no quotient exceeds 448 (docs/format.md
// 2.7). It fails unless amax is finite and positive.
func FP8TableMultiplier(amax float32) (uint16, error) {
	if !positive(amax) {
		return 0, fmt.Errorf("largest magnitude %v of the table is not finite and positive", amax)
	}
	exact := float64(amax) / MaxE4M3
	w := ToBF16(float32(exact))
	for float64(FromBF16(w)) < exact {
		w++
	}
	return w, nil
}

// FP8Table encodes BF16 values as E4M3FN under one multiplier for the whole
// table: code = e4m3(f32(x / multiplier)), a binary32 division. There are only
// 65,536 different source words, so their codes are tabulated.
type FP8Table struct {
	multiplier float32
	code       [1 << 16]byte // 0x7f (never a code) where the word cannot be encoded
}

// NewFP8Table prepares the encoder for a BF16 multiplier word, which must be
// finite and positive.
func NewFP8Table(multiplier uint16) (*FP8Table, error) {
	m := FromBF16(multiplier)
	if !positive(m) {
		return nil, fmt.Errorf("multiplier word 0x%04x is not finite and positive", multiplier)
	}
	t := &FP8Table{multiplier: m}
	for w := range t.code {
		q := FromBF16(uint16(w)) / m
		if math.Abs(float64(q)) <= MaxE4M3 {
			t.code[w] = ToE4M3(q)
		} else {
			t.code[w] = 0x7f
		}
	}
	return t, nil
}

// Encode writes one code per little-endian BF16 word of src; signs of zeros are
// kept. It fails at a value that is not finite or larger than 448 multipliers,
// naming its index in src; values before it are encoded.
func (t *FP8Table) Encode(dst, src []byte) error {
	dst = dst[:len(src)/2]
	first := 0
	if n := len(dst) &^ 31; vectors && n > 0 && fp8OverAVX2(&dst[0], &src[0], n, t.multiplier) == 0 {
		first = n
	}
	for i := first; i < len(dst); i++ {
		c := t.code[binary.LittleEndian.Uint16(src[2*i:])]
		if c == 0x7f {
			return fmt.Errorf("value %d: source value %v is beyond the table's multiplier", i, bf16At(src, i))
		}
		dst[i] = c
	}
	return nil
}
