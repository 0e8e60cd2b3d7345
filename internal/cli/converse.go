package cli

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"

	"golang.org/x/term"

	"ninfer/internal/engine"
	"ninfer/internal/front"
)

// terminal reports whether a person types at stdin.
func (e *environment) terminal() bool {
	f, ok := e.in.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}

const converseHelp = "type a message and press return; /new starts over, /quit or end of file leaves, an interrupt stops an answer"

// converse is a conversation at the terminal: every line is a user's turn. Answers go to stdout, reasoning and prompts to stderr.
func (c *runCommand) converse(e *environment, batch *engine.Batch, f *front.Front, req front.Request) error {
	e.say("%s", converseHelp)
	lines := bufio.NewReader(e.in)
	for {
		fmt.Fprint(e.err, "> ")
		line, err := lines.ReadString('\n')
		text := strings.TrimSpace(line)
		switch {
		case text == "/quit", errors.Is(err, io.EOF) && text == "":
			fmt.Fprintln(e.err)
			return nil
		case err != nil && !errors.Is(err, io.EOF):
			return err
		case text == "":
			continue
		case text == "/new":
			req.Messages = nil
			continue
		case strings.HasPrefix(text, "/"):
			e.say("%s", converseHelp)
			continue
		}
		turn := req
		turn.Messages = append(req.Messages[:len(req.Messages):len(req.Messages)], front.Message{Role: "user", Content: front.Text(text)})
		p, err := f.Prepare(turn)
		if err == nil {
			err = roomFor(p, c.MaxContext)
		}
		if err != nil { // a person can do something about it
			e.say("%v; /new starts over", err)
			continue
		}
		out := &printer{session: p.Session(), answer: e.out, reasoning: e.err}
		res, err := c.turn(out, batch, p)
		if err != nil {
			return err
		}
		if res.Reason != engine.Stop {
			e.say("%s after %d tokens", res.Reason, len(res.IDs))
		}
		req.Messages = append(turn.Messages, front.Message{Role: "assistant", Content: front.Text(out.said.String())})
	}
}

// turn generates one answer; an interrupt ends the answer, not the conversation.
func (c *runCommand) turn(out *printer, batch *engine.Batch, p *front.Prepared) (engine.Outcome, error) {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	return out.generate(ctx, batch, p, c.DraftTokens)
}
