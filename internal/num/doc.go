// Package num holds the numeric formats of the .ninfer container: what a word
// means (Format), where the words of a tensor lie (Layout, Geometry), how a
// stored tensor is read (Tensor) and how one is made (the Encode functions).
//
// The rules are those of docs/format.md, 2 and 3: every conversion rounds
// to nearest with ties to even unless its comment says otherwise, products
// are never fused with additions, subnormals are never flushed, and a
// division written in a comment is a true division. Encoders therefore give
// the same bytes on every machine, and those bytes have reached disk: a
// change in them is a change of format.
//
// Nothing here allocates per row, keeps state between calls or starts
// goroutines. A Tensor does not copy its bytes; whoever owns a mapping must
// keep it open while tensors over it are in use. All functions may be called
// concurrently as long as destinations do not overlap.
package num
