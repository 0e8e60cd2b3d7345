// Package decode turns the ids a model generates into the text a client sees,
// as they come.
//
// It holds back incomplete characters and text that may become a stop string,
// divides reasoning from answer at the </think> token, finds stop ids and stop
// strings, counts reasoning tokens and says when a thinking budget is used up.
//
// A round of generation goes in two steps. Preview tells how many of the ids
// that would come next may be kept, and changes nothing. Commit takes the ids
// that were kept, with any that were inserted, and returns what to show. What
// Commit returned is never taken back. A Decoder belongs to one goroutine.
package decode

import (
	"fmt"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"ninfer/internal/text/token"
)

// Vocabulary gives the bytes of an id; *token.Tokenizer is one.
type Vocabulary interface {
	Bytes(id int32) []byte
}

// Options say how the output of one request is read.
type Options struct {
	// Thinking says that the prompt left a think block open. Output then starts in
	// the reasoning channel, which the first ThinkEnd closes.
	Thinking bool
	ThinkEnd int32

	// StopIDs end the output. The one met is committed and counted, not shown.
	StopIDs []int32
	// Stops and ReasoningStops end the output where they occur in the text of the
	// answer or of the reasoning. The match and what follows it are not shown. None
	// may be empty or other than UTF-8: a match must not cut a character.
	Stops, ReasoningStops []string

	// Budget is the most ids the model may make while the think block is open; 0 is
	// no limit. Closing are the ids that are then inserted; ThinkEnd is among them.
	Budget  int
	Closing []int32

	// Raw shows everything as it is, in the answer's channel: no division, control
	// tokens and the stop id spelled out. Stops, counts and budget are as without it.
	Raw bool
}

// Reason is why ids after a certain one are not kept.
type Reason uint8

// The reasons.
const (
	Continue   Reason = iota // there is none
	StopID                   // a stop id was met
	StopString               // a stop string was completed
	Budget                   // the thinking budget is used up: Closing follows
)

// Kind says what an Event is.
type Kind uint8

// The kinds of events.
const (
	Reasoning    Kind = iota // text of the reasoning
	ReasoningEnd             // the think block closed
	Answer                   // text of the answer
	End                      // the output ended; nothing follows
)

// Event is a piece of what a client sees.
type Event struct {
	Kind Kind
	Text string // of Reasoning and Answer, never empty there

	// Of End: why, and the stop string met. Reason is Continue if the output ended
	// for a reason the decoder does not know, such as a limit.
	Reason Reason
	Stop   string
}

// Decoder reads the output of one request.
type Decoder struct {
	vocabulary Vocabulary
	opt        Options
	stops      [2][]pattern // by channel: reasoning, answer
	state      state
}

// state is everything that Commit changes. Slices in it are replaced, not written to,
// so that a copy may be changed without the original.
type state struct {
	open      bool   // in the reasoning channel
	drop      bool   // white space at the start of the answer is being dropped
	partial   string // bytes of a character not yet complete
	held      string // text that may be the start of a stop string
	progress  []int  // for each stop of the channel: how much of it the text ends with
	made      int    // ids the model made in the open block
	inserting int    // ids of Closing still to come
	tokens    int
	reasoning int // ids committed in the reasoning channel
	done      bool
	reason    Reason
	stop      string
}

// New returns a decoder at the start of an output.
func New(vocabulary Vocabulary, opt Options) (*Decoder, error) {
	if opt.Budget < 0 {
		return nil, fmt.Errorf("thinking budget of %d", opt.Budget)
	}
	if opt.Thinking && opt.Budget > 0 && !slices.Contains(opt.Closing, opt.ThinkEnd) {
		return nil, fmt.Errorf("thinking budget: the closing text does not close the think block")
	}
	d := &Decoder{vocabulary: vocabulary, opt: opt}
	for i, stops := range [2][]string{opt.ReasoningStops, opt.Stops} {
		for _, s := range stops {
			if s == "" || !utf8.ValidString(s) {
				return nil, fmt.Errorf("stop string %q is empty or not UTF-8", s)
			}
			d.stops[i] = append(d.stops[i], newPattern(s))
		}
	}
	d.state.open = opt.Thinking
	return d, nil
}

// Clone returns a decoder in the same place, which goes its own way from there.
func (d *Decoder) Clone() *Decoder {
	c := *d
	return &c
}

// Preview says how many of the ids that would follow the committed ones may be
// kept, and why not more. With StopID, StopString and Budget the last kept id is the
// one that brought it about; the kept ids may also be all of them. It changes nothing.
func (d *Decoder) Preview(ids []int32) (keep int, why Reason) {
	s := d.state
	for i := 0; ; i++ {
		switch {
		case s.done:
			return i, s.reason
		case s.inserting > 0:
			return i, Budget
		case i == len(ids):
			return i, Continue
		}
		d.step(&s, ids[i], nil)
	}
}

// Commit takes ids that were kept, followed by inserted ones if the budget was used
// up, and returns what they add to the output. Ids after the end are ignored.
func (d *Decoder) Commit(ids []int32) []Event {
	var events []Event
	for _, id := range ids {
		if d.state.done {
			break
		}
		d.step(&d.state, id, &events)
	}
	return events
}

// Finish ends the output, for a reason of the caller's, and returns what was held
// back. After the end it returns nothing.
func (d *Decoder) Finish() []Event {
	if d.state.done {
		return nil
	}
	var events []Event
	d.flush(&d.state, &events)
	d.end(&d.state, Continue, "", &events)
	return events
}

