// Package convert turns a checkpoint into an artifact: profiles radixark and swift with their format options into dialect L (docs/format.md 4.1,
// 5.5), profile mixed into dialect E (4.2, 5.6), and version 2 containers into version 3.
//
// Run checks everything that can be checked before it writes, writes through hidden temporaries, and publishes at the end: after
// any failure, and after the process was killed, no file has the output's name.
//
// Objects are cut into pieces of about four megabytes of source. Workers, four for each core but at most 32, read, encode and
// write pieces side by side; only an object's digest is taken in order. So an object larger than all others together, the n-gram table,
// keeps no core waiting, and memory does not grow with the model: less than 1 GiB is in use for the real one, and less than 2 GiB with
// what the garbage collector leaves standing. What is kept of it are the index, buffers, and the scales of matrices whose codes are
// not all out yet, 157 MB for both banks of the drafter.
//
// The bytes follow from the checkpoint, the variant and the ranking file alone, whatever the machine, the number of cores and
// the size of the parts; so does the artifact's id.
package convert
