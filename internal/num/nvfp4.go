package num

import (
	"fmt"
	"math"
)

// Profile selects one of the two NVFP4 expert encoders of specification 2.8.
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
func EncodeNVFP4(p Profile, n, k int, src, codes, scales []byte) (float32, error) {
	if n%128 != 0 || k%64 != 0 || len(src) != 2*n*k || len(codes) != n*k/2 || len(scales) != n*k/16 {
		panic(fmt.Sprintf("num: nvfp4 [%d,%d] from %d bytes to %d and %d", n, k, len(src), len(codes), len(scales)))
	}
	if i := bf16NotFinite(src); i >= 0 {
		return 0, notFinite(i/k, i%k, src[2*(i-i%k):])
	}
	amax := bf16MaxAbs(src)
	if amax == 0 {
		if p == ProfileB {
			return 0, fmt.Errorf("all values are zero")
		}
		clear(codes)
		clear(scales)
		return 1, nil
	}
	global := float64(amax) / maxNVFP4 // used by profile B
	d := float32(maxNVFP4 / float64(amax))
	if p == ProfileB {
		d = float32(1 / global)
	}
	if !positive(d) {
		return 0, fmt.Errorf("largest magnitude %v gives the divisor %v, which is not finite and positive", amax, d)
	}
	for r := range n {
		for g := range k / 16 {
			i := r*k + 16*g
			group, out := src[2*i:][:32], codes[i/2:][:8]
			if p == ProfileA {
				scales[Swizzle(r, g, k)] = encodeGroupA(out, group, d)
			} else {
				scales[Swizzle(r, g, k)] = encodeGroupB(out, group, d, global)
			}
		}
	}
	return d, nil
}

// encodeGroupA encodes 16 values in binary32 and returns the scale word.
func encodeGroupA(out, src []byte, d float32) byte {
	var y [16]float32
	most := uint32(0) // magnitudes are ordered as their bits
	for i := range y {
		y[i] = float32(bf16At(src, i) * d)
		most = max(most, math.Float32bits(y[i])&0x7fffffff)
	}
	word := ToE4M3(min(math.Float32frombits(most)/6, MaxE4M3))
	s := FromE4M3(word)
	if s == 0 {
		clear(out)
		return word
	}
	for i := range out {
		out[i] = ToE2M1(y[2*i]/s) | ToE2M1(y[2*i+1]/s)<<4
	}
	return word
}

// encodeGroupB encodes 16 values in binary64 and returns the scale word.
func encodeGroupB(out, src []byte, d float32, global float64) byte {
	most := float64(bf16MaxAbs(src))
	word := ToE4M3(float32(min(most/(6*global), MaxE4M3)))
	step := float64(FromE4M3(word)) / float64(d)
	if step == 0 {
		clear(out)
		return word
	}
	code := func(i int) byte {
		q := float64(bf16At(src, i)) / step
		c := e2m1Magnitude(math.Abs(q))
		if q < 0 {
			c |= 8
		}
		return c
	}
	for i := range out {
		out[i] = code(2*i) | code(2*i+1)<<4
	}
	return word
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

// ModelOptFusedDivisor is ModelOptDivisor for a fused gate and up matrix, whose
// two multipliers must be equal.
func ModelOptFusedDivisor(gate, up float32) (float32, error) {
	if gate != up {
		return 0, fmt.Errorf("gate multiplier %v and up multiplier %v differ", gate, up)
	}
	return ModelOptDivisor(gate)
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
