package server_test

import (
	"bufio"
	"context"
	"encoding/json/v2"
	"fmt"
	"io"
	"log/slog"
	"math"
	"math/rand/v2"
	"net/http"
	"os"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"ninfer/internal/backend"
	"ninfer/internal/backend/cpu"
	"ninfer/internal/engine"
	"ninfer/internal/front"
	"ninfer/internal/model"
	"ninfer/internal/model/modeltest"
	"ninfer/internal/server"
)

// spread counts durations in buckets that grow by 2^(1/16): it takes the same memory however many there are.
type spread struct {
	mu sync.Mutex // above what it guards
	n  [16 * 40]int
}

func (s *spread) add(d time.Duration) {
	at := int(16 * math.Log2(max(1, float64(d)/float64(time.Microsecond))))
	s.mu.Lock()
	defer s.mu.Unlock()
	s.n[min(at, len(s.n)-1)]++
}

// at is the duration that the given part is below, to about 4 %.
func (s *spread) at(part float64) time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	total := 0
	for _, n := range s.n {
		total += n
	}
	seen := 0
	for i, n := range s.n {
		if seen += n; total > 0 && float64(seen) >= part*float64(total) {
			return time.Duration(math.Exp2(float64(i+1)/16) * float64(time.Microsecond))
		}
	}
	return 0
}

func (s *spread) String() string {
	return fmt.Sprintf("p50 %v, p99 %v", s.at(.5).Round(10*time.Microsecond), s.at(.99).Round(10*time.Microsecond))
}

// ask is a request of the soak with the text that it gives alone, or "" where chance decides.
type ask struct {
	body, want string
}

