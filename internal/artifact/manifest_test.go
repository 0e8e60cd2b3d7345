package artifact

import (
	"bytes"
	"encoding/json/v2"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestManifest writes manifest and checksum list of an artifact in parts and
// checks copies of it with them.
func TestManifest(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "tiny.ninfer")
	write(t, path, tinyDirectory(), tinyObjects(), PlanOptions{Limit: 16384}, WriterOptions{ID: &tinyID})
	r := verify(t, path, Options{FileDigests: true})
	if err := WriteManifest(path, &r); err != nil {
		t.Fatal(err)
	}
	if err := WriteManifest(path, &r); !errors.Is(err, os.ErrExist) {
		t.Errorf("a manifest was overwritten: %v", err)
	}
	text, err := os.ReadFile(ManifestPath(path))
	if err != nil {
		t.Fatal(err)
	}
	// Digests of the files are those of docs/format.md 7.2.
	var m struct {
		Manifest string
		ID       string `json:"artifact_id"`
		Payload  int64  `json:"payload_bytes"`
		Files    []struct {
			Name   string
			Bytes  int64
			SHA256 string
		}
		Objects map[string]string `json:"object_sha256"`
	}
	if err := json.Unmarshal(text, &m, json.MatchCaseInsensitiveNames(true)); err != nil {
		t.Fatal(err)
	}
	if m.Manifest != "ninfer-manifest/1" || m.ID != "000102030405060708090a0b0c0d0e0f" || m.Payload != 24256 || len(m.Files) != 2 ||
		m.Files[0].SHA256 != "444f1bf68ac469684738dd4868c3ac8dd3cc780fb6cb4899127a56493126bdcf" || m.Files[0].Bytes != 16384 ||
		m.Files[1].SHA256 != "feee9a3c29fd997d2086582522906239d2d8e73797004309b5dcc2674d10b7d1" || m.Files[1].Name != "tiny.ninfer.part-0001" ||
		m.Objects["r.hello"] != sha([]byte("hello")) || len(m.Objects) != 2 {
		t.Errorf("%s", text)
	}

	mine, err := ReadManifest(ManifestPath(path))
	if err != nil {
		t.Fatal(err)
	}
	if diff := mine.Compare(path, &r); len(diff) > 0 {
		t.Errorf("differs from its own manifest: %q", diff)
	}
	// As a report it names the damaged object.
	if v := verify(t, path, Options{Report: ManifestPath(path)}); !v.Passed || v.ReportEqual != 2 || len(v.Unchecked) > 0 {
		t.Errorf("as a report: %+v", v)
	}
	part := path + ".part-0001"
	b, _ := os.ReadFile(part)
	b[5000] ^= 4
	save(t, part, b)
	v := verify(t, path, Options{Report: ManifestPath(path), FileDigests: true})
	wantFailure(t, v, `tensor "w.a": its sha256 is`)
	if diff := strings.Join(mine.Compare(path, &v), "\n"); !strings.Contains(diff, `object "w.a"`) || !strings.Contains(diff, "tiny.ninfer.part-0001 is") {
		t.Errorf("differences %q", diff)
	}
	if err := WriteManifest(path+"x", &v); err == nil {
		t.Error("a manifest of a damaged artifact was written")
	}

	other := filepath.Join(t.TempDir(), "tiny.ninfer")
	d := tinyDirectory()
	d.Objects[0].ID, d.Components[0].Resources = "r.other", Map[string]{}
	objects := tinyObjects()
	objects["r.other"] = objects["r.hello"]
	write(t, other, d, objects, PlanOptions{}, WriterOptions{})
	w := verify(t, other, Options{FileDigests: true})
	diff := strings.Join(mine.Compare(other, &w), "\n")
	for _, s := range []string{"artifact id is", "directory's sha256", "1 files, the manifest 2", `"r.other" is not listed`, `lacks object "r.hello"`} {
		if !strings.Contains(diff, s) {
			t.Errorf("differences %q do not say %q", diff, s)
		}
	}

	for _, foreign := range []string{"", "{}", `{"manifest":"ninfer-manifest/2"}`, `{"schema":1,"files":{}}`, "[]"} {
		save(t, filepath.Join(dir, "f"), []byte(foreign))
		if _, err := ReadManifest(filepath.Join(dir, "f")); !errors.Is(err, ErrForeignManifest) {
			t.Errorf("%q: %v", foreign, err)
		}
	}
}

