//go:build unix

package convert

import (
	"context"
	"errors"
	"fmt"
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

// childVar makes the test binary convert instead of testing: it names the output.
const childVar = "NINFER_CONVERT_TEST_OUT"

func TestMain(m *testing.M) {
	out := os.Getenv(childVar)
	if out == "" {
		os.Exit(m.Run())
	}
	if s := os.Getenv(childVar + "_LIMIT"); s != "" {
		n, err := strconv.ParseUint(s, 10, 64)
		if err == nil {
			err = syscall.Setrlimit(syscall.RLIMIT_FSIZE, &syscall.Rlimit{Cur: n, Max: n})
		}
		if err != nil {
			panic(err)
		}
	}
	_, err := Run(context.Background(), Options{Model: micro, Out: out, MaxFileBytes: 1 << 20})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		var e *Error
		if errors.As(err, &e) {
			os.Exit(e.ExitCode())
		}
		os.Exit(99)
	}
}

func child(out string, env ...string) *exec.Cmd {
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(append(os.Environ(), childVar+"="+out), env...)
	return cmd
}

// TestKill: a conversion into parts is killed at random moments; the next one succeeds, and nothing else is left.
func TestKill(t *testing.T) {
	clean := t.TempDir()
	start := time.Now()
	if msg, err := child(filepath.Join(clean, output)).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, msg)
	}
	took := time.Since(start)
	want := list(t, clean)
	seed := uint64(time.Now().UnixNano())
	t.Logf("an undisturbed conversion takes %v; seed %d", took, seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	early, late := 0, 0
	for i := range 12 {
		dir := t.TempDir()
		out := filepath.Join(dir, output)
		cmd := child(out)
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		// One part of the run after another, so that twelve runs reach all of them.
		time.Sleep(time.Duration((float64(i) + rng.Float64()) / 12 * float64(took)))
		if err := cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
			t.Fatal(err)
		}
		cmd.Wait()
		after := list(t, dir)
		complete := slices.Contains(after, output)
		if complete {
			// It was published before the kill: it must be whole, and a second run must refuse and tidy up.
			late++
			if _, err := Run(context.Background(), Options{Model: micro, Out: out, MaxFileBytes: 1 << 20}); err == nil || !strings.Contains(err.Error(), "exist") {
				t.Fatalf("over a complete artifact: %v", err)
			}
		} else {
			if len(after) > 0 {
				early++
			}
			if _, err := Run(context.Background(), Options{Model: micro, Out: out, MaxFileBytes: 1 << 20}); err != nil {
				t.Fatalf("after a kill that left %q: %v", after, err)
			}
		}
		left := list(t, dir)
		if complete { // the kill may have come before the report
			left = slices.DeleteFunc(left, func(n string) bool { return n == artifact.ReportPath(output) })
			left = append(left, artifact.ReportPath(output))
			slices.Sort(left)
		}
		if !slices.Equal(left, want) {
			t.Errorf("after a kill that left %q, the folder holds %q", after, left)
		}
		for _, name := range want {
			if name != artifact.ReportPath(output) && digest(read(t, filepath.Join(dir, name))) != digest(read(t, filepath.Join(clean, name))) {
				t.Errorf("%s differs after a kill that left %q", name, after)
			}
		}
		f, err := artifact.Open(out)
		if err != nil {
			t.Fatal(err)
		}
		f.Close()
	}
	t.Logf("%d kills left something unfinished, %d came after publishing", early, late)
	if early == 0 {
		t.Error("no kill interrupted a conversion")
	}
}

// TestFileSizeLimit: the system refuses the space. One line, status 1, nothing left.
func TestFileSizeLimit(t *testing.T) {
	for _, limit := range []int{4096, 1 << 19, 1<<20 - 4096} {
		dir := t.TempDir()
		cmd := child(filepath.Join(dir, output), childVar+"_LIMIT="+strconv.Itoa(limit))
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
