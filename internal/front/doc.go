// Package front stands between protocols and the model: it turns a conversation with options into a prepared prompt, and the ids that
// a model generates into events for a client. The command line and every HTTP protocol use it, so that the same request gives the same
// prompt, defaults, limits and counts everywhere.
//
// The way through it:
//
//	f, err := front.New(front.Options{...})      // once, at start
//	p, err := f.Prepare(front.Request{...})      // per request; a refusal is an *Error with a code
//	s := p.Session()                             // the watcher's half: Preview before, Commit after every round
//	... generate p.Prompt with p.MaxNew, p.Sampling, p.StopIDs, asking s.Preview and showing what s.Commit returns ...
//	rest := s.Finish()                           // what was held back
//	u := s.Usage()
//
// A Front may be used by any number of goroutines. A Session belongs to one at a time. The package knows no engine: Sampling has the
// fields of engine.Sampling and converts to it, and Session.Preview returns what an engine.Verdict needs.
package front
