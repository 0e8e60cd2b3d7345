package kernels

import (
	"os"
	"strings"
	"testing"
)

// The committed resource report mentions every kernel on both targets and shows no spills.
func TestResources(t *testing.T) {
	text, err := os.ReadFile("resources.txt")
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{}
	for line := range strings.Lines(string(text)) {
		f := strings.Fields(line)
		if len(f) != 7 || !strings.HasPrefix(f[2], "sm_") {
			continue
		}
		seen[f[1]+" "+f[2]] = true
		if f[6] != "0" {
			t.Errorf("%s on %s spills %s bytes", f[1], f[2], f[6])
		}
	}
	for _, k := range table.Kernels {
		for _, a := range table.Archs {
			if !seen[k.Name+" "+a] {
				t.Errorf("%s on %s is not in the report", k.Name, a)
			}
		}
	}
}

// A tile's shared memory fits in a block of either target.
func TestTiles(t *testing.T) {
	for _, rows := range []int{64, 128} {
		if n := TileShared(rows); n > 99<<10 {
			t.Errorf("tiles of %d rows need %d bytes", rows, n)
		}
	}
}
