// Package cli is the command line: one file per command. It alone picks a backend and wires the packages together.
//
// Results go to stdout, everything else to stderr: one line, lower case, with the program's name, and a second line "hint: ..." where
// the cure is known. Exit status 0 is success, 1 a failure, 2 a usage error, 130 an interrupted run.
package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"

	"github.com/alecthomas/kong"
)

// Exit statuses.
const (
	exitOK          = 0
	exitFailure     = 1
	exitUsage       = 2
	exitInterrupted = 130
)

// commands is the whole command line.
type commands struct {
	Version versionFlag `help:"Print version and revision."`

	Run      runCommand      `cmd:"" help:"Generate from one prompt."`
	Serve    serveCommand    `cmd:"" help:"Serve over HTTP."`
	Bench    benchCommand    `cmd:"" help:"Measure prompts and generation."`
	Convert  convertCommand  `cmd:"" help:"Turn a checkpoint into an artifact."`
	Upgrade  upgradeCommand  `cmd:"" help:"Turn a version 2 file into an artifact."`
	Verify   verifyCommand   `cmd:"" help:"Check every byte of an artifact."`
	Inspect  inspectCommand  `cmd:"" help:"Show what an artifact holds."`
	Pull     pullCommand     `cmd:"" help:"Download a model repository or an artifact."`
	Synth    synthCommand    `cmd:"" help:"Write an artifact with random weights, for measuring speed."`
	Selftest selftestCommand `cmd:"" help:"Compare this machine with recorded results of the reference implementation."`

	Perplexity perplexityCommand `cmd:"" help:"Measure how well a model predicts texts."`
	Compare    compareCommand    `cmd:"" help:"Measure what another artifact or storage format changes in a model's answers."`
}

// environment is where a command reads and writes.
type environment struct {
	ctx context.Context
	in  io.Reader
	out io.Writer
	err io.Writer
}

// say writes one line for a person.
func (e *environment) say(format string, args ...any) {
	fmt.Fprintf(e.err, "ninfer: "+format+"\n", args...)
}

// usageError is an error of how the program was called.
type usageError struct{ error }

func (e usageError) Unwrap() error { return e.error }

func usagef(format string, args ...any) error { return usageError{fmt.Errorf(format, args...)} }

// hintedError is an error with a known cure.
type hintedError struct {
	error
	hint string
}

func (e hintedError) Unwrap() error { return e.error }

// statusError ends the program with a status; everything worth saying was said.
type statusError int

func (e statusError) Error() string { return fmt.Sprintf("exit status %d", int(e)) }

// coder is an error that knows its exit status, such as convert's.
type coder interface{ ExitCode() int }

// programs maps the names of the family's separate programs to commands.
var programs = map[string]string{"ninfer-serve": "serve", "ninfer_bench": "bench", "ninfer-perplexity": "perplexity"}

// Main runs the program with its arguments, the first being its own name, and returns the exit status.
func Main(args []string, in io.Reader, out, errw io.Writer) int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	go func() { // a second interrupt ends the program at once
		<-ctx.Done()
		stop()
	}()
	env := &environment{ctx: ctx, in: in, out: out, err: errw}
	err := env.run(args)
	var status statusError
	var hinted hintedError
	var coded coder
	var usage usageError
	switch {
	case err == nil:
		return exitOK
	case errors.As(err, &status):
		return int(status)
	}
	env.say("%v", err)
	if errors.As(err, &hinted) {
		fmt.Fprintf(errw, "hint: %s\n", hinted.hint)
	}
	switch {
	case errors.As(err, &usage): // kong's errors know a status of their own, which is not ours
		return exitUsage
	case errors.As(err, &coded):
		return coded.ExitCode()
	}
	return exitFailure
}

// exited is how kong's own exits (help, version) leave the parser.
type exited int

