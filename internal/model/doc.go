// Package model is Qwen3.8-Flash-Next: the binding of an artifact's weights to typed views, and the order of operations of every
// kind of pass, written once as data for any backend.
//
// A [Model] holds views into its [Store]; the store must stay open for as long as the model is used. A [Runner] drives one device
// and belongs to one goroutine.
package model
