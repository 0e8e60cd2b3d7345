package convert

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"ninfer/internal/artifact"
)

// TestUpgradeRelease: the input's disk space comes back behind the reader and nowhere else, and the output is the same.
func TestUpgradeRelease(t *testing.T) {
	v, config := randomMixed(t)
	v.payload = append(v.payload, bytes.Repeat([]byte("x"), 3*upgradeBlock)...) // trailing bytes: several blocks
	whole := v.bytes()
	want, _ := doUpgrade(t, UpgradeOptions{In: v.save(t), Out: filepath.Join(t.TempDir(), "a.ninfer"), Config: config})

	in := v.save(t)
	if blocks(t, in) < int64(len(whole))/2 {
		t.Skip("this file system does not say how much disk space a file has")
	}
	var ends []int64
	out := filepath.Join(t.TempDir(), "a.ninfer")
	r, g := doUpgrade(t, UpgradeOptions{In: in, Out: out, Config: config, ReleaseInput: true, fault: func(off int64) error {
		// Before this block is released: what is ahead must be there still.
		b := read(t, in)
		if !bytes.Equal(b[off:], whole[off:]) {
			t.Errorf("bytes after %d are gone", off)
		}
		ends = append(ends, off)
		return nil
	}})
	if len(ends) < 4 {
		t.Fatalf("only %d blocks", len(ends))
	}
	if r.ArtifactID != want.ArtifactID || r.V2SHA256 != digest(whole) {
		t.Errorf("id %s, want %s", r.ArtifactID, want.ArtifactID)
	}
	checkUpgraded(t, v, r, g.Path(), "content")
	info, err := os.Stat(in)
	if err != nil || info.Size() != int64(len(whole)) {
		t.Fatalf("the input has %d bytes, want %d", info.Size(), len(whole))
	}
	if n := blocks(t, in); n > 8192 {
		t.Errorf("the input still uses %d bytes", n)
	}
	_, err = artifact.OpenV2(in)
	if err == nil || !bytes.Contains([]byte(err.Error()), []byte("released its input")) {
		t.Errorf("the consumed input: %v", err)
	}

	// After a failure the input is gone up to there, which must be recognised, and no output is left.
	in = v.save(t)
	refuseUpgrade(t, UpgradeOptions{In: in, Config: config, ReleaseInput: true, fault: func(off int64) error {
		if off > 2*upgradeBlock {
			return errors.New("power cut")
		}
		return nil
	}}, "power cut")
	if b := read(t, in); len(b) != len(whole) || !bytes.Equal(b[2*upgradeBlock:], whole[2*upgradeBlock:]) {
		t.Error("more of the input is gone than was read")
	}
	refuseUpgrade(t, UpgradeOptions{In: in, Config: config}, "download it again")

	// An input that may not be written cannot be released: nothing is begun.
	if os.Geteuid() != 0 {
		in = v.save(t)
		if err := os.Chmod(in, 0o444); err != nil {
			t.Fatal(err)
		}
		refuseUpgrade(t, UpgradeOptions{In: in, Config: config, ReleaseInput: true}, "permission denied")
	}
}

// blocks is the disk space of a file.
func blocks(t testing.TB, path string) int64 {
	t.Helper()
	var st syscall.Stat_t
	if err := syscall.Stat(path, &st); err != nil {
		t.Fatal(err)
	}
	return st.Blocks * 512
}
