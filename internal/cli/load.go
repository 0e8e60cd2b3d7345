package cli

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"time"

	"ninfer/internal/arch"
	"ninfer/internal/artifact"
	"ninfer/internal/backend/cpu"
	"ninfer/internal/backend/cuda/device"
	"ninfer/internal/front"
	"ninfer/internal/model"
	"ninfer/internal/nano"
	"ninfer/internal/text/chat"
	"ninfer/internal/text/token"
)

// sorted returns a map's keys in order.
func sorted[K cmp.Ordered, V any](m map[K]V) []K { return slices.Sorted(maps.Keys(m)) }

// loaded is an opened artifact with everything that text needs.
type loaded struct {
	store     *model.Artifact
	config    *arch.Config
	tokenizer *token.Tokenizer
	template  *chat.Template
	made      func([]byte) ([]device.Plane, bool) // of weights that a GPU is to make, nil of a file's
}

// openArtifact opens the artifact at a path, or without one the model inside the program, which it says.
func openArtifact(e *environment, path string) (*artifact.File, error) {
	if path != "" {
		return artifact.Open(path)
	}
	data, err := nano.Artifact()
	if errors.Is(err, nano.ErrLeftOut) {
		return nil, usageError{hintedError{fmt.Errorf("no artifact named, and %w", err), "name a .ninfer file; ninfer convert makes one"}}
	}
	if err != nil {
		return nil, err
	}
	e.say("no artifact named: this is nano, a small model inside the program; the real one: ninfer pull %s, then ninfer convert", repository)
	return artifact.OpenBytes(nano.Name, data)
}

// repository is where the checkpoint is that convert's default profile reads.
const repository = "RadixArk/Qwen3.8-Flash-Next-NVFP4"

// load opens an artifact, or nano if path is empty, and reads its frontend.
func load(e *environment, path string) (*loaded, error) {
	f, err := openArtifact(e, path)
	if err != nil {
		return nil, err
	}
	store, err := model.NewArtifact(f)
	if err != nil {
		f.Close()
		return nil, err
	}
	l := &loaded{store: store, config: store.Config()}
	if err := l.frontend(); err != nil {
		f.Close()
		return nil, err
	}
	return l, nil
}

func (l *loaded) frontend() error {
	var err error
	resource := func(role string) []byte {
		var b []byte
		if err == nil {
			b, err = l.store.Resource("text", role)
		}
		return b
	}
	tokenizer, config, template := resource("tokenizer.json"), resource("tokenizer_config.json"), resource("chat_template.jinja")
	if err != nil {
		return err
	}
	if l.tokenizer, err = token.Load(tokenizer, config); err != nil {
		return fmt.Errorf("%s: %w", l.store.File.Path(), err)
	}
	if l.template, err = chat.NewTemplate("chat_template.jinja", template); err != nil {
		return fmt.Errorf("%s: %w", l.store.File.Path(), err)
	}
	return nil
}

// front makes the text side of the artifact with the given settings.
func (l *loaded) front(opt front.Options) (*front.Front, error) {
	opt.Tokenizer, opt.Template = l.tokenizer, l.template
	var err error
	if opt.TokenizerConfig, err = l.store.Resource("text", "tokenizer_config.json"); err != nil {
		return nil, err
	}
	if opt.GenerationConfig, err = l.store.Resource("text", "generation_config.json"); err != nil {
		return nil, err
	}
	f, err := front.New(opt)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", l.store.File.Path(), err)
	}
	return f, nil
}

// override replaces the artifact's chat template by a file's.
func (l *loaded) override(path string) error {
	source, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	l.template, err = chat.NewTemplate(path, source)
	return err
}

// bind binds the weights.
func (l *loaded) bind(opt model.Options) (*model.Model, error) {
	opt.IDs = l.tokenizer.Count()
	m, err := model.Bind(l.config, l.store, opt)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", l.store.File.Path(), err)
	}
	return m, nil
}

// warm brings an INT4 n-gram table into the page cache if there is room for it, and says what it did.
func (l *loaded) warm(e *environment, f *modelFlags) error {
	want := l.store.TableBytes()
	if l.made != nil || !l.store.Warms() || want == 0 {
		return nil
	}
	if free, known := cpu.Available(); known && free < want {
		f.milestone(e, "n-gram table: %s, more than memory has free: rows are read from the file as they are needed", inUnits(want))
		return nil
	}
	start := time.Now()
	n, err := l.store.WarmTable(e.ctx)
	if err != nil {
		return err
	}
	f.milestone(e, "n-gram table: %s in the page cache after %v", inUnits(n), time.Since(start).Round(time.Millisecond))
	return nil
}

func (l *loaded) close() { l.store.File.Close() }
