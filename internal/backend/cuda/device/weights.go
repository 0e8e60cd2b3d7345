package device

import (
	"fmt"
	"math"
	"unsafe"

	"ninfer/internal/backend"
	"ninfer/internal/backend/cuda/device/kernels"
	"ninfer/internal/backend/cuda/driver"
	"ninfer/internal/num"
)

// bytesOf is v's memory.
func bytesOf[T any](v *T) []byte { return unsafe.Slice((*byte)(unsafe.Pointer(v)), unsafe.Sizeof(*v)) }

// bytesIn is a slice's memory.
func bytesIn[T any](v []T) []byte {
	if len(v) == 0 {
		return nil
	}
	return unsafe.Slice((*byte)(unsafe.Pointer(&v[0])), uintptr(len(v))*unsafe.Sizeof(v[0]))
}

var formats = map[num.Format]kernels.Format{
	num.BF16: kernels.BF16, num.FP32: kernels.FP32, num.FP8RowBF16: kernels.FP8RowBF16, num.FP8RowFP32: kernels.FP8RowFP32,
	num.NVFP4: kernels.NVFP4, num.Q4G64: kernels.Q4, num.Q5G64: kernels.Q5, num.Q6G64: kernels.Q6, num.Q8G32: kernels.Q8,
}

// matrix uploads the tensor a weight is a part of, once, and describes the weight.
func (d *Device) matrix(c *driver.Context, w backend.Weight) (kernels.Mat, error) {
	if !w.Present() {
		return kernels.Mat{}, nil
	}
	f, ok := formats[w.T.Format]
	if !ok {
		return kernels.Mat{}, fmt.Errorf("no kernels for format %v", w.T.Format)
	}
	key := &w.T.Data[0]
	base, ok := d.weights[key]
	if !ok {
		var err error
		if base, err = d.alloc(c, "weights", uint64(len(w.T.Data)+3)&^3); err != nil { // kernels read scales of two bytes by words
			return kernels.Mat{}, err
		}
		d.weights[key] = base
		if err = d.put(c, base, w.T.Data); err != nil {
			return kernels.Mat{}, err
		}
	}
	g := w.T.Geometry()
	at := func(p num.PlaneSpec) driver.Ptr {
		if p.Len == 0 {
			return 0
		}
		return base + driver.Ptr(p.Off)
	}
	return kernels.Mat{
		Codes: at(g.Codes), High: at(g.High), Scales: at(g.Scales), Divisors: at(g.Divisors), Format: uint32(f),
		First: uint32(w.First), Rows: uint32(w.N), K: uint32(g.Cols),
		Stride: uint32(g.Codes.Stride), HighStride: uint32(g.High.Stride), ScaleStride: uint32(g.Scales.Stride), ExpertRows: uint32(g.ExpertRows),
	}, nil
}

// part describes a matrix of a Gemv; out has one row of outLd values for each activation row.
func part(m kernels.Mat, out driver.Ptr, outLd int, flags uint32, scale float32) kernels.Part {
	return kernels.Part{M: m, Out: out, OutLd: uint32(outLd), Flags: flags, Scale: scale}
}

type vectorKey struct {
	data     *byte
	first, n int
}

// vector uploads a small weight as FP32, row after row.
func (d *Device) vector(c *driver.Context, w backend.Weight) (driver.Ptr, error) {
	key := vectorKey{&w.T.Data[0], w.First, w.N}
	if p, ok := d.vectors[key]; ok {
		return p, nil
	}
	cols := w.Cols()
	v := make([]float32, w.N*cols)
	for i := range w.N {
		w.Decode32(v[i*cols:(i+1)*cols], i)
	}
	p, err := d.upload(c, bytesIn(v))
	if err == nil {
		d.vectors[key] = p
		d.stored += uint64(w.N) * rowBytes(w.T)
	}
	return p, err
}

// rowBytes is the stored size of a row of a tensor that has rows.
func rowBytes(t num.Tensor) uint64 {
	g := t.Geometry()
	return uint64(g.Codes.Stride + g.High.Stride + g.Scales.Stride)
}

// upload copies bytes to new device memory.
func (d *Device) upload(c *driver.Context, b []byte) (driver.Ptr, error) {
	p, err := d.alloc(c, "constants", uint64(len(b)))
	if err != nil {
		return 0, err
	}
	if err := c.ToDevice(d.stream, p, b); err != nil {
		return 0, err
	}
	return p, c.SyncStream(d.stream)
}

// rotary uploads the inverse frequencies of a rotation, and behind them the axis of each.
func (d *Device) rotary(c *driver.Context, r backend.Rotary) (driver.Ptr, error) {
	if p, ok := d.rotaries[r]; ok {
		return p, nil
	}
	half := r.Dim / 2
	v := make([]uint32, 2*half)
	for i := range half {
		exponent := float32(2*i) / float32(r.Dim) // as backend.Rotary.Angle
		v[i] = math.Float32bits(1 / float32(math.Pow(r.Theta, float64(exponent))))
		v[half+i] = uint32(r.Axis(i))
	}
	p, err := d.upload(c, bytesIn(v))
	if err == nil {
		d.rotaries[r] = p
	}
	return p, err
}
