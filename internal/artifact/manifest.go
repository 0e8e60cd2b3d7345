package artifact

import (
	"bytes"
	"encoding/json/jsontext"
	"encoding/json/v2"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// ManifestPath is where a manifest is written, and where Verify's callers look
// for it.
func ManifestPath(path string) string { return path + ".manifest.json" }

// manifestVersion is the first member of our manifests. It has reached disk.
const manifestVersion = "ninfer-manifest/1"

// ErrForeignManifest reports a manifest that is not of this program's form.
// Others exist, under similar names, and mean nothing here.
var ErrForeignManifest = errors.New("manifest of another program")

// Manifest lists the digests of an artifact: enough to check a copy of it and
// to name a damaged file or object. It is JSON with these members in this
// order. Digests are SHA-256 in lower-case hex.
type Manifest struct {
	Version      string         `json:"manifest"` // "ninfer-manifest/1"
	ArtifactID   string         `json:"artifact_id"`
	PayloadBytes int64          `json:"payload_bytes"`
	Files        []ManifestFile `json:"files"`            // the entry first
	Directory    string         `json:"directory_sha256"` // of the json_bytes bytes of the directory
	ObjectText   jsontext.Value `json:"object_sha256"`    // object id to digest, in payload order

	Objects map[string]string `json:"-"` // ObjectText, read
}

// ManifestFile is one file of the set; Name has no folder.
type ManifestFile struct {
	Name   string `json:"name"`
	Bytes  int64  `json:"bytes"`
	SHA256 string `json:"sha256"`
}

// WriteManifest writes the manifest of an artifact that Verify passed with
// FileDigests, beside it. It never overwrites.
func WriteManifest(path string, r *Result) error {
	if !r.Passed || len(r.FileSHA256) != r.Files || r.ObjectSHA256.Len() != r.Objects {
		return fmt.Errorf("artifact %s: a manifest is only made of an artifact that passed, with the digests of all files", path)
	}
	a, err := Open(path)
	if err != nil {
		return err
	}
	defer a.Close()
	m := Manifest{
		Version: manifestVersion, ArtifactID: r.ArtifactID, PayloadBytes: r.PayloadBytes, Directory: hexDigest(a.text),
	}
	for i, f := range r.FileSHA256 {
		m.Files = append(m.Files, ManifestFile{f.File, a.parts[i].start + a.parts[i].bytes, f.SHA256})
	}
	text := []byte{'{'}
	for id, sum := range r.ObjectSHA256.All() {
		if len(text) > 1 {
			text = append(text, ',')
		}
		text = appendString(append(appendString(text, id), ':'), sum)
	}
	m.ObjectText = append(text, '}')
	out, err := json.Marshal(&m, jsontext.WithIndent("  "))
	if err != nil {
		return fmt.Errorf("artifact %s: manifest: %w", path, err)
	}
	return writeNew(ManifestPath(path), append(out, '\n'))
}

// ReadManifest reads a manifest. One that is not of our form gives
// ErrForeignManifest.
func ReadManifest(path string) (*Manifest, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("artifact: manifest: %w", err)
	}
	var m Manifest
	if err := json.Unmarshal(b, &m); err != nil || m.Version != manifestVersion {
		return nil, fmt.Errorf("artifact: %w: %s has no member manifest %q", ErrForeignManifest, path, manifestVersion)
	}
	if err := json.Unmarshal(m.ObjectText, &m.Objects); err != nil {
		return nil, fmt.Errorf("artifact: manifest %s: object_sha256: %w", path, oneLine(err))
	}
	return &m, nil
}

