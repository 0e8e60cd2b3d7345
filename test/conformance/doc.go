// Package conformance drives the built program with the clients that people use. It is a module of its own, so that the clients never
// become dependencies of the program.
package conformance
