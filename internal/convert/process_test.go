//go:build unix

package convert

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"ninfer/internal/artifact"
)

// childVar makes the test binary convert instead of testing: it names the output. With _MODEL, _PARTS and _LIMIT behind it: the
// checkpoint, the largest file, and the limit that the system shall set on files.
const childVar = "NINFER_CONVERT_TEST_OUT"

func TestMain(m *testing.M) {
	out := os.Getenv(childVar)
	if out == "" {
		os.Exit(m.Run())
	}
	number := func(name string) uint64 {
		s := os.Getenv(childVar + name)
		if s == "" {
			return 0
		}
		n, err := strconv.ParseUint(s, 10, 64)
		if err != nil {
			panic(err)
		}
		return n
	}
	if n := number("_LIMIT"); n > 0 {
		if err := syscall.Setrlimit(syscall.RLIMIT_FSIZE, &syscall.Rlimit{Cur: n, Max: n}); err != nil {
			panic(err)
		}
	}
	_, err := Run(context.Background(), Options{Model: os.Getenv(childVar + "_MODEL"), Out: out, MaxFileBytes: int64(number("_PARTS"))})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		var e *Error
		if errors.As(err, &e) {
			os.Exit(e.ExitCode())
		}
		os.Exit(99)
	}
}

// subject is what a child process converts, and what comes of it undisturbed.
type subject struct {
	model string
	parts int64
	files map[string]string // digests by name; none for the report, which has the time in it
	took  time.Duration     // by the latest one, since others use the machine
}

func newSubject(t *testing.T, model string, parts int64, dir string) *subject {
	s := &subject{model: model, parts: parts}
	start := time.Now()
	if msg, err := s.child(filepath.Join(dir, output)).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, msg)
	}
	s.took = time.Since(start)
	s.files = digests(t, dir)
	if len(s.files) < 4 {
		t.Fatalf("only the files %q", slices.Sorted(maps.Keys(s.files)))
	}
	return s
}

func (s *subject) child(out string, env ...string) *exec.Cmd {
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(append(os.Environ(), childVar+"="+out, childVar+"_MODEL="+s.model, childVar+"_PARTS="+strconv.FormatInt(s.parts, 10)), env...)
	return cmd
}

// again converts where something went wrong before, and compares what the folder then holds. It tells whether the artifact was there already.
func (s *subject) again(t *testing.T, out string) (published bool) {
	t.Helper()
	dir := filepath.Dir(out)
	after := list(t, dir)
	start := time.Now()
	msg, err := s.child(out).CombinedOutput()
	if err == nil {
		s.took = time.Since(start)
	}
	switch published = slices.Contains(after, output); {
	case published && (err == nil || !strings.Contains(string(msg), "exist")):
		t.Fatalf("over a complete artifact: %v: %s", err, msg)
	case !published && err != nil:
		t.Fatalf("after %q: %v: %s", after, err, msg)
	}
	got := digests(t, dir)
	if published { // the end may have come before the report
		got[artifact.ReportPath(output)] = ""
	}
	if !maps.Equal(got, s.files) {
		t.Errorf("after %q the folder holds\n%v\nwant\n%v", after, got, s.files)
	}
	f, err := artifact.Open(out)
	if err != nil {
		t.Fatal(err)
	}
	f.Close()
	return published
}

// digests are the SHA-256 of all files of a folder but reports and what a file system keeps there.
func digests(t *testing.T, dir string) map[string]string {
	t.Helper()
	out := map[string]string{}
	for _, name := range list(t, dir) {
		if name == "lost+found" {
			continue
		}
		out[name] = ""
		if name == artifact.ReportPath(output) {
			continue
		}
		f, err := os.Open(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		h := sha256.New()
		if _, err := io.Copy(h, f); err != nil {
			t.Fatal(err)
		}
		f.Close()
		out[name] = hex.EncodeToString(h.Sum(nil))
	}
	return out
}

// kill kills conversions at random moments, one part of the run after another, so that all are reached; each time the next one
// succeeds, and nothing else is left.
func (s *subject) kill(t *testing.T, runs int, folder func() string) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("an undisturbed conversion takes %v; seed %d", s.took, seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	early, late := 0, 0
	for i := range runs {
		dir := folder()
		out := filepath.Join(dir, output)
		cmd := s.child(out)
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Duration((float64(i) + rng.Float64()) / float64(runs) * float64(s.took)))
		if err := cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
			t.Fatal(err)
		}
		cmd.Wait()
		after := list(t, dir)
		switch {
		case slices.Contains(after, output):
			late++
		case len(after) > 0:
			early++
		}
		s.again(t, out)
		if err := os.RemoveAll(dir); err != nil {
			t.Fatal(err)
		}
		if (i+1)%10 == 0 {
			t.Logf("%d done", i+1)
		}
	}
	t.Logf("of %d kills %d left something unfinished, %d came after publishing", runs, early, late)
	if early < max(1, runs/10) {
		t.Error("few kills interrupted a conversion")
	}
}

// TestKill kills conversions of the small checkpoint into parts.
func TestKill(t *testing.T) {
	if testing.Short() {
		t.Skip("conversions in processes of their own: the long run has them")
	}
	newSubject(t, micro, 1<<20, t.TempDir()).kill(t, 12, t.TempDir)
}

// TestCores: processes with one core and with two, into one file and into parts, write the same payload under the same id.
func TestCores(t *testing.T) {
	if testing.Short() {
		t.Skip("conversions in processes of their own: the long run has them")
	}
	var want []byte
	var id [16]byte
	for _, parts := range []int64{0, 1 << 20} {
		s := &subject{model: micro, parts: parts}
		for _, cores := range []string{"1", "2"} {
			out := filepath.Join(t.TempDir(), output)
			if msg, err := s.child(out, "GOMAXPROCS="+cores).CombinedOutput(); err != nil {
				t.Fatalf("%v: %s", err, msg)
			}
			f, err := artifact.Open(out)
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			payload := make([]byte, f.PayloadBytes())
			if _, err := f.ReadAt(payload, 0); err != nil {
				t.Fatal(err)
			}
			if n := len(f.Directory().Files); (n > 1) != (parts > 0) {
				t.Errorf("%d files for a limit of %d", n, parts)
			}
			if want == nil {
				want, id = payload, f.ID()
			}
			if !bytes.Equal(payload, want) || f.ID() != id {
				t.Errorf("%s cores, files of %d: other payload or id", cores, parts)
			}
		}
	}
}

// TestFileSizeLimit: the system refuses the space. One line, status 1, nothing left.
func TestFileSizeLimit(t *testing.T) {
	for _, limit := range []int{4096, 1 << 19, 1<<20 - 4096} {
		dir := t.TempDir()
		cmd := (&subject{model: micro, parts: 1 << 20}).child(filepath.Join(dir, output), childVar+"_LIMIT="+strconv.Itoa(limit))
		msg, err := cmd.CombinedOutput()
		var exit *exec.ExitError
		if !errors.As(err, &exit) || exit.ExitCode() != 1 {
			t.Errorf("limit %d: %v: %s", limit, err, msg)
		}
		if text := string(msg); strings.Count(text, "\n") != 1 || !strings.Contains(text, output) || !strings.Contains(text, "file too large") {
			t.Errorf("limit %d: message %q", limit, text)
		}
		if left := list(t, dir); len(left) > 0 {
			t.Errorf("limit %d: left %q", limit, left)
		}
	}
}