// Compare tells in what an artifact that Verify has read differs from the
// manifest, one line each. File digests are compared where Verify computed
// them.
func (m *Manifest) Compare(path string, r *Result) []string {
	var out []string
	failf := func(format string, args ...any) { out = append(out, plain("manifest: "+fmt.Sprintf(format, args...))) }
	a, err := Open(path)
	if err != nil {
		return []string{"manifest: " + err.Error()}
	}
	defer a.Close()
	if got := FormatID(a.id); got != m.ArtifactID {
		failf("the artifact id is %s, the manifest says %s", got, m.ArtifactID)
	}
	if got := hexDigest(a.text); got != m.Directory {
		failf("the directory's sha256 is %s, the manifest says %s", got, m.Directory)
	}
	if a.total != m.PayloadBytes {
		failf("the payload has %d bytes, the manifest says %d", a.total, m.PayloadBytes)
	}
	if len(a.parts) != len(m.Files) {
		failf("the artifact has %d files, the manifest %d", len(a.parts), len(m.Files))
	} else {
		for i, f := range m.Files {
			p := a.parts[i]
			if name := filepath.Base(p.path); name != f.Name && i > 0 {
				failf("file %d is %s, the manifest says %s", i, quote(name), quote(f.Name))
			}
			if n := p.start + p.bytes; n != f.Bytes {
				failf("%s has %d bytes, the manifest says %d", f.Name, n, f.Bytes)
			}
			for _, g := range r.FileSHA256 {
				if g.File == filepath.Base(p.path) && g.SHA256 != f.SHA256 {
					failf("the sha256 of %s is %s, the manifest says %s", g.File, g.SHA256, f.SHA256)
				}
			}
		}
	}
	for id, got := range r.ObjectSHA256.All() {
		want, ok := m.Objects[id]
		if !ok {
			failf("object %s is not listed", quote(id))
		} else if got != want {
			failf("the sha256 of object %s is %s, the manifest says %s", quote(id), got, want)
		}
	}
	for id := range m.Objects {
		if !a.has(id) {
			failf("the artifact lacks object %s", quote(id))
		}
	}
	slices.Sort(out)
	return out
}

// SumsPath is the checksum list beside an artifact.
func SumsPath(path string) string { return filepath.Join(filepath.Dir(path), sumsNames[0]) }

// WriteSums enters the digests of an artifact's files into the checksum list
// beside it, in the form that sha256sum -c reads. Lines about other files stay;
// a line that says something else about one of these files is an error.
func WriteSums(path string, files []FileDigest) error {
	list := SumsPath(path)
	old, err := os.ReadFile(list)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("artifact: checksum list: %w", err)
	}
	sums := map[string]string{}
	if err == nil {
		if sums, err = readSums(list); err != nil {
			return err
		}
	}
	text := bytes.Clone(old)
	if len(text) > 0 && text[len(text)-1] != '\n' {
		text = append(text, '\n')
	}
	changed := false
	for _, f := range files {
		if strings.ContainsAny(f.File, "\n\r\\") {
			return fmt.Errorf("artifact: checksum list: the name %s cannot be written in one", quote(f.File))
		}
		switch was, ok := sums[f.File]; {
		case !ok:
			text = fmt.Appendf(text, "%s  %s\n", f.SHA256, f.File)
			changed = true
		case was != f.SHA256:
			return fmt.Errorf("artifact: checksum list %s says %s for %s, its sha256 is %s", list, was, f.File, f.SHA256)
		}
	}
	if !changed {
		return nil
	}
	temp := filepath.Join(filepath.Dir(list), "."+filepath.Base(list)+".tmp")
	if err := os.WriteFile(temp, text, 0o666); err != nil {
		os.Remove(temp)
		return fmt.Errorf("artifact: checksum list %s: %w", list, cause(err))
	}
	if err := os.Rename(temp, list); err != nil {
		os.Remove(temp)
		return fmt.Errorf("artifact: checksum list %s: %w", list, linkCause(err))
	}
	return nil
}

// writeNew writes a file that must not exist yet.
func writeNew(path string, text []byte) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o666)
	if err != nil {
		return fmt.Errorf("artifact: %w", err)
	}
	_, err = f.Write(text)
	if err == nil {
		err = f.Sync()
	}
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		os.Remove(path)
		return fmt.Errorf("artifact: %s: %w", path, cause(err))
	}
	return nil
}
