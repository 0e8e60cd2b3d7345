//go:build unix

package artifact

import (
	"bytes"
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

	"golang.org/x/sys/unix"
)

// The crash tests run this test binary as a child that writes an artifact and
// dies. NINFER_TEST_WRITER holds the child's orders.
const childEnv = "NINFER_TEST_WRITER"

func TestMain(m *testing.M) {
	if orders := os.Getenv(childEnv); orders != "" {
		os.Exit(childWriter(strings.Split(orders, "|")))
	}
	os.Exit(m.Run())
}

// childObjects are 260 KB: many chunks, six files.
func childDirectory() *Directory {
	d := tinyDirectory()
	d.Objects = append(d.Objects, Object{ID: "big", Shape: []int{60_000}, Format: "int32", Layout: "contiguous_le_v1"})
	return d
}

func childObjects() map[string][]byte {
	o := tinyObjects()
	o["big"] = bytes.Repeat([]byte("ninfer!?"), 30_000)
	return o
}

const childLimit = 53248

// childWriter writes m.ninfer into a directory. Orders: directory, link or
// rename, the number of the step at which to die by SIGKILL (-1: never), a
// pause in microseconds per step and chunk, RLIMIT_FSIZE (0: none).
func childWriter(orders []string) int {
	dir, mode := orders[0], orders[1]
	dieAt, _ := strconv.Atoi(orders[2])
	pause, _ := strconv.Atoi(orders[3])
	limit, _ := strconv.Atoi(orders[4])
	if limit > 0 {
		if err := unix.Setrlimit(unix.RLIMIT_FSIZE, &unix.Rlimit{Cur: uint64(limit), Max: uint64(limit)}); err != nil {
			fmt.Println(err)
			return 3
		}
	}
	steps := 0
	h := hooks{step: func(string) {
		if steps == dieAt {
			syscall.Kill(os.Getpid(), syscall.SIGKILL)
			select {}
		}
		steps++
		time.Sleep(time.Duration(pause) * time.Microsecond)
	}}
	if mode == "rename" {
		h.link = func(string, string) error { return syscall.EPERM }
	}
	err := writeChunks(filepath.Join(dir, "m.ninfer"), h, func() { h.step("chunk") })
	if err != nil {
		fmt.Println(err)
		return 1
	}
	fmt.Println("steps", steps)
	return 0
}

func writeChunks(path string, h hooks, each func()) error {
	p, err := NewPlan("m.ninfer", childDirectory(), PlanOptions{Limit: childLimit})
	if err != nil {
		return err
	}
	w, err := Create(path, p, WriterOptions{hooks: h})
	if err != nil {
		return err
	}
	defer w.Abort()
	for id, b := range childObjects() {
		for at := 0; at < len(b); at += 32768 {
			if err := w.WriteAt(id, int64(at), b[at:min(len(b), at+32768)]); err != nil {
				return err
			}
			each()
		}
	}
	_, err = w.Finish()
	return err
}

func child(dir, mode string, dieAt, pause, limit int) *exec.Cmd {
	exe, err := os.Executable()
	if err != nil {
		panic(err)
	}
	c := exec.Command(exe)
	c.Env = append(os.Environ(), fmt.Sprintf("%s=%s|%s|%d|%d|%d", childEnv, dir, mode, dieAt, pause, limit))
	return c
}

// bystanders are files that look like ours but are not.
func bystanders(t *testing.T, dir string) map[string]string {
	t.Helper()
	out := map[string]string{
		"m.ninfer.part-0042":               "another part",
		".m.ninfer.0123456789abcdef-0.tmp": "another temporary",
		".other.ninfer.lock":               "another lock",
		"m.ninfer.conversion.json":         "{}",
		"other.ninfer":                     "another artifact",
	}
	for name, text := range out {
		save(t, filepath.Join(dir, name), []byte(text))
	}
	return out
}

// again is the run after a crash: it must succeed unless the first had, and
// leave nothing but the artifact and the bystanders. It tells whether the
// first run had published.
func again(t *testing.T, dir string, others map[string]string, what string) bool {
	t.Helper()
	path := filepath.Join(dir, "m.ninfer")
	_, err := os.Lstat(path)
	published := err == nil
	err = writeChunks(path, hooks{}, func() {})
	if published && !errors.Is(err, ErrExists) || !published && err != nil {
		t.Fatalf("%s: published %v, then: %v", what, published, err)
	}
	var want []string
	for name, text := range others {
		want = append(want, name)
		if b, err := os.ReadFile(filepath.Join(dir, name)); err != nil || string(b) != text {
			t.Errorf("%s: %s was touched: %q, %v", what, name, b, err)
		}
	}
	a, err := Open(path)
	if err != nil {
		t.Fatalf("%s: %v", what, err)
	}
	defer a.Close()
	for _, p := range a.Parts() {
		if p.Err != nil {
			t.Errorf("%s: %v", what, p.Err)
		}
		want = append(want, filepath.Base(p.Path))
	}
	slices.Sort(want)
	if got := listing(t, dir); !slices.Equal(got, want) {
		t.Errorf("%s: directory holds %q, want %q", what, got, want)
	}
	os.Rename(ReportPath(path), ReportPath(path)+".x") // the bystander is no report
	if v := verify(t, path, Options{}); !v.Passed || v.IDKind != "content" {
		t.Errorf("%s: %q", what, v.Failures)
	}
	return published
}

