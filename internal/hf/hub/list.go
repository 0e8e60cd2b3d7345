package hub

import (
	"cmp"
	"context"
	"encoding/hex"
	"encoding/json/v2"
	"fmt"
	"io"
	"math"
	"net/url"
	"path"
	"path/filepath"
	"slices"
	"strings"
)

// File is one file of a repository.
type File struct {
	Path   string // with slashes, below the repository's root
	Size   int64
	SHA256 string // lower-case hex, of large files
	Blob   string // git's SHA-1 of the others, lower-case hex
}

// oid names the content; it is empty if the hub gives no digest.
func (f *File) oid() string { return cmp.Or(f.SHA256, f.Blob) }

// Listing is a repository at one commit.
type Listing struct {
	Repo   string
	Commit string // hex
	Files  []File // sorted by path
}

// maxListing bounds the list that is read.
const maxListing = 64 << 20

// List asks for the files of a repository at a revision and keeps those that Include and Exclude select. A list with a name
// that would not stay below the output folder is refused as a whole.
func List(ctx context.Context, o Options) (*Listing, error) {
	c, err := newClient(o)
	if err != nil {
		return nil, err
	}
	defer c.close()
	return c.list(ctx)
}

func (c *client) list(ctx context.Context) (*Listing, error) {
	var body struct {
		SHA      string `json:"sha"`
		Siblings []struct {
			Name string `json:"rfilename"`
			Size *int64 `json:"size"`
			Blob string `json:"blobId"`
			LFS  *struct {
				SHA256 string `json:"sha256"`
				OID    string `json:"oid"` // an older name
				Size   int64  `json:"size"`
			} `json:"lfs"`
		} `json:"siblings"`
	}
	what := "list of " + c.o.Repo
	at := "/api/models/" + c.o.Repo + "/revision/" + url.PathEscape(c.o.Revision) + "?blobs=true"
	err := c.retry(ctx, what, func() (bool, error) {
		r, err := c.get(ctx, at, nil)
		if err != nil {
			return false, err
		}
		defer r.Body.Close()
		if err := statusError(r); err != nil {
			return false, err
		}
		text, err := io.ReadAll(io.LimitReader(r.Body, maxListing+1))
		switch {
		case err != nil:
			return false, transient{err}
		case len(text) > maxListing:
			return false, fmt.Errorf("more than %d bytes", maxListing)
		}
		if err := json.Unmarshal(text, &body); err != nil {
			return false, fmt.Errorf("not a file list: %s", strings.Join(strings.Fields(err.Error()), " "))
		}
		return true, nil
	})
	if err != nil {
		return nil, err
	}
	l := &Listing{Repo: c.o.Repo, Commit: body.SHA}
	if _, err := hex.DecodeString(l.Commit); err != nil || len(l.Commit) < 7 {
		return nil, fmt.Errorf("hub: %s: %q is not a commit", what, l.Commit)
	}
	seen := map[string]bool{}
	total := int64(0)
	for _, s := range body.Siblings {
		f := File{Path: s.Name, Blob: strings.ToLower(s.Blob)}
		switch {
		case s.LFS != nil:
			f.Size, f.SHA256, f.Blob = s.LFS.Size, strings.ToLower(cmp.Or(s.LFS.SHA256, s.LFS.OID)), ""
		case s.Size != nil:
			f.Size = *s.Size
		default:
			return nil, fmt.Errorf("hub: %s: no size for %q", what, s.Name)
		}
		if err := checkName(f.Path); err != nil {
			return nil, fmt.Errorf("hub: %s: %w", what, err)
		}
		switch {
		case seen[f.Path]:
			return nil, fmt.Errorf("hub: %s: %q is listed twice", what, f.Path)
		case f.Size < 0:
			return nil, fmt.Errorf("hub: %s: %q has size %d", what, f.Path, f.Size)
		case f.SHA256 != "" && !isHex(f.SHA256, 64), f.Blob != "" && !isHex(f.Blob, 40):
			return nil, fmt.Errorf("hub: %s: %q has the digest %q", what, f.Path, f.oid())
		}
		seen[f.Path] = true
		if !c.selected(f.Path) {
			continue
		}
		if total > math.MaxInt64-f.Size {
			return nil, fmt.Errorf("hub: %s: sizes add up to more than %d bytes", what, int64(math.MaxInt64))
		}
		total += f.Size
		l.Files = append(l.Files, f)
	}
	slices.SortFunc(l.Files, func(a, b File) int { return strings.Compare(a.Path, b.Path) })
	// A file cannot also be the folder of another.
	for _, f := range l.Files {
		for dir := path.Dir(f.Path); dir != "."; dir = path.Dir(dir) {
			if seen[dir] {
				return nil, fmt.Errorf("hub: %s: %q is a file and a folder", what, dir)
			}
		}
	}
	if len(l.Files) == 0 {
		return nil, fmt.Errorf("hub: %s has no file to fetch (of %d listed)", c.o.Repo, len(body.Siblings))
	}
	return l, nil
}

func isHex(s string, n int) bool {
	_, err := hex.DecodeString(s)
	return err == nil && len(s) == n
}

// checkName refuses names that could leave the output folder, that mean something else on another system, or that are ours.
func checkName(name string) error {
	bad := name == "" || len(name) > 1024 || path.Clean(name) != name || path.IsAbs(name) ||
		strings.ContainsAny(name, `\:*?"<>|`) || strings.IndexFunc(name, func(r rune) bool { return r < 0x20 || r == 0x7f }) >= 0 ||
		!filepath.IsLocal(filepath.FromSlash(name))
	for _, part := range strings.Split(name, "/") {
		// Systems drop dots and spaces at the end.
		bad = bad || part == "." || part == ".." || strings.TrimRight(part, ". ") != part || strings.EqualFold(part, stateDir)
	}
	if bad {
		return fmt.Errorf("file name %q is not allowed", name)
	}
	return nil
}

// selected tells whether the patterns choose a file; they match its path or its last element.
func (c *client) selected(name string) bool {
	match := func(patterns []string) bool {
		return slices.ContainsFunc(patterns, func(p string) bool {
			a, _ := path.Match(p, name)
			b, _ := path.Match(p, path.Base(name))
			return a || b
		})
	}
	return (len(c.o.Include) == 0 || match(c.o.Include)) && !match(c.o.Exclude)
}
