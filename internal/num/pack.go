package num

// highBytes is the size of the high plane per group of the grouped integer
// formats (docs/format.md 3.3).
func highBytes(f Format) int {
	switch f {
	case Q5G64:
		return 8
	case Q6G64:
		return 16
	}
	return 0
}

// unpackGroup reads the codes of one group of a grouped integer format.
// len(lanes) is the group size.
func unpackGroup(f Format, lanes []int8, base, high []byte) {
	switch f {
	case Q8G32:
		for i := range lanes {
			lanes[i] = int8(base[i])
		}
	case Q4G64:
		for i := range lanes {
			lanes[i] = int8(base[i/2]>>(i%2*4)<<4) >> 4
		}
	case Q5G64:
		for i := range lanes {
			u := base[i/2]>>(i%2*4)&15 | high[i/8]>>(i%8)&1<<4
			lanes[i] = int8(u<<3) >> 3
		}
	case Q6G64:
		for i := range lanes {
			u := base[i/2]>>(i%2*4)&15 | high[i/4]>>(i%4*2)&3<<4
			lanes[i] = int8(u<<2) >> 2
		}
	}
}

// packGroup is the inverse of unpackGroup; codes must be in range.
func packGroup(f Format, lanes []int8, base, high []byte) {
	if f == Q8G32 {
		for i, c := range lanes {
			base[i] = byte(c)
		}
		return
	}
	base, lanes = base[:32], lanes[:64]
	for j := range base {
		base[j] = byte(lanes[2*j])&15 | byte(lanes[2*j+1])<<4
	}
	switch f {
	case Q5G64:
		for j := range high {
			l, h := lanes[8*j:][:8], byte(0)
			for i, c := range l {
				h |= byte(c) >> 4 & 1 << i
			}
			high[j] = h
		}
	case Q6G64:
		for j := range high {
			l := lanes[4*j:][:4]
			high[j] = byte(l[0])>>4&3 | byte(l[1])>>4&3<<2 | byte(l[2])>>4&3<<4 | byte(l[3])>>4&3<<6
		}
	}
}

// UnpackCodes reads the codes of one row, one byte per column: the two's
// complement value for q4 to q8, u in 0..15 for u4z8 (zero point not taken
// off), the E2M1 code in 0..15 for NVFP4, the E4M3FN word for FP8 formats.
// codes and high are the row's bytes in those planes; len(dst) is the number of
// columns. It panics for formats without codes.
func UnpackCodes(f Format, dst []int8, codes, high []byte) {
	switch f {
	case Q4G64, Q5G64, Q6G64, Q8G32:
		var lanes [64]int8
		group, hb := f.Group(), highBytes(f)
		for g := 0; len(dst) > 0; g++ {
			unpackGroup(f, lanes[:group], codes[32*g:][:32], high[hb*g:][:hb])
			dst = dst[copy(dst, lanes[:group]):]
		}
	case NVFP4, U4Z8G16:
		for i := range dst {
			dst[i] = int8(codes[i/2] >> (i % 2 * 4) & 15)
		}
	case FP8, FP8RowBF16, FP8RowFP32:
		for i := range dst {
			dst[i] = int8(codes[i])
		}
	default:
		panic("num: format " + f.String() + " has no codes")
	}
}

// PackCodes is the inverse of UnpackCodes. Codes that do not fit are cut to
// the format's bits. The padding lanes of grouped formats become zero.
func PackCodes(f Format, src []int8, codes, high []byte) {
	switch f {
	case Q4G64, Q5G64, Q6G64, Q8G32:
		var lanes [64]int8
		group, hb := f.Group(), highBytes(f)
		for g := range len(codes) / 32 {
			n := copy(lanes[:group], src)
			clear(lanes[n:])
			src = src[n:]
			packGroup(f, lanes[:group], codes[32*g:][:32], high[hb*g:][:hb])
		}
	case NVFP4, U4Z8G16:
		clear(codes)
		for i, c := range src {
			codes[i/2] |= byte(c) & 15 << (i % 2 * 4)
		}
	case FP8, FP8RowBF16, FP8RowFP32:
		for i, c := range src {
			codes[i] = byte(c)
		}
	default:
		panic("num: format " + f.String() + " has no codes")
	}
}
