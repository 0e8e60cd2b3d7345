package server

import (
	"encoding/json/jsontext"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
)

// The store against a plain one: the same responses are there after every step, within the bounds, and what is counted is what is held.
func TestResponseStore(t *testing.T) {
	const records, room = 6, 20_000
	s := newResponseStore(records, room)
	rng := rand.New(rand.NewPCG(1, 2))
	var kept []*responseRecord // the last used first
	held := func() int64 {
		n := int64(0)
		seen := map[*responseTurn]bool{}
		for _, r := range kept {
			n += int64(len(r.object)) + recordOverhead
			for turn := r.turn; turn != nil; turn = turn.parent {
				if !seen[turn] {
					seen[turn] = true
					n += sizeOf(turn.input, turn.output)
				}
			}
		}
		return n
	}
	var lost []*responseRecord
	refused, evicted := 0, 0
	for i := range 5000 {
		pick := func() int { return rng.IntN(len(kept)) }
		switch op := rng.IntN(10); {
		case op < 2 && len(kept) > 0: // use
			at := pick()
			r := kept[at]
			if got, ok := s.get(r.id); !ok || got != r {
				t.Fatalf("step %d: %s is not there", i, r.id)
			}
			kept = slices.Insert(slices.Delete(kept, at, at+1), 0, r)
		case op == 2 && len(kept) > 0:
			at := pick()
			if !s.remove(kept[at].id) || s.remove(kept[at].id) {
				t.Fatalf("step %d: %s", i, kept[at].id)
			}
			lost = append(lost, kept[at])
			kept = slices.Delete(kept, at, at+1)
		default:
			turn := &responseTurn{}
			switch {
			case len(kept) > 0 && rng.IntN(3) > 0:
				turn.parent = kept[pick()].turn
			case len(lost) > 0 && rng.IntN(4) == 0:
				turn.parent = lost[rng.IntN(len(lost))].turn // it went away while its child was made
			}
			item := func() []jsontext.Value {
				return slices.Repeat([]jsontext.Value{jsontext.Value(strings.Repeat("x", rng.IntN(1500)))}, rng.IntN(3))
			}
			turn.input, turn.output = item(), item()
			turn.size = sizeOf(turn.input, turn.output)
			r := &responseRecord{id: fmt.Sprint("r", i), object: make([]byte, rng.IntN(500)), turn: turn}
			alone := int64(len(r.object)) + recordOverhead
			for at := turn; at != nil; at = at.parent {
				alone += sizeOf(at.input, at.output)
			}
			if got := s.put(r); got != (alone <= room) {
				t.Fatalf("step %d: %v of %d bytes", i, got, alone)
			}
			if alone > room {
				refused++
				break
			}
			kept = slices.Insert(kept, 0, r)
			for len(kept) > records || held() > room {
				last := len(kept) - 1
				lost = append(lost, kept[last])
				kept = kept[:last]
				evicted++
			}
		}
		if s.bytes != held() || s.bytes > room || s.order.Len() != len(kept) || len(s.byID) != len(kept) {
			t.Fatalf("step %d: %d bytes in %d, want %d in %d", i, s.bytes, s.order.Len(), held(), len(kept))
		}
		for _, r := range kept {
			if s.byID[r.id] == nil {
				t.Fatalf("step %d: %s is not there", i, r.id)
			}
		}
	}
	if refused < 10 || evicted < 1000 {
		t.Errorf("%d refused, %d evicted: the steps are not what they should be", refused, evicted)
	}
}

// Addresses of pictures are taken out, and nothing else is touched.
func TestWithoutImages(t *testing.T) {
	for in, want := range map[string]string{
		`{"id":"a","content":[{"type":"input_text","text":"t"}]}`:                                                                     `{"id":"a","content":[{"type":"input_text","text":"t"}]}`,
		`{"id":"a","content":[{"type":"input_image","image_url":"data:x","detail":"auto"},{"type":"input_text","text":"t"}],"z":1.0}`: `{"id":"a","content":[{"type":"input_image","image_url":null,"detail":"auto"},{"type":"input_text","text":"t"}],"z":1.0}`,
		`{"call_id":"a","output":[{"type":"input_image","image_url":"http://h/"}]}`:                                                   `{"call_id":"a","output":[{"type":"input_image","image_url":null}]}`,
		`{"call_id":"a","output":"image_url"}`:                                                                                        `{"call_id":"a","output":"image_url"}`,
	} {
		if got := string(withoutImages(jsontext.Value(in))); got != want {
			t.Errorf("%s: %s", in, got)
		}
	}
}
