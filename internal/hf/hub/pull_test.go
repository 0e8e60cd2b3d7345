package hub

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// TestMain also is the child of TestKill.
func TestMain(m *testing.M) {
	if endpoint := os.Getenv("HUB_TEST_CHILD"); endpoint != "" {
		_, err := Pull(context.Background(), Options{Endpoint: endpoint, Repo: fakeRepo, Out: os.Getenv("HUB_TEST_OUT"), Chunk: 1000, Jobs: 2})
		fmt.Println(err)
		os.Exit(0)
	}
	os.Exit(m.Run())
}

func testFiles() map[string][]byte {
	return map[string][]byte{
		"model-00001.safetensors":    content(1, 100_003),
		"sub/dir/model b.ninfer":     content(2, 70_000),
		"config.json":                []byte(`{"architectures":["Qwen4ExpForConditionalGeneration"]}`),
		".gitattributes":             []byte("* -text\n"),
		"empty":                      {},
		"very/" + long(240) + "/one": content(3, 10),
	}
}

func long(n int) string { return strings.Repeat("n", n) }

var testSmall = []string{"config.json", ".gitattributes", "empty"}

func options(h *fakeHub, out string) Options {
	return Options{
		Endpoint: h.URL, Repo: fakeRepo, Out: out, Chunk: 10_000, Jobs: 4, idle: 2 * time.Second,
		pause: func(ctx context.Context, _ time.Duration) error { return ctx.Err() },
	}
}

