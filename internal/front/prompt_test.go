package front_test

import (
	"errors"
	"slices"
	"testing"

	"ninfer/internal/front"
)

// A prompt of ids is taken as it is; the markers in it decide the channel that the output starts in.
func TestGivenPrompt(t *testing.T) {
	opt := micro(t)
	f := newFront(t, opt)
	open, _ := opt.Tokenizer.ID("<think>")
	shut, _ := opt.Tokenizer.ID("</think>")
	for _, c := range []struct {
		ids      []int32
		thinking bool
	}{
		{[]int32{20, 30}, false},
		{[]int32{20, open, 30}, true},
		{[]int32{open, 20, shut}, false},
	} {
		p, err := f.Prepare(front.Request{Prompt: c.ids})
		if err != nil || !slices.Equal(p.Prompt, c.ids) || p.Thinking != c.thinking || p.MaxNew != opt.MaxTokens {
			t.Errorf("%v: %+v, %v", c.ids, p, err)
		}
	}
	for _, bad := range [][]int32{{}, {-1}, {480}} {
		_, err := f.Prepare(front.Request{Prompt: bad})
		var refused *front.Error
		if !errors.As(err, &refused) || refused.Code != front.CodeInvalidPrompt {
			t.Errorf("%v: %v", bad, err)
		}
	}
}
