package cli

import (
	"encoding/json/jsontext"
	"encoding/json/v2"
	"fmt"
	"io"
	"os"
	"text/tabwriter"

	"ninfer/internal/front"
	"ninfer/internal/quality"
)

type compareCommand struct {
	Base  string `arg:"" optional:"" help:"Artifact to compare with. Default: nano, the model inside the program."`
	Other string `arg:"" optional:"" help:"Artifact to judge. Default: the base, with the storage formats below."`

	Prompts  string   `placeholder:"FILE" help:"JSON array of conversations, each as run's --messages takes it. Default: built-in questions."`
	Text     string   `placeholder:"FILE" help:"Also the perplexity of both over this UTF-8 text."`
	Corpus   string   `placeholder:"FILE" help:"Also the perplexity of both over the texts of a manifest."`
	MaxNew   int      `default:"128" placeholder:"N" help:"Most tokens of an answer."`
	Context  int      `default:"4096" placeholder:"N" help:"Most tokens of a conversation or window."`
	NearTie  *float64 `placeholder:"F" help:"Fail if the other picks another token where the base's logits are further apart than this."`
	Thinking bool     `help:"Let the models think."`
	JSON     bool     `name:"json" help:"Everything as one JSON object."`

	storageFlags `embed:""`
}

// compareReport is the JSON form.
type compareReport struct {
	Version string           `json:"version"`
	Base    artifactIdentity `json:"base"`
	Other   artifactIdentity `json:"other"`
	KVDtype string           `json:"other_kv_dtype"`
	State   string           `json:"other_gdn_state_dtype"`
	*quality.Comparison
	BaseText  *quality.Perplexity `json:"base_text,omitzero"`
	OtherText *quality.Perplexity `json:"other_text,omitzero"`
}

func (c *compareCommand) Run(e *environment) error {
	switch {
	case c.MaxNew < 1 || c.Context < 2 || c.MaxNew >= c.Context:
		return usagef("--max-new is %d and --context %d: need at least 1, and less than the context", c.MaxNew, c.Context)
	case c.Text != "" && c.Corpus != "":
		return usagef("--text excludes --corpus")
	case c.NearTie != nil && !(*c.NearTie >= 0):
		return usagef("--near-tie is %v, need at least 0", *c.NearTie)
	}
	otherFlags, err := c.flags(c.Context)
	if err != nil {
		return err
	}
	baseFlags := otherFlags
	baseFlags.KVDtype, baseFlags.GDNStateDtype = "bf16", "fp32"
	streams, err := c.streams()
	if err != nil {
		return usageError{err}
	}
	l, err := load(e, c.Base)
	if err != nil {
		return err
	}
	defer l.close()
	other := l
	if c.Other != "" {
		if other, err = load(e, c.Other); err != nil {
			return err
		}
		defer other.close()
	}
	prompts, err := c.conversations(l)
	if err != nil {
		return err
	}
	a, closeA, err := baseFlags.subject(e, l)
	if err != nil {
		return err
	}
	defer closeA()
	b, closeB, err := otherFlags.subject(e, other)
	if err != nil {
		return err
	}
	defer closeB()
	r := compareReport{Version: version(), Base: l.identity(), Other: other.identity(), KVDtype: otherFlags.KVDtype, State: otherFlags.GDNStateDtype}
	if r.Comparison, err = quality.Compare(e.ctx, a, b, prompts, c.MaxNew, nil); err == nil && streams != nil {
		o := quality.PerplexityOptions{Context: c.Context, Stride: c.Context / 2}
		if r.BaseText, err = quality.Measure(e.ctx, a, streams, l.tokenizer.EncodePlain, o); err == nil {
			r.OtherText, err = quality.Measure(e.ctx, b, streams, l.tokenizer.EncodePlain, o)
		}
	}
	if e.ctx.Err() != nil {
		e.say("interrupted")
		return statusError(exitInterrupted)
	}
	if err != nil {
		return err
	}
	if c.JSON {
		err = printJSON(e, r)
	} else {
		err = r.print(e.out, l)
	}
	if err == nil && c.NearTie != nil && r.LargestMargin > *c.NearTie {
		e.say("a token changed where the base's logits are %.3f apart, --near-tie allows %v", r.LargestMargin, *c.NearTie)
		return statusError(exitFailure)
	}
	return err
}

func (c *compareCommand) streams() ([]quality.Stream, error) {
	switch {
	case c.Corpus != "":
		return quality.ReadCorpus(c.Corpus, false)
	case c.Text != "":
		s, err := quality.ReadText(c.Text)
		return []quality.Stream{s}, err
	}
	return nil, nil
}

