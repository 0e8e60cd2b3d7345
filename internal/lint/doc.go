// Package lint tests the repository itself: which package may import which, that every package says what it is, that the
// modules linked into the binary are the ones we agreed to, and that what comments and documents cite is there. It has no code of its own.
package lint
