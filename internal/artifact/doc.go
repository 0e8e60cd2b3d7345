// Package artifact reads, writes and verifies .ninfer files, container
// version 3: an entry file with a JSON directory, and continuation files
// ("parts") that together hold one logical payload of tensors and resources.
//
// Reading: Open checks the entry and its directory and touches neither the
// payload nor the parts, so that a directory can be inspected while parts are
// missing; Tensor, Resource and ReadAt check an object or a part when it is
// first needed. Tensors are views of read-only mappings wherever the object
// lies in one file: they are dead once the File is closed, and a file that is
// truncated while mapped ends the process.
//
// Writing: NewPlan places objects and fixes the directory text and the split,
// byte for byte; Create makes temporaries beside the output, any number of
// goroutines write the objects, and Finish publishes parts first and the entry
// last, without ever overwriting. Nothing has a final name before it is
// complete, and what a killed process left behind is reclaimed by the next
// Create for the same output.
//
// Verify checks everything that can be checked without knowing the model: the
// structure, the validity of every word, and the content against the
// artifact's id, a conversion report, checksum lists or another copy.
//
// Files of container version 2 are opened by OpenV2 and verified by VerifyV2;
// their objects look like those of version 3.
package artifact
