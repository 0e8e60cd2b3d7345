package device_test

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"ninfer/internal/backend/cuda/device"
	"ninfer/internal/backend/cuda/device/kernels"
)

// Every Project kernel, on the shape of the real model and on small and uneven ones, with and without factors: results are those of float64, and
// a row has the same bits in each kernel of a format and beside any number of others.
func TestProjectors(t *testing.T) {
	d := open(t, device.Options{})
	defer d.Close()
	const most = kernels.ProjectRows
	for _, s := range []struct{ n, k, dim int }{{2560, 6144, 128}, {2561, 1536, 64}, {7000, 320, 32}, {300, 768, 128}, {130, 320, 32}, {7, 64, 16}} {
		if testing.Short() && s.n > 300 && s.k < 6144 { // for tools that slow a GPU down
			continue
		}
		t.Run(fmt.Sprintf("%d x %d", s.n, s.k), func(t *testing.T) {
			for _, fp8 := range []bool{true, false} {
				if testing.Short() && s.k == 6144 && !fp8 {
					continue
				}
				r := rand.New(rand.NewPCG(uint64(s.n*s.k), 11))
				weight := make([]float64, s.n*s.k)
				var w, scale []byte
				for i := range weight {
					if fp8 {
						var c byte
						c, weight[i] = randomE4M3(r)
						w = append(w, c)
					} else {
						b := toBF16(r.NormFloat64())
						w, weight[i] = binary.LittleEndian.AppendUint16(w, b), ofBF16(b)
					}
				}
				scales := make([]float64, s.n)
				for i := range scales {
					scales[i] = 1
					if fp8 {
						b := toBF16(math.Exp2(-8 + r.NormFloat64()))
						scale, scales[i] = binary.LittleEndian.AppendUint16(scale, b), ofBF16(b)
					}
				}
				for _, kind := range []string{"factors", "bf16", "fp32"} {
					q := kernels.Projection{K: s.k, N: s.n, Dim: 1, F32: kind == "fp32"}
					x, squares := make([]byte, 0, 4*most*s.k), []byte(nil)
					value := make([]float64, most*s.k)
					for i := range value {
						v := r.NormFloat64() * math.Exp2(float64(i/s.k%5)-2)
						if q.F32 {
							x, value[i] = binary.LittleEndian.AppendUint32(x, math.Float32bits(float32(v))), float64(float32(v))
						} else {
							b := toBF16(v)
							x, value[i] = binary.LittleEndian.AppendUint16(x, b), ofBF16(b)
						}
					}
					if kind == "factors" {
						q.Dim = s.dim
						for i := range most * s.k / s.dim {
							sum := 0.0
							for range 4 {
								part := float32(float64(s.dim) * math.Exp2(3*r.Float64()))
								squares, sum = binary.LittleEndian.AppendUint32(squares, math.Float32bits(part)), sum+float64(part)
							}
							for j := range s.dim {
								value[i*s.dim+j] /= math.Sqrt(sum/float64(s.dim) + 1e-6)
							}
						}
					}
					var alone [most][]byte
					width := len(x) / most
					for _, j := range kernels.Projectors {
						if j.E4M3 != fp8 {
							continue
						}
						for q.R = 1; q.R <= most; q.R++ {
							if testing.Short() && q.R > 3 && q.R < most {
								continue
							}
							for first := 0; first < most; first += q.R { // rows at other places too
								if first+q.R > most || q.R > 1 && first > 1 || testing.Short() && first > 0 {
									break
								}
								name := fmt.Sprintf("%s %d x %d, fp8 %v, %s, rows %d to %d", j.Kernel.Name(), s.n, s.k, fp8, kind, first, first+q.R)
								some := squares
								if some != nil {
									some = squares[first*s.k/s.dim*16:]
								}
								out, ok, err := d.Projected(j, q, w, scale, x[first*width:(first+q.R)*width], some)
								if err != nil {
									t.Fatalf("%s: %v", name, err)
								}
								if !ok {
									break
								}
								for i := range q.R {
									row := out[2*i*s.n : 2*(i+1)*s.n]
									if alone[first+i] == nil {
										alone[first+i] = row
										var off, all float64
										for n := 0; n < s.n; n += 1 + s.n/97 {
											var want float64
											for k := range s.k {
												want += weight[n*s.k+k] * value[(first+i)*s.k+k]
											}
											want *= scales[n]
											got := ofBF16(binary.LittleEndian.Uint16(row[2*n:]))
											off, all = off+(got-want)*(got-want), all+want*want
										}
										if off = math.Sqrt(off / all); !(off < 3e-3) {
											t.Errorf("%s: row %d is off by %.1e", name, first+i, off)
										}
									} else if !bytes.Equal(row, alone[first+i]) {
										t.Errorf("%s: row %d has other bits than before", name, first+i)
									}
								}
							}
						}
					}
					for i, row := range alone {
						if row == nil && !testing.Short() {
							t.Errorf("%d x %d, fp8 %v, %s: no kernel has done row %d", s.n, s.k, fp8, kind, i)
						}
					}
				}
			}
		})
	}
}
