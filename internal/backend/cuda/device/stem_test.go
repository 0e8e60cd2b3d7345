package device_test

import (
	"bytes"
	"encoding/binary"
	"math"
	"math/rand/v2"
	"testing"

	"ninfer/internal/backend/cuda/device"
)

// A stem's streams are those of float64, rounded where two products and a sum are, on the shape of the real model and on small and uneven ones. A row has
// the same bits beside others.
func TestStem(t *testing.T) {
	d := open(t, device.Options{})
	defer d.Close()
	for _, k := range []int{2560, 2064, 512, 128, 48} {
		for _, fp8 := range []bool{true, false} {
			r := rand.New(rand.NewPCG(uint64(k), 5))
			matrix := func() (m device.StemMatrix, w []float64) {
				for range k {
					scale := 1.0
					if fp8 {
						b := toBF16(math.Exp2(-8 + r.NormFloat64()))
						m.Scales, scale = binary.LittleEndian.AppendUint16(m.Scales, b), ofBF16(b)
					}
					for range k {
						b := toBF16(r.NormFloat64())
						if !fp8 {
							m.Codes, w = binary.LittleEndian.AppendUint16(m.Codes, b), append(w, ofBF16(b))
							continue
						}
						c, v := randomE4M3(r)
						m.Codes, w = append(m.Codes, c), append(w, v*scale)
					}
				}
				return m, w
			}
			embed, we := matrix()
			hidden, wh := matrix()
			const rows = 6
			vectors := func(n int) (raw []byte, v []float64) {
				for i := range n * k {
					b := toBF16(r.NormFloat64() * math.Exp2(float64(i/k%5)-2))
					raw, v = binary.LittleEndian.AppendUint16(raw, b), append(v, ofBF16(b))
				}
				return raw, v
			}
			e, ve := vectors(rows)
			h, vh := vectors(4 * rows)
			all, ok, err := d.Stem(embed, hidden, k, e, h)
			if err != nil || !ok {
				t.Fatalf("%d, fp8 %v: ok %v, %v", k, fp8, ok, err)
			}
			for row := range rows {
				one, _, err := d.Stem(embed, hidden, k, e[2*k*row:2*k*(row+1)], h[8*k*row:8*k*(row+1)])
				if err != nil {
					t.Fatal(err)
				}
				if !bytes.Equal(one, all[8*k*row:8*k*(row+1)]) {
					t.Errorf("%d, fp8 %v: row %d has other bits alone", k, fp8, row)
				}
				for s := range 4 {
					var off, sum float64
					for n := 0; n < k; n += 1 + k/97 {
						var a, b float64
						for i := range k {
							a += wh[n*k+i] * vh[(4*row+s)*k+i]
							b += we[n*k+i] * ve[row*k+i]
						}
						want := ofBF16(toBF16(a)) + ofBF16(toBF16(b))
						got := ofBF16(binary.LittleEndian.Uint16(one[2*(s*k+n):]))
						off, sum = off+(got-want)*(got-want), sum+want*want
					}
					if off = math.Sqrt(off / sum); !(off < 3e-3) {
						t.Errorf("%d, fp8 %v: stream %d of row %d is off by %.1e", k, fp8, s, row, off)
					}
				}
			}
		}
	}
}
