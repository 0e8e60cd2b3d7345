package backend

// Cache is what a device keeps keys and values in.
type Cache uint8

// The caches.
const (
	// CacheFull keeps what the device computes.
	CacheFull Cache = iota
	// CacheBF16 rounds keys, values and index keys to BF16.
	CacheBF16
	// CacheFP8 keeps [State.Group] values of a row as E4M3 with one BF16 scale, their largest magnitude / 448. Keys are turned by a
	// normalised Hadamard transform first, and so are the queries that meet them. Index keys are BF16.
	CacheFP8
)

func (c Cache) String() string { return [...]string{"full", "bf16", "fp8"}[c] }
