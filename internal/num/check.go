package num

import (
	"encoding/binary"
	"fmt"
	"math"
)

// Validate checks that every word of the tensor is legal and that all padding
// is zero (level 3 of verification). The error names the first offending
// word's row, column and byte offset in the object. Direct formats have no
// illegal words; NaN codes of an FP8 table are found by E4M3NaN.
func (t Tensor) Validate() error {
	g := t.Geometry()
	r, err := g.RowBytes(t.Data, 0, g.Rows)
	if err != nil {
		return err
	}
	if err := g.CheckRows(r); err != nil {
		return err
	}
	if err := g.CheckDivisors(t.Planes().Divisors); err != nil {
		return err
	}
	for _, s := range g.Gaps() {
		if err := CheckPadding(s.Off, t.Data[s.Off:s.Off+s.Len]); err != nil {
			return err
		}
	}
	return nil
}

// E4M3NaN is the index of the first NaN code (0x7f or 0xff), -1 if there is
// none.
func E4M3NaN(codes []byte) int {
	i := 0
	for ; i+8 <= len(codes); i += 8 {
		w := binary.LittleEndian.Uint64(codes[i:]) & 0x7f7f7f7f7f7f7f7f
		if (w+0x0101010101010101)&0x8080808080808080 != 0 {
			break
		}
	}
	for ; i < len(codes); i++ {
		if codes[i]&0x7f == 0x7f {
			return i
		}
	}
	return -1
}

// CheckPadding checks that padding bytes are zero; off is the first one's
// offset in its object, for the error.
func CheckPadding(off int64, b []byte) error {
	for i, c := range b {
		if c != 0 {
			return fmt.Errorf("padding at offset %d is 0x%02x, want zero", off+int64(i), c)
		}
	}
	return nil
}

// CheckDivisors checks the divisor plane of an NVFP4 matrix or bank: every
// divisor must be finite and positive. The plane of other formats is empty.
func (g *Geometry) CheckDivisors(plane []byte) error {
	for e := range len(plane) / 4 {
		d := math.Float32frombits(binary.LittleEndian.Uint32(plane[4*e:]))
		if !positive(d) {
			return fmt.Errorf("expert %d (offset %d): divisor %v is not finite and positive", e, g.Divisors.Off+4*int64(e), d)
		}
	}
	return nil
}

// positive tells whether x is finite and above zero.
func positive(x float32) bool { return x > 0 && x <= math.MaxFloat32 }

// CheckRows checks the words of a run of rows, and the padding inside the
// rows. Divisors and the padding between planes are not part of rows.
func (g *Geometry) CheckRows(r RowBytes) error {
	g.must(r)
	switch g.Format {
	case FP8RowBF16, FP8RowFP32:
		return g.checkRowScaled(r)
	case Q4G64, Q5G64, Q6G64, Q8G32:
		return g.checkGrouped(r)
	case U4Z8G16:
		return g.checkU4(r)
	case NVFP4:
		return g.checkNVFP4(r)
	}
	return nil
}

func (g *Geometry) codeError(row, col int, within int, format string, args ...any) error {
	off := g.Codes.Off + int64(row)*g.Codes.Stride + int64(within)
	return fmt.Errorf("row %d column %d (offset %d): %s", row, col, off, fmt.Sprintf(format, args...))
}

func (g *Geometry) scaleError(row, group int, format string, args ...any) error {
	off := g.Scales.Off + int64(row)*g.Scales.Stride + 2*int64(group)
	what := fmt.Sprintf(format, args...)
	if g.Group == 0 {
		return fmt.Errorf("row %d (offset %d): %s", row, off, what)
	}
	return fmt.Errorf("row %d column %d (offset %d): %s", row, group*g.Group, off, what)
}

