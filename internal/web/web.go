// Package web is the chat page that the server shows at /: HTML, a style sheet and four ES modules, embedded as they are, without a build
// step. The page talks to the same /v1 endpoints as every other client, keeps conversations in the browser and loads nothing from elsewhere.
//
// It consists of / and the files under /assets/. The page holds no secret, so no key is
// needed for it; what it asks of the API needs one as always.
package web

import (
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"io/fs"
	"net/http"
	"path"
	"strings"
	"sync"
	"time"
)

//go:embed page
var files embed.FS

// policy lets the page use its own files and its own server, and nothing else: no other origin, no inline script or style, no frame around it.
const policy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"

// types are by extension; what the system calls a type must not matter.
var types = map[string]string{
	".html": "text/html; charset=utf-8", ".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml",
}

// file is a file in the forms it is sent in.
type file struct {
	kind         string
	plain, small []byte // small is with gzip
	tag          string // of plain
}

// all are the files by the path they are served at.
var all = sync.OnceValue(func() map[string]*file {
	all := map[string]*file{}
	err := fs.WalkDir(files, "page", func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		data, err := files.ReadFile(name)
		if err != nil {
			return err
		}
		at := strings.TrimPrefix(name, "page")
		if at == "/index.html" {
			at = "/"
		}
		sum := sha256.Sum256(data)
		all[at] = &file{types[path.Ext(name)], data, compress(data), hex.EncodeToString(sum[:12])}
		return nil
	})
	if err != nil {
		panic("web: the embedded files cannot be read: " + err.Error())
	}
	return all
})

// File returns the handler of the file at a path, or nil if there is none. It is for GET and HEAD.
func File(path string) http.Handler {
	if f, ok := all()[path]; ok {
		return http.HandlerFunc(f.send)
	}
	return nil
}

func compress(data []byte) []byte {
	var b bytes.Buffer
	z, _ := gzip.NewWriterLevel(&b, gzip.BestCompression) // the level is valid
	z.Write(data)                                         // to memory
	z.Close()
	return b.Bytes()
}

// send answers with the file, or that the browser's copy is still good: a new version of the program shows at once.
func (f *file) send(w http.ResponseWriter, r *http.Request) {
	h := w.Header()
	h.Set("Content-Type", f.kind)
	h.Set("Content-Security-Policy", policy)
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Referrer-Policy", "no-referrer")
	h.Set("Cache-Control", "no-cache")
	h.Set("Vary", "Accept-Encoding")
	body, tag := f.plain, f.tag
	if acceptsGzip(r.Header.Get("Accept-Encoding")) {
		body, tag = f.small, f.tag+"-gzip"
		h.Set("Content-Encoding", "gzip")
	}
	h.Set("ETag", `"`+tag+`"`)
	http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(body))
}

// acceptsGzip reads an Accept-Encoding field as far as gzip goes.
func acceptsGzip(field string) bool {
	for part := range strings.SplitSeq(field, ",") {
		name, weight, _ := strings.Cut(part, ";")
		if strings.EqualFold(strings.TrimSpace(name), "gzip") {
			q, _ := strings.CutPrefix(strings.ReplaceAll(strings.ToLower(weight), " ", ""), "q=")
			return strings.Trim(q, "0.") != "" || q == ""
		}
	}
	return false
}
