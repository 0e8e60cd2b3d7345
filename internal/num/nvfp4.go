package num

import (
	"encoding/binary"
	"fmt"
	"math"
)

// Profile selects one of the two NVFP4 expert encoders of docs/format.md 2.8.
// Both are in use, and their bytes differ at ties and at negative zeros.
type Profile uint8

const (
	// ProfileA computes in binary32 and accepts an all-zero expert; the
	// upgrade of the mixed artifact uses it (dialect E).
	ProfileA Profile = iota
	// ProfileB computes in binary64 and refuses an all-zero expert; the
	// converter uses it for MTP experts (dialect L).
	ProfileB
)

// Activation divisors that go with ProfileB, the same for every expert.
const (
	GateUpActivationDivisor float32 = 2688. / 24
	DownActivationDivisor   float32 = 2688. / 2720
)

// maxNVFP4 is the largest product of an E2M1 value and an E4M3 scale.
const maxNVFP4 = 6 * MaxE4M3

// EncodeNVFP4 encodes one matrix of n rows and k columns (n % 128 = 0,
// k % 64 = 0) from little-endian BF16, row-major. It writes n*k/2 bytes of
// codes, the n*k/16 bytes of the swizzled scale plane, and returns the
// divisor. It fails on a value that is not finite, on an all-zero matrix
// (ProfileB) and where the divisor would not be finite and positive.
//
// Profile A, in binary32: y = x*d, s = e4m3(min(max|y|/6, 448)), code =
// e2m1(y/s). Profile B, in binary64: s = e4m3(min(max|x|/(6*g), 448)) with
// g = amax/2688, code = e2m1(x/(s/d)).
func EncodeNVFP4(p Profile, n, k int, src, codes, scales []byte) (float32, error) {
	if n%128 != 0 || k%64 != 0 || len(src) != 2*n*k || len(codes) != n*k/2 || len(scales) != n*k/16 {
		panic(fmt.Sprintf("num: nvfp4 [%d,%d] from %d bytes to %d and %d", n, k, len(src), len(codes), len(scales)))
	}
	word := bf16MaxAbs(src)
	if word >= bf16Infinity {
		i := bf16NotFinite(src)
		return 0, notFinite(i/k, i%k, src[2*(i-i%k):])
	}
	amax := FromBF16(word)
	if amax == 0 {
		if p == ProfileB {
			return 0, fmt.Errorf("all values are zero")
		}
		clear(codes)
		clear(scales)
		return 1, nil
	}
	e := nvfp4Encoder{profile: p, global: float64(amax) / maxNVFP4, d: float32(maxNVFP4 / float64(amax))}
	if p == ProfileB {
		e.d = float32(1 / e.global)
	}
	if !positive(e.d) {
		return 0, fmt.Errorf("largest magnitude %v gives the divisor %v, which is not finite and positive", amax, e.d)
	}
	// Scales first, codes then: each loop's turns are independent of each other.
	words, most := make([]byte, k/16), make([]uint16, k/16)
	for r := range n {
		row, out := src[2*r*k:][:2*k], codes[r*k/2:][:k/2]
		if vectors {
			groupMaxAVX2(&most[0], &row[0], len(most), 1)
		} else {
			for g := range most {
				most[g] = max16(row[32*g:][:32])
			}
		}
		for g := range words {
			words[g] = e.scale(most[g])
			if !e.known[words[g]] {
				e.measure(words[g])
			}
		}
		if vectors {
			nvfp4GroupsAVX2(&out[0], &row[0], &words[0], &e.above[0], len(words)/4)
		} else {
			for g, word := range words {
				e.encode(out[8*g:][:8], row[32*g:][:32], word)
			}
		}
		line := scales[Swizzle(r, 0, k):]
		for g := 0; g < len(words); g += 4 {
			copy(line[g*128:][:4], words[g:][:4])
		}
	}
	return e.d, nil
}

// nvfp4Encoder encodes the groups of one matrix.
//
// The code of a value grows with its magnitude, and BF16 has few magnitudes.
// So instead of dividing every value, it finds for each scale word the
// magnitudes at which codes 1 to 7 begin, by the profile's own arithmetic, and
// counts how many of these a value has reached.
type nvfp4Encoder struct {
	profile Profile
	d       float32
	global  float64 // of profile B

	known [128]bool
	begin [128][7]uint64 // by scale word: the magnitude in all four 16-bit lanes; 0x8000 is never reached
	above [128][8]int16  // the magnitudes before these, for vectors, and the one above which signs count
}

const (
	lanesHigh = 0x8000800080008000
	lanesOne  = 0x0001000100010001
)

