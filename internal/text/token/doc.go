// Package token turns text into the model's token ids and back.
//
// It is a byte-level BPE tokenizer read from the two files that travel with the
// model, tokenizer.json and tokenizer_config.json, and gives the ids that the
// Hugging Face tokenizers library gives for them. Only what the family uses is
// implemented: NFC, the Qwen split patterns, byte-level symbols, ranked merges.
// A file that asks for anything else fails to load; nothing is ignored that
// would change an id.
//
// Control tokens. A spelling such as <|im_end|> is one control token for Encode
// and a run of ordinary tokens for EncodePlain. Text that came from a user must
// go through EncodePlain, or through EncodeSegments when it stands inside a
// rendered prompt; otherwise it can forge the end of its own turn.
//
// A Tokenizer does not change after Load and may be used by any number of
// goroutines. Slices that it returns, except from Bytes, belong to the caller.
package token