func (g *Geometry) checkRowScaled(r RowBytes) error {
	for i := range r.N {
		row := r.First + i
		codes := r.Codes[i*g.Cols:][:g.Cols]
		if c := E4M3NaN(codes); c >= 0 {
			return g.codeError(row, c, c, "fp8 code 0x%02x is NaN", codes[c])
		}
		var zero, ok bool
		var word uint32
		if g.Format == FP8RowBF16 {
			w := binary.LittleEndian.Uint16(r.Scales[2*i:])
			word, zero, ok = uint32(w), w == 0, w < 0x7f80
		} else {
			word = binary.LittleEndian.Uint32(r.Scales[4*i:])
			zero, ok = word == 0, word < 0x7f800000
		}
		if !ok {
			return g.scaleError(row, 0, "row scale 0x%0*x is negative or not finite", int(g.Scales.Stride)*2, word)
		}
		if !zero {
			continue
		}
		for c, w := range codes {
			if w&0x7f != 0 {
				return g.codeError(row, c, c, "fp8 code 0x%02x in a row whose scale is zero", w)
			}
		}
	}
	return nil
}

func (g *Geometry) checkGrouped(r RowBytes) error {
	var lanes [64]int8
	hb := highBytes(g.Format)
	for i := range r.N {
		row := r.First + i
		codes := r.Codes[i*int(g.Codes.Stride):][:g.Codes.Stride]
		high := r.High[i*int(g.High.Stride):][:g.High.Stride]
		scales := r.Scales[i*int(g.Scales.Stride):][:g.Scales.Stride]
		for k := range g.Groups {
			scale := binary.LittleEndian.Uint16(scales[2*k:])
			first := k * g.Group
			if scale >= 0x7c00 {
				return g.scaleError(row, k, "scale 0x%04x is negative or not finite", scale)
			}
			if first >= g.Cols && scale != 0 {
				return g.scaleError(row, k, "scale 0x%04x of a group beyond the last column", scale)
			}
			used := max(0, min(g.Group, g.Cols-first)) // lanes that are columns
			if g.Format != Q8G32 && used == g.Group && scale != 0 {
				continue // every bit pattern is legal
			}
			unpackGroup(g.Format, lanes[:g.Group], codes[32*k:][:32], high[hb*k:][:hb])
			for j, c := range lanes[:g.Group] {
				var what string
				switch {
				case c == -128:
					what = "is not allowed"
				case c == 0:
					continue
				case j >= used:
					what = "beyond the last column"
				case scale == 0:
					what = "in a group whose scale is zero"
				default:
					continue
				}
				within := 32*k + j
				if g.Format != Q8G32 {
					within = 32*k + j/2
				}
				return g.codeError(row, first+j, within, "%s code %d %s", g.Format, c, what)
			}
		}
	}
	return nil
}

func (g *Geometry) checkU4(r RowBytes) error {
	for i := range r.N * g.Groups {
		row, k := r.First+i/g.Groups, i%g.Groups
		scale := binary.LittleEndian.Uint16(r.Scales[2*i:])
		if scale >= 0x7c00 {
			return g.scaleError(row, k, "scale 0x%04x is negative or not finite", scale)
		}
		if scale != 0 || binary.LittleEndian.Uint64(r.Codes[8*i:]) == 0x8888888888888888 {
			continue
		}
		for j := range 16 {
			if u := r.Codes[8*i+j/2] >> (j % 2 * 4) & 15; u != 8 {
				return g.codeError(row, 16*k+j, 8*k+j/2, "code %d in a group whose scale is zero, want 8", u)
			}
		}
	}
	return nil
}

// checkNVFP4 needs to look at scales only: every E2M1 code is legal, and zero
// scales with non-zero codes are.
func (g *Geometry) checkNVFP4(r RowBytes) error {
	i := 0
	for ; i+8 <= len(r.Scales); i += 8 {
		w := binary.LittleEndian.Uint64(r.Scales[i:])
		if (w|(w+0x0101010101010101))&0x8080808080808080 != 0 {
			break
		}
	}
	for ; i < len(r.Scales); i++ {
		if r.Scales[i] < 0x7f {
			continue
		}
		// Tiles never straddle experts, as rows per expert are whole tiles.
		n, k := unswizzle(i, g.Cols)
		off := g.Scales.Off + int64(r.First)*int64(g.Groups) + int64(i)
		return fmt.Errorf("row %d column %d (offset %d): scale 0x%02x is negative or NaN", r.First+n, 16*k, off, r.Scales[i])
	}
	return nil
}