// conversations renders the prompts with the base's template.
func (c *compareCommand) conversations(l *loaded) ([]quality.Prompt, error) {
	raw := quality.Questions
	if c.Prompts != "" {
		var err error
		if raw, err = os.ReadFile(c.Prompts); err != nil {
			return nil, usageError{err}
		}
	}
	list, err := splitConversations(raw)
	if err != nil {
		return nil, usagef("%s: %w", c.Prompts, err)
	}
	opt := front.Options{Context: c.Context, MaxTokens: c.MaxNew, NoThinking: !c.Thinking, Greedy: true}
	f, err := l.front(opt)
	if err != nil {
		return nil, err
	}
	var out []quality.Prompt
	for i, one := range list {
		var req front.Request
		if req.Messages, req.Tools, err = parseConversation(one); err != nil {
			return nil, usagef("%s: conversation %d: %w", c.Prompts, i, err)
		}
		p, err := f.Prepare(req)
		if err == nil && len(p.Prompt)+c.MaxNew > c.Context {
			err = fmt.Errorf("%d tokens and %d of an answer do not fit a context of %d", len(p.Prompt), c.MaxNew, c.Context)
		}
		if err != nil {
			return nil, usagef("%s: conversation %d: %w", c.Prompts, i, err)
		}
		q := quality.Prompt{Name: fmt.Sprint(i), IDs: p.Prompt, Stops: map[int32]bool{}}
		for _, id := range p.StopIDs {
			q.Stops[id] = true
		}
		out = append(out, q)
	}
	return out, nil
}

// splitConversations takes an array of conversations apart.
func splitConversations(raw []byte) ([][]byte, error) {
	var list []jsontext.Value
	if err := json.Unmarshal(raw, &list); err != nil {
		return nil, err
	}
	if len(list) == 0 {
		return nil, fmt.Errorf("no conversations")
	}
	out := make([][]byte, len(list))
	for i, v := range list {
		out[i] = v
	}
	return out, nil
}

func (r *compareReport) print(w io.Writer, l *loaded) error {
	fmt.Fprintf(w, "base   %s  %s, %d bytes, bf16 cache, fp32 state\n", r.Base.File, r.Base.ID, r.Base.Bytes)
	fmt.Fprintf(w, "other  %s  %s, %d bytes, %s cache, %s state\n\n", r.Other.File, r.Other.ID, r.Other.Bytes, r.KVDtype, r.State)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "prompt\ttokens\tmean change\tlargest\tmean kl\tflips\tsame text\t")
	for _, a := range r.Answers {
		n := float64(max(a.Tokens, 1))
		same := "yes"
		if !a.Same {
			same = fmt.Sprintf("to token %d", a.Differs)
		}
		fmt.Fprintf(t, "%s\t%d\t%+.5f\t%.5f\t%.6f\t%d\t%s\t\n", a.Prompt, a.Tokens, (a.Other-a.Base)/n, a.Worst, a.KL/n, len(a.Flips), same)
	}
	t.Flush()
	fmt.Fprintf(w, "\n%d tokens: mean change of the log-probability %+.5f, without sign %.5f, largest %.5f, mean kl %.6f\n", r.Tokens, r.MeanChange, r.MeanSize, r.LargestChange, r.MeanKL)
	fmt.Fprintf(w, "perplexity of the answers %.5f to %.5f (%+.2f %%)\n", r.BasePerplexity, r.OtherPerplexity, 100*(r.OtherPerplexity/r.BasePerplexity-1))
	fmt.Fprintf(w, "same text %d of %d; %d flips", r.SameText, len(r.Answers), r.Flips)
	if r.Flips > 0 {
		fmt.Fprintf(w, ", the base's logits at most %.4f apart there", r.LargestMargin)
	}
	fmt.Fprintln(w)
	for _, a := range r.Answers {
		for _, f := range a.Flips {
			fmt.Fprintf(w, "  prompt %s token %d: %q became %q, %.4f apart\n", f.Prompt, f.At, l.tokenizer.Decode([]int32{f.Base}), l.tokenizer.Decode([]int32{f.Other}), f.Margin)
		}
	}
	if r.BaseText != nil {
		x, y := r.BaseText.Overall.Perplexity, r.OtherText.Overall.Perplexity
		fmt.Fprintf(w, "perplexity of the text %.5f to %.5f (%+.3f %%), %d tokens\n", x, y, 100*(y/x-1), r.BaseText.Overall.Scored)
	}
	return nil
}
