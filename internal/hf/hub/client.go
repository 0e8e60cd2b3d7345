package hub

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"path"
	"regexp"
	"strconv"
	"strings"
	"time"
)

// DefaultEndpoint is where repositories are looked for unless the options or the environment say otherwise.
const DefaultEndpoint = "https://huggingface.co"

// EndpointEnv and TokenEnv are the environment variables that commands take the endpoint and the token from.
const (
	EndpointEnv = "HF_ENDPOINT"
	TokenEnv    = "HF_TOKEN"
)

// Options say what to fetch and how. The zero values of all but Repo and Out are useful.
type Options struct {
	Endpoint string // base URL; empty: DefaultEndpoint
	Token    string // access token, or empty
	Repo     string // OWNER/NAME
	Revision string // branch, tag or commit; empty: main
	Out      string // folder, made if needed

	Include []string // patterns (path.Match) of paths or last elements; none: all files
	Exclude []string

	Jobs  int   // requests at a time; 0: 8
	Chunk int64 // bytes of one request; 0: 64 MiB

	// Progress, if set, is called now and then, by one goroutine at a time.
	Progress func(Progress)
	// Waiting, if set, is called before a pause with what failed; any goroutine may call it.
	Waiting func(failed error, pause time.Duration)

	// For tests: how long to wait between attempts, and how long a connection may be silent.
	pause func(ctx context.Context, d time.Duration) error
	idle  time.Duration
	space func(dir string) (int64, error)
}

// Progress is how far a pull has come, in bytes of all selected files.
type Progress struct {
	Done, Total int64 // Done includes what was there at the start
	Fetched     int64 // in this run
	Elapsed     time.Duration
}

// Rate is the mean speed of this run in bytes per second.
func (p Progress) Rate() float64 { return float64(p.Fetched) / max(p.Elapsed.Seconds(), 1e-9) }

type client struct {
	o    Options
	base *url.URL
	http *http.Client
}

// UsageError is an option that no hub could serve.
type UsageError struct{ msg string }

func (e *UsageError) Error() string { return e.msg }

func usagef(format string, args ...any) error { return &UsageError{fmt.Sprintf(format, args...)} }

var repoName = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*$`)

func newClient(o Options) (*client, error) {
	o.Endpoint, o.Revision = cmp.Or(o.Endpoint, DefaultEndpoint), cmp.Or(o.Revision, "main")
	o.Jobs, o.Chunk = cmp.Or(o.Jobs, 8), cmp.Or(o.Chunk, 64<<20)
	o.idle = cmp.Or(o.idle, time.Minute)
	if o.pause == nil {
		o.pause = sleep
	}
	if o.space == nil {
		o.space = freeSpace
	}
	base, err := url.Parse(strings.TrimRight(o.Endpoint, "/"))
	switch {
	case err != nil || base.Host == "" || base.Scheme != "https" && base.Scheme != "http" || base.RawQuery != "" || base.Fragment != "":
		return nil, usagef("hub: endpoint %q is not an http or https address", redact(o.Endpoint))
	case base.User != nil:
		return nil, usagef("hub: an endpoint holds no user name or password")
	case !repoName.MatchString(o.Repo) || strings.Contains(o.Repo, ".."):
		return nil, usagef("hub: repository %q is not of the form OWNER/NAME", o.Repo)
	case strings.Contains(o.Revision, "..") || strings.ContainsAny(o.Revision, "\\?#%\x00 \n\r\t"):
		return nil, usagef("hub: revision %q is not a branch, tag or commit", o.Revision)
	case o.Jobs < 1 || o.Jobs > 256:
		return nil, usagef("hub: %d requests at a time, need 1 to 256", o.Jobs)
	case o.Chunk < 1:
		return nil, usagef("hub: chunks of %d bytes", o.Chunk)
	case strings.ContainsAny(o.Token, "\r\n\x00"):
		return nil, usagef("hub: the token has a line break in it")
	case o.Token != "" && base.Scheme == "http" && !loopback(base.Hostname()):
		return nil, usagef("hub: a token is not sent to a plain http endpoint; use https or unset %s", TokenEnv)
	}
	for _, p := range append(append([]string{}, o.Include...), o.Exclude...) {
		if _, err := path.Match(p, ""); err != nil {
			return nil, usagef("hub: pattern %q: %v", p, err)
		}
	}
	transport := http.DefaultTransport.(*http.Transport).Clone()
	transport.MaxIdleConnsPerHost = o.Jobs
	transport.ResponseHeaderTimeout = o.idle
	transport.DisableCompression = true // ranges count stored bytes
	// One connection for each request: over a single one, all share one window.
	transport.Protocols = new(http.Protocols)
	transport.Protocols.SetHTTP1(true)
	c := &client{o: o, base: base}
	c.http = &http.Client{Transport: transport, CheckRedirect: c.redirect}
	return c, nil
}

func (c *client) close() { c.http.CloseIdleConnections() }

func loopback(host string) bool {
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}

// redact cuts what may hold secrets off an address.
func redact(s string) string {
	s, _, _ = strings.Cut(s, "?")
	if i := strings.LastIndexByte(s, '@'); i >= 0 {
		s = s[i+1:]
	}
	return s
}

// redirect follows to where files are stored, but takes the token to no other host and from no secure connection to a plain one.
func (c *client) redirect(next *http.Request, via []*http.Request) error {
	if len(via) >= 10 {
		return refused("too many redirects")
	}
	if via[0].URL.Scheme == "https" && next.URL.Scheme != "https" {
		return refused("a redirect from https to " + next.URL.Scheme)
	}
	if next.URL.Scheme != c.base.Scheme || next.URL.Host != c.base.Host {
		next.Header.Del("Authorization")
	}
	next.Header.Del("Referer") // it may hold a signed address
	return nil
}

// refused is a redirect that is not followed.
type refused string

func (r refused) Error() string { return string(r) }

func cleanTag(s string) string { return strings.Trim(strings.TrimPrefix(s, "W/"), `"`) }

