package gemm

import (
	"fmt"

	"ninfer/internal/backend/cuda/driver"
	"ninfer/internal/backend/cuda/gemm/kernels"
)

// Site is a hyper-connection site: four streams of Hidden values mixed into a block's input through a gate of rank Rank.
type Site struct {
	Hidden, Rank int
	Eps          float32
	Norm         driver.Ptr // BF16 [4*Hidden], used as 1 + w
	Down, Up     Matrix     // [Rank][4*Hidden], [4*Hidden][Rank]
	InjectW      driver.Ptr // BF16 [4][4*Hidden]; 0 for a mixer, which injects nothing
}

func (m Site) down(out driver.Ptr) Product {
	return Product{W: m.Down, Out: out, OutLd: m.Rank, Epilogue: Silu, Factor: 0.25}
}

// Products are the dense products of the site, for Prepare.
func (m Site) Products() []Product { return []Product{m.down(0)} }

// Bytes is the workspace that Mix needs for up to rows rows.
func (m Site) Bytes(rows int) uint64 {
	return uint64(rows)*uint64(8*m.Hidden+2*m.Rank) + 512 + Bytes(rows, []Product{m.down(0)})
}

// Mix brings pending injections home and makes a block's input:
//
//	x <- x + inject y;  n = x rstd (1 + norm) per stream;  mix = mean over streams of sigmoid(Up silu(Down n / 4)) n;  inject <- 2 sigmoid(InjectW n / 4)
//
// x is BF16 [rows][4][Hidden], changed in place where y (BF16 [rows][Hidden]) is not 0; inject is FP32 [rows][4], read with y, written with InjectW;
// mix is BF16 [rows][Hidden]. n is rounded to BF16 where Down and the mean use it.
func (s *Set) Mix(c *driver.Context, st driver.Stream, m Site, x, y, inject driver.Ptr, rows int, mix driver.Ptr, ws Workspace) error {
	if m.Hidden < 8 || m.Hidden%8 != 0 || m.Hidden > 4096 || m.Rank < 1 || m.Down.N != m.Rank || m.Down.K != 4*m.Hidden || m.Up.N != 4*m.Hidden ||
		m.Up.K != m.Rank || m.Rank%8 != 0 || m.Up.Format == E4M3 && m.Rank%16 != 0 || m.Up.Format > E4M3 || rows < 1 || uint64(rows)*uint64(4*m.Hidden) >= 1<<32-1 {
		return fmt.Errorf("cuda: no kernels for a hyper-connection of %d rows of %d, rank %d", rows, m.Hidden, m.Rank)
	}
	normed, err := ws.cut("normalised streams", 8*uint64(rows)*uint64(m.Hidden))
	if err != nil {
		return err
	}
	low, err := ws.cut("low-rank rows", 2*uint64(rows)*uint64(m.Rank))
	if err != nil {
		return err
	}
	q := kernels.SiteParams{X: x, Y: y, Inject: inject, Norm: m.Norm, InjectW: m.InjectW, Normed: normed, M: uint32(rows), H: uint32(m.Hidden), Eps: m.Eps}
	first := kernels.Site
	if m.Hidden > 2560 {
		first = kernels.SiteLong
	}
	if err := launch(s, c, st, first, [3]uint32{q.M, 1, 1}, 0, &q); err != nil {
		return err
	}
	if err := s.Multiply(c, st, normed, 4*m.Hidden, rows, m.down(low), ws); err != nil {
		return err
	}
	up := kernels.MixParams{Low: low, Up: m.Up.Data, Scale: m.Up.Scale, Normed: normed, Mix: mix, M: uint32(rows), H: uint32(m.Hidden), L: uint32(m.Rank)}
	if m.Up.ScaleF32 {
		up.ScaleF32 = 1
	}
	kernel := kernels.MixBf16
	if m.Up.Format == E4M3 {
		kernel = kernels.MixE4m3
	}
	return launch(s, c, st, kernel, [3]uint32{(up.M + 127) / 128 * ((up.H + 31) / 32), 1, 1}, kernels.TileShared(128), &up)
}
