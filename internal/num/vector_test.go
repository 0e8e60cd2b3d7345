package num

import (
	"bytes"
	"encoding/binary"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
)

// plainly calls f without vector instructions.
func plainly(f func()) {
	defer func(was bool) { vectors = was }(vectors)
	vectors = false
	f()
}

// TestWithoutVectors repeats the tests of encoders as processors without vector instructions run them.
func TestWithoutVectors(t *testing.T) {
	if !vectors {
		t.Skip("the tests ran without")
	}
	for name, test := range map[string]func(*testing.T){
		"plain": TestEncodersArePlain, "rows": TestRowEncoderVectors, "saturates": TestFP8RowSaturates, "table": TestFP8TableVectors,
		"bank": TestNVFP4BankVector, "groups": TestNVFP4ProfileGroups, "errors": TestEncoderErrors,
	} {
		plainly(func() { t.Run(name, test) })
	}
}

// sameRows encodes rows both ways: equal bytes, or the same error.
func sameRows(t *testing.T, f Format, cols int, src []byte) {
	t.Helper()
	rows := len(src) / 2 / cols
	g := geometry(t, f, rows, cols)
	var out [2][]byte
	var errs [2]string
	run := func(i int) {
		dst, err := g.NewRowBytes(0, rows)
		if err != nil {
			t.Fatal(err)
		}
		if err := g.EncodeRows(dst, src); err != nil {
			errs[i] = err.Error()
			return
		}
		out[i] = slices.Concat(dst.Codes, dst.High, dst.Scales)
	}
	run(0)
	plainly(func() { run(1) })
	if errs[0] != errs[1] || !bytes.Equal(out[0], out[1]) {
		t.Fatalf("%s [%d,%d]: with vectors %q, without %q; bytes equal: %v", f, rows, cols, errs[0], errs[1], bytes.Equal(out[0], out[1]))
	}
}

func sameNVFP4(t *testing.T, p Profile, n, k int, src []byte) {
	t.Helper()
	var out [2][]byte
	var errs [2]string
	run := func(i int) {
		codes, scales := make([]byte, n*k/2), make([]byte, n*k/16)
		d, err := EncodeNVFP4(p, n, k, src, codes, scales)
		if err != nil {
			errs[i] = err.Error()
			return
		}
		out[i] = binary.LittleEndian.AppendUint32(slices.Concat(codes, scales), math.Float32bits(d))
	}
	run(0)
	plainly(func() { run(1) })
	if errs[0] != errs[1] || !bytes.Equal(out[0], out[1]) {
		t.Fatalf("profile %d [%d,%d]: with vectors %q, without %q; bytes equal: %v", p, n, k, errs[0], errs[1], bytes.Equal(out[0], out[1]))
	}
}

// TestVectors: every encoder gives the same bytes and errors with and without vector instructions, for words of all sizes, lengths that do
// not fill a vector, and values that are not finite in any place.
func TestVectors(t *testing.T) {
	if !vectors {
		t.Skip("no vector instructions here")
	}
	r := rand.New(rand.NewPCG(5, 11))
	for _, e := range []int{0, 1, 3, 12, 31, 40, 100, 103, 108, 112, 113, 114, 120, 127, 140, 143, 200, 240, 254, 255} {
		for _, below := range []int{0, 3, 14, 30, 255} {
			for _, cols := range []int{1, 15, 31, 32, 33, 63, 64, 65, 127, 128, 200, 640, 4096 + 64 + 17} {
				src := spread(r, 2*cols, e, below)
				for _, f := range []Format{Q4G64, Q5G64, Q6G64, Q8G32, FP8RowBF16} {
					sameRows(t, f, cols, src)
				}
			}
			src := spread(r, 128*192, e, below)
			for i := range 192 { // a row with groups that are far smaller
				binary.LittleEndian.PutUint16(src[2*(5*192+i):], uint16(i%3)<<15|uint16(i/16))
			}
			sameNVFP4(t, ProfileA, 128, 192, src)
			sameNVFP4(t, ProfileB, 128, 192, src)
		}
	}
	for i := range 300 {
		src := spread(r, 300, 120, 9)
		binary.LittleEndian.PutUint16(src[2*i:], []uint16{0x7f80, 0xff80, 0x7fc0, 0xffff}[i%4])
		for _, f := range []Format{Q4G64, Q5G64, Q6G64, Q8G32, FP8RowBF16} {
			sameRows(t, f, 300, src)
		}
	}
}

// TestVectorTable: every BF16 word under multipliers of all kinds has the code of the table, which is the definition's, or is refused.
func TestVectorTable(t *testing.T) {
	if !vectors {
		t.Skip("no vector instructions here")
	}
	r := rand.New(rand.NewPCG(6, 12))
	multipliers := []uint16{0x0001, 0x007f, 0x0080, 0x3b12, 0x3b92, 0x3f80, 0x7f7f}
	for range 40 {
		multipliers = append(multipliers, 1+uint16(r.IntN(0x7f7f)))
	}
	for _, m := range multipliers {
		table, err := NewFP8Table(m)
		if err != nil {
			t.Fatal(err)
		}
		var src, want []byte
		block := make([]byte, 64)
		for w := range 1 << 16 {
			if c := table.code[w]; c != 0x7f {
				src, want = binary.LittleEndian.AppendUint16(src, uint16(w)), append(want, c)
				continue
			}
			at := w % 32
			binary.LittleEndian.PutUint16(block[2*at:], uint16(w))
			if fp8OverAVX2(&make([]byte, 32)[0], &block[0], 32, table.multiplier) == 0 {
				t.Fatalf("multiplier %04x: word %04x was not refused", m, w)
			}
			clear(block)
		}
		got := make([]byte, len(want))
		if n := len(got) &^ 31; fp8OverAVX2(&got[0], &src[0], n, table.multiplier) != 0 || !bytes.Equal(got[:n], want[:n]) {
			t.Fatalf("multiplier %04x: other codes than the table's", m)
		}
		if err := table.Encode(got, src); err != nil || !bytes.Equal(got, want) {
			t.Fatalf("multiplier %04x: %v", m, err)
		}
	}
}
