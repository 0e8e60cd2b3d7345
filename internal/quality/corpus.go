package quality

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json/v2"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Stream is one text of a corpus.
type Stream struct {
	Name   string
	Domain string
	Path   string // as it was opened
	SHA256 string // of the file, lower-case hex
	Text   string
}

// manifest is a corpus on disk: a list of texts, each with a name, a domain, a path below the manifest's folder and the SHA-256 of the file.
type manifest struct {
	Corpus  string `json:"corpus"`
	Streams []struct {
		Name   string `json:"name"`
		Domain string `json:"domain"`
		Path   string `json:"path"`
		SHA256 string `json:"sha256"`
	} `json:"streams"`
}

// ReadCorpus reads the texts that a manifest lists, in its order. quick takes the first of each domain. A file whose digest is not the
// listed one, or that is not UTF-8, is an error that names it.
func ReadCorpus(path string, quick bool) ([]Stream, error) {
	raw, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	streams, err := readManifest(raw, filepath.Dir(path), quick)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return streams, nil
}

func readManifest(raw []byte, dir string, quick bool) ([]Stream, error) {
	var m manifest
	if err := json.Unmarshal(raw, &m); err != nil {
		return nil, err
	}
	if len(m.Streams) == 0 {
		return nil, errors.New("lists no streams")
	}
	names, domains := map[string]bool{}, map[string]bool{}
	var out []Stream
	for i, s := range m.Streams {
		switch {
		case s.Name == "" || s.Domain == "" || s.Path == "" || s.SHA256 == "":
			return nil, fmt.Errorf("stream %d needs name, domain, path and sha256", i)
		case names[s.Name]:
			return nil, fmt.Errorf("stream %q is listed twice", s.Name)
		case strings.ContainsFunc(s.Path, unicode.IsControl):
			return nil, fmt.Errorf("stream %q: path %q has control characters", s.Name, s.Path)
		case !filepath.IsLocal(filepath.FromSlash(s.Path)):
			return nil, fmt.Errorf("stream %q: path %q leaves the manifest's folder", s.Name, s.Path)
		}
		names[s.Name] = true
		if quick && domains[s.Domain] {
			continue
		}
		domains[s.Domain] = true
		t, err := ReadText(filepath.Join(dir, filepath.FromSlash(s.Path)))
		if err != nil {
			return nil, fmt.Errorf("stream %q: %w", s.Name, err)
		}
		if want := strings.ToLower(s.SHA256); t.SHA256 != want {
			return nil, fmt.Errorf("stream %q: the sha256 of %s is %s, listed is %q", s.Name, t.Path, t.SHA256, want)
		}
		t.Name, t.Domain = s.Name, s.Domain
		out = append(out, t)
	}
	return out, nil
}

// ReadText reads one UTF-8 file as a stream of its own domain.
func ReadText(path string) (Stream, error) {
	raw, err := os.ReadFile(path)
	if err != nil {
		return Stream{}, err
	}
	if !utf8.Valid(raw) {
		return Stream{}, fmt.Errorf("%s is not UTF-8", path)
	}
	sum := sha256.Sum256(raw)
	return Stream{Name: filepath.Base(path), Domain: "text", Path: path, SHA256: hex.EncodeToString(sum[:]), Text: string(raw)}, nil
}
