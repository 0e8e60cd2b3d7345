package quality

import (
	"context"
	"fmt"
	"math"
)

// Window is a run of tokens that starts from an empty sequence, of which the tokens from First on are scored.
type Window struct {
	Begin  int     `json:"begin"`
	End    int     `json:"end"`
	First  int     `json:"first_scored"`
	Scored int     `json:"scored"`
	NLL    float64 `json:"nll"` // sum over the scored tokens
}

// Windows cuts a text of n tokens so that every token after the first is scored once: the first window scores what follows its first
// token, every later one moves on by stride tokens and keeps up to context-stride tokens before them as history.
func Windows(n, context, stride int) []Window {
	var out []Window
	for first := 1; first < n; {
		w := Window{First: first, End: min(context, n)}
		if first > 1 {
			w.End = min(first+stride, n)
			w.Begin = max(0, first-(context-stride))
		}
		w.Scored = w.End - first
		first = w.End
		out = append(out, w)
	}
	return out
}

// Score is a sum over tokens. Perplexity is exp(NLL/Scored).
type Score struct {
	Tokens     int     `json:"tokens"`
	Scored     int     `json:"scored"`
	NLL        float64 `json:"nll"`
	Perplexity float64 `json:"perplexity"`
}

func (s *Score) add(tokens, scored int, nll float64) {
	s.Tokens += tokens
	s.Scored += scored
	s.NLL += nll
	s.Perplexity = math.Exp(s.NLL / float64(max(s.Scored, 1)))
}

// StreamScore is one text's result.
type StreamScore struct {
	Name   string `json:"name"`
	Domain string `json:"domain"`
	Path   string `json:"path"`
	SHA256 string `json:"sha256"`
	Bytes  int    `json:"bytes"`
	Score
	Windows []Window `json:"windows"`
}

// DomainScore is the sum over the texts of a domain.
type DomainScore struct {
	Domain  string `json:"domain"`
	Streams int    `json:"streams"`
	Score
}

// TokenScore is the log-probability of one scored token.
type TokenScore struct {
	Stream  string  `json:"stream"`
	Window  int     `json:"window"`
	At      int     `json:"position"` // in the stream
	ID      int32   `json:"token"`
	Logprob float64 `json:"logprob"`
}

// Perplexity is the result over a corpus.
type Perplexity struct {
	Streams []StreamScore `json:"streams"`
	Domains []DomainScore `json:"domains"`
	Overall Score         `json:"overall"`
}

// PerplexityOptions say how texts are cut. Both functions may be nil.
type PerplexityOptions struct {
	Context, Stride int
	Token           func(TokenScore) error
	Progress        func(scored, all int) // in tokens
}

// Measure scores the streams of a corpus one after another. ids encodes a text.
func Measure(ctx context.Context, s *Subject, streams []Stream, ids func(text string) []int32, o PerplexityOptions) (*Perplexity, error) {
	if o.Context < 2 || o.Stride < 1 || o.Stride >= o.Context {
		return nil, fmt.Errorf("quality: context of %d and stride of %d", o.Context, o.Stride)
	}
	texts := make([][]int32, len(streams))
	all := 0
	for i, t := range streams {
		texts[i] = ids(t.Text)
		if len(texts[i]) < 2 {
			return nil, fmt.Errorf("stream %q has %d tokens: at least two are needed to score one", t.Name, len(texts[i]))
		}
		all += len(texts[i]) - 1
	}
	p := &Perplexity{}
	done := 0
	for i, t := range streams {
		out := StreamScore{Name: t.Name, Domain: t.Domain, Path: t.Path, SHA256: t.SHA256, Bytes: len(t.Text)}
		out.Windows = Windows(len(texts[i]), o.Context, o.Stride)
		scored, nll := 0, 0.0
		for k := range out.Windows {
			w := &out.Windows[k]
			tokens := texts[i][w.Begin:w.End]
			err := s.Rows(ctx, tokens[:len(tokens)-1], w.First-1-w.Begin, func(at int, logits []float32) error {
				id := tokens[at+1]
				l := float64(logits[id]) - LogSum(logits)
				w.NLL -= l
				done++
				if o.Progress != nil {
					o.Progress(done, all)
				}
				if o.Token != nil {
					return o.Token(TokenScore{t.Name, k, w.Begin + at + 1, id, l})
				}
				return nil
			})
			if err != nil {
				return nil, err
			}
			scored, nll = scored+w.Scored, nll+w.NLL
		}
		out.add(len(texts[i]), scored, nll)
		p.Streams = append(p.Streams, out)
		p.domain(t.Domain).add(len(texts[i]), scored, nll)
		p.Overall.add(len(texts[i]), scored, nll)
	}
	return p, nil
}

// domain finds a domain's sum and counts one stream more.
func (p *Perplexity) domain(name string) *DomainScore {
	for i := range p.Domains {
		if d := &p.Domains[i]; d.Domain == name {
			d.Streams++
			return d
		}
	}
	p.Domains = append(p.Domains, DomainScore{Domain: name, Streams: 1})
	return &p.Domains[len(p.Domains)-1]
}
