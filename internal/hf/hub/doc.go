// Package hub downloads model repositories from a hub that speaks the Hugging Face protocol: a file list for a revision, and
// files that are served in ranges.
//
// Pull fetches a repository into a folder. It resolves the revision to a commit first and asks for that commit only, so that
// all files belong together. Files are fetched in chunks, several at a time; what is complete is on the disk and recorded
// before the next is asked for, so a pull that was killed goes on where it stopped when it is started again. A file gets its
// name when all of it is there and its digest agrees with the list: until then it lies in the folder .ninfer-pull. Files that
// are there already are compared and never overwritten.
//
// The token is sent to the endpoint's own host and to no other, is never sent over a plain connection beyond this machine,
// and appears in no error.
package hub
