package convert

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"ninfer/internal/arch"
)

// crashVar names a folder with room for 15 GB; it turns TestCrash on, which takes ten minutes on an idle machine. crashVar_RUNS is the
// number of kills and of full disks, by default 50 each.
const crashVar = "NINFER_CONVERT_CRASH"

// TestCrash disturbs conversions of a generated checkpoint of 4 GiB into parts of half a gigabyte: by SIGKILL, and by file systems that are
// too small. Each time no final name is left, and the next conversion leaves the same bytes as an undisturbed one, and nothing else.
func TestCrash(t *testing.T) {
	root := os.Getenv(crashVar)
	if root == "" {
		t.Skipf("%s names no folder", crashVar)
	}
	runs := 50
	if s := os.Getenv(crashVar + "_RUNS"); s != "" {
		if _, err := fmt.Sscan(s, &runs); err != nil {
			t.Fatal(err)
		}
	}
	v, err := arch.ParseVariant("radixark", "", "", "")
	if err != nil {
		t.Fatal(err)
	}
	root, err = os.MkdirTemp(root, "ninfer-crash-")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(root)
	folders := 0
	folder := func() string {
		folders++
		dir := filepath.Join(root, fmt.Sprint(folders))
		if err := os.Mkdir(dir, 0o777); err != nil {
			t.Fatal(err)
		}
		return dir
	}
	model := filepath.Join(root, "model")
	source, _ := generate(t, model, v)
	clean := folder()
	s := newSubject(t, model, 512<<20, clean)
	var size int64
	for name := range s.files {
		info, err := os.Stat(filepath.Join(clean, name))
		if err != nil {
			t.Fatal(err)
		}
		size += info.Size()
	}
	os.RemoveAll(clean)
	t.Logf("source %.2f GB, artifact %.2f GB in %d files", float64(source)/1e9, float64(size)/1e9, len(s.files)-1)
	t.Run("kill", func(t *testing.T) { s.kill(t, runs, folder) })
	t.Run("full", func(t *testing.T) { s.full(t, runs, folder(), size) })
}

// full converts into file systems of random sizes, all too small for the artifact, then gives them room and converts again. Most have no
// extents, hence no way to reserve space: the disk is full in the middle of writing. Every fifth has, and refuses at once.
func (s *subject) full(t *testing.T, runs int, dir string, size int64) {
	image, mnt := filepath.Join(dir, "image"), filepath.Join(dir, "mnt")
	if err := os.Mkdir(mnt, 0o777); err != nil {
		t.Fatal(err)
	}
	if os.Getuid() != 0 {
		t.Skip("mounting needs root")
	}
	command := func(name string, args ...string) (err error) {
		// A loop device is let go a moment after its file system, and a mount may meet it in between.
		for range 20 {
			var msg []byte
			if msg, err = exec.Command(name, args...).CombinedOutput(); err == nil {
				return nil
			}
			err = fmt.Errorf("%s %q: %v: %s", name, args, err, msg)
			if name != "mount" && name != "umount" {
				break
			}
			time.Sleep(100 * time.Millisecond)
		}
		return err
	}
	// unmount waits until the file system is really gone: whoever looks at it at that moment, such as sync, keeps it for longer.
	unmount := func() error {
		if err := command("umount", mnt); err != nil {
			return err
		}
		for range 300 {
			if msg, err := exec.Command("losetup", "-j", image).CombinedOutput(); err != nil || len(msg) == 0 {
				return err
			}
			time.Sleep(100 * time.Millisecond)
		}
		return fmt.Errorf("%s is in use after umount", image)
	}
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	reserved, midway := 0, 0
	for i := range runs {
		func() {
			features := "^extents,^64bit,^has_journal"
			if i%5 == 4 {
				features = "^has_journal"
			}
			room := 8<<20 + int64(float64(size-64<<20)*(float64(i)+rng.Float64())/float64(runs))
			f, err := os.Create(image)
			if err == nil {
				err = errors.Join(f.Truncate(room), f.Close())
			}
			if err == nil {
				err = command("mkfs.ext4", "-q", "-F", "-m", "0", "-N", "128", "-O", features, image)
			}
			if err != nil {
				t.Fatal(err)
			}
			if err := command("mount", "-o", "loop", image, mnt); err != nil {
				if i == 0 {
					t.Skip(err) // no loop devices here
				}
				t.Fatal(err)
			}
			defer func() {
				if err := unmount(); err != nil {
					t.Fatal(err)
				}
			}()
			out := filepath.Join(mnt, output)
			msg, err := s.child(out).CombinedOutput()
			var exit *exec.ExitError
			text := string(msg)
			if !errors.As(err, &exit) || exit.ExitCode() != 1 || strings.Count(text, "\n") != 1 || !strings.Contains(text, "no space left") {
				t.Fatalf("%d bytes of room: %v: %s", room, err, text)
			}
			if strings.Contains(text, "reserving") {
				reserved++
			} else {
				midway++
			}
			if left := slices.DeleteFunc(list(t, mnt), func(name string) bool { return name == "lost+found" }); len(left) > 0 {
				t.Errorf("%d bytes of room: left %q", room, left)
			}
			if err := unmount(); err != nil {
				t.Fatal(err)
			}
			for _, c := range [][]string{{"e2fsck", "-f", "-y", image}, {"truncate", "-s", fmt.Sprint(size + 256<<20), image}, {"resize2fs", image}, {"mount", "-o", "loop", image, mnt}} {
				if err := command(c[0], c[1:]...); err != nil {
					t.Fatal(err)
				}
			}
			if s.again(t, out) {
				t.Errorf("%d bytes of room: published", room)
			}
			if (i+1)%10 == 0 {
				t.Logf("%d done", i+1)
			}
		}()
	}
	t.Logf("of %d full disks %d refused to reserve the space, %d ended in the middle of writing", runs, reserved, midway)
	if midway < runs/2 {
		t.Error("few disks were full in the middle of writing")
	}
}
