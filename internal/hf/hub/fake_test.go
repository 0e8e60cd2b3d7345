package hub

import (
	"crypto/sha1"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json/v2"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"testing"
)

// fakeHub serves one repository on loopback: lists and resolves like a hub, and redirects large files to a second server that
// stores them, as hubs do.
type fakeHub struct {
	*httptest.Server
	store *httptest.Server
	token string // demanded if set

	mu       sync.Mutex
	files    map[string][]byte
	small    map[string]bool // served by the hub itself, listed with git's digest
	noDigest bool
	list     string // replaces the list
	requests []string
	sent     int64 // payload bytes
	leaked   bool  // the token reached the store

	// fault may answer a request for content in the hub's place: it returns true if it did. n counts the requests for content.
	fault func(n int, name string, w http.ResponseWriter, r *http.Request) bool
	n     int
}

const (
	fakeRepo   = "someone/some-model"
	fakeCommit = "0123456789abcdef0123456789abcdef01234567"
)

// content is n bytes that depend on the seed.
func content(seed uint64, n int) []byte {
	b := make([]byte, n)
	r := rand.New(rand.NewPCG(seed, 1))
	for i := range b {
		b[i] = byte(r.Uint32())
	}
	return b
}

func sha256hex(b []byte) string {
	s := sha256.Sum256(b)
	return hex.EncodeToString(s[:])
}

// blob is what git hash-object prints.
func blob(b []byte) string {
	s := sha1.Sum(append([]byte("blob "+strconv.Itoa(len(b))+"\x00"), b...))
	return hex.EncodeToString(s[:])
}

func newFakeHub(t testing.TB, files map[string][]byte, small ...string) *fakeHub {
	h := &fakeHub{files: files, small: map[string]bool{}}
	for _, s := range small {
		h.small[s] = true
	}
	h.Server = httptest.NewServer(http.HandlerFunc(h.serve))
	h.store = httptest.NewServer(http.HandlerFunc(h.serveStore))
	t.Cleanup(func() { h.Server.Close(); h.store.Close() })
	return h
}

func (h *fakeHub) serve(w http.ResponseWriter, r *http.Request) {
	h.mu.Lock()
	h.requests = append(h.requests, r.URL.Path+" "+r.Header.Get("Range"))
	h.mu.Unlock()
	if h.token != "" && r.Header.Get("Authorization") != "Bearer "+h.token {
		w.WriteHeader(http.StatusUnauthorized)
		return
	}
	switch {
	case strings.HasPrefix(r.URL.Path, "/api/models/"+fakeRepo+"/revision/"):
		h.serveList(w, r)
	case strings.HasPrefix(r.URL.Path, "/"+fakeRepo+"/resolve/"+fakeCommit+"/"):
		name := strings.TrimPrefix(r.URL.Path, "/"+fakeRepo+"/resolve/"+fakeCommit+"/")
		data, ok := h.files[name]
		if !ok {
			http.NotFound(w, r)
			return
		}
		if h.small[name] {
			h.send(w, r, name, data, blob(data))
			return
		}
		w.Header().Set("X-Linked-Etag", `"`+sha256hex(data)+`"`)
		w.Header().Set("Location", h.store.URL+"/blob?name="+url.QueryEscape(name)+"&Signature=secret")
		w.WriteHeader(http.StatusFound)
	default:
		http.NotFound(w, r)
	}
}

func (h *fakeHub) serveStore(w http.ResponseWriter, r *http.Request) {
	if r.Header.Get("Authorization") != "" {
		h.mu.Lock()
		h.leaked = true
		h.mu.Unlock()
	}
	name := r.URL.Query().Get("name")
	h.send(w, r, name, h.files[name], "store-"+name)
}

func (h *fakeHub) send(w http.ResponseWriter, r *http.Request, name string, data []byte, etag string) {
	h.mu.Lock()
	h.n++
	n, fault := h.n, h.fault
	h.mu.Unlock()
	if fault != nil && fault(n, name, w, r) {
		return
	}
	w.Header().Set("ETag", `"`+etag+`"`)
	begin, end := 0, len(data)
	if _, err := fmt.Sscanf(r.Header.Get("Range"), "bytes=%d-%d", &begin, &end); err == nil {
		if begin >= len(data) {
			w.WriteHeader(http.StatusRequestedRangeNotSatisfiable)
			return
		}
		end = min(end+1, len(data))
		w.Header().Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", begin, end-1, len(data)))
		w.Header().Set("Content-Length", strconv.Itoa(end-begin))
		w.WriteHeader(http.StatusPartialContent)
	}
	k, _ := w.Write(data[begin:end])
	h.mu.Lock()
	h.sent += int64(k)
	h.mu.Unlock()
}

func (h *fakeHub) serveList(w http.ResponseWriter, r *http.Request) {
	if h.list != "" {
		fmt.Fprint(w, h.list)
		return
	}
	if r.URL.Query().Get("blobs") != "true" {
		http.Error(w, "no sizes asked for", http.StatusBadRequest)
		return
	}
	type lfs struct {
		SHA256  string `json:"sha256"`
		Size    int    `json:"size"`
		Pointer int    `json:"pointerSize"`
	}
	type sibling struct {
		Name string `json:"rfilename"`
		Size int    `json:"size"`
		Blob string `json:"blobId,omitempty"`
		LFS  *lfs   `json:"lfs,omitempty"`
	}
	var body struct {
		ID       string    `json:"id"`
		SHA      string    `json:"sha"`
		Siblings []sibling `json:"siblings"`
	}
	body.ID, body.SHA = fakeRepo, fakeCommit
	for name, data := range h.files {
		s := sibling{Name: name, Size: len(data)}
		switch {
		case h.noDigest:
		case h.small[name]:
			s.Blob = blob(data)
		default:
			s.Blob = strings.Repeat("0", 40) // of the pointer, not of the content
			s.LFS = &lfs{sha256hex(data), len(data), 134}
		}
		body.Siblings = append(body.Siblings, s)
	}
	b, _ := json.Marshal(&body)
	w.Write(b)
}

// counted is how many payload bytes were sent so far.
func (h *fakeHub) counted() int64 {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.sent
}
