// Package convert turns a checkpoint into an artifact (artifact.md 4.1, 4.2, 5.5 to 5.7), and a file of container version 2 into one of
// version 3 (1.8, 1.9). CheckProfile compares an artifact with the inventory of its own config.
//
// Run checks everything that can be checked before it writes, writes through hidden temporaries, and publishes at the end: after
// any failure, and after the process was killed, no file has the output's name. Memory does not grow with the model: objects
// are streamed in chunks, one object per core at a time.
//
// The bytes follow from the checkpoint, the variant and the ranking file alone, whatever the machine, the number of cores and
// the size of the parts; so does the artifact's id.
package convert
