package cli

import (
	"encoding/json/v2"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"

	"ninfer/internal/nano"
)

func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){
		"ninfer":       func() { os.Exit(Main(os.Args, os.Stdin, os.Stdout, os.Stderr)) },
		"ninfer-serve": func() { os.Exit(Main(os.Args, os.Stdin, os.Stdout, os.Stderr)) },
	})
}

// TestScripts runs testdata/*.txtar. The condition nano holds if the program has a model inside. $MICRO is the reference checkpoint's folder, $NAME the fixed output name, $RAW the rendered prompt of
// the conversation chat_think, and the file expected what the reference generates for it up to its end token.
func TestScripts(t *testing.T) {
	micro, err := filepath.Abs("../../testdata/micro-radixark")
	if err != nil {
		t.Fatal(err)
	}
	var golden struct {
		Cases map[string]struct {
			Text   string `json:"text"`
			Prompt string `json:"prompt"`
		} `json:"cases"`
	}
	raw, err := os.ReadFile(filepath.Join(micro, "golden.json"))
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(raw, &golden); err != nil {
		t.Fatal(err)
	}
	think := golden.Cases["chat_think"]
	text, _, found := strings.Cut(think.Text, "<|endoftext|>")
	if !found {
		t.Fatal("the reference's continuation has no end token; the scripts expect one")
	}
	testscript.Run(t, testscript.Params{
		Dir: "testdata",
		Condition: func(name string) (bool, error) {
			if name != "nano" {
				return false, fmt.Errorf("unknown condition %q", name)
			}
			_, err := nano.Artifact()
			return err == nil, nil
		},
		Setup: func(e *testscript.Env) error {
			e.Setenv("MICRO", micro)
			e.Setenv("RAW", think.Prompt)
			e.Setenv("NAME", "qwen3_8_flash_next_125b_a6b_nvfp4.ninfer")
			return os.WriteFile(filepath.Join(e.WorkDir, "expected"), []byte(text+"<|endoftext|>\n"), 0o644)
		},
	})
}
