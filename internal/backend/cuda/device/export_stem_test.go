package device

import (
	"ninfer/internal/backend/cuda/device/kernels"
	"ninfer/internal/backend/cuda/driver"
)

// StemMatrix is a square matrix in BF16, or in E4M3 with BF16 scales.
type StemMatrix struct{ Codes, Scales []byte }

// Stem is what the kernel of a stem makes of the two matrices, rows of e and four rows of hidden for each of them, all in BF16. Not ok if there is none.
func (d *Device) Stem(embed, hidden StemMatrix, k int, e, h []byte) (out []byte, ok bool, err error) {
	rows := len(e) / (2 * k)
	out = make([]byte, 8*k*rows)
	matrix := func(m StemMatrix) kernels.Mat {
		q := kernels.Mat{Format: uint32(kernels.BF16), Rows: uint32(k), K: uint32(k), Stride: uint32(2 * k)}
		if m.Scales != nil {
			q.Format, q.Stride, q.ScaleStride = uint32(kernels.FP8RowBF16), uint32(k), 2
		}
		return q
	}
	g := kernels.GemvParams{R: uint32(4 * rows), XLd: uint32(k), Parts: 2}
	mh, me := &g.Part[0], &g.Part[1]
	mh.M, me.M = matrix(hidden), matrix(embed)
	join, ok := d.stemJoin(me.M, mh.M, 4*k)
	if !ok {
		return nil, false, nil
	}
	err = d.placed("stem", map[*driver.Ptr][]byte{
		&g.X: h, &mh.M.Codes: hidden.Codes, &mh.M.Scales: hidden.Scales, &mh.Out: out, &me.M.Codes: embed.Codes, &me.M.Scales: embed.Scales, &me.Out: e,
	}, &mh.Out, out, func(c *driver.Context) error {
		return d.set.Run(c, d.stream, join, [3]uint32{uint32(tiles(k, kernels.StemColumns)), 1, 1}, 0, &g, true)
	})
	return out, true, err
}
