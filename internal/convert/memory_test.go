package convert

import (
	"slices"
	"testing"

	"ninfer/internal/arch"
	"ninfer/internal/num"
)

// TestMemoryBound adds up what a conversion of the real model can hold at once, for every variant: the buffers of all workers, what encoders
// collect until an object's codes are out, and the checkpoint's index. 2 GiB is promised.
func TestMemoryBound(t *testing.T) {
	// Measured for 300,000 tensors: 82 MiB are kept of the index, the list of names included, and 150 are in use while it is read. The
	// list of needed tensors is of the same kind.
	const index, fixed = 300 << 20, 64 << 20
	for _, o := range variants {
		v := variant(t, o)
		c := arch.Official()
		specs, err := arch.Inventory(c, v, c.ProposalRows(248077))
		if err != nil {
			t.Fatal(err)
		}
		var worker int64
		var held []int64
		for _, s := range specs {
			if s.Resource {
				continue
			}
			g, err := num.NewGeometry(s.Format, s.Layout, s.Shape)
			if err != nil {
				t.Fatal(err)
			}
			row := 2 * int64(g.Cols)
			var need int64
			switch s.Source.Op {
			case arch.OpTranspose:
				need = 2 * g.Bytes
			case arch.OpWiden, arch.OpQuantize, arch.OpProposal:
				// Source and codes; FP32 codes are twice as long.
				need = 3 * max(chunk, row)
				held = append(held, g.High.Len+g.Scales.Len)
			case arch.OpEncodeBank:
				need = g.Codes.Len / int64(g.Experts) * 5
				held = append(held, g.Scales.Len+g.Divisors.Len)
			case arch.OpBank, arch.OpPackedBank:
				need = 2*chunk + g.Scales.Len/int64(g.Experts)*2
			case arch.OpPackedTable:
				need = 2 * chunk
			default:
				need = chunk + chunk/2
			}
			worker = max(worker, need)
		}
		slices.Sort(held)
		sum := int64(index + fixed)
		for i, n := range slices.Backward(held) {
			if len(held)-i > maxWorkers {
				break
			}
			sum += n
		}
		sum += maxWorkers * (worker + 8<<20) // package direct has a buffer for each transfer
		t.Logf("%s: %d KiB a worker, %d MiB in all", v.OutputName(), worker>>10, sum>>20)
		if sum >= 2<<30 {
			t.Errorf("%s: %d bytes", v.OutputName(), sum)
		}
	}
}
