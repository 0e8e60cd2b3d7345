// Package kernels holds the CUDA kernels of wide passes: sources, compiled machine code, generated parameter structs.
//
// tools/kernelgen -dir internal/backend/cuda/chunk/kernels compiles them; the machine code is committed, and this package's tests fail
// when a source has changed and the code has not.
package kernels

import (
	"embed"
	"io/fs"

	"ninfer/internal/backend/cuda/code"
	"ninfer/internal/backend/cuda/driver"
)

//go:embed fatbin/*.fatbin
var fatbins embed.FS

// Set is the loaded kernels of one context.
type Set = code.Set[ID]

// Load loads the machine code into c: the committed one, or that of files. It fails with *driver.ArchError on a GPU there is no code for.
func Load(c *driver.Context, files fs.FS) (*Set, error) { return code.Load(c, &table, files, nil) }

// Layout is the size of every parameter struct followed by the offsets of its fields.
func Layout() []uintptr { return layout }
