//go:build nonano

package nano

import "testing"

func TestLeftOut(t *testing.T) {
	if _, err := Artifact(); err != ErrLeftOut {
		t.Errorf("artifact: %v", err)
	}
	if _, err := Golden(); err != ErrLeftOut {
		t.Errorf("golden: %v", err)
	}
}
