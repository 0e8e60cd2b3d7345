package device_test

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"ninfer/internal/backend/cuda/device"
)

// Attention of rows over lists of tokens, with as many heads as the official model has: results are those of float64, and a row has the same
// bits beside any number of others.
func TestAttended(t *testing.T) {
	d := open(t, device.Options{})
	defer d.Close()
	const tokens, heads, kv, ld, most = 4096, 24, 2, 2052, 8
	r := rand.New(rand.NewPCG(5, 17))
	normal := func(n int, deviation float64) (b []byte, v []float64) {
		for range n {
			u := uint16(math.Float32bits(float32(r.NormFloat64()*deviation)) >> 16)
			b, v = binary.LittleEndian.AppendUint16(b, u), append(v, ofBF16(u))
		}
		return b, v
	}
	codes := func(n int) (b []byte, v []float64) {
		for range n {
			c, w := randomE4M3(r)
			b, v = append(b, c), append(v, w)
		}
		return b, v
	}
	counts := []uint32{2051, 1, 32, 33, 2048, 64, 65, 777}
	lists := make([]uint32, most*ld)
	for i, n := range counts {
		for j, token := range r.Perm(tokens)[:n] {
			lists[i*ld+j] = uint32(token)
		}
		slices.Sort(lists[i*ld:][:n])
		for j := int(n); j < ld; j++ {
			lists[i*ld+j] = 3 // a token that is not to be looked at
		}
	}
	for _, fp8 := range []bool{false, true} {
		a := device.Attention{Heads: heads, KV: kv, Ld: ld}
		q, qv := normal(most*heads*256, 1)
		gates, gv := normal(most*heads*512, 1)
		var kvals, vvals, ks, vs []float64
		if fp8 {
			a.Keys, kvals = codes(tokens * kv * 256)
			a.Values, vvals = codes(tokens * kv * 256)
			a.KeyScales, ks = normal(tokens*kv, 0x1p-6)
			a.ValScales, vs = normal(tokens*kv, 0x1p-6)
			for i := range kvals {
				kvals[i], vvals[i] = kvals[i]*ks[i/256], vvals[i]*vs[i/256]
			}
		} else {
			a.Keys, kvals = normal(tokens*kv*256, 1)
			a.Values, vvals = normal(tokens*kv*256, 1)
		}
		want := func(row, head int) []float64 {
			n, query, out := int(counts[row]), qv[(row*heads+head)*256:][:256], make([]float64, 256)
			scores, top, sum := make([]float64, n), math.Inf(-1), 0.0
			for i := range scores {
				key := kvals[(int(lists[row*ld+i])*kv+head/(heads/kv))*256:][:256]
				for c, v := range query {
					scores[i] += v * key[c] / 16
				}
				top = max(top, scores[i])
			}
			for i, s := range scores {
				w := math.Exp(s - top)
				sum += w
				for c, v := range vvals[(int(lists[row*ld+i])*kv+head/(heads/kv))*256:][:256] {
					out[c] += w * v
				}
			}
			for c := range out {
				out[c] /= sum * (1 + math.Exp(-gv[(row*heads+head)*512+256+c]))
			}
			return out
		}
		var alone [most][]byte
		for a.Rows = 1; a.Rows <= most; a.Rows++ {
			for first := 0; first+a.Rows <= most; first++ {
				if a.Rows > 1 && first > 1 || testing.Short() && first > 0 {
					break
				}
				name := fmt.Sprintf("fp8 %v, rows %d to %d", fp8, first, first+a.Rows)
				a.Q, a.Gates = q[first*heads*512:], gates[first*heads*1024:]
				a.List, a.Count = lists[first*ld:], counts[first:]
				out, err := d.Attended(a)
				if err != nil {
					t.Fatalf("%s: %v", name, err)
				}
				for i := range a.Rows {
					row := out[i*heads*512 : (i+1)*heads*512]
					if alone[first+i] != nil {
						if !bytes.Equal(row, alone[first+i]) {
							t.Errorf("%s: row %d has other bits than before", name, first+i)
						}
						continue
					}
					alone[first+i] = row
					for head := 0; head < heads; head += 5 {
						var off, all float64
						for c, w := range want(first+i, head) {
							got := ofBF16(binary.LittleEndian.Uint16(row[2*(head*256+c):]))
							off, all = off+(got-w)*(got-w), all+w*w
						}
						if off = math.Sqrt(off / all); !(off < 4e-3) {
							t.Errorf("%s: head %d of row %d is off by %.1e", name, head, first+i, off)
						}
					}
				}
			}
		}
	}
}

// The best blocks of a row by its scores, ties to the lower: in one segment and in several, by one block and by several, spread, close together,
// with few values and with one.
func TestSelected(t *testing.T) {
	d := open(t, device.Options{})
	defer d.Close()
	r := rand.New(rand.NewPCG(3, 4))
	sizes := []int{3, 512, 513, 2000, 4096, 4097, 9000, 16384, 65536}
	ratios := []int{4, 2, 6}
	if testing.Short() { // for tools that slow a GPU down
		sizes, ratios = sizes[3:4], ratios[:1]
	}
	for _, ratio := range ratios {
		for _, n := range sizes {
			pages := make([]uint32, n*ratio/64+2)
			for i, page := range r.Perm(len(pages)) {
				pages[i] = uint32(page)
			}
			for kind, value := range map[string]func(int) float64{
				"normal": func(int) float64 { return r.NormFloat64() },
				"wide":   func(int) float64 { return math.Exp2(60 * r.NormFloat64()) },
				"close":  func(int) float64 { return 1 + 1e-6*r.Float64() },
				"few":    func(int) float64 { return float64(r.IntN(5)) },
				"pairs":  func(i int) float64 { return float64(i / 2 % 700) },
				"equal":  func(int) float64 { return 1.5 },
				"zero":   func(int) float64 { return math.Copysign(0, r.Float64()-0.5) },
				"rare":   func(int) float64 { return max(0, r.NormFloat64()-2.5) },
				"outlier": func(i int) float64 {
					if i == n/2 {
						return 1e7
					}
					return r.NormFloat64()
				},
				"rising":  func(i int) float64 { return float64(i) },
				"falling": func(i int) float64 { return -float64(i) },
				"holes": func(i int) float64 {
					if i%3 == 0 {
						return math.NaN()
					}
					return math.Abs(r.NormFloat64())
				},
			} {
				if testing.Short() && kind != "normal" && kind != "few" {
					continue
				}
				const most = 512
				tail := r.IntN(ratio)
				scores, order := make([]float32, (n+3)/4*4), make([]int, n)
				for i := range scores {
					scores[i] = 1e30 // nobody's
				}
				for i := range order {
					scores[i], order[i] = float32(value(i)), i
				}
				slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(scores[b], scores[a]) })
				order = order[:min(n, most)]
				slices.Sort(order)
				var want []uint32
				add := func(token int) { want = append(want, pages[token/64]*64+uint32(token%64)) }
				for _, b := range order {
					for i := range ratio {
						add(b*ratio + i)
					}
				}
				for i := range tail {
					add(n*ratio + i)
				}
				for _, rows := range []int{1, 100} {
					got, err := d.Selected(scores, pages, n*ratio+tail-1, ratio, most, rows)
					if err != nil {
						t.Fatal(err)
					}
					if !slices.Equal(got, want) {
						t.Errorf("%d blocks of %d, %s, one of %d rows: %d tokens, want %d, or others", n, ratio, kind, rows, len(got), len(want))
					}
				}
			}
		}
	}
}
