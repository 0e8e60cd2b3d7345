// Package convert turns a checkpoint into an artifact of dialect L (artifact.md 4.1, 5.5, 5.7).
//
// Run checks everything that can be checked before it writes, writes through hidden temporaries, and publishes at the end: after
// any failure, and after the process was killed, no file has the output's name. Memory does not grow with the model: objects
// are streamed in chunks, one object per core at a time.
//
// The bytes follow from the checkpoint, the variant and the ranking file alone, whatever the machine, the number of cores and
// the size of the parts; so does the artifact's id.
package convert
