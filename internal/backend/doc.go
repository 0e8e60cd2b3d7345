// Package backend is the seam between the model and the machine it runs on.
//
// The model writes its order of operations once, as data: a [Program] is a list of block-level operations ([Op]) for one kind of
// pass. A [Device] compiles a program and runs it: the CPU backend walks the list, the CUDA backend turns it into captured
// graphs. Operations name activations ([Buf]) and pieces of a sequence's image ([StateID]); they hold typed weight views
// ([Weight]) and never a pointer into a device.
//
// A sequence's truth is its committed length. Every [State] of a lane always describes exactly that many tokens; a pass that
// may be cut leaves records instead, and [Device.Commit] folds the first n of them. Whatever is declared as a State is part of
// the image: it is moved, saved and compared with it, and an operation cannot keep anything in an undeclared place.
//
// A Device belongs to one goroutine. Errors of Launch and Wait end the device: no state is defined after them.
package backend
