// Package synth makes artifacts with random weights, of any configuration and up to the full size, for measuring speed.
//
// The words of an object are a pure function of seed, object and offset: any number of goroutines may fill any ranges in any order, a
// file or device memory alike. Every word is valid in its format, and magnitudes are such that activations stay finite; the model
// says nothing sensible. Such an artifact names itself synthetic in its metadata.
package synth
