// Package engine generates token ids: it feeds prompts, draws tokens, drafts, verifies, and asks a watcher before anything is
// committed. It knows ids only, never text.
//
// A round goes: preview what the model wants to say, commit the part the watcher keeps, then publish it. What is published is never
// taken back, and the state left behind is the one that plain decoding to the same token would leave: every token of the sequence
// but the last is in it.
package engine