func TestWriteSums(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "tiny.ninfer")
	write(t, path, tinyDirectory(), tinyObjects(), PlanOptions{Limit: 16384}, WriterOptions{ID: &tinyID})
	r := verify(t, path, Options{FileDigests: true})
	foreign := strings.Repeat("ab", 32) + "  other.ninfer"
	save(t, SumsPath(path), []byte(foreign)) // without a line end
	for range 2 {
		if err := WriteSums(path, r.FileSHA256); err != nil {
			t.Fatal(err)
		}
	}
	want := foreign + "\n" +
		"444f1bf68ac469684738dd4868c3ac8dd3cc780fb6cb4899127a56493126bdcf  tiny.ninfer\n" +
		"feee9a3c29fd997d2086582522906239d2d8e73797004309b5dcc2674d10b7d1  tiny.ninfer.part-0001\n"
	if got, err := os.ReadFile(SumsPath(path)); err != nil || string(got) != want {
		t.Errorf("list %q, %v", got, err)
	}
	if v := verify(t, path, Options{FileDigests: true}); !v.Passed || v.Sums != SumsPath(path) || len(v.Unchecked) > 0 {
		t.Errorf("%+v", v)
	}
	if err := WriteSums(path, []FileDigest{{"tiny.ninfer", strings.Repeat("00", 32)}}); err == nil {
		t.Error("a contradicting digest was accepted")
	}
	if err := WriteSums(path, []FileDigest{{"a\nb", strings.Repeat("00", 32)}}); err == nil {
		t.Error("a name with a line break was accepted")
	}
	if got, _ := os.ReadFile(SumsPath(path)); string(got) != want {
		t.Errorf("the list changed to %q", got)
	}
	if names := listing(t, dir); len(names) != 3 {
		t.Errorf("files %q", names)
	}
}

// TestSparse: zeros that are not written are equal to zeros that are.
func TestSparse(t *testing.T) {
	d := tinyDirectory()
	d.Objects = append(d.Objects, Object{ID: "table", Shape: []int{1 << 20, 16}, Format: "bf16", Layout: "contiguous_le_v1"})
	objects := tinyObjects()
	table := make([]byte, 1<<25)
	copy(table[1<<24:], "some row")
	objects["table"] = table
	dense := filepath.Join(t.TempDir(), "m.ninfer")
	want := write(t, dense, d, objects, PlanOptions{Limit: 1 << 24}, WriterOptions{})

	dir := t.TempDir()
	path := filepath.Join(dir, "m.ninfer")
	p, err := NewPlan("m.ninfer", d, PlanOptions{Limit: 1 << 24})
	if err != nil {
		t.Fatal(err)
	}
	w, err := Create(path, p, WriterOptions{NoReserve: true})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Abort()
	check := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	check(w.WriteAt("r.hello", 0, objects["r.hello"]))
	check(w.WriteAt("w.a", 0, objects["w.a"]))
	check(w.WriteZerosAt("table", 0, 1<<24))
	check(w.WriteAt("table", 1<<24, []byte("some row")))
	check(w.WriteZerosAt("table", 1<<24+8, 1<<24-8))
	check(w.WriteZerosAt("table", 1<<25, 0))
	got, err := w.Finish()
	check(err)
	if got.ID != want.ID || got.PayloadBytes != want.PayloadBytes {
		t.Errorf("id %x, want %x", got.ID, want.ID)
	}
	for _, name := range got.Files {
		a, err1 := os.ReadFile(filepath.Join(dir, name))
		b, err2 := os.ReadFile(filepath.Join(filepath.Dir(dense), name))
		if err1 != nil || err2 != nil || !bytes.Equal(a, b) {
			t.Errorf("%s differs: %v, %v", name, err1, err2)
		}
	}
	if used, ok := diskBytes(path + ".part-0001"); ok && used > 1<<22 {
		t.Errorf("a part of 16 MiB zeros uses %d bytes", used)
	}

	for name, f := range map[string]func(w *Writer) error{
		"unknown": func(w *Writer) error { return w.WriteZerosAt("x", 0, 1) },
		"beyond":  func(w *Writer) error { return w.WriteZerosAt("table", 1<<25-1, 2) },
		"before":  func(w *Writer) error { return w.WriteZerosAt("table", -1, 1) },
		"twice": func(w *Writer) error {
			return errors.Join(w.WriteAt("table", 5, []byte{1}), w.WriteZerosAt("table", 0, 6))
		},
	} {
		w, err := Create(filepath.Join(t.TempDir(), "m.ninfer"), p, WriterOptions{NoReserve: true})
		check(err)
		if err := f(w); err == nil {
			t.Errorf("%s: no error", name)
		}
		if _, err := w.Finish(); err == nil {
			t.Errorf("%s: published after an error", name)
		}
	}
}
