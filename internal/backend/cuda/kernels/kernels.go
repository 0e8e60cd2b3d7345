// Package kernels holds the CUDA kernels: sources, compiled machine code, generated parameter structs, and the launch plans that
// belong to each kernel.
//
// The machine code is compiled by tools/kernelgen and committed; manifest.json ties it to the sources, and this package's tests fail
// when a source has changed and the code has not. Load checks that the GPU is one the code was made for and that both compilers
// agree about every parameter struct; after that a Set is read-only.
//
// A plan function (Gemv, HcDown, ...) turns an operation's sizes and addresses into a launch: grid, shared memory, parameters. Plans
// depend on the GPU only through Limits, so they can be tested without one. All matrix plans promise that results do not depend on
// anything but the inputs and the plan: reductions have a fixed order.
package kernels

import (
	"embed"
	"io/fs"

	"ninfer/internal/backend/cuda/code"
	"ninfer/internal/backend/cuda/driver"
)

//go:embed fatbin/*.fatbin
var fatbins embed.FS

// Limits is what a plan needs to know about a GPU.
type Limits struct {
	SMs            uint32
	SharedPerBlock uint32 // bytes a block may have
	SharedPerSM    uint32 // bytes
}

// LimitsOf reads a device's limits.
func LimitsOf(d driver.Device) Limits {
	return Limits{SMs: uint32(d.SMs), SharedPerBlock: uint32(d.SharedPerBlock), SharedPerSM: uint32(d.SharedPerSM)}
}

// Half is the shared memory a block may use so that two kernels fit on an SM (rule R5); 1 KB a block belongs to the system.
func (l Limits) Half() uint32 { return l.SharedPerSM/2 - 1024 }

// Set is the loaded kernels of one context.
type Set struct {
	*code.Set[ID]
	Limits Limits
}

// Load loads the machine code into c: the committed one, or that of files. It fails with *driver.ArchError on a GPU there is no code for.
func Load(c *driver.Context, files fs.FS) (*Set, error) {
	s, err := code.Load(c, &table, files, nil)
	if err != nil {
		return nil, err
	}
	return &Set{s, LimitsOf(c.Device)}, nil
}

// Plan is how a kernel is launched.
type Plan struct {
	Kernel ID
	Grid   uint32
	Shared uint32 // dynamic shared memory, bytes
}

// Run launches a plan on a stream. params is the kernel's struct; pdl lets it start before its predecessor has ended.
func (s *Set) Run[P any](c *driver.Context, st driver.Stream, plan Plan, params *P, pdl bool) error {
	return s.Set.Run(c, st, plan.Kernel, [3]uint32{plan.Grid, 1, 1}, plan.Shared, params, pdl)
}

// Layout is the size of every parameter struct followed by the offsets of its fields.
func Layout() []uintptr { return layout }
