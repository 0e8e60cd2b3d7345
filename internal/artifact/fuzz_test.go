package artifact

import (
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"ninfer/internal/num"
)

// FuzzOpen feeds mutated entries to the reader: no panic, and whatever opens
// can be walked and verified.
func FuzzOpen(f *testing.F) {
	path := filepath.Join(f.TempDir(), "tiny.ninfer")
	r := write(f, path, tinyDirectory(), tinyObjects(), PlanOptions{Limit: 16384}, WriterOptions{ID: &tinyID})
	for _, name := range r.Files {
		b, err := os.ReadFile(filepath.Join(filepath.Dir(path), name))
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Add(entryBytes(sampleText, 1152))
	f.Add(entryBytes(strings.Replace(sampleText, `"path":"other"`, `"path":"ot\nher"`, 1), 1152))
	f.Add([]byte(v2Magic))
	f.Add([]byte{})
	dir := f.TempDir()
	f.Fuzz(func(t *testing.T, b []byte) {
		path := filepath.Join(dir, fmt.Sprintf("%d.ninfer", os.Getpid()))
		save(t, path, b)
		a, err := Open(path)
		if err != nil {
			if strings.ContainsAny(err.Error(), "\r\n") {
				t.Errorf("message has more than one line: %q", err)
			}
			return
		}
		defer a.Close()
		var said []string
		say := func(err error) {
			if err != nil {
				said = append(said, err.Error())
			}
		}
		for _, p := range a.Parts() {
			say(p.Err)
		}
		for _, o := range a.Directory().Objects {
			if o.Resource {
				_, err = a.Resource(o.ID)
			} else {
				var x num.Tensor
				if x, err = a.Tensor(o.ID); err == nil {
					err = x.Validate()
				}
			}
			say(err)
			a.Spans(o.ID)
		}
		v, err := Verify(path, Options{FileDigests: true})
		if err != nil {
			t.Error(err)
		}
		for _, text := range slices.Concat(said, v.Failures, v.Notes, v.Unchecked) {
			if strings.ContainsAny(text, "\r\n") {
				t.Errorf("message has more than one line: %q", text)
			}
		}
	})
}

// FuzzDirectory feeds mutated directory texts: no panic, messages of one line,
// and what is accepted is the same directory after it was written again.
func FuzzDirectory(f *testing.F) {
	p, err := NewPlan("tiny.ninfer", mixedDirectory(), PlanOptions{Limit: 16384})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(p.Text)
	f.Add([]byte(sampleText))
	f.Fuzz(func(t *testing.T, text []byte) {
		d, err := parseDirectory(text, "dir/s.ninfer", "s.ninfer")
		if err != nil {
			if strings.ContainsAny(err.Error(), "\r\n") {
				t.Errorf("message has more than one line: %q", err)
			}
			return
		}
		content, err := appendContent(nil, &d.Directory, converterOrder)
		if err != nil {
			t.Fatal(err)
		}
		e, err := parseDirectory(appendFiles(content, d.Files), "dir/s.ninfer", "s.ninfer")
		if err != nil {
			t.Fatalf("written again: %v", err)
		}
		if e.contentEnd != len(content) {
			t.Errorf("content ends at %d, want %d", e.contentEnd, len(content))
		}
		// Open objects may be spelled differently now.
		for i := range e.Components {
			e.Components[i].Config = d.Components[i].Config
		}
		e.Metadata, e.Provenance = d.Metadata, d.Provenance
		if !reflect.DeepEqual(d.Directory, e.Directory) {
			t.Errorf("directory changed when written again:\n%+v\n%+v", d.Directory, e.Directory)
		}
	})
}

// FuzzSideFiles feeds manifests, checksum lists and reports: no panic, messages of one line, and a list holds digests only.
func FuzzSideFiles(f *testing.F) {
	dir := f.TempDir()
	path := filepath.Join(dir, "tiny.ninfer")
	write(f, path, tinyDirectory(), tinyObjects(), PlanOptions{Limit: 16384}, WriterOptions{ID: &tinyID})
	r, err := Verify(path, Options{FileDigests: true})
	if err != nil {
		f.Fatal(err)
	}
	if err := WriteManifest(path, &r); err != nil {
		f.Fatal(err)
	}
	if err := WriteSums(path, r.FileSHA256); err != nil {
		f.Fatal(err)
	}
	for _, name := range []string{ManifestPath(path), SumsPath(path)} {
		b, err := os.ReadFile(name)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Add([]byte(`{"manifest":"ninfer-manifest/1","files":[{"name":"x","bytes":-1}],"object_sha256":{"a":"b","\n":"c"}}`))
	f.Add([]byte(`{"manifest":"ninfer-manifest/1","object_sha256":[1,"\r\n"]}`))
	f.Add([]byte(`{"v2_objects":{"a":"b"}}`))
	f.Add([]byte(strings.Repeat("0", 64) + " *./x\r\n" + strings.Repeat("F", 64) + "  y\n"))
	f.Add([]byte(strings.Repeat("0", 64) + " *./")) // was taken for a file without a name
	f.Add([]byte(`{"object_sha256":{"r.hello":"` + strings.Repeat("0", 64) + `"}}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		name := filepath.Join(dir, fmt.Sprintf("%d.side", os.Getpid()))
		save(t, name, b)
		oneLineOnly := func(err error) {
			if err != nil && strings.ContainsAny(err.Error(), "\r\n") {
				t.Errorf("message has more than one line: %q", err)
			}
		}
		m, err := ReadManifest(name)
		if oneLineOnly(err); err == nil {
			for _, line := range m.Compare(path, &r) {
				if strings.ContainsAny(line, "\r\n") {
					t.Errorf("message has more than one line: %q", line)
				}
			}
		}
		sums, err := readSums(name)
		oneLineOnly(err)
		for file, sum := range sums {
			if len(sum) != 64 || strings.Trim(sum, "0123456789abcdef") != "" || file == "" {
				t.Errorf("%q has the digest %q", file, sum)
			}
		}
		v, err := Verify(path, Options{Report: name})
		oneLineOnly(err)
		if err == nil {
			for _, line := range append(v.Failures, v.Notes...) {
				if strings.ContainsAny(line, "\r\n") {
					t.Errorf("message has more than one line: %q", line)
				}
			}
		}
	})
}
