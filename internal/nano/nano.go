// Package nano is the model inside the program: a small trained model of the same architecture, so that every command does something
// real on a fresh machine without a GPU and without a download.
//
// The artifact is made by this program's own convert from the checkpoint that tools/nano trains; see that folder's README. The build tag
// nonano leaves it out, which saves the program its size.
package nano

import (
	"errors"
	"io/fs"
)

// Name is what messages call the model where others have a path.
const Name = "nano (built in)"

// folder holds the embedded files: the artifact and, below golden, recorded results.
const folder = "model"

// file is the name that convert gives an artifact of this variant.
const file = folder + "/qwen3_8_flash_next_125b_a6b_nvfp4.ninfer"

// ErrLeftOut says that this build has no model inside.
var ErrLeftOut = errors.New("this build has no model of its own")

// Artifact returns the artifact's bytes, a copy that the caller owns, or ErrLeftOut.
func Artifact() ([]byte, error) {
	data, err := files.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, ErrLeftOut
	}
	return data, err
}

// Golden returns what the reference implementation computes with the model, in the form that package selftest reads, or ErrLeftOut.
func Golden() (fs.FS, error) {
	const dir = folder + "/golden"
	if _, err := fs.Stat(files, dir); err != nil {
		return nil, ErrLeftOut
	}
	return fs.Sub(files, dir)
}
