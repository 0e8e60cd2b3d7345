package artifact

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json/jsontext"
	"math"
	"os"
	"path/filepath"
	"testing"
)

// tinyDirectory is the directory of docs/format.md 7.2.
func tinyDirectory() *Directory {
	d := &Directory{
		Objects: []Object{
			{ID: "r.hello", Resource: true, Bytes: 5},
			{ID: "w.a", Shape: []int{2, 3000}, Format: "fp32", Layout: "contiguous_le_v1"},
		},
		Uses: []Use{{Parameter: "text/a", Input: "text/x", Policy: "A16Only"}},
	}
	text := Component{ID: "text", Config: jsontext.Value(`{"architectures":["Demo"]}`)}
	text.Resources.Set("hello.txt", "r.hello")
	d.Components = []Component{text}
	d.Bindings.Set("text/a", Binding{Object: "w.a"})
	return d
}

// tinyObjects is the content of docs/format.md 7.2.
func tinyObjects() map[string][]byte {
	b := make([]byte, 0, 24000)
	for i := range 6000 {
		b = binary.LittleEndian.AppendUint32(b, math.Float32bits(float32(i%97-48)))
	}
	return map[string][]byte{"r.hello": []byte("hello"), "w.a": b}
}

var tinyID = [16]byte{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}

// write writes an artifact and gives its receipt.
func write(t testing.TB, path string, d *Directory, objects map[string][]byte, po PlanOptions, wo WriterOptions) *Receipt {
	t.Helper()
	p, err := NewPlan(filepath.Base(path), d, po)
	if err != nil {
		t.Fatal(err)
	}
	w, err := Create(path, p, wo)
	if err != nil {
		t.Fatal(err)
	}
	for _, o := range p.Directory.Objects {
		if err := w.WriteAt(o.ID, 0, objects[o.ID]); err != nil {
			t.Fatal(err)
		}
	}
	r, err := w.Finish()
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func sha(b []byte) string {
	s := sha256.Sum256(b)
	return hex.EncodeToString(s[:])
}

func listing(t testing.TB, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// TestTiny writes the artifact of docs/format.md 7.2 and compares the files
// with the digests given there.
func TestTiny(t *testing.T) {
	for _, c := range []struct {
		name       string
		limit      int64
		jsonLength int
		digests    []string
		lengths    []int
		header     string
	}{
		{"default", 0, 502, []string{"004962ef19a925e421bf8edcca147a252d310e26d44d41951b264ea10ac00af5"}, []int{28352}, ""},
		{"16384", 16384, 557, []string{
			"444f1bf68ac469684738dd4868c3ac8dd3cc780fb6cb4899127a56493126bdcf",
			"feee9a3c29fd997d2086582522906239d2d8e73797004309b5dcc2674d10b7d1",
		}, []int{16384, 16064}, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			path := filepath.Join(dir, "tiny.ninfer")
			r := write(t, path, tinyDirectory(), tinyObjects(), PlanOptions{Limit: c.limit}, WriterOptions{ID: &tinyID})
			if got := listing(t, dir); len(got) != len(c.digests) {
				t.Errorf("files %q, want %d", got, len(c.digests))
			}
			for i, name := range r.Files {
				b, err := os.ReadFile(filepath.Join(dir, name))
				if err != nil {
					t.Fatal(err)
				}
				if len(b) != c.lengths[i] || sha(b) != c.digests[i] {
					t.Errorf("%s: %d bytes, sha256 %s, want %d, %s", name, len(b), sha(b), c.lengths[i], c.digests[i])
				}
				want := "4e494e4645520003e00f000000000000000102030405060708090a0b0c0d0e0f"
				if i == 1 {
					want = "4e494e50525400030100000000000000000102030405060708090a0b0c0d0e0f"
				}
				if got := hex.EncodeToString(b[:32]); got != want {
					t.Errorf("%s: header %s, want %s", name, got, want)
				}
			}
			a, err := Open(path)
			if err != nil {
				t.Fatal(err)
			}
			defer a.Close()
			if n := len(bytes.TrimRight(a.DirectoryText(), " ")); n != c.jsonLength {
				t.Errorf("directory text has %d bytes, want %d", n, c.jsonLength)
			}
			if a.PayloadStart() != 4096 || a.PayloadBytes() != 24256 || a.ID() != tinyID {
				t.Errorf("S %d, payload %d, id %s", a.PayloadStart(), a.PayloadBytes(), FormatID(a.ID()))
			}
			record := `{"id":"w.a","shape":[2,3000],"format":"fp32","layout":"contiguous_le_v1","offset":256,"bytes":24000,"kind":"tensor"}`
			if !bytes.Contains(a.DirectoryText(), []byte(record)) {
				t.Errorf("directory lacks %s", record)
			}
			tensor, err := a.Tensor("w.a")
			if err != nil {
				t.Fatal(err)
			}
			if want := tinyObjects()["w.a"]; !bytes.Equal(tensor.Data, want) {
				t.Error("tensor differs from what was written")
			}
			res, err := a.Resource("r.hello")
			if err != nil || string(res) != "hello" {
				t.Errorf("resource %q, %v", res, err)
			}
		})
	}
}
