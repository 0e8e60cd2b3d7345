package engine

import (
	"errors"
	"fmt"
	"slices"

	"ninfer/internal/backend"
)

// PageTokens is the number of tokens of a page of cache.
const PageTokens = backend.PageTokens

// ErrTooLarge is returned for a request that the pool of pages could never hold.
var ErrTooLarge = errors.New("request does not fit the cache")

// RequestID names a request to the scheduler.
type RequestID uint64

// Limits size a scheduler.
type Limits struct {
	Lanes   int
	Pages   int // of the pool that all lanes share
	Pending int // most requests that wait for a lane
	Chunk   int // most prompt rows of a unit
	// GapRows is the most prompt rows of a unit while other lanes are decoding: it bounds the gap that a long prompt causes in
	// their output.
	GapRows int
	// Passes is how many later requests may be admitted before the first waiting one that does not fit.
	Passes int
}

// Unit is one step of the engine's work: a chunk of one prompt, or a round of all lanes that are generating.
type Unit struct {
	// Admit are requests that got a lane before the unit, in order.
	Admit []Admission
	// Prefill, if Rows is not 0, is a chunk of a prompt.
	Prefill Chunk
	// Round are the lanes of a decoding round, ascending.
	Round []int
}

// Admission is a request that starts.
type Admission struct {
	ID    RequestID
	Lane  int
	Pages int // reserved for it
}

// Chunk is a run of prompt rows.
type Chunk struct {
	Lane  int
	First int // row of the prompt
	Rows  int
	Last  bool // the prompt ends with it
}

// Scheduler decides what runs next. It is a plain value: events go in, units come out; it has no clock, no goroutine and
// no device, so whole schedules can be written down as text.
//
// A request that is admitted has all its pages reserved, so what starts can finish. Requests start in the order they came; while
// the first one waits for pages, a bounded number of later ones may pass it.
type Scheduler struct {
	limits   Limits
	waiting  []entry
	lanes    []entry // id 0 is a free lane
	free     int     // pages
	passed   int     // requests that passed the first waiting one
	roundDue bool    // the last unit was a prompt's
}

// entry is one request as the scheduler sees it.
type entry struct {
	id     RequestID
	prompt int
	done   int // prompt rows run
	pages  int
}

func (e *entry) decoding() bool { return e.id != 0 && e.done == e.prompt }

// NewScheduler returns an empty scheduler.
func NewScheduler(l Limits) (*Scheduler, error) {
	if l.Lanes < 1 || l.Pages < 1 || l.Pending < 0 || l.Chunk < 1 || l.GapRows < 1 || l.Passes < 0 {
		return nil, fmt.Errorf("engine: scheduler limits %+v: lanes, pages, chunk and gap must be positive", l)
	}
	return &Scheduler{limits: l, lanes: make([]entry, l.Lanes), free: l.Pages}, nil
}

// pagesFor is the number of pages that hold so many tokens.
func pagesFor(tokens int) int { return (tokens + PageTokens - 1) / PageTokens }

// Arrive queues a request of prompt tokens that may grow by at most output.
func (s *Scheduler) Arrive(id RequestID, prompt, output int) error {
	pages := pagesFor(prompt + output)
	switch {
	case id == 0 || prompt < 1 || output < 1:
		return fmt.Errorf("engine: request %d of %d and %d tokens", id, prompt, output)
	case pages > s.limits.Pages:
		return fmt.Errorf("%w: it needs %d pages, the pool has %d", ErrTooLarge, pages, s.limits.Pages)
	case len(s.waiting) >= s.limits.Pending+s.idleLanes():
		return ErrOverloaded
	}
	s.waiting = append(s.waiting, entry{id: id, prompt: prompt, pages: pages})
	return nil
}

// idleLanes is the number of lanes without a request.
func (s *Scheduler) idleLanes() int {
	n := 0
	for i := range s.lanes {
		if s.lanes[i].id == 0 {
			n++
		}
	}
	return n
}

// Leave removes a request, waiting or running, whatever the reason: finished, cancelled, failed. It reports whether it was there.
func (s *Scheduler) Leave(id RequestID) bool {
	for i := range s.waiting {
		if s.waiting[i].id == id {
			if i == 0 {
				s.passed = 0
			}
			s.waiting = slices.Delete(s.waiting, i, i+1)
			return true
		}
	}
	for i := range s.lanes {
		if s.lanes[i].id == id {
			s.free += s.lanes[i].pages
			s.lanes[i] = entry{}
			return true
		}
	}
	return false
}

// Extend makes more rows of prompt of a running request: tokens that were put into its output without the model. They must be
// inside its reservation.
func (s *Scheduler) Extend(id RequestID, rows int) {
	for i := range s.lanes {
		if s.lanes[i].id == id {
			s.lanes[i].prompt += rows
		}
	}
}

// Active is the number of requests that have a lane, Waiting of those that do not, FreePages of the pages reserved by none.
func (s *Scheduler) Active() int { return s.limits.Lanes - s.idleLanes() }

// Waiting is the number of requests without a lane.
func (s *Scheduler) Waiting() int { return len(s.waiting) }

// Decoding is the number of requests that take part in the next round.
func (s *Scheduler) Decoding() int {
	n := 0
	for i := range s.lanes {
		if s.lanes[i].decoding() {
			n++
		}
	}
	return n
}

// FreePages is the number of pages that no request has reserved.
func (s *Scheduler) FreePages() int { return s.free }

// Next admits what can start and returns the next unit. Calling it says that the unit before was carried out.
func (s *Scheduler) Next() Unit {
	u := Unit{Admit: s.admit()}
	prefill := s.oldestPrompt()
	var round []int
	for i := range s.lanes {
		if s.lanes[i].decoding() {
			round = append(round, i)
		}
	}
	if prefill < 0 || s.roundDue && len(round) > 0 {
		s.roundDue = false
		u.Round = round
		return u
	}
	e := &s.lanes[prefill]
	rows := min(e.prompt-e.done, s.limits.Chunk)
	if len(round) > 0 {
		rows = min(rows, s.limits.GapRows)
	}
	u.Prefill = Chunk{Lane: prefill, First: e.done, Rows: rows, Last: e.done+rows == e.prompt}
	e.done += rows
	s.roundDue = true
	return u
}

// oldestPrompt is the lane whose prompt runs next: one at a time, the earliest request first.
func (s *Scheduler) oldestPrompt() int {
	best := -1
	for i := range s.lanes {
		e := &s.lanes[i]
		if e.id != 0 && e.done < e.prompt && (best < 0 || e.id < s.lanes[best].id) {
			best = i
		}
	}
	return best
}

// admit gives free lanes to waiting requests whose pages are free.
func (s *Scheduler) admit() []Admission {
	var out []Admission
	for i := 0; i < len(s.waiting); {
		lane := slices.IndexFunc(s.lanes, func(e entry) bool { return e.id == 0 })
		if lane < 0 || i > 0 && s.passed >= s.limits.Passes {
			break
		}
		e := s.waiting[i]
		if e.pages > s.free {
			i++
			continue
		}
		if i == 0 {
			s.passed = 0
		} else {
			s.passed++
		}
		s.free -= e.pages
		s.lanes[lane] = e
		s.waiting = slices.Delete(s.waiting, i, i+1)
		out = append(out, Admission{ID: e.id, Lane: lane, Pages: e.pages})
	}
	return out
}
