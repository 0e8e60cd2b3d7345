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
	err = d.do("stem", func(c *driver.Context) error {
		var all []driver.Ptr
		defer func() {
			for _, at := range all {
				_ = c.Free(at)
			}
		}()
		put := func(b []byte) driver.Ptr {
			if len(b) == 0 || err != nil {
				return 0
			}
			var at driver.Ptr
			if at, err = c.Alloc("test", uint64(len(b))); err == nil {
				all = append(all, at)
				if err = c.ToDevice(d.stream, at, b); err == nil {
					err = c.SyncStream(d.stream)
				}
			}
			return at
		}
		matrix := func(m StemMatrix) kernels.Mat {
			q := kernels.Mat{Codes: put(m.Codes), Scales: put(m.Scales), Format: uint32(kernels.BF16), Rows: uint32(k), K: uint32(k), Stride: uint32(2 * k)}
			if m.Scales != nil {
				q.Format, q.Stride, q.ScaleStride = uint32(kernels.FP8RowBF16), uint32(k), 2
			}
			return q
		}
		me, mh := matrix(embed), matrix(hidden)
		var j kernels.ID
		if j, ok = d.stemJoin(me, mh, 4*k); !ok || err != nil {
			return err
		}
		g := kernels.GemvParams{X: put(h), R: uint32(4 * rows), XLd: uint32(k), Parts: 2}
		g.Part[0] = kernels.Part{M: mh, Out: put(out)}
		g.Part[1] = kernels.Part{M: me, Out: put(e)}
		if err != nil {
			return err
		}
		if err := d.set.Run(c, d.stream, j, [3]uint32{uint32(tiles(k, kernels.StemColumns)), 1, 1}, 0, &g, true); err != nil {
			return err
		}
		if err := c.ToHost(d.stream, out, g.Part[0].Out); err != nil {
			return err
		}
		return c.SyncStream(d.stream)
	})
	return out, ok, err
}
