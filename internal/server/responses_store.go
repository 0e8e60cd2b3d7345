package server

import (
	"container/list"
	"encoding/json/jsontext"
	"sync"
)

// responseTurn is what one response added to a conversation: its input and its output, each item with an id. Turns of the same
// conversation share those before them; a turn does not change once it is made.
type responseTurn struct {
	parent        *responseTurn
	input, output []jsontext.Value

	size int64 // bytes of its own items
	uses int   // records and turns that hold it; the store's
}

// items are all items up to the end of the turn, oldest first.
func (t *responseTurn) items() []jsontext.Value {
	if t == nil {
		return nil
	}
	return append(append(t.parent.items(), t.input...), t.output...)
}

// weigh is the bytes of a turn with all before it.
func (t *responseTurn) weigh() int64 {
	n := int64(0)
	for ; t != nil; t = t.parent {
		n += t.size
	}
	return n
}

// itemOverhead is about what an item takes beside its bytes, and recordOverhead what a response does.
const (
	itemOverhead   = 64
	recordOverhead = 1 << 10
)

func sizeOf(items ...[]jsontext.Value) int64 {
	n := int64(0)
	for _, list := range items {
		for _, v := range list {
			n += int64(len(v)) + itemOverhead
		}
	}
	return n
}

// responseRecord is a response that is kept.
type responseRecord struct {
	id       string
	object   []byte // as it is answered
	turn     *responseTurn
	preserve *bool // preserve_thinking, which responses after it inherit
}

// responseStore keeps responses in memory, the last used ones, bounded by their number and by the bytes of all they hold. What a deleted or
// evicted response shared with others stays as long as those need it.
type responseStore struct {
	records int   // most
	room    int64 // most bytes

	mu    sync.Mutex // above what it guards
	byID  map[string]*list.Element
	order *list.List // of *responseRecord, the last used first
	bytes int64
}

func newResponseStore(records int, room int64) *responseStore {
	return &responseStore{records: records, room: room, byID: map[string]*list.Element{}, order: list.New()}
}

// get returns a response and notes its use.
func (s *responseStore) get(id string) (*responseRecord, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	e, ok := s.byID[id]
	if !ok {
		return nil, false
	}
	s.order.MoveToFront(e)
	return e.Value.(*responseRecord), true
}

// put keeps a response. It reports whether there is room for it at all.
func (s *responseStore) put(r *responseRecord) bool {
	if s.cost(r.turn)+int64(len(r.object)) > s.room {
		return false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.bytes += int64(len(r.object)) + recordOverhead
	s.hold(r.turn)
	s.byID[r.id] = s.order.PushFront(r)
	for s.order.Len() > s.records || s.bytes > s.room {
		s.drop(s.order.Back())
	}
	return true
}

// cost is what a response with a turn takes alone, without its object.
func (s *responseStore) cost(t *responseTurn) int64 { return t.weigh() + recordOverhead }

// remove forgets a response and reports whether it was there.
func (s *responseStore) remove(id string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	e, ok := s.byID[id]
	if ok {
		s.drop(e)
	}
	return ok
}

func (s *responseStore) drop(e *list.Element) {
	r := s.order.Remove(e).(*responseRecord)
	delete(s.byID, r.id)
	s.bytes -= int64(len(r.object)) + recordOverhead
	for t := r.turn; t != nil; t = t.parent {
		if t.uses--; t.uses > 0 {
			break
		}
		s.bytes -= t.size
	}
}

// hold counts a use of a turn. Whoever is first to hold it also holds those before it.
func (s *responseStore) hold(t *responseTurn) {
	for ; t != nil; t = t.parent {
		if t.uses++; t.uses > 1 {
			break
		}
		s.bytes += t.size
	}
}
