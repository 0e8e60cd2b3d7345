package web_test

import (
	"compress/gzip"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"ninfer/internal/web"
)

func get(method, path string, header ...string) *http.Response {
	r := httptest.NewRequest(method, path, nil)
	for i := 0; i < len(header); i += 2 {
		r.Header.Set(header[i], header[i+1])
	}
	w := httptest.NewRecorder()
	if f := web.File(path); f != nil {
		f.ServeHTTP(w, r)
	} else {
		w.WriteHeader(http.StatusNotFound)
	}
	return w.Result()
}

func text(t *testing.T, r io.Reader) string {
	t.Helper()
	b, err := io.ReadAll(r)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// Every file on disk is served as it is, with its type, and nothing else is.
func TestFiles(t *testing.T) {
	kinds := map[string]string{".html": "text/html; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8", ".svg": "image/svg+xml"}
	err := filepath.WalkDir("page", func(name string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		want, err := os.ReadFile(name)
		if err != nil {
			return err
		}
		url := strings.TrimPrefix(filepath.ToSlash(name), "page")
		if url == "/index.html" {
			url = "/"
		}
		res := get("GET", url)
		if got := text(t, res.Body); res.StatusCode != 200 || got != string(want) || res.Header.Get("Content-Type") != kinds[filepath.Ext(name)] {
			t.Errorf("%s: %d, %s, %d bytes of %d", url, res.StatusCode, res.Header.Get("Content-Type"), len(got), len(want))
		}
		res = get("GET", url, "Accept-Encoding", "br, gzip;q=0.5")
		z, err := gzip.NewReader(res.Body)
		if err != nil {
			t.Fatal(err)
		}
		if text(t, z) != string(want) || res.Header.Get("Content-Encoding") != "gzip" || res.Header.Get("Vary") != "Accept-Encoding" {
			t.Errorf("%s: compressed it is another", url)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		method, path string
		want         int
	}{
		{"GET", "/index.html", 404},
		{"GET", "/assets/", 404},
		{"GET", "/assets/../web.go", 404},
		{"GET", "/page/index.html", 404},
		{"HEAD", "/", 200},
	} {
		if res := get(c.method, c.path); res.StatusCode != c.want {
			t.Errorf("%s %s: %d, want %d", c.method, c.path, res.StatusCode, c.want)
		}
	}
	if res := get("HEAD", "/"); text(t, res.Body) != "" {
		t.Error("HEAD has a body")
	}
}

func TestCaching(t *testing.T) {
	plain, small := get("GET", "/assets/app.js"), get("GET", "/assets/app.js", "Accept-Encoding", "gzip")
	one, two := plain.Header.Get("ETag"), small.Header.Get("ETag")
	if one == "" || one == two || plain.Header.Get("Cache-Control") != "no-cache" {
		t.Errorf("tags %q and %q, %q", one, two, plain.Header.Get("Cache-Control"))
	}
	for _, c := range []struct {
		accept, tag string
		want        int
	}{{"", one, 304}, {"gzip", two, 304}, {"gzip", "W/" + two, 304}, {"gzip", one, 200}, {"gzip;q=0", one, 304}, {"gzip; q=0.000", one, 304}, {"identity", one, 304}, {"", `"x"`, 200}} {
		if res := get("GET", "/assets/app.js", "Accept-Encoding", c.accept, "If-None-Match", c.tag); res.StatusCode != c.want {
			t.Errorf("%+v: %d", c, res.StatusCode)
		}
	}
}

// The page may load nothing that does not come with it, and has nothing inline that the policy would stop.
func TestOffline(t *testing.T) {
	res := get("GET", "/")
	page := text(t, res.Body)
	policy := res.Header.Get("Content-Security-Policy")
	for _, want := range []string{"default-src 'none'", "script-src 'self'", "style-src 'self'", "connect-src 'self'", "frame-ancestors 'none'"} {
		if !strings.Contains(policy, want) {
			t.Errorf("policy %q lacks %s", policy, want)
		}
	}
	if strings.Contains(policy, "unsafe") || strings.Contains(policy, "http") || res.Header.Get("X-Content-Type-Options") != "nosniff" {
		t.Errorf("policy %q", policy)
	}
	if m := regexp.MustCompile(`(?i)<style|\sstyle=|\son[a-z]+=|<script(>| [^>]*>[^<])|javascript:`).FindString(page); m != "" {
		t.Errorf("inline code: %q", m)
	}
	for _, m := range regexp.MustCompile(`(?:src|href)="([^"]+)"`).FindAllStringSubmatch(page, -1) {
		if m[1][0] == '#' {
			continue
		}
		if res := get("GET", "/"+m[1]); res.StatusCode != 200 {
			t.Errorf("%s is not there", m[1])
		}
	}
	paths, _ := filepath.Glob("page/assets/*")
	for _, name := range paths {
		data, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		source := regexp.MustCompile(`http://www\.w3\.org/2000/svg`).ReplaceAllString(string(data), "")
		if m := regexp.MustCompile(`["'(]https?://[a-z0-9]`).FindString(source); m != "" {
			t.Errorf("%s names another server: %s", name, m)
		}
		for _, m := range regexp.MustCompile(`(?m)^(?:import|export) .* from "([^"]+)"`).FindAllStringSubmatch(source, -1) {
			if _, err := os.Stat(filepath.Join("page/assets", m[1])); err != nil {
				t.Error(err)
			}
		}
		if strings.Contains(source, "innerHTML") || strings.Contains(source, "eval(") {
			t.Errorf("%s makes markup or code of text", name)
		}
	}
}
