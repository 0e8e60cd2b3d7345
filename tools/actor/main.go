// Command actor is the server with an actor in the model's place: it says what the last message of the conversation tells it to. So the
// clients that people use can be tested with everything a model may say, calls of tools above all, on the real HTTP side.
//
//	actor CHECKPOINT [-places N] [-delay D]
//
// CHECKPOINT is a folder with tokenizer.json, tokenizer_config.json and generation_config.json. The address is printed on stdout. A user's
// message is said word for word, think markers and all, and then the answer ends; after results of tools the answer is "Got " and the
// results. A message "COUNT n" is answered with n tokens as fast as they are taken. Of a message with a line SAY, as agents bury one under
// their own text, what follows the line is said; lines THEN divide it into what is said at the first, second, … answer to it.
package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"ninfer/internal/engine"
	"ninfer/internal/front"
	"ninfer/internal/server"
	"ninfer/internal/text/chat"
	"ninfer/internal/text/token"
	"ninfer/internal/web"
)

const template = `{%- if tools %}{{- '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' }}{%- endif %}` +
	`{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}{%- if m.reasoning_content %}{{- '[' + m.reasoning_content + ']' }}{%- endif %}` +
	`{{- m.content | default('', true) }}{%- if m.tool_calls %}{{- m.tool_calls | tojson }}{%- endif %}{{- '<|im_end|>\n' }}{%- endfor %}` +
	`{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}` +
	`{%- else %}{{- '<think>\n' }}{%- endif %}{%- endif %}`

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "actor:", err)
		os.Exit(1)
	}
}

func run() error {
	places := flag.Int("places", 64, "requests at a time")
	delay := flag.Duration("delay", 0, "time for a token")
	flag.Parse()
	if flag.NArg() != 1 {
		return fmt.Errorf("one argument needed: a folder with a tokenizer")
	}
	var files [3][]byte
	for i, name := range []string{"tokenizer.json", "tokenizer_config.json", "generation_config.json"} {
		b, err := os.ReadFile(filepath.Join(flag.Arg(0), name))
		if err != nil {
			return err
		}
		files[i] = b
	}
	tok, err := token.Load(files[0], files[1])
	if err != nil {
		return err
	}
	tmpl, err := chat.NewTemplate("actor", []byte(template))
	if err != nil {
		return err
	}
	f, err := front.New(front.Options{
		Tokenizer: tok, Template: tmpl, TokenizerConfig: files[1], GenerationConfig: files[2], Context: 1 << 20, MaxTokens: 1 << 19, FreshSeeds: true,
	})
	if err != nil {
		return err
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	ctx, cancel := signal.NotifyContext(context.Background(), os.Interrupt)
	defer cancel()
	s := server.New(server.Options{ModelID: "actor", Log: server.NewLog(io.Discard, slog.LevelError), Page: web.File})
	s.Ready(server.Model{Front: f, Queue: engine.NewQueue(&actor{tok: tok, delay: *delay}, *places, time.Minute), Concurrency: *places, File: "actor"})
	fmt.Println("http://" + l.Addr().String())
	return s.Serve(ctx, l)
}

// actor is a worker that gives each of its requests a token at a time.
type actor struct {
	tok   *token.Tokenizer
	delay time.Duration
	acts  []*act
}

// act is one request.
type act struct {
	ctx    context.Context
	id     engine.RequestID
	req    engine.Request
	onDone func(engine.Outcome, error)
	say    []int32
	out    engine.Outcome
}

func (a *actor) Check(engine.Request) error { return nil }

func (a *actor) Add(ctx context.Context, id engine.RequestID, r engine.Request, onRun func(), onDone func(engine.Outcome, error)) error {
	onRun()
	r.Progress(0)
	r.Progress(len(r.Prompt))
	a.acts = append(a.acts, &act{ctx: ctx, id: id, req: r, onDone: onDone, say: a.script(a.tok.Decode(r.Prompt)), out: engine.Outcome{Stats: engine.Stats{PromptTokens: len(r.Prompt)}}})
	return nil
}

// script is what to say after a prompt.
func (a *actor) script(prompt string) []int32 {
	turns := strings.Split(prompt, "<|im_start|>")
	turns = turns[:len(turns)-1] // the answer's opener
	text := func(i int) (role, content string) {
		role, content, _ = strings.Cut(turns[i], "\n")
		return role, strings.TrimSuffix(content, "<|im_end|>\n")
	}
	var results []string
	answers := 0
	for i := len(turns) - 1; i >= 0; i-- {
		role, content := text(i)
		var steps []string
		if at := strings.LastIndex(content, "SAY\n"); at >= 0 {
			steps = strings.Split(content[at+len("SAY\n"):], "\nTHEN\n")
		}
		switch {
		case role == "system":
			continue
		case role == "tool":
			if answers == 0 {
				results = append(results, content)
			}
			continue
		case role == "assistant":
			answers++
			continue
		case answers < len(steps):
			content = steps[answers]
		case results != nil:
			slices.Reverse(results)
			content = "</think>\n\nGot " + strings.Join(results, " and ")
		case strings.HasPrefix(content, "COUNT "):
			n, _ := strconv.Atoi(strings.TrimPrefix(content, "COUNT "))
			return slices.Repeat(a.tok.Encode("x"), n)
		}
		return append(a.tok.Encode(content), a.tok.Encode("<|im_end|>")...)
	}
	return a.tok.Encode("</think>Nothing<|im_end|>")
}

func (a *actor) Remove(id engine.RequestID, err error) bool { return false }

func (a *actor) Step() (bool, error) {
	for i := 0; i < len(a.acts); {
		act := a.acts[i]
		if act.step() {
			act.onDone(act.out, nil)
			a.acts = slices.Delete(a.acts, i, i+1)
			continue
		}
		i++
	}
	if len(a.acts) > 0 {
		time.Sleep(a.delay)
	}
	return len(a.acts) > 0, nil
}

// step says a token and reports whether the act is over.
func (a *act) step() bool {
	switch {
	case a.ctx.Err() != nil:
		a.out.Reason = engine.Cancelled
	case len(a.say) == 0 || len(a.out.IDs) >= a.req.MaxNew:
		a.out.Reason = engine.Length
	default:
		v := a.req.Watcher.Preview(a.say[:1])
		kept := slices.Concat(a.say[:v.Keep], v.Insert)
		a.say = a.say[1:]
		a.out.IDs = append(a.out.IDs, kept...)
		a.out.Stats.OutputTokens = len(a.out.IDs)
		if a.req.Watcher.Commit(kept) != nil {
			a.out.Reason = engine.Cancelled
		}
		if v.Reason != engine.Continue {
			a.out.Reason = v.Reason
		}
	}
	return a.out.Reason != engine.Continue
}

func (a *actor) Abandon(cause error) {
	for _, act := range a.acts {
		act.onDone(act.out, cause)
	}
	a.acts = nil
}
