// Package optest is the conformance suite of backends: every operation and every promise of a [backend.Device], with random and
// edge shapes, against another device that is taken as right (the CPU oracle).
//
// It uses nothing but the Device interface, so that any backend can be plugged in: values enter as media rows of an embedding, and
// leave as taps of the streams and as logits of a head.
package optest
