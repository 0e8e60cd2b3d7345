package chunk

// Limit makes a GPU seem to have so many bytes of shared memory a block; it returns what it had.
func (s *Set) Limit(shared int) (before int) {
	before, s.shared = s.shared, shared
	return before
}