// Tokens is the number of ids committed, stop id and inserted ones included.
func (d *Decoder) Tokens() int { return d.state.tokens }

// ReasoningTokens is the number of ids committed in the reasoning channel, inserted
// ones and the closing marker included.
func (d *Decoder) ReasoningTokens() int { return d.state.reasoning }

// Closing is what to insert when Preview or a commit ends with Budget.
func (d *Decoder) Closing() []int32 { return slices.Clone(d.opt.Closing) }

// step takes one id. Events may be nil.
func (d *Decoder) step(s *state, id int32, events *[]Event) {
	inserted := s.inserting > 0
	s.tokens++
	if s.open {
		s.reasoning++
	}
	if inserted {
		s.inserting--
	} else if s.open {
		s.made++
	}
	switch {
	case !inserted && slices.Contains(d.opt.StopIDs, id):
		if d.opt.Raw {
			d.text(s, id, true, events)
		}
		d.flush(s, events)
		d.end(s, StopID, "", events)
	case s.open && id == d.opt.ThinkEnd:
		if d.opt.Raw {
			d.text(s, id, inserted, events)
		}
		if s.done {
			return
		}
		d.flush(s, events)
		s.open = false
		s.drop = !d.opt.Raw
		if !d.opt.Raw {
			emit(events, Event{Kind: ReasoningEnd})
		}
	default:
		d.text(s, id, inserted, events)
	}
	if s.open && !s.done && !inserted && d.opt.Budget > 0 && s.made == d.opt.Budget {
		d.flush(s, events)
		s.inserting = len(d.opt.Closing)
	}
}

// text adds the bytes of an id to the text of the open channel. Free text is not
// searched for stop strings.
func (d *Decoder) text(s *state, id int32, free bool, events *[]Event) {
	data := append([]byte(s.partial), d.vocabulary.Bytes(id)...)
	var b strings.Builder
	s.partial = ""
	for len(data) > 0 {
		n, ok, more := token.Scan(data)
		switch {
		case ok:
			b.Write(data[:n])
		case more:
			s.partial = string(data[:n])
		default:
			b.WriteRune(utf8.RuneError)
		}
		data = data[n:]
	}
	text := b.String()
	if s.drop {
		text = strings.TrimLeftFunc(text, unicode.IsSpace)
		if text == "" {
			return
		}
		s.drop = false
	}
	stops := d.channelStops(s)
	if len(stops) == 0 || free {
		d.show(s, s.held+text, events)
		s.held, s.progress = "", nil
		return
	}
	progress := make([]int, len(stops))
	copy(progress, s.progress)
	held := s.held + text
	hold, found, cut := 0, -1, len(held)
	for i, p := range stops {
		var start int
		var met bool
		progress[i], start, met = p.find(text, progress[i])
		// Of those that this id completes the one that starts first counts, then the
		// one declared first.
		if at := len(s.held) + start; met && (found < 0 || at < cut) {
			found, cut = i, at
		}
		hold = max(hold, progress[i])
	}
	if found >= 0 {
		d.show(s, held[:cut], events)
		s.held, s.partial = "", ""
		d.end(s, StopString, stops[found].text, events)
		return
	}
	d.show(s, held[:len(held)-hold], events)
	s.held, s.progress = held[len(held)-hold:], progress
}

// flush shows what is held back; an unfinished character shows as U+FFFD.
func (d *Decoder) flush(s *state, events *[]Event) {
	text := s.held
	if s.partial != "" {
		text += string(utf8.RuneError)
	}
	s.held, s.partial, s.progress = "", "", nil
	d.show(s, text, events)
}

func (d *Decoder) channelStops(s *state) []pattern {
	if s.open {
		return d.stops[0]
	}
	return d.stops[1]
}

func (d *Decoder) show(s *state, text string, events *[]Event) {
	if text == "" {
		return
	}
	kind := Answer
	if s.open && !d.opt.Raw {
		kind = Reasoning
	}
	emit(events, Event{Kind: kind, Text: text})
}

func (d *Decoder) end(s *state, why Reason, stop string, events *[]Event) {
	s.done, s.reason, s.stop = true, why, stop
	emit(events, Event{Kind: End, Reason: why, Stop: stop})
}

// emit appends an event, joining text with text of the same kind.
func emit(events *[]Event, e Event) {
	if events == nil {
		return
	}
	if n := len(*events); n > 0 && e.Text != "" && (*events)[n-1].Kind == e.Kind {
		(*events)[n-1].Text += e.Text
		return
	}
	*events = append(*events, e)
}

// pattern is a stop string with its failure function (Knuth, Morris, Pratt), so
// that a search over a stream looks at each byte once.
type pattern struct {
	text string
	fail []int // fail[i]: length of the longest border of text[:i+1]
}

func newPattern(text string) pattern {
	fail := make([]int, len(text))
	for i, n := 1, 0; i < len(text); i++ {
		for n > 0 && text[i] != text[n] {
			n = fail[n-1]
		}
		if text[i] == text[n] {
			n++
		}
		fail[i] = n
	}
	return pattern{text, fail}
}

// find searches text, before which the first progress bytes of the pattern stood.
// It returns the progress after text, or met and where the first match starts,
// counted from the start of text and negative if before it.
func (p pattern) find(text string, progress int) (after, start int, met bool) {
	for i := range len(text) {
		for progress > 0 && text[i] != p.text[progress] {
			progress = p.fail[progress-1]
		}
		if text[i] == p.text[progress] {
			progress++
		}
		if progress == len(p.text) {
			return 0, i + 1 - progress, true
		}
	}
	return progress, 0, false
}