// TestKillAtEveryStep kills a writer before every change of what the
// directory shows and after every chunk.
func TestKillAtEveryStep(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{"link", "rename"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			out, err := child(t.TempDir(), mode, -1, 0, 0).Output()
			var steps int
			if _, scanErr := fmt.Sscanf(string(out), "steps %d", &steps); err != nil || scanErr != nil || steps < 20 {
				t.Fatalf("%q, %v", out, err)
			}
			published, orphans := 0, 0
			for i := range steps {
				if testing.Short() && i%5 != 0 {
					continue
				}
				dir := t.TempDir()
				others := bystanders(t, dir)
				var exit *exec.ExitError
				if err := child(dir, mode, i, 0, 0).Run(); !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
					t.Fatalf("step %d: the child was not killed: %v", i, err)
				}
				if _, err := os.Lstat(filepath.Join(dir, "m.ninfer.part-0001")); err == nil {
					orphans++
				}
				if again(t, dir, others, fmt.Sprintf("step %d", i)) {
					published++
				}
			}
			// The test is only worth its name if it met all phases.
			if orphans <= published || mode == "link" && published == 0 {
				t.Errorf("%d of %d kills left published parts, %d a published entry", orphans, steps, published)
			}
		})
	}
}

// TestKillAtRandom kills a writer at random moments.
func TestKillAtRandom(t *testing.T) {
	t.Parallel()
	rng := rand.New(rand.NewPCG(8, 9))
	killed := 0
	for i := range 20 {
		dir := t.TempDir()
		others := bystanders(t, dir)
		c := child(dir, "link", -1, 1000, 0)
		if err := c.Start(); err != nil {
			t.Fatal(err)
		}
		for range 5000 { // until it has begun
			if _, err := os.Lstat(filepath.Join(dir, lockName("m.ninfer"))); err == nil {
				break
			}
			time.Sleep(200 * time.Microsecond)
		}
		time.Sleep(time.Duration(rng.IntN(60_000)) * time.Microsecond)
		c.Process.Kill()
		if c.Wait() != nil {
			killed++
		}
		again(t, dir, others, fmt.Sprintf("run %d", i))
	}
	if killed < 10 {
		t.Errorf("only %d of 20 children were killed while they ran", killed)
	}
}

// TestReclaimLeavesOthersFiles: what changed hands after a crash stays.
func TestReclaimLeavesOthersFiles(t *testing.T) {
	t.Parallel()
	crash := func(t *testing.T, mode string, step func(listing []string) bool) string {
		for i := 15; ; i++ { // publishing begins later
			dir := t.TempDir()
			if err := child(dir, mode, i, 0, 0).Run(); err == nil {
				t.Fatal("no step leaves the wanted state")
			}
			if step(listing(t, dir)) {
				return dir
			}
		}
	}
	t.Run("entry renamed after publishing", func(t *testing.T) {
		dir := crash(t, "link", func(names []string) bool { return slices.Contains(names, "m.ninfer") })
		// The user moves the entry; its parts keep their names and belong to it.
		if err := os.Rename(filepath.Join(dir, "m.ninfer"), filepath.Join(dir, "mine.ninfer")); err != nil {
			t.Fatal(err)
		}
		if err := writeChunks(filepath.Join(dir, "m.ninfer"), hooks{}, func() {}); !errors.Is(err, ErrExists) {
			t.Errorf("got %v, want ErrExists for a part", err)
		}
		if v := verify(t, filepath.Join(dir, "mine.ninfer"), Options{}); !v.Passed {
			t.Error(v.Failures)
		}
	})
	t.Run("part replaced", func(t *testing.T) {
		dir := crash(t, "link", func(names []string) bool { return slices.Contains(names, "m.ninfer.part-0002") })
		part := filepath.Join(dir, "m.ninfer.part-0002")
		if err := os.Remove(part); err != nil {
			t.Fatal(err)
		}
		save(t, part, []byte("mine"))
		if err := writeChunks(filepath.Join(dir, "m.ninfer"), hooks{}, func() {}); !errors.Is(err, ErrExists) {
			t.Errorf("got %v, want ErrExists", err)
		}
		if names := listing(t, dir); !slices.Equal(names, []string{"m.ninfer.part-0002"}) {
			t.Errorf("directory holds %q", names)
		}
	})
	t.Run("renamed part replaced by a like one", func(t *testing.T) {
		dir := crash(t, "rename", func(names []string) bool { return slices.Contains(names, "m.ninfer.part-0002") })
		part := filepath.Join(dir, "m.ninfer.part-0002")
		other := time.Now().Add(-time.Hour)
		if err := os.Chtimes(part, other, other); err != nil {
			t.Fatal(err)
		}
		if err := writeChunks(filepath.Join(dir, "m.ninfer"), hooks{}, func() {}); !errors.Is(err, ErrExists) {
			t.Errorf("got %v, want ErrExists", err)
		}
		if names := listing(t, dir); !slices.Equal(names, []string{"m.ninfer.part-0002"}) {
			t.Errorf("directory holds %q", names)
		}
	})
	t.Run("lock file of something else", func(t *testing.T) {
		for _, text := range []string{
			"1234\n", "{}\n", `{"ninfer_output":1,"entry":"x","files":[{"name":"x","temp":".x.1-0.tmp","length":1}]}` + "\n",
			`{"ninfer_output":1,"entry":"m.ninfer","files":[{"name":"m.ninfer","temp":"../victim","length":1}]}` + "\n",
			`{"ninfer_output":1,"entry":"m.ninfer","files":[{"name":"victim","temp":".m.ninfer.1-0.tmp","length":1}]}` + "\n", "1",
		} {
			dir := t.TempDir()
			lock := filepath.Join(dir, lockName("m.ninfer"))
			save(t, lock, []byte(text))
			save(t, filepath.Join(dir, "victim"), nil)
			err := writeChunks(filepath.Join(dir, "m.ninfer"), hooks{}, func() {})
			if err == nil || !strings.Contains(err.Error(), lock) {
				t.Errorf("got %v, want an error naming the lock file", err)
			}
			if b, err := os.ReadFile(lock); err != nil || string(b) != text {
				t.Errorf("it now holds %q, %v", b, err)
			}
			if names := listing(t, dir); len(names) != 2 {
				t.Errorf("directory holds %q", names)
			}
		}
	})
}

