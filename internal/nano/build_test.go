package nano_test

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"ninfer/internal/convert"
	"ninfer/internal/nano"
)

// The artifact inside the program is what convert makes of the checkpoint in the repository, to the byte: tools/nano/build.sh.
func TestArtifactIsConverted(t *testing.T) {
	got, err := nano.Artifact()
	if errors.Is(err, nano.ErrLeftOut) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	out := filepath.Join(t.TempDir(), "qwen3_8_flash_next_125b_a6b_nvfp4.ninfer")
	if _, err := convert.Run(t.Context(), convert.Options{Profile: "radixark", Model: filepath.Join(data, "checkpoint"), Out: out}); err != nil {
		t.Fatal(err)
	}
	want, err := os.ReadFile(out)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Errorf("the embedded artifact of %d bytes is not the one that convert makes, of %d: run tools/nano/build.sh", len(got), len(want))
	}
	if len(got) > 24_000_000 {
		t.Errorf("%d bytes, at most 24,000,000 go into the program", len(got))
	}
}
