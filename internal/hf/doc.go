// Package hf reads Hugging Face checkpoints: the safetensors index and its shards.
//
// Open reads every shard's header, in parallel, and maps the shards; it checks all framing, so that a tensor it lists can be
// read. Nothing of the tensors themselves is touched. Tensor.Data is a view of the mapping and dies with Close; a file that is
// truncated while mapped ends the process on access. Tensor.ReadAt reads through the file instead: it costs a copy, keeps
// the process small, and a file that shrank is an ordinary error.
//
// A Checkpoint may be used by many goroutines; Close must come after all of them.
package hf