// TestSoak loads a server with more clients than it has lanes and places, for as long as NINFER_SOAK says (see the Makefile): prompts from a
// few to some hundred tokens, greedy and sampled, streams and whole answers, clients that leave at any moment. Every finished greedy
// answer is what the request gives alone without drafts; goroutines, memory and pages do not grow; in the end nothing is left.
func TestSoak(t *testing.T) {
	length, err := time.ParseDuration(os.Getenv("NINFER_SOAK"))
	if err != nil {
		t.Skip("NINFER_SOAK is no duration")
	}
	const lanes, waiting, clients, limit, pages = 8, 200, 212, 512, 40
	m := modeltest.Micro(t)
	open := func(lanes, pages int, adaptive bool) *engine.Batch {
		dev := cpu.NewFast(cpu.Options{States: m.States, Lanes: lanes, Tokens: limit, Verify: 6, Carry: 140, Pages: pages})
		t.Cleanup(func() { // after the server's
			if used, _ := dev.(backend.Paged).Pages(); used != 0 {
				t.Errorf("%d pages held in the end", used)
			}
			dev.Close()
		})
		b, err := engine.NewBatch(model.NewRunner(m, dev, 128), engine.BatchOptions{
			Limits:  engine.Limits{Lanes: lanes, Pages: pages, Pending: waiting + lanes, GapRows: 64, Passes: lanes},
			Context: limit, Adaptive: adaptive,
		})
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	quiet := server.Options{Log: server.NewLog(io.Discard, slog.LevelError)}

	rng := rand.New(rand.NewPCG(1, 77))
	asks := make([]ask, 64)
	{
		s := start(t, setup{worker: open(1, limit/engine.PageTokens, false), front: front.Options{Context: limit}, opt: quiet})
		for i := range asks {
			words := make([]string, 1+rng.IntN(12))
			if i%8 == 0 {
				words = make([]string, 60+rng.IntN(60))
			}
			for j := range words {
				words[j] = []string{"the", "quick", "fox", "says", "7", "maps", "été", "run"}[rng.IntN(8)]
			}
			n := 2 + rng.IntN(50)
			asks[i].body = fmt.Sprintf(`{"messages":[{"role":"user","content":%q}],"enable_thinking":false,"max_tokens":%d,"temperature":%d,"seed":%d`,
				strings.Join(words, " "), n, min(1, i%4), i)
			if i%4 == 0 {
				a := s.chat(t, asks[i].body+"}")
				if a.status != 200 {
					t.Fatalf("alone: %d %s", a.status, a.body)
				}
				asks[i].want = answerOf(t, []byte(a.body))
			}
		}
	}

	b := open(lanes, pages, true)
	s := start(t, setup{worker: b, front: front.Options{Context: limit}, opt: quiet, draft: 4, places: lanes + waiting, timeout: time.Hour})
	http.DefaultClient.CloseIdleConnections()
	baseline := runtime.NumGoroutine()
	transport := &http.Transport{MaxIdleConnsPerHost: clients}
	client := &http.Client{Transport: transport}
	var first, gap, whole spread
	var right, random, left, refused, wrong, tokens atomic.Int64
	until := time.Now().Add(length)
	var running sync.WaitGroup
	for i := range clients {
		rng := rand.New(rand.NewPCG(uint64(i), 78))
		running.Go(func() {
			for time.Now().Before(until) {
				a := asks[rng.IntN(len(asks))]
				stream := rng.IntN(3) > 0
				ctx, cancel := context.WithCancel(context.Background())
				leaves := rng.IntN(10) < 3
				if leaves {
					time.AfterFunc(time.Duration(rng.ExpFloat64()*float64(2*time.Second)), cancel)
				}
				r, _ := http.NewRequestWithContext(ctx, "POST", s.url+"/v1/chat/completions", strings.NewReader(fmt.Sprintf(`%s,"stream":%v}`, a.body, stream)))
				begin := time.Now()
				text, status, err := converse(client, r, stream, func(i int, since time.Duration) {
					tokens.Add(1)
					if i == 0 {
						first.add(time.Since(begin))
					} else {
						gap.add(since)
					}
				})
				cancel()
				switch {
				case err != nil && leaves:
					left.Add(1)
				case err != nil:
					wrong.Add(1)
					t.Errorf("%s: %v", a.body, err)
				case status == 429:
					refused.Add(1)
					time.Sleep(time.Duration(50+rng.IntN(100)) * time.Millisecond)
				case status != 200:
					wrong.Add(1)
					t.Errorf("%s: status %d", a.body, status)
				case a.want == "":
					random.Add(1)
				case text != a.want:
					wrong.Add(1)
					t.Errorf("%s: %q, alone %q", a.body, text, a.want)
				default:
					right.Add(1)
				}
				if err == nil && status == 200 {
					whole.add(time.Since(begin))
				}
			}
		})
	}
	// Samples of what must not grow, from when everything has been in use for a while.
	type sample struct{ routines, heap float64 }
	var samples []sample
	const count = 40
	mostPages := 0
	tick := time.NewTicker(length / count)
	for i := range count {
		<-tick.C
		act := b.Activity()
		mostPages = max(mostPages, act.Reserved)
		if act.Reserved > pages {
			t.Errorf("%d pages reserved of %d", act.Reserved, pages)
		}
		samples = append(samples, sample{float64(runtime.NumGoroutine()), float64(heap())})
		if i%4 == 3 {
			load := s.queue.Load()
			t.Logf("%v: %d running, %d waiting, %d goroutines, heap %.1f MiB, %d of %d pages, %d tokens streamed, %d right, %d left", (time.Duration(i+1) * length / count).Round(time.Second),
				load.Running, load.Waiting, runtime.NumGoroutine(), samples[i].heap/(1<<20), act.Reserved, pages, tokens.Load(), right.Load(), left.Load())
		}
	}
	tick.Stop()
	running.Wait()
	transport.CloseIdleConnections()
	eventually(t, "all places are free", func() bool { return s.queue.Load() == engine.Load{} })
	eventually(t, "goroutines end", func() bool { return runtime.NumGoroutine() <= baseline+2 })
	mean := func(of []sample) (m sample) {
		for _, s := range of {
			m.routines += s.routines / float64(len(of))
			m.heap += s.heap / float64(len(of))
		}
		return m
	}
	early, late := mean(samples[count/4:count/2]), mean(samples[3*count/4:])
	act := b.Activity()
	if act.Reserved != 0 {
		t.Errorf("%d pages reserved in the end", act.Reserved)
	}
	t.Logf("%v: %d greedy answers right, %d sampled ones, %d clients left, %d refused, %d wrong", length, right.Load(), random.Load(), left.Load(), refused.Load(), wrong.Load())
	t.Logf("first token %v; gap %v; whole answer %v", &first, &gap, &whole)
	t.Logf("goroutines %.0f then %.0f, heap %.2f then %.2f MiB, at most %d of %d pages; %d of %d drafts accepted, %d rounds with drafts",
		early.routines, late.routines, early.heap/(1<<20), late.heap/(1<<20), mostPages, pages, act.Accepted, act.Drafted, act.Rounds)
	if late.routines > 1.1*early.routines+20 {
		t.Error("goroutines grow")
	}
	if late.heap > 1.1*early.heap+2<<20 {
		t.Error("memory grows")
	}
	if right.Load() == 0 || left.Load() == 0 || random.Load() == 0 {
		t.Error("the soak is not one")
	}
}

// answerOf is the text of a whole answer.
func answerOf(t *testing.T, body []byte) string {
	text, err := textOf(body)
	if err != nil {
		t.Fatalf("%v: %s", err, body)
	}
	return text
}

func textOf(body []byte) (string, error) {
	var a struct {
		Choices []struct {
			Message, Delta struct {
				Content string `json:"content"`
			}
		} `json:"choices"`
	}
	if err := json.Unmarshal(body, &a, json.MatchCaseInsensitiveNames(true)); err != nil {
		return "", err
	}
	if len(a.Choices) == 0 {
		return "", nil
	}
	return a.Choices[0].Message.Content + a.Choices[0].Delta.Content, nil
}

// converse sends a request and reads the answer; piece is called for every piece of text of a stream, with the time since the one before.
func converse(c *http.Client, r *http.Request, stream bool, piece func(i int, since time.Duration)) (text string, status int, err error) {
	res, err := c.Do(r)
	if err != nil {
		return "", 0, err
	}
	defer res.Body.Close()
	if res.StatusCode != 200 || !stream {
		b, err := io.ReadAll(res.Body)
		if err == nil && res.StatusCode == 200 {
			text, err = textOf(b)
		}
		return text, res.StatusCode, err
	}
	lines := bufio.NewReader(res.Body)
	last, n, done := time.Now(), 0, false
	for {
		line, err := lines.ReadString('\n')
		if err == io.EOF && done {
			return text, 200, nil
		}
		if err != nil {
			return text, 200, err
		}
		data, ok := strings.CutPrefix(strings.TrimSpace(line), "data: ")
		switch {
		case !ok:
		case data == "[DONE]":
			done = true
		default:
			part, err := textOf([]byte(data))
			if err != nil {
				return text, 200, err
			}
			if part != "" {
				piece(n, time.Since(last))
				last = time.Now()
				n++
				text += part
			}
		}
	}
}
