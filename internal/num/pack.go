package num

// highBytes is the size of the high plane per group of the grouped integer
// formats (specification 3.3).
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
	clear(base)
	clear(high)
	for i, c := range lanes {
		u := byte(c)
		if f == Q8G32 {
			base[i] = u
			continue
		}
		base[i/2] |= u & 15 << (i % 2 * 4)
		switch f {
		case Q5G64:
			high[i/8] |= u >> 4 & 1 << (i % 8)
		case Q6G64:
			high[i/4] |= u >> 4 & 3 << (i % 4 * 2)
		}
	}
}