// checkFiles compares a folder with what the hub has.
func checkFiles(t *testing.T, out string, files map[string][]byte) {
	t.Helper()
	var got []string
	err := filepath.WalkDir(out, func(path string, d os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, _ := filepath.Rel(out, path)
		if d.IsDir() {
			if d.Name() == stateDir {
				left, err := os.ReadDir(path)
				for _, e := range left {
					if e.Name() != "complete.json" && e.Name() != "lock" {
						t.Errorf("%s was left in %s", e.Name(), stateDir)
					}
				}
				if err != nil {
					return err
				}
				return filepath.SkipDir
			}
			return nil
		}
		name := filepath.ToSlash(rel)
		got = append(got, name)
		if b, err := os.ReadFile(path); err != nil || !bytes.Equal(b, files[name]) {
			t.Errorf("%s has %d bytes that are not the hub's %d: %v", name, len(b), len(files[name]), err)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(got) != len(files) {
		t.Errorf("files %q, want %d", got, len(files))
	}
}

func TestPull(t *testing.T) {
	h := newFakeHub(t, testFiles(), testSmall...)
	h.token = "hf_secretToken"
	out := filepath.Join(t.TempDir(), "made", "for it")
	o := options(h, out)
	o.Token = h.token
	var last Progress
	o.Progress = func(p Progress) { last = p }
	s, err := Pull(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	checkFiles(t, out, h.files)
	total := int64(0)
	for _, b := range h.files {
		total += int64(len(b))
	}
	if s.Commit != fakeCommit || s.Files != 6 || s.Bytes != total || s.Fetched != total || s.Present != 0 || len(s.Unhash) != 0 {
		t.Errorf("%+v", s)
	}
	if last.Done != total || last.Total != total || last.Rate() <= 0 {
		t.Errorf("last progress %+v", last)
	}
	if h.counted() != total {
		t.Errorf("%d bytes were sent for %d", h.counted(), total)
	}
	if h.leaked {
		t.Error("the token reached the store")
	}
	if !slices.ContainsFunc(h.requests, func(s string) bool { return strings.HasSuffix(s, "model-00001.safetensors bytes=50000-59999") }) {
		t.Errorf("requests %q hold no range", h.requests)
	}

	// Again: nothing is fetched, and nothing hashed that did not change.
	s, err = Pull(t.Context(), o)
	if err != nil || s.Fetched != 0 || s.Present != 6 || h.counted() != total {
		t.Errorf("%+v, %v", s, err)
	}
	// A file that changed is noticed, and not overwritten, whatever its time says.
	path := filepath.Join(out, "model-00001.safetensors")
	info, _ := os.Stat(path)
	bad := bytes.Clone(h.files["model-00001.safetensors"])
	bad[77] ^= 1
	if err := os.WriteFile(path, bad, 0o666); err != nil {
		t.Fatal(err)
	}
	os.Chtimes(path, time.Time{}, info.ModTime().Add(time.Second))
	if _, err := Pull(t.Context(), o); err == nil || !strings.Contains(err.Error(), "differs") {
		t.Errorf("a changed file: %v", err)
	}
	os.Truncate(path, 500)
	if _, err := Pull(t.Context(), o); err == nil || !strings.Contains(err.Error(), "has 500 bytes") {
		t.Errorf("a short file: %v", err)
	}
	os.Remove(path)
	if _, err = Pull(t.Context(), o); err != nil {
		t.Fatal(err)
	}
	checkFiles(t, out, h.files)

	o.Token = "hf_other"
	if _, err := Pull(t.Context(), o); err == nil || !strings.Contains(err.Error(), "HF_TOKEN") || strings.Contains(err.Error(), "hf_other") {
		t.Errorf("a wrong token: %v", err)
	}
}

func TestPatterns(t *testing.T) {
	h := newFakeHub(t, testFiles(), testSmall...)
	out := t.TempDir()
	o := options(h, out)
	o.Include, o.Exclude = []string{"*.json", "sub/dir/*", "model-*"}, []string{"*.safetensors"}
	if _, err := Pull(t.Context(), o); err != nil {
		t.Fatal(err)
	}
	checkFiles(t, out, map[string][]byte{"config.json": h.files["config.json"], "sub/dir/model b.ninfer": h.files["sub/dir/model b.ninfer"]})
	o.Include = []string{"nothing"}
	if _, err := Pull(t.Context(), o); err == nil || !strings.Contains(err.Error(), "no file") {
		t.Errorf("%v", err)
	}
	o.Include = []string{"[a"}
	if _, err := Pull(t.Context(), o); err == nil || !strings.Contains(err.Error(), "pattern") {
		t.Errorf("%v", err)
	}
}

// hijack ends the connection after sending raw bytes.
func hijack(w http.ResponseWriter, raw string) bool {
	conn, _, err := w.(http.Hijacker).Hijack()
	if err == nil {
		io.WriteString(conn, raw)
		conn.Close()
	}
	return true
}

// TestFaults: every fault passes if it happens now and then, and is named if it stays.
func TestFaults(t *testing.T) {
	const name = "big"
	data := content(9, 95_000)
	other := content(10, 95_000)
	rangeOf := func(r *http.Request) (a, b int) {
		fmt.Sscanf(r.Header.Get("Range"), "bytes=%d-%d", &a, &b)
		return a, min(b+1, len(data))
	}
	partial := func(w http.ResponseWriter, r *http.Request, body []byte, tag string) bool {
		a, b := rangeOf(r)
		w.Header().Set("ETag", tag)
		w.Header().Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", a, b-1, len(body)))
		w.WriteHeader(http.StatusPartialContent)
		w.Write(body[a:b])
		return true
	}
	status := func(code int) func(http.ResponseWriter, *http.Request) bool {
		return func(w http.ResponseWriter, _ *http.Request) bool {
			w.Header().Set("Retry-After", "7")
			w.WriteHeader(code)
			return true
		}
	}
	header := func(name, value string) func(http.ResponseWriter, *http.Request) bool {
		return func(w http.ResponseWriter, r *http.Request) bool {
			a, b := rangeOf(r)
			w.Header().Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", a, b-1, len(data)))
			w.Header().Set(name, value)
			w.WriteHeader(http.StatusPartialContent)
			w.Write(data[a:b])
			return true
		}
	}
	for _, c := range []struct {
		name  string
		fault func(w http.ResponseWriter, r *http.Request) bool
		says  string // when it stays; empty: it succeeds even so
	}{
		{"connection dropped at once", func(w http.ResponseWriter, r *http.Request) bool { return hijack(w, "") }, "gave up"},
		{"dropped inside the header", func(w http.ResponseWriter, r *http.Request) bool { return hijack(w, "HTTP/1.1 206 Par") }, "gave up"},
		{"short body", func(w http.ResponseWriter, r *http.Request) bool {
			a, b := rangeOf(r)
			return hijack(w, fmt.Sprintf("HTTP/1.1 206 Partial Content\r\nContent-Length: %d\r\nContent-Range: bytes %d-%d/%d\r\n\r\n%s",
				b-a, a, b-1, len(data), data[a:(a+b+1)/2]))
		}, ""}, // each answer brings half of the rest
		{"no bytes in the body", func(w http.ResponseWriter, r *http.Request) bool {
			a, b := rangeOf(r)
			return hijack(w, fmt.Sprintf("HTTP/1.1 206 Partial Content\r\nContent-Length: %d\r\nContent-Range: bytes %d-%d/%d\r\n\r\n", b-a, a, b-1, len(data)))
		}, "gave up"},
		{"a shorter range than asked for", func(w http.ResponseWriter, r *http.Request) bool {
			a, b := rangeOf(r)
			b = (a + b + 1) / 2
			w.Header().Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", a, b-1, len(data)))
			w.WriteHeader(http.StatusPartialContent)
			w.Write(data[a:b])
			return true
		}, ""},
		{"another range", header("Content-Range", "bytes 3-12/95000"), "asked for bytes"},
		{"a range beyond what was asked", header("Content-Range", "bytes 0-94999/95000"), "asked for bytes"},
		{"no range header", header("Content-Range", ""), "asked for bytes"},
		{"another size", header("Content-Range", "bytes 0-9999/96000"), "changed"},
		{"status 429", status(429), "status 429"},
		{"status 500", status(500), "status 500"},
		{"status 503", status(503), "status 503"},
		{"status 416", status(416), "shorter"},
		{"signed address ran out", status(403), "status 403"},
		{"status 204", status(204), "status 204"},
		{"range ignored", func(w http.ResponseWriter, r *http.Request) bool {
			w.Write(data)
			return true
		}, ""},
		{"range ignored, short body", func(w http.ResponseWriter, r *http.Request) bool {
			return hijack(w, fmt.Sprintf("HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s", len(data), data[:500]))
		}, "gave up"},
		{"corrupt bytes", func(w http.ResponseWriter, r *http.Request) bool { return partial(w, r, other, `"store-big"`) }, "wrong digest"},
		{"changed ETag", func(w http.ResponseWriter, r *http.Request) bool { return partial(w, r, other, `"new"`) }, "wrong digest"},
		{"silence", func(w http.ResponseWriter, r *http.Request) bool {
			a, b := rangeOf(r)
			w.Header().Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", a, b-1, len(data)))
			w.WriteHeader(http.StatusPartialContent)
			w.(http.Flusher).Flush()
			<-r.Context().Done()
			return true
		}, "nothing came"},
		{"endless redirects", func(w http.ResponseWriter, r *http.Request) bool {
			http.Redirect(w, r, r.URL.String(), http.StatusFound)
			return true
		}, "too many redirects"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			once := c.name != "status 416" && c.name != "another size" && c.name != "endless redirects" && c.name != "status 204"
			if once {
				h := newFakeHub(t, map[string][]byte{name: data})
				h.fault = func(n int, _ string, w http.ResponseWriter, r *http.Request) bool {
					if n%3 != 2 || n > 12 {
						return false
					}
					return c.fault(w, r)
				}
				out := t.TempDir()
				o := options(h, out)
				o.idle = 100 * time.Millisecond
				var waited atomic.Int64
				o.pause = func(ctx context.Context, d time.Duration) error { waited.Add(int64(d)); return ctx.Err() }
				var told atomic.Int64
				o.Waiting = func(failed error, pause time.Duration) {
					told.Add(int64(pause))
					if failed == nil || !strings.Contains(failed.Error(), name) || strings.ContainsAny(failed.Error(), "\r\n") || strings.Contains(failed.Error(), "secret") {
						t.Errorf("told of %v", failed)
					}
				}
				if _, err := Pull(t.Context(), o); err != nil {
					t.Errorf("now and then: %v", err)
				}
				checkFiles(t, out, h.files)
				if told.Load() != waited.Load() {
					t.Errorf("told of %v, waited %v", time.Duration(told.Load()), time.Duration(waited.Load()))
				}
				if c.name == "status 429" && time.Duration(waited.Load()) < 7*time.Second {
					t.Errorf("waited %v, the server asked for 7s", time.Duration(waited.Load()))
				}
			}

			h := newFakeHub(t, map[string][]byte{name: data})
			h.fault = func(_ int, _ string, w http.ResponseWriter, r *http.Request) bool { return c.fault(w, r) }
			out := t.TempDir()
			o := options(h, out)
			o.idle = 300 * time.Millisecond
			_, err := Pull(t.Context(), o)
			if c.says == "" {
				if err != nil {
					t.Errorf("always: %v", err)
				}
				checkFiles(t, out, h.files)
				return
			}
			if err == nil || !strings.Contains(err.Error(), c.says) || !strings.Contains(err.Error(), name) {
				t.Fatalf("always: %v, want %q", err, c.says)
			}
			if strings.Contains(err.Error(), "secret") || strings.ContainsAny(err.Error(), "\r\n") {
				t.Errorf("the error %q shows a signed address or has two lines", err)
			}
			if _, err := os.Stat(filepath.Join(out, name)); err == nil {
				t.Error("the file has its name")
			}
		})
	}
}

// TestChangedContent: a file without digest whose ETag changes on the way is fetched from its beginning.
func TestChangedContent(t *testing.T) {
	first, second := content(1, 50_000), content(2, 50_000)
	h := newFakeHub(t, map[string][]byte{"big": second}, "big") // small: no redirect, its ETag counts
	h.noDigest = true
	h.fault = func(n int, _ string, w http.ResponseWriter, r *http.Request) bool {
		if n > 3 {
			return false
		}
		var a, b int
		fmt.Sscanf(r.Header.Get("Range"), "bytes=%d-%d", &a, &b)
		w.Header().Set("ETag", `"the first"`)
		w.Header().Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", a, b, len(first)))
		w.WriteHeader(http.StatusPartialContent)
		w.Write(first[a : b+1])
		return true
	}
	out := t.TempDir()
	o := options(h, out)
	o.Jobs = 1
	s, err := Pull(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	checkFiles(t, out, h.files)
	if !slices.Equal(s.Unhash, []string{"big"}) {
		t.Errorf("files without digest: %q", s.Unhash)
	}
}

// TestListFaults: the list is asked for again after a fault that may pass.
func TestListFaults(t *testing.T) {
	h := newFakeHub(t, testFiles(), testSmall...)
	var n atomic.Int32
	proxy := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if k := n.Add(1); k <= 2 && strings.HasPrefix(r.URL.Path, "/api") {
			if k == 1 {
				w.WriteHeader(http.StatusBadGateway)
				return
			}
			hijack(w, "HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{\"sha")
			return
		}
		h.serve(w, r)
	})
	h.Config.Handler = proxy
	if _, err := Pull(t.Context(), options(h, t.TempDir())); err != nil {
		t.Error(err)
	}
}

func TestResume(t *testing.T) {
	data := content(5, 200_000)
	h := newFakeHub(t, map[string][]byte{"a/big": data, "small": content(6, 300)})
	out := t.TempDir()
	ctx, cancel := context.WithCancel(t.Context())
	h.fault = func(n int, _ string, w http.ResponseWriter, r *http.Request) bool {
		if n == 12 {
			cancel()
		}
		return false
	}
	if _, err := Pull(ctx, options(h, out)); !errors.Is(err, context.Canceled) {
		t.Fatalf("%v", err)
	}
	if _, err := os.Stat(filepath.Join(out, "a", "big")); err == nil {
		t.Fatal("the file has its name before it is complete")
	}
	h.fault = nil
	before := h.counted()
	o := options(h, out)
	o.Chunk = 7777 // what is there was fetched in other chunks
	s, err := Pull(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	checkFiles(t, out, h.files)
	if sent := h.counted() - before; sent >= 140_000 || sent != s.Fetched {
		t.Errorf("%d bytes were sent again, %d kept", sent, s.Fetched)
	}

	// State that does not fit is not believed.
	for what, damage := range map[string]func(part, state string){
		"part too short":   func(part, _ string) { os.Truncate(part, 10) },
		"part missing":     func(part, _ string) { os.Remove(part) },
		"state broken":     func(_, state string) { os.WriteFile(state, []byte(`{"size":20`), 0o666) },
		"state of another": func(_, state string) { replaceIn(t, state, sha256hex(data), sha256hex(nil)) },
		"wrong chunk list": func(_, state string) { replaceIn(t, state, "[true", "[true,true") },
		"chunk of nothing": func(_, state string) { replaceIn(t, state, `"chunk":10000`, `"chunk":0`) },
		"damaged part":     func(part, _ string) { os.WriteFile(part, make([]byte, len(data)), 0o666) },
	} {
		t.Run(what, func(t *testing.T) {
			out := t.TempDir()
			ctx, cancel := context.WithCancel(t.Context())
			h.mu.Lock()
			h.n = 0
			h.fault = func(n int, _ string, w http.ResponseWriter, r *http.Request) bool {
				if n == 12 {
					cancel()
				}
				return false
			}
			h.mu.Unlock()
			if _, err := Pull(ctx, options(h, out)); !errors.Is(err, context.Canceled) {
				t.Fatal(err)
			}
			part := filepath.Join(out, stateDir, "a%2Fbig.part")
			damage(part, part+".json")
			h.mu.Lock()
			h.fault = nil
			h.mu.Unlock()
			if _, err := Pull(t.Context(), options(h, out)); err != nil {
				t.Error(err)
			}
			checkFiles(t, out, h.files)
		})
	}
}

func replaceIn(t *testing.T, path, old, new string) {
	b, err := os.ReadFile(path)
	if err != nil || !bytes.Contains(b, []byte(old)) {
		t.Fatalf("%s has no %q: %v", path, old, err)
	}
	os.WriteFile(path, bytes.Replace(b, []byte(old), []byte(new), 1), 0o666)
}

// TestKill kills the process at moments of a slow download and goes on.
func TestKill(t *testing.T) {
	h := newFakeHub(t, map[string][]byte{"x": content(7, 60_000), "y": content(8, 5000)})
	h.fault = func(int, string, http.ResponseWriter, *http.Request) bool {
		time.Sleep(3 * time.Millisecond)
		return false
	}
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	out := t.TempDir()
	kills := 0
	for i := range 6 {
		child := exec.Command(exe)
		child.Env = append(os.Environ(), "HUB_TEST_CHILD="+h.URL, "HUB_TEST_OUT="+out)
		if err := child.Start(); err != nil {
			t.Fatal(err)
		}
		start := h.counted()
		for d := time.Now(); h.counted() < start+int64(4000+3000*i) && time.Since(d) < 5*time.Second; {
			time.Sleep(time.Millisecond)
		}
		child.Process.Kill()
		if child.Wait() != nil {
			kills++
		}
		if err := partial(out, h.files); err != nil {
			t.Fatal(err)
		}
	}
	if kills < 2 {
		t.Fatalf("only %d of 6 were killed on the way", kills)
	}
	h.fault = nil
	o := options(h, out)
	if _, err := Pull(t.Context(), o); err != nil {
		t.Fatal(err)
	}
	checkFiles(t, out, h.files)
	if h.counted() > 65_000+6*20_000 {
		t.Errorf("%d bytes were sent for 65000", h.counted())
	}
}

// partial checks that what has its name is complete.
func partial(out string, files map[string][]byte) error {
	for name, want := range files {
		if b, err := os.ReadFile(filepath.Join(out, name)); err == nil && !bytes.Equal(b, want) {
			return fmt.Errorf("%s has its name and %d wrong bytes", name, len(b))
		}
	}
	return nil
}

func TestRefused(t *testing.T) {
	files := testFiles()
	h := newFakeHub(t, files, testSmall...)
	item := func(s string) string { return `{"sha":"` + fakeCommit + `","siblings":[` + s + `]}` }
	for _, c := range []struct {
		name string
		list string
		set  func(o *Options)
		says string
	}{
		{"up", item(`{"rfilename":"../x","size":1}`), nil, "not allowed"},
		{"up inside", item(`{"rfilename":"a/../../x","size":1}`), nil, "not allowed"},
		{"absolute", item(`{"rfilename":"/etc/x","size":1}`), nil, "not allowed"},
		{"backslash", item(`{"rfilename":"..\\x","size":1}`), nil, "not allowed"},
		{"drive", item(`{"rfilename":"C:x","size":1}`), nil, "not allowed"},
		{"empty", item(`{"rfilename":"","size":1}`), nil, "not allowed"},
		{"dot", item(`{"rfilename":"a/./x","size":1}`), nil, "not allowed"},
		{"folder", item(`{"rfilename":"a/","size":1}`), nil, "not allowed"},
		{"control", item(`{"rfilename":"a\u0000b","size":1}`), nil, "not allowed"},
		{"trailing dot", item(`{"rfilename":"a./x","size":1}`), nil, "not allowed"},
		{"ours", item(`{"rfilename":".ninfer-pull/complete.json","size":1}`), nil, "not allowed"},
		{"ours in capitals", item(`{"rfilename":"sub/.NINFER-pull/x","size":1}`), nil, "not allowed"},
		{"unselected too", item(`{"rfilename":"../x","size":1},{"rfilename":"y","size":1}`), func(o *Options) { o.Include = []string{"y"} }, "not allowed"},
		{"twice", item(`{"rfilename":"x","size":1},{"rfilename":"x","size":1}`), nil, "twice"},
		{"file and folder", item(`{"rfilename":"x","size":1},{"rfilename":"x/y","size":1}`), nil, "file and a folder"},
		{"no size", item(`{"rfilename":"x"}`), nil, "no size"},
		{"negative size", item(`{"rfilename":"x","size":-1}`), nil, "size -1"},
		{"sizes overflow", item(`{"rfilename":"x","size":9223372036854775807},{"rfilename":"y","size":1}`), nil, "add up"},
		{"bad digest", item(`{"rfilename":"x","size":1,"lfs":{"sha256":"zz","size":1}}`), nil, "digest"},
		{"no commit", `{"sha":"../..","siblings":[{"rfilename":"x","size":1}]}`, nil, "not a commit"},
		{"no files", item(``), nil, "no file"},
		{"not json", `<html>`, nil, "not a file list"},
		{"no room", "", func(o *Options) { o.space = func(string) (int64, error) { return 1000, nil } }, "room for 1000"},
		{"unknown space", "", func(o *Options) { o.space = func(string) (int64, error) { return 0, errors.New("no idea") } }, "no idea"},
		{"repository", "", func(o *Options) { o.Repo = "../x" }, "OWNER/NAME"},
		{"repository without owner", "", func(o *Options) { o.Repo = "x" }, "OWNER/NAME"},
		{"unknown repository", "", func(o *Options) { o.Repo = "no/body" }, "no such repository"},
		{"revision", "", func(o *Options) { o.Revision = "../main" }, "revision"},
		{"endpoint", "", func(o *Options) { o.Endpoint = "ftp://x" }, "endpoint"},
		{"endpoint with password", "", func(o *Options) { o.Endpoint = "http://a:geheim@localhost" }, "password"},
		{"token over plain http", "", func(o *Options) { o.Endpoint, o.Token = "http://192.0.2.1", "geheim" }, "plain http"},
		{"token with a line break", "", func(o *Options) { o.Token = "geheim\nX: y" }, "line break"},
		{"jobs", "", func(o *Options) { o.Jobs = 1000 }, "1 to 256"},
		{"no folder", "", func(o *Options) { o.Out = "" }, "folder"},
	} {
		t.Run(c.name, func(t *testing.T) {
			h.list = c.list
			out := filepath.Join(t.TempDir(), "out")
			o := options(h, out)
			if c.set != nil {
				c.set(&o)
			}
			before := h.counted()
			_, err := Pull(t.Context(), o)
			if err == nil || !strings.Contains(err.Error(), c.says) || strings.Contains(err.Error(), "geheim") || strings.ContainsAny(err.Error(), "\r\n") {
				t.Errorf("%v, want %q", err, c.says)
			}
			if h.counted() != before {
				t.Error("content was fetched")
			}
		})
	}
}

// TestSymlink: a link in the output folder does not lead out of it.
func TestSymlink(t *testing.T) {
	h := newFakeHub(t, map[string][]byte{"sub/x": []byte("text")})
	out, elsewhere := t.TempDir(), t.TempDir()
	if err := os.Symlink(elsewhere, filepath.Join(out, "sub")); err != nil {
		t.Skip(err)
	}
	if _, err := Pull(t.Context(), options(h, out)); err == nil {
		t.Error("a file was written through a link")
	}
	if left, _ := os.ReadDir(elsewhere); len(left) > 0 {
		t.Errorf("%q was written outside", left)
	}
}

// TestLock: two pulls into one folder do not mix.
func TestLock(t *testing.T) {
	h := newFakeHub(t, testFiles(), testSmall...)
	out := t.TempDir()
	var once sync.Once
	h.fault = func(_ int, _ string, _ http.ResponseWriter, _ *http.Request) bool {
		once.Do(func() {
			if _, err := Pull(t.Context(), options(h, out)); err == nil || !strings.Contains(err.Error(), "another pull") {
				t.Errorf("a second pull: %v", err)
			}
		})
		return false
	}
	if _, err := Pull(t.Context(), options(h, out)); err != nil {
		t.Fatal(err)
	}
}

// TestSecureRedirect: an https hub does not send anybody to plain http.
func TestSecureRedirect(t *testing.T) {
	c := &client{}
	req := func(s string) *http.Request {
		r, _ := http.NewRequest(http.MethodGet, s, nil)
		r.Header.Set("Authorization", "Bearer x")
		return r
	}
	c.base = req("https://hub.test").URL
	if err := c.redirect(req("http://store.test/x"), []*http.Request{req("https://hub.test/y")}); err == nil {
		t.Error("followed from https to http")
	}
	for to, keeps := range map[string]bool{
		"https://hub.test/y": true, "https://cdn.hub.test/y": false, "https://hub.test:444/y": false, "https://store.test/y": false,
	} {
		r := req(to)
		if err := c.redirect(r, []*http.Request{req("https://hub.test/x")}); err != nil || (r.Header.Get("Authorization") != "") != keeps {
			t.Errorf("%s: %v, header %q", to, err, r.Header.Get("Authorization"))
		}
	}
}

func TestRetryAfter(t *testing.T) {
	if d := retryAfter("12"); d != 12*time.Second {
		t.Error(d)
	}
	if d := retryAfter("999999"); d != 5*time.Minute {
		t.Error(d)
	}
	if d := retryAfter(time.Now().Add(20 * time.Second).UTC().Format(http.TimeFormat)); d < 15*time.Second || d > 20*time.Second {
		t.Error(d)
	}
	if d := retryAfter("bald"); d != 0 {
		t.Error(d)
	}
}

// FuzzName: a name that is accepted stays below the folder on every system, and out of our own corner of it.
func FuzzName(f *testing.F) {
	for _, s := range []string{"a/b.json", "../x", "a/../../x", `a\..\x`, "C:x", "/x", "a//b", ".", "con", "a/.ninfer-pull/x", "x.", "ä/😀"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, name string) {
		if checkName(name) != nil {
			return
		}
		root := filepath.FromSlash("/root/of/it")
		rel, err := filepath.Rel(root, filepath.Join(root, name))
		if err != nil || filepath.ToSlash(rel) != name {
			t.Errorf("%q leads to %q: %v", name, rel, err)
		}
		for _, part := range strings.FieldsFunc(name, func(r rune) bool { return r == '/' || r == '\\' || r == ':' }) {
			if part == ".." || strings.EqualFold(part, ".ninfer-pull") || strings.HasSuffix(part, ".") {
				t.Errorf("%q was accepted", name)
			}
		}
	})
}

// answer is a transport that gives one body to every request.
type answer []byte

func (a answer) RoundTrip(r *http.Request) (*http.Response, error) {
	return &http.Response{StatusCode: http.StatusOK, Body: io.NopCloser(bytes.NewReader(a)), Request: r}, nil
}

// FuzzListing feeds what a hub says of a repository: no panic, messages of one line, and what is accepted has sorted names that stay below
// the folder, none of them twice, and sizes that add up.
func FuzzListing(f *testing.F) {
	for _, s := range []string{
		`{"sha":"0123456789","siblings":[{"rfilename":"a","size":1,"blobId":"` + strings.Repeat("a", 40) + `"},{"rfilename":"b/c","lfs":{"sha256":"` + strings.Repeat("B", 64) + `","size":9}}]}`,
		`{"sha":"0123456789","siblings":[{"rfilename":"a","size":1},{"rfilename":"a/b","size":1}]}`, `{"sha":"x\ny"}`,
		`{"sha":"0123456789","siblings":[{"rfilename":"../a","size":1}]}`, `{"sha":"0123456789","siblings":[{"rfilename":"a","size":9223372036854775807},{"rfilename":"b","size":1}]}`,
		`[]`, `{"siblings":[{"rfilename":1}]}`,
	} {
		f.Add([]byte(s))
	}
	c, err := newClient(Options{Repo: "a/b", Endpoint: "http://127.0.0.1:1"})
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		c.http.Transport = answer(body)
		l, err := c.list(t.Context())
		if err != nil {
			if strings.ContainsAny(err.Error(), "\r\n") {
				t.Errorf("message has more than one line: %q", err)
			}
			return
		}
		last, total := "", int64(0)
		for _, f := range l.Files {
			if f.Path <= last || f.Size < 0 || checkName(f.Path) != nil {
				t.Errorf("%+v after %q", f, last)
			}
			if last, total = f.Path, total+f.Size; total < 0 {
				t.Errorf("sizes overflow at %q", f.Path)
			}
		}
	})
}
