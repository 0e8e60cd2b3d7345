package artifact

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
)

func hexDigest(b []byte) string {
	s := sha256.Sum256(b)
	return hex.EncodeToString(s[:])
}

// WriteZerosAt is WriteAt for n zero bytes, without writing them: the files
// begin as holes that read as zeros, and with WriterOptions.NoReserve they stay
// so. The bytes still enter the object's digest.
func (w *Writer) WriteZerosAt(object string, off, n int64) error {
	r, ok := w.byID[object]
	if !ok {
		return w.fail(fmt.Errorf("artifact: %s has no object %s to write", w.plan.Entry, quote(object)))
	}
	w.gate.RLock()
	defer w.gate.RUnlock()
	if w.over {
		return fmt.Errorf("artifact: write to %s after its end", w.plan.Entry)
	}
	if err := w.failure(); err != nil {
		return err
	}
	if off < 0 || n < 0 || n > r.length || off > r.length-n {
		return w.fail(fmt.Errorf("artifact: write [%d,%d) outside the %d bytes of %s", off, off+n, r.length, r.name()))
	}
	if n == 0 {
		return nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.reserve(off, off+n) {
		return w.fail(fmt.Errorf("artifact: bytes of [%d,%d) of %s are written twice", off, off+n, r.name()))
	}
	if off == r.hashed {
		for left := n; left > 0; {
			k := min(left, int64(len(zeros)))
			r.hash.Write(zeros[:k])
			left -= k
		}
		r.hashed += n
	}
	return nil
}

// zeros is what holes read as.
var zeros [1 << 16]byte
