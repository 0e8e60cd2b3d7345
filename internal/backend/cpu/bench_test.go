package cpu

import (
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"testing"
	"time"

	"ninfer/internal/backend"
	"ninfer/internal/backend/optest"
	"ninfer/internal/num"
)

// scanTask reads memory and does nothing with it: what the GEMV benchmarks are compared with.
type scanTask struct {
	level Level
	data  []byte
	sink  []uint64
}

const scanUnit = 256 << 10

func (s *scanTask) do(w, u int) {
	s.sink[w*8] |= scanBytes(s.level, s.data[u*scanUnit:(u+1)*scanUnit])
}

// BenchmarkGEMV multiplies over 500 MB of weights with one vector, matrix after matrix, so that no cache helps. Each iteration is
// followed by a scan that only loads the same memory with the same workers. Medians of the matrices are compared, and the best ones,
// which tell more where other programs run beside.
func BenchmarkGEMV(b *testing.B) {
	for _, f := range optest.Formats {
		b.Run(f.String(), func(b *testing.B) { benchmarkGEMV(b, f, 1) })
	}
}

// BenchmarkGEMM is the same with many rows: what prefill does.
func BenchmarkGEMM(b *testing.B) {
	for _, f := range []num.Format{num.BF16, num.FP8RowBF16, num.NVFP4, num.Q4G64} {
		for _, rows := range []int{4, 64} {
			b.Run(fmt.Sprintf("%v/%d", f, rows), func(b *testing.B) { benchmarkGEMV(b, f, rows) })
		}
	}
}

func benchmarkGEMV(b *testing.B, f num.Format, rows int) {
	const k = 2560
	n, total := 8192, 512<<20
	if rows > 1 {
		n, total = 4096, 8<<20
	}
	dev := &fast{level: best(), kernels: kernelsOf(best()), pool: newPool(runtime.GOMAXPROCS(0))}
	defer dev.pool.close()
	dev.scratches = make([][]float32, dev.pool.workers)
	dev.job.f = dev
	r := rand.New(rand.NewPCG(1, 2))
	first := optest.Tensor(r, f, n, k)
	size := len(first.Data)
	count := (total + size - 1) / size
	all := make([]byte, (count*size+scanUnit-1)/scanUnit*scanUnit)
	var ms []matrix
	for i := range count {
		data := all[i*size : (i+1)*size]
		copy(data, first.Data)
		t, err := num.NewTensor(f, first.Layout, first.Shape, data)
		if err != nil {
			b.Fatal(err)
		}
		ms = append(ms, newMatrix(backend.Whole(t), dev.kernels))
	}
	src := random(r, rows*k)
	out := make([]float32, rows*n)
	scan := &scanTask{level: dev.level, data: all, sink: make([]uint64, 8*dev.pool.workers)}
	var gemv, read []float64
	for b.Loop() {
		for i := range ms {
			start := time.Now()
			dev.arena.reset()
			x := newOperand(src, k, k, rows)
			dev.job.add(&ms[i], &x, out, n)
			dev.job.run()
			gemv = append(gemv, time.Since(start).Seconds())
		}
		for i := range ms {
			scan.data = all[i*size:][:size/scanUnit*scanUnit]
			start := time.Now()
			dev.pool.run(scan, size/scanUnit)
			read = append(read, time.Since(start).Seconds()*float64(size)/float64(len(scan.data)))
		}
	}
	rate := func(v []float64, at int) float64 { return float64(size) / v[at] / 1e9 }
	slices.Sort(gemv)
	slices.Sort(read)
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(rate(gemv, len(gemv)/2), "GB/s")
	if rows > 1 {
		b.ReportMetric(2*float64(n*k*rows)/gemv[0]/1e9, "best-GFLOP/s")
		return
	}
	b.ReportMetric(rate(read, len(read)/2), "scan-GB/s")
	b.ReportMetric(rate(gemv, 0), "best-GB/s")
	b.ReportMetric(rate(read, 0), "best-scan-GB/s")
	b.ReportMetric(rate(gemv, len(gemv)/2)/rate(read, len(read)/2), "ratio")
	b.ReportMetric(rate(gemv, 0)/rate(read, 0), "best-ratio")
}
