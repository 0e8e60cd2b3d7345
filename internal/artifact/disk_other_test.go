//go:build !unix

package artifact

// diskBytes is not known here.
func diskBytes(string) (int64, bool) { return 0, false }
