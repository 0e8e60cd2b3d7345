package engine

import (
	"sync"
	"time"
)

// Activity is what a batch was doing when it last changed, and sums since it was made.
type Activity struct {
	Lanes       int
	Running     int // requests with a lane
	Waiting     int // requests without one, those that the batch has not been given apart
	Prefilling  int // of Running: rows of a prompt or an insertion have still to run
	DecodeReady int // of Running: in the next decoding round

	Pages    int // of the pool
	Reserved int // of them, by running requests: all that they may come to need

	PromptTokens    int64 // of requests that got a lane
	PrefillTokens   int64 // rows that ran in passes over prompts and insertions
	GeneratedTokens int64 // committed output, inserted tokens included
	DecodeTokens    int64 // of them, committed by decoding rounds and not inserted
	Rounds          int64 // by lane: passes with drafts
	FallbackSteps   int64 // by lane: passes without, while drafting was asked for
	Drafted         int64
	Accepted        int64

	DecodeUnits int64 // decoding rounds, each of all lanes that were ready
	DecodeLanes int64 // those lanes, of all rounds
	DeviceWait  time.Duration
	PromptWork  time.Duration // units over prompts and insertions, without waiting for the device
	RoundWork   time.Duration // and decoding rounds
}

// ledger keeps a batch's activity. The batch's goroutine writes it between units of work, anyone reads it: never is it held during one.
type ledger struct {
	mu   sync.Mutex // above what it guards
	seen Activity
}

// Activity tells what the batch is doing. Unlike all else but Check it may be called by any goroutine; it does not wait for the device.
func (b *Batch) Activity() Activity {
	b.ledger.mu.Lock()
	defer b.ledger.mu.Unlock()
	return b.ledger.seen
}

// publish brings what others see up to date with the scheduler and the sums. The scheduler counts a chunk as run once it has handed it
// out; last says that a lane's last one has still to run.
func (b *Batch) publish(last bool) {
	a := b.sums
	a.Lanes, a.Pages = b.sched.limits.Lanes, b.sched.limits.Pages
	a.Running, a.Waiting, a.Reserved = b.sched.Active(), b.sched.Waiting(), a.Pages-b.sched.FreePages()
	a.DecodeReady = b.sched.Decoding()
	if last {
		a.DecodeReady--
	}
	a.Prefilling = a.Running - a.DecodeReady
	b.ledger.mu.Lock()
	defer b.ledger.mu.Unlock()
	b.ledger.seen = a
}

// mark is where a request's counts stood before a unit of work.
type mark struct {
	stats   Stats
	foreign int
}

func (g *generation) mark() mark { return mark{g.out.Stats, g.foreign} }

// tally adds what a unit of work, a decoding round or not, did for a request.
func (b *Batch) tally(g *generation, m mark, round bool) {
	before, after := m.stats, g.out.Stats
	output := after.OutputTokens - before.OutputTokens
	b.sums.GeneratedTokens += int64(output)
	if round {
		b.sums.DecodeTokens += int64(output - (g.foreign - m.foreign))
	}
	b.sums.Rounds += int64(after.Rounds - before.Rounds)
	b.sums.FallbackSteps += int64(after.FallbackSteps - before.FallbackSteps)
	b.sums.Drafted += int64(after.Drafted - before.Drafted)
	b.sums.Accepted += int64(after.Accepted - before.Accepted)
}