// encode writes the codes of 16 values under a scale word.
func (e *nvfp4Encoder) encode(out, src []byte, word byte) {
	_, _ = out[7], src[31]
	if word == 0 {
		clear(out[:8])
		return
	}
	b := &e.begin[word]
	b0, b1, b2, b3, b4, b5, b6 := b[0], b[1], b[2], b[3], b[4], b[5], b[6]
	for i := range 4 {
		v := binary.LittleEndian.Uint64(src[8*i:])
		m := v | lanesHigh // the guard bit keeps borrows inside their lanes
		// Whether each beginning is reached, in the high bits. Who reached one has reached those before it, so that the bits of the
		// count are differences.
		t1, t3, t5 := m-b1, m-b3, m-b5
		n := t3&lanesHigh>>13 | (t1^t3^t5)&lanesHigh>>14 | ((m-b0)^t1^(m-b2)^t3^(m-b4)^t5^(m-b6))&lanesHigh>>15
		sign := v & lanesHigh
		if e.profile == ProfileB { // negative zero has none there
			sign &= v&^lanesHigh + ^uint64(lanesHigh)
		}
		n |= sign >> 12
		n |= n >> 12
		out[2*i], out[2*i+1] = byte(n), byte(n>>32)
	}
}

// lanesMax is the larger of each pair of 15-bit lanes.
func lanesMax(a, b uint64) uint64 {
	larger := ((a | lanesHigh) - b) & lanesHigh // where a >= b
	mask := larger - larger>>15
	return a&mask | b&^(mask|lanesHigh)
}

// max16 is the largest magnitude word of 16 values.
func max16(src []byte) uint16 {
	_ = src[31]
	le := binary.LittleEndian
	m := lanesMax(
		lanesMax(le.Uint64(src)&^lanesHigh, le.Uint64(src[8:])&^lanesHigh),
		lanesMax(le.Uint64(src[16:])&^lanesHigh, le.Uint64(src[24:])&^lanesHigh))
	m = lanesMax(m, m>>32)
	return uint16(max(m&0xffff, m>>16&0xffff))
}

// scale is the scale word of a group with a largest magnitude word.
func (e *nvfp4Encoder) scale(word uint16) byte {
	most := FromBF16(word)
	if e.profile == ProfileA {
		return ToE4M3(min(float32(most*e.d)/6, MaxE4M3))
	}
	return ToE4M3(float32(min(float64(most)/(6*e.global), MaxE4M3)))
}

// code is the magnitude of the code of a BF16 magnitude under a scale.
func (e *nvfp4Encoder) code(magnitude uint16, s float32) byte {
	x := FromBF16(magnitude)
	if e.profile == ProfileA {
		y := float32(x * e.d)
		return e2m1Magnitude(float64(y / s))
	}
	return e2m1Magnitude(float64(x) / (float64(s) / float64(e.d)))
}

// measure finds where codes begin under a scale word. Under zero there are neither codes nor signs.
func (e *nvfp4Encoder) measure(word byte) {
	e.known[word] = true
	above := &e.above[word]
	for i := range above {
		above[i] = math.MaxInt16
	}
	if word == 0 {
		return
	}
	above[7] = -1
	if e.profile == ProfileB { // negative zero has no sign there
		above[7] = 0
	}
	s := FromE4M3(word)
	for i, boundary := range [7]float64{0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5} {
		code := byte(i + 1)
		const end = 0x7f80 // infinity
		m := min(ToBF16(float32(boundary*float64(s)/float64(e.d)))&0x7fff, end)
		for m > 0 && e.code(m-1, s) >= code {
			m--
		}
		for m < end && e.code(m, s) < code {
			m++
		}
		if m == end {
			m = 0x8000
		}
		e.begin[word][i] = uint64(m) * lanesOne
		above[i] = int16(m - 1)
	}
}

// ModelOptDivisor turns a multiplier of a ModelOpt checkpoint (weight_scale_2
// or input_scale) into the divisor f32(1/multiplier) that artifacts store. Both
// must be finite and positive.
func ModelOptDivisor(multiplier float32) (float32, error) {
	if !positive(multiplier) {
		return 0, fmt.Errorf("multiplier %v is not finite and positive", multiplier)
	}
	d := float32(1 / float64(multiplier))
	if !positive(d) {
		return 0, fmt.Errorf("multiplier %v has no finite reciprocal", multiplier)
	}
	return d, nil
}

// PackedFusedDivisor checks the divisors of a compressed-tensors checkpoint
// (weight_global_scale, already a divisor) of a gate and an up matrix to be
// fused: their bits must be equal, the value finite and positive. For a single
// matrix pass its divisor twice.
func PackedFusedDivisor(gate, up float32) (float32, error) {
	if math.Float32bits(gate) != math.Float32bits(up) {
		return 0, fmt.Errorf("gate divisor %v and up divisor %v differ", gate, up)
	}
	if !positive(gate) {
		return 0, fmt.Errorf("divisor %v is not finite and positive", gate)
	}
	return gate, nil
}

// CheckPackedInputScale checks the input_global_scale of a compressed-tensors
// checkpoint, which must be exactly 1 and is dropped.
func CheckPackedInputScale(x float32) error {
	if x != 1 {
		return fmt.Errorf("input scale %v is not 1", x)
	}
	return nil
}