// TestLock: a second writer of the same output fails on the lock, another
// output is free, and a lock file without a living owner is taken over.
func TestLock(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "m.ninfer")
	// Stale: a process that died at once, and an empty file.
	if err := child(dir, "link", 0, 0, 0).Run(); err == nil {
		t.Fatal("the child was not killed")
	}
	if _, err := os.Lstat(filepath.Join(dir, lockName("m.ninfer"))); err != nil {
		t.Fatal("the child left no lock file")
	}
	p, err := NewPlan("m.ninfer", childDirectory(), PlanOptions{})
	if err != nil {
		t.Fatal(err)
	}
	w, err := Create(path, p, WriterOptions{})
	if err != nil {
		t.Fatal(err)
	}
	before := listing(t, dir)
	if _, err := Create(path, p, WriterOptions{}); !errors.Is(err, ErrLocked) {
		t.Errorf("second writer: %v, want ErrLocked", err)
	}
	out, err := child(dir, "link", -1, 0, 0).Output()
	if err == nil || !strings.Contains(string(out), "another process is writing this output") || strings.Count(string(out), "\n") != 1 {
		t.Errorf("second process: %q, %v", out, err)
	}
	if after := listing(t, dir); !slices.Equal(before, after) {
		t.Errorf("the second writers changed %q to %q", before, after)
	}
	q, _ := NewPlan("other.ninfer", childDirectory(), PlanOptions{})
	o, err := Create(filepath.Join(dir, "other.ninfer"), q, WriterOptions{})
	if err != nil {
		t.Errorf("another output: %v", err)
	} else if err := o.Abort(); err != nil {
		t.Error(err)
	}
	for id, b := range childObjects() {
		if err := w.WriteAt(id, 0, b); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := w.Finish(); err != nil {
		t.Fatal(err)
	}
	if names := listing(t, dir); !slices.Equal(names, []string{"m.ninfer"}) {
		t.Errorf("directory holds %q", names)
	}
	os.Remove(path)
	save(t, filepath.Join(dir, lockName("m.ninfer")), nil)
	if err := writeChunks(path, hooks{}, func() {}); err != nil {
		t.Errorf("after an empty lock file: %v", err)
	}
}

// TestFileSizeLimit runs a writer under RLIMIT_FSIZE at several sizes: below
// the entry's framing, inside a part, just enough.
func TestFileSizeLimit(t *testing.T) {
	for _, c := range []struct {
		limit int
		ok    bool
	}{{100, false}, {4096, false}, {20000, false}, {childLimit - 1, false}, {childLimit, true}} {
		dir := t.TempDir()
		out, err := child(dir, "link", -1, 0, c.limit).CombinedOutput()
		names := listing(t, dir)
		if c.ok {
			if err != nil || len(names) < 3 {
				t.Errorf("limit %d: %s, %v, %q", c.limit, out, err, names)
			}
			continue
		}
		var exit *exec.ExitError
		if !errors.As(err, &exit) || exit.ExitCode() != 1 || strings.Count(string(out), "\n") != 1 || !strings.Contains(string(out), "file too large") {
			t.Errorf("limit %d: %q, %v, want one line about a file too large", c.limit, out, err)
		}
		if len(names) > 0 {
			t.Errorf("limit %d: left behind %q", c.limit, names)
		}
	}
}
