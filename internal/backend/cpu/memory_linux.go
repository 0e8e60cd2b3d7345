package cpu

import "os"

// Available is how many bytes of memory programs can still take, mapped files counting as free; ok is false where it is unknown.
func Available() (bytes int64, ok bool) { return availableIn(os.DirFS("/")) }