// tag is the identity of a response's content: what the hub said before it redirected, or else what the server that sent it says.
func tag(r *http.Response) string {
	for hop := r; hop != nil; hop = hop.Request.Response {
		if t := cleanTag(hop.Header.Get("X-Linked-Etag")); t != "" {
			return t
		}
	}
	return cleanTag(r.Header.Get("ETag"))
}

// get asks for an address below the endpoint. A failure to get a response is transient.
func (c *client) get(ctx context.Context, at string, header http.Header) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, c.base.String()+at, nil)
	if err != nil {
		return nil, errors.New("bad address")
	}
	for k, v := range header {
		req.Header[k] = v
	}
	req.Header.Set("User-Agent", "ninfer")
	req.Header.Set("Accept-Encoding", "identity")
	if c.o.Token != "" {
		req.Header.Set("Authorization", "Bearer "+c.o.Token)
	}
	r, err := c.http.Do(req)
	if err != nil {
		var u *url.Error // it has the address, which may be a signed one
		if errors.As(err, &u) {
			err = u.Err
		}
		var no refused
		if errors.As(err, &no) {
			return nil, err
		}
		return nil, transient{err}
	}
	return r, nil
}

// transient is an error that may pass.
type transient struct{ error }

func (t transient) Unwrap() error { return t.error }

// throttled is a transient error with the server's wish when to come back.
type throttled struct {
	transient
	after time.Duration
}

// statusError turns a status that is not a success into an error, transient if it may pass.
func statusError(r *http.Response) error {
	if r.StatusCode/100 == 2 {
		return nil
	}
	io.CopyN(io.Discard, r.Body, 4096)
	err := fmt.Errorf("status %d", r.StatusCode)
	switch s := r.StatusCode; {
	case s == http.StatusUnauthorized, s == http.StatusForbidden && r.Request.Response == nil:
		return fmt.Errorf("%w: access denied; a token in %s may be needed, or the repository's terms must be accepted", err, TokenEnv)
	case s == http.StatusNotFound:
		return fmt.Errorf("%w: no such repository, revision or file, or it is private", err)
	case s == http.StatusTooManyRequests, s == http.StatusServiceUnavailable:
		return throttled{transient{err}, retryAfter(r.Header.Get("Retry-After"))}
	case s >= 500, s == http.StatusRequestTimeout, s == http.StatusForbidden: // the last one: a signed address that ran out
		return transient{err}
	}
	return err
}

func retryAfter(s string) time.Duration {
	if n, err := strconv.Atoi(s); err == nil && n > 0 {
		return min(time.Duration(n)*time.Second, 5*time.Minute)
	}
	if t, err := http.ParseTime(s); err == nil {
		return min(max(time.Until(t), 0), 5*time.Minute)
	}
	return 0
}

// attempts is how often something is tried without progress.
const attempts = 8

// retry calls f until it reports the end or fails for good. Transient errors are tried again after growing pauses; the count
// starts anew when f reports progress by returning true beside an error.
func (c *client) retry(ctx context.Context, what string, f func() (progress bool, err error)) error {
	for n := 1; ; n++ {
		progress, err := f()
		if err == nil {
			return nil
		}
		if ctx.Err() != nil {
			return fmt.Errorf("hub: %s: %w", what, ctx.Err())
		}
		var t transient
		var th throttled
		if !errors.As(err, &th) && !errors.As(err, &t) {
			return fmt.Errorf("hub: %s: %w", what, err)
		}
		if progress {
			n = 1
		}
		if n >= attempts {
			return fmt.Errorf("hub: %s: gave up after %d attempts: %w", what, attempts, err)
		}
		d := time.Second << (n - 1) / 2
		d = min(d, 30*time.Second)
		d += rand.N(d / 2)
		d = max(d, th.after)
		if c.o.Waiting != nil {
			c.o.Waiting(fmt.Errorf("hub: %s: %w", what, err), d)
		}
		if err := c.o.pause(ctx, d); err != nil {
			return fmt.Errorf("hub: %s: %w", what, err)
		}
	}
}

func sleep(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
