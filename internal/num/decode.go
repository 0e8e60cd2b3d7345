package num

import (
	"encoding/binary"
	"math"
)

// The decoders are written once for both result types. Every product below is
// exact in float64, and in float32 rounds once; nothing is added to a product,
// so there is nothing to fuse.

// decodeRow decodes one row from its bytes in each plane (all formats but
// NVFP4).
func decodeRow[F float32 | float64](f Format, dst []F, codes, high, scales []byte) {
	le := binary.LittleEndian
	switch f {
	case BF16:
		for len(dst) >= 4 {
			w := le.Uint64(codes)
			dst[0] = F(FromBF16(uint16(w)))
			dst[1] = F(FromBF16(uint16(w >> 16)))
			dst[2] = F(FromBF16(uint16(w >> 32)))
			dst[3] = F(FromBF16(uint16(w >> 48)))
			dst, codes = dst[4:], codes[8:]
		}
		for i := range dst {
			dst[i] = F(FromBF16(le.Uint16(codes[2*i:])))
		}
	case FP32:
		codes = codes[:4*len(dst)]
		for i := range dst {
			dst[i] = F(math.Float32frombits(le.Uint32(codes[4*i:])))
		}
	case Int32:
		for i := range dst {
			dst[i] = F(int32(le.Uint32(codes[4*i:])))
		}
	case Int64:
		for i := range dst {
			dst[i] = F(int64(le.Uint64(codes[8*i:])))
		}
	case FP8:
		for i, c := range codes[:len(dst)] {
			dst[i] = F(e4m3Values[c])
		}
	case FP8RowBF16:
		scaleE4M3(dst, codes, F(FromBF16(le.Uint16(scales))))
	case FP8RowFP32:
		scaleE4M3(dst, codes, F(math.Float32frombits(le.Uint32(scales))))
	case Q4G64:
		decodeQ4(dst, codes, scales)
	case Q5G64, Q6G64, Q8G32:
		decodeGrouped(f, dst, codes, high, scales)
	case U4Z8G16:
		decodeU4(dst, codes, scales)
	default:
		panic("num: decode of format " + f.String())
	}
}

func scaleE4M3[F float32 | float64](dst []F, codes []byte, s F) {
	for i, c := range codes[:len(dst)] {
		dst[i] = F(e4m3Values[c]) * s
	}
}

// signed4 is the value of a nibble as a two's complement number.
var signed4 = [16]float32{0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1}

func decodeQ4[F float32 | float64](dst []F, codes, scales []byte) {
	for g := 0; len(dst) > 0; g++ {
		s := F(FromF16(binary.LittleEndian.Uint16(scales[2*g:])))
		n := min(64, len(dst))
		decodeNibbles(dst[:n], codes[32*g:][:32], s, &signed4)
		dst = dst[n:]
	}
}

// zero8 is the value of a nibble with zero point 8.
var zero8 = [16]float32{-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7}

func decodeU4[F float32 | float64](dst []F, codes, scales []byte) {
	for g := 0; len(dst) > 0; g++ {
		s := F(FromF16(binary.LittleEndian.Uint16(scales[2*g:])))
		decodeNibbles(dst[:16], codes[8*g:][:8], s, &zero8)
		dst = dst[16:]
	}
}

// decodeNibbles gives lane i the value of nibble i, low nibble first.
func decodeNibbles[F float32 | float64](dst []F, codes []byte, s F, values *[16]float32) {
	for len(dst) >= 16 {
		w := binary.LittleEndian.Uint64(codes)
		out := dst[:16]
		for i := range out {
			out[i] = F(values[w&15]) * s
			w >>= 4
		}
		dst, codes = dst[16:], codes[8:]
	}
	for i := range dst {
		dst[i] = F(values[codes[i/2]>>(i%2*4)&15]) * s
	}
}

func decodeGrouped[F float32 | float64](f Format, dst []F, codes, high, scales []byte) {
	var lanes [64]int8
	group := f.Group()
	hb := highBytes(f)
	for g := 0; len(dst) > 0; g++ {
		s := F(FromF16(binary.LittleEndian.Uint16(scales[2*g:])))
		unpackGroup(f, lanes[:group], codes[32*g:][:32], high[hb*g:][:hb])
		n := min(group, len(dst))
		for i := range dst[:n] {
			dst[i] = F(lanes[i]) * s
		}
		dst = dst[n:]
	}
}

// decodeNVFP4 decodes a row; scales begins at the row's first scale word in
// the swizzled plane, where groups come in fours, 512 bytes apart.
func decodeNVFP4[F float32 | float64](dst []F, codes, scales []byte, divisor float32) {
	d := F(divisor)
	var table [16]F
	for g := range len(dst) / 16 {
		s := e4m3Values[scales[g/4*512+g%4]]
		for c := range 8 {
			v := F(e2m1Values[c]*s) / d // the product has six significant bits: exact
			table[c], table[c+8] = v, -v
		}
		out := dst[16*g:][:16]
		w := binary.LittleEndian.Uint64(codes[8*g:])
		for i := range out {
			out[i] = table[w&15]
			w >>= 4
		}
	}
}