func (e *environment) run(args []string) (err error) {
	var c commands
	parser, err := kong.New(&c,
		kong.Name("ninfer"),
		kong.Description("Runs Qwen3.8-Flash-Next artifacts (.ninfer) on one NVIDIA GPU or on the CPU."),
		kong.Writers(e.out, e.err),
		kong.Exit(func(code int) { panic(exited(code)) }),
		kong.UsageOnError(),
		kong.ConfigureHelp(kong.HelpOptions{Compact: true, NoExpandSubcommands: true}),
		kong.ValueFormatter(withDefault),
		kong.Bind(e),
	)
	if err != nil {
		panic(err)
	}
	defer func() {
		switch code := recover().(type) {
		case nil:
		case exited:
			err = nil
			if code != 0 {
				err = statusError(code)
			}
		default:
			panic(code)
		}
	}()
	words := negatives(e.expand(args, parser))
	if len(words) == 0 {
		words = []string{"--help"}
	}
	ctx, err := parser.Parse(words)
	if err != nil {
		return hintedError{usageError{err}, "ninfer --help, or ninfer COMMAND --help"}
	}
	if err := repeated(ctx); err != nil {
		return err
	}
	return ctx.Run()
}

// withDefault is the help of an option, with its default where the text does not tell it.
func withDefault(v *kong.Value) string {
	text := kong.DefaultHelpValueFormatter(v)
	if v.Default == "" || v.IsBool() || strings.Contains(text, "efault") {
		return text
	}
	return text + " Default: " + v.Default + "."
}

// expand turns the older forms into commands: a program of the family by its own name, and an artifact as the first word.
func (e *environment) expand(args []string, parser *kong.Kong) []string {
	name, words := strings.TrimSuffix(filepath.Base(args[0]), ".exe"), args[1:]
	if command, ok := programs[name]; ok {
		words = append([]string{command}, words...)
	}
	if len(words) > 0 && words[0] == "bench" { // the one option with a single dash and two letters
		words = slices.Clone(words)
		for i := range words {
			if words[i] == "-pg" {
				words[i] = "--prompt-gen"
			}
		}
	}
	if len(words) == 0 || strings.HasPrefix(words[0], "-") {
		return words
	}
	for _, c := range parser.Model.Children {
		if c.Name == words[0] {
			return words
		}
	}
	if _, err := os.Stat(words[0]); err == nil || strings.HasSuffix(words[0], ".ninfer") {
		return append([]string{"run"}, words...)
	}
	return words
}

// negatives joins an option and a negative number after it, which would read as an option of its own.
func negatives(words []string) []string {
	var out []string
	for _, w := range words {
		last := len(out) - 1
		if _, err := strconv.ParseFloat(w, 64); err == nil && w[0] == '-' && last >= 0 && strings.HasPrefix(out[last], "--") && !strings.Contains(out[last], "=") {
			out[last] += "=" + w
			continue
		}
		out = append(out, w)
	}
	return out
}

// repeated refuses an option that is given twice and holds one value.
func repeated(ctx *kong.Context) error {
	seen := map[*kong.Flag]bool{}
	for _, p := range ctx.Path {
		if p.Flag == nil || p.Flag.IsCumulative() {
			continue
		}
		if seen[p.Flag] {
			return usagef("option --%s is given twice", p.Flag.Name)
		}
		seen[p.Flag] = true
	}
	return nil
}

// versionFlag prints the version.
type versionFlag bool

// BeforeReset runs as soon as the flag is seen.
func (versionFlag) BeforeReset(app *kong.Kong, e *environment) error {
	fmt.Fprintln(e.out, "ninfer", version())
	app.Exit(exitOK)
	return nil
}

// release is set by the linker for released binaries.
var release = "development"

func version() string {
	revision := ""
	if b, ok := debug.ReadBuildInfo(); ok {
		for _, s := range b.Settings {
			if s.Key == "vcs.revision" {
				revision = " " + s.Value
			}
		}
	}
	return release + revision
}
