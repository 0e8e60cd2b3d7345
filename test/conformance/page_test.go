package conformance

import (
	"context"
	"encoding/json/v2"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/input"
	"github.com/chromedp/cdproto/log"
	"github.com/chromedp/cdproto/network"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"
)

// actor is a server with the program's page and answers of its own, so that the page meets everything: the last message decides.
type actor struct {
	page http.Handler // the program
	key  string

	mu     sync.Mutex // above what it guards
	bodies []chatBody
	left   int // clients that went away
}

type chatBody struct {
	Model    string  `json:"model"`
	Stream   bool    `json:"stream"`
	Effort   string  `json:"reasoning_effort"`
	Top      float64 `json:"top_p"`
	Tools    []any   `json:"tools"`
	Messages []struct {
		Role       string `json:"role"`
		Content    string `json:"content"`
		Reasoning  string `json:"reasoning_content"`
		ToolCallID string `json:"tool_call_id"`
		ToolCalls  []struct {
			ID       string `json:"id"`
			Function struct {
				Name      string `json:"name"`
				Arguments string `json:"arguments"`
			} `json:"function"`
		} `json:"tool_calls"`
		Page any `json:"page"`
	} `json:"messages"`
}

func (m *actor) last() chatBody {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.bodies[len(m.bodies)-1]
}

func (m *actor) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	refuse := func(status int, message, code string) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(status)
		fmt.Fprintf(w, `{"error":{"message":%q,"type":"invalid_request_error","param":null,"code":%q}}`, message, code)
	}
	if strings.HasPrefix(r.URL.Path, "/v1/") && m.key != "" && r.Header.Get("Authorization") != "Bearer "+m.key {
		refuse(401, "the API key is missing or wrong", "invalid_api_key")
		return
	}
	switch r.URL.Path {
	case "/v1/models":
		w.Header().Set("Content-Type", "application/json")
		io.WriteString(w, `{"object":"list","data":[{"id":"qwen3.8-flash-next","object":"model","created":1,"owned_by":"ninfer","max_model_len":131072}]}`)
	case "/v1/chat/completions":
		var body chatBody
		if err := json.UnmarshalRead(r.Body, &body); err != nil {
			refuse(400, err.Error(), "invalid_json")
			return
		}
		m.mu.Lock()
		m.bodies = append(m.bodies, body)
		m.mu.Unlock()
		m.answer(w, r, body, refuse)
	default:
		m.page.ServeHTTP(w, r)
	}
}

const markdown = "Here is the idea in short: `quickselect` keeps **one half** of the list.\n\n" +
	"## Steps\n\n1. Pick a pivot.\n2. Split the list:\n   - smaller ones\n   - larger ones\n3. Go on in the half that holds place *k*.\n\n" +
	"```python\ndef select(a, k):\n    pivot = a[len(a) // 2]\n    low = [x for x in a if x < pivot]\n    if k < len(low):\n        return select(low, k)\n    return pivot if k == len(low) else select([x for x in a if x > pivot], k - len(low) - 1)\n```\n\n" +
	"| Case | Comparisons |\n|---|---:|\n| mean | 3.4 n |\n| worst | n² ÷ 2 |\n\n> Text like <script>alert(1)</script> stays text, see https://example.org/a_b.\n"

// answer has the shapes of OpenAI's Chat Completions.
func (m *actor) answer(w http.ResponseWriter, r *http.Request, body chatBody, refuse func(int, string, string)) {
	last := body.Messages[len(body.Messages)-1]
	if last.Content == "refuse" {
		refuse(400, `reasoning_effort "high" is not supported: accepted are none, low, medium, xhigh`, "reasoning_effort_not_supported")
		return
	}
	w.Header().Set("Content-Type", "text/event-stream")
	send := func(rest string) {
		fmt.Fprintf(w, "data: {\"id\":\"chatcmpl-1\",\"object\":\"chat.completion.chunk\",\"created\":1,\"model\":\"m\",%s}\n\n", rest)
		w.(http.Flusher).Flush()
	}
	n := 0
	delta := func(d string) {
		n++
		send(fmt.Sprintf(`"choices":[{"index":0,"delta":%s,"logprobs":null,"finish_reason":null}],"usage":null,"timings":{"predicted_n":%d,"predicted_per_second":118.04}`, d, n))
	}
	end := func(reason string) {
		send(fmt.Sprintf(`"choices":[{"index":0,"delta":{},"logprobs":null,"finish_reason":%q}],"usage":null`, reason))
		send(fmt.Sprintf(`"choices":[],"usage":{"prompt_tokens":1090,"completion_tokens":%d,"total_tokens":151,"prompt_tokens_details":{"cached_tokens":64},"completion_tokens_details":{"reasoning_tokens":5}},"timings":{"predicted_n":%d,"predicted_per_second":118.04,"prompt_ms":214.7}`, n, n))
		io.WriteString(w, "data: [DONE]\n\n")
	}
	text := func(name, s string) {
		for len(s) > 0 {
			cut := min(len(s), 7)
			for cut < len(s) && s[cut]&0xC0 == 0x80 {
				cut++
			}
			piece, _ := json.Marshal(s[:cut])
			delta(fmt.Sprintf(`{%q:%s}`, name, piece))
			s = s[cut:]
		}
	}
	delta(`{"role":"assistant","content":""}`)
	io.WriteString(w, ": keep-alive\n\n")
	switch last.Content {
	case "wait":
		for i := range 100 {
			send(fmt.Sprintf(`"choices":[{"index":0,"delta":{},"logprobs":null,"finish_reason":null}],"usage":null,"prompt_progress":{"total":9000,"cache":1000,"processed":%d,"time_ms":1}`, 1000+i*60))
			select {
			case <-r.Context().Done():
				return
			case <-time.After(50 * time.Millisecond):
			}
		}
	case "think":
		for i := range 10_000 {
			text("reasoning_content", fmt.Sprintf("Step %d of the thought. ", i))
			select {
			case <-r.Context().Done():
				m.mu.Lock()
				m.left++
				m.mu.Unlock()
				return
			case <-time.After(10 * time.Millisecond):
			}
		}
	case "endless":
		for i := range 10_000 {
			text("content", fmt.Sprintf("word%d ", i))
			select {
			case <-r.Context().Done():
				m.mu.Lock()
				m.left++
				m.mu.Unlock()
				return
			case <-time.After(10 * time.Millisecond):
			}
		}
	case "break":
		text("content", "The beginning")
		io.WriteString(w, `data: {"error":{"message":"the engine has failed","type":"server_error","param":null,"code":"service_unavailable"}}`+"\n\n")
	case "tool":
		text("reasoning_content", "Two look-ups.")
		text("content", "Checking both.")
		delta(`{"tool_calls":[{"index":0,"id":"call_0a","type":"function","function":{"name":"weather","arguments":"{\"city\":\"Oslo\",\"days\":1.0}"}},{"index":1,"id":"call_0b","type":"function","function":{"name":"weather","arguments":"{\"city\":\"São Paulo\",\"days\":2}"}}]}`)
		end("tool_calls")
	case "limit":
		text("content", "Cut of")
		end("length")
	default:
		if last.Role == "tool" {
			text("content", "It is "+last.Content+".")
		} else {
			text("reasoning_content", "The user asks for an explanation. A short text, then code and a table.")
			text("content", markdown)
		}
		end("stop")
	}
}

// browser is a tab with an empty profile. It fails the test on errors of the page and on requests to other servers.
type browser struct {
	*testing.T
	ctx   context.Context
	model *actor
}

// openActor shows the program's page with an actor behind it.
func openActor(t *testing.T, key string, width, height int64) *browser {
	t.Helper()
	path := chromium(t)
	program, err := url.Parse(serve(t, micro).url)
	if err != nil {
		t.Fatal(err)
	}
	m := &actor{page: httputil.NewSingleHostReverseProxy(program), key: key}
	server := httptest.NewServer(m)
	t.Cleanup(server.Close)
	b := open(t, path, server.URL, width, height)
	b.model = m
	return b
}

// chromium is the browser's path; without one the test is skipped.
func chromium(t *testing.T) string {
	t.Helper()
	for _, name := range []string{"chromium", "chromium-browser", "google-chrome"} {
		if p, err := exec.LookPath(name); err == nil {
			return p
		}
	}
	t.Skip("no chromium on this machine")
	return ""
}

// open shows the page of a server.
func open(t *testing.T, path, origin string, width, height int64) *browser {
	t.Helper()
	options := []chromedp.ExecAllocatorOption{
		chromedp.ExecPath(path), chromedp.UserDataDir(t.TempDir()), chromedp.WindowSize(int(width), int(height)),
		chromedp.Flag("headless", true), chromedp.Flag("no-sandbox", true), chromedp.Flag("disable-gpu", true), chromedp.Flag("disable-quic", true),
		chromedp.Flag("no-first-run", true), chromedp.Flag("disable-background-networking", true), chromedp.Flag("disable-component-update", true), chromedp.Flag("disable-sync", true),
		chromedp.Flag("disable-dev-shm-usage", true),
	}
	ctx, cancel := chromedp.NewExecAllocator(context.Background(), options...)
	t.Cleanup(cancel)
	ctx, cancel = chromedp.NewContext(ctx)
	t.Cleanup(cancel)
	err := chromedp.Listen(ctx, func(ev any) {
		switch ev := ev.(type) {
		case *runtime.EventExceptionThrown:
			t.Errorf("the page threw: %s", ev.ExceptionDetails.Exception.Description)
		case *log.EventEntryAdded:
			// The browser itself reports refusals of the server.
			if ev.Entry.Source != log.EntrySourceNetwork {
				t.Errorf("the browser complains: %s", ev.Entry.Text)
			}
		case *network.EventRequestWillBeSent:
			if u := ev.Request.URL; !strings.HasPrefix(u, origin+"/") && !strings.HasPrefix(u, "data:") && u != "about:blank" {
				t.Errorf("the page asks %s", u)
			}
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel = context.WithTimeout(ctx, 90*time.Second) // not the first one: it owns the browser
	t.Cleanup(cancel)
	b := &browser{T: t, ctx: ctx}
	call(b, log.Enable, cdp.Empty{})
	call(b, network.Enable, network.EnableParams{})
	call(b, runtime.Enable, cdp.Empty{})
	view := []chromedp.EmulateViewportOption{chromedp.EmulatePortrait}
	if width < 600 {
		view = append(view, chromedp.EmulateMobile)
	}
	b.do(chromedp.EmulateViewport(width, height, view...), chromedp.Navigate(origin+"/"))
	return b
}

// call sends a command of the protocol.
func call[P, R any](b *browser, command cdp.Command[P, R], params P) {
	b.Helper()
	if _, err := chromedp.Call(b.ctx, command, params); err != nil {
		b.Fatal(err)
	}
}

func (b *browser) do(actions ...chromedp.Action[chromedp.Void]) {
	b.Helper()
	if err := chromedp.Do(b.ctx, actions...); err != nil {
		b.Fatal(err)
	}
}

// js evaluates an expression.
func js[T any](b *browser, expression string) T {
	b.Helper()
	out, err := chromedp.Run(b.ctx, chromedp.Evaluate[T](expression))
	if err != nil {
		b.Fatalf("%s: %v", expression, err)
	}
	return out
}

// until waits for an expression to be true.
func (b *browser) until(expression string) {
	b.Helper()
	for range 400 {
		if js[bool](b, "Boolean("+expression+")") {
			return
		}
		time.Sleep(25 * time.Millisecond)
	}
	b.shot("failed")
	b.Fatalf("never true: %s\nbox %q\n%s", expression, js[string](b, `document.querySelector("#input").value`), js[string](b, "document.body.innerText"))
}

const idle = `document.documentElement.dataset.state === "idle"`

// ask types into the box and sends it, by keys only.
func (b *browser) ask(text string) {
	b.Helper()
	b.do(chromedp.Focus(chromedp.CSS("#input")), chromedp.KeyEvent(text))
	b.enter()
}

// enter is the key as a keyboard gives it: one event that a page can prevent as a whole.
func (b *browser) enter() {
	b.Helper()
	down := input.DispatchKeyEventParams{Type: input.DispatchKeyEventTypeKeyDown, Key: "Enter", Code: "Enter", Text: "\r", UnmodifiedText: "\r", WindowsVirtualKeyCode: 13, NativeVirtualKeyCode: 13}
	up := down
	up.Type, up.Text, up.UnmodifiedText = input.DispatchKeyEventTypeKeyUp, "", ""
	call(b, input.DispatchKeyEvent, down)
	call(b, input.DispatchKeyEvent, up)
}

func (b *browser) key(key string, modifiers ...chromedp.KeyOption) {
	b.Helper()
	b.do(chromedp.KeyEvent(key, modifiers...))
}

var alt = chromedp.KeyModifiers(kb.ModifierAlt)

// shot keeps a picture if NINFER_PAGE_SHOTS names a folder.
func (b *browser) shot(name string) {
	b.Helper()
	dir := os.Getenv("NINFER_PAGE_SHOTS")
	if dir == "" {
		return
	}
	time.Sleep(300 * time.Millisecond)
	png, err := chromedp.Run(b.ctx, chromedp.CaptureScreenshot())
	if err != nil {
		b.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, name+".png"), png, 0o644); err != nil {
		b.Fatal(err)
	}
}

func (b *browser) theme(name string) {
	b.Helper()
	call(b, emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{Features: []*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: name}}})
}

func TestPageAnswer(t *testing.T) {
	b := openActor(t, "", 1200, 820)
	b.until(`document.querySelector("#model").innerText === "qwen3.8-flash-next"`)
	b.theme("light")
	b.shot("empty-light")
	b.ask("Explain <b>quickselect</b> & co.")
	b.until(`document.querySelector(".turn.assistant table") && ` + idle)
	if got := js[string](b, `document.querySelector(".turn.user .body").textContent`); got != "Explain <b>quickselect</b> & co." {
		t.Errorf("the question shows as %q", got)
	}
	if body := b.model.last(); !body.Stream || body.Model != "qwen3.8-flash-next" || len(body.Messages) != 1 || body.Messages[0].Content != "Explain <b>quickselect</b> & co." {
		t.Errorf("asked %+v", body)
	}
	for expression, want := range map[string]string{
		`document.querySelector(".thought summary").textContent.replace(/[0-9.]+/, "N")`:      "Reasoned for N s",
		`String(document.querySelector(".thought").open)`:                                     "false",
		`document.querySelector(".turn.assistant > .text:not(details *) strong").textContent`: "one half",
		`document.querySelector(".text ol ul li").textContent`:                                "smaller ones",
		`document.querySelector(".text pre code").textContent.split("\n")[1]`:                 "    pivot = a[len(a) // 2]",
		`document.querySelector(".code figcaption span").textContent`:                         "python",
		`document.querySelector(".text td.right").textContent`:                                "3.4 n",
		`document.querySelector("blockquote").innerText`:                                      "Text like <script>alert(1)</script> stays text, see https://example.org/a_b.",
		`document.querySelector("blockquote a").href`:                                         "https://example.org/a_b",
		`document.querySelector(".figures").textContent.replace(/[0-9]+ tokens/, "N tokens")`: "118.0 tok/s · N tokens · prompt 1,090 (64 cached) in 0.2 s",
		`document.querySelector("#list .now").innerText`:                                      "Explain <b>quickselect</b> & co.",
		`document.activeElement.id`:                                                           "input",
	} {
		if got := js[string](b, expression); got != want {
			t.Errorf("%s is %q, want %q", expression, got, want)
		}
	}
	b.shot("answer-light")
	b.key("o", alt)
	b.until(`document.querySelector(".thought").open && document.querySelector(".thought .text").innerText.startsWith("The user asks")`)
	b.theme("dark")
	b.shot("answer-dark")

	// The history survives, and goes back to the server as the API wants it.
	b.do(chromedp.Reload())
	b.until(`document.querySelector("#list .open") && document.querySelector("#model.up")`)
	b.key(kb.ArrowDown, alt)
	b.until(`document.querySelector(".turn.assistant table")`)
	b.ask("limit")
	b.until(`document.querySelectorAll(".turn.assistant").length === 2 && ` + idle)
	if got := js[string](b, `document.querySelectorAll(".note")[1].textContent`); !strings.Contains(got, "limit") {
		t.Errorf("a cut answer says %q", got)
	}
	body := b.model.last()
	if len(body.Messages) != 3 || body.Messages[1].Content != markdown || !strings.HasPrefix(body.Messages[1].Reasoning, "The user asks") || body.Messages[1].Page != nil {
		t.Errorf("history %+v", body.Messages)
	}
}

func TestPageStop(t *testing.T) {
	b := openActor(t, "", 1200, 820)
	b.theme("dark")
	b.ask("endless")
	b.until(`document.querySelector(".turn.assistant > .text p")?.innerText.includes("word9 ")`)
	if !js[bool](b, `!document.querySelector("#stop").hidden && document.querySelector("#send").hidden`) {
		t.Error("no stop button")
	}
	b.until(`/^118\.0 tok\/s · \d+ tokens$/.test(document.querySelector("#rate").textContent)`)
	b.key(kb.Escape)
	b.until(idle)
	for range 100 {
		if b.model.mu.Lock(); b.model.left == 1 {
			b.model.mu.Unlock()
			break
		}
		b.model.mu.Unlock()
		time.Sleep(20 * time.Millisecond)
	}
	if b.model.left != 1 {
		t.Error("the server was not told")
	}
	if got := js[string](b, `document.querySelector(".note").textContent`); got != "Stopped." {
		t.Errorf("note %q", got)
	}
	// What there was stays and goes on being the history.
	b.ask("limit")
	b.until(`document.querySelectorAll(".turn.assistant").length === 2 && ` + idle)
	if m := b.model.last().Messages; len(m) != 3 || m[1].Role != "assistant" || !strings.Contains(m[1].Content, "word9 ") {
		t.Errorf("history %+v", m)
	}
	// An edit takes back what follows.
	b.key(kb.ArrowUp)
	b.until(`document.querySelector("#input").value === "limit" && document.querySelectorAll(".turn.user").length === 1`)
	b.do(chromedp.Evaluate[chromedp.Void](`document.querySelector("#input").value = ""`))
	b.ask("think")
	b.until(`document.querySelector(".thought.busy")`)
	b.key("o", alt)
	b.until(`document.querySelector(".thought[open] .text")?.innerText.includes("Step 9")`)
	b.shot("thinking-dark")
	b.do(chromedp.Click(chromedp.CSS("#stop")))
	b.until(idle)
	// The prompt's progress; stopping before anything came leaves no answer.
	b.key("n", alt)
	b.ask("wait")
	b.until(`document.querySelector(".wait progress")?.value > 500`)
	b.shot("wait-dark")
	b.key(kb.Escape)
	b.until(idle + ` && !document.querySelector(".turn.assistant")`)
	if n := js[int](b, `document.querySelectorAll("#list .open").length`); n != 2 {
		t.Errorf("%d conversations", n)
	}
	b.do(chromedp.Evaluate[chromedp.Void](`document.querySelector("#list .now .icon").click()`))
	b.until(`document.querySelectorAll("#list .open").length === 1 && document.querySelector(".empty")`)
}

func TestPageTools(t *testing.T) {
	b := openActor(t, "", 1200, 820)
	b.theme("light")
	b.key("s", alt)
	b.until(`document.querySelector("#settings").open`)
	tools := `[{"type":"function","function":{"name":"weather"}}]`
	b.do(chromedp.SetValue(chromedp.CSS("#settings [name=tools]"), tools+"x"), chromedp.SetValue(chromedp.CSS("#settings [name=effort]"), "low"), chromedp.SetValue(chromedp.CSS("#settings [name=topP]"), "0.5"), chromedp.SetValue(chromedp.CSS("#settings [name=system]"), "Be brief."))
	b.do(chromedp.Click(chromedp.CSS("#settings .main")))
	b.until(`!document.querySelector("#settings .error").hidden`)
	b.do(chromedp.SetValue(chromedp.CSS("#settings [name=tools]"), tools))
	b.shot("settings-light")
	b.do(chromedp.Click(chromedp.CSS("#settings .main")))
	b.until(`!document.querySelector("#settings").open`)
	b.ask("tool")
	b.until(`document.querySelectorAll(".call").length === 2 && ` + idle)
	if body := b.model.last(); body.Effort != "low" || body.Top != 0.5 || len(body.Tools) != 1 || body.Messages[0].Role != "system" || body.Messages[0].Content != "Be brief." {
		t.Errorf("asked %+v", body)
	}
	if got := js[string](b, `document.querySelector(".call pre").textContent`); got != "{\n  \"city\": \"Oslo\",\n  \"days\": 1.0\n}" {
		t.Errorf("arguments show as %q", got)
	}
	b.until(`document.activeElement === document.querySelector(".call textarea")`)
	b.shot("tools-light")
	b.key("sunny")
	b.enter()
	b.until(`document.querySelectorAll(".call textarea").length === 1 && document.activeElement === document.querySelector(".call textarea")`)
	b.key("rain")
	b.enter()
	b.until(`document.querySelectorAll(".turn.assistant").length === 2 && ` + idle)
	b.shot("tools-done-light")
	m := b.model.last().Messages
	if len(m) != 5 || len(m[2].ToolCalls) != 2 || m[2].ToolCalls[0].Function.Arguments != `{"city":"Oslo","days":1.0}` || m[3].ToolCallID != "call_0a" || m[3].Content != "sunny" || m[4].ToolCallID != "call_0b" || m[4].Content != "rain" {
		t.Errorf("history %+v", m)
	}
	if got := js[string](b, `[...document.querySelectorAll(".turn.assistant > .text")].at(-1).innerText`); got != "It is rain." {
		t.Errorf("answer %q", got)
	}
}

func TestPageErrors(t *testing.T) {
	b := openActor(t, "secret", 1200, 820)
	b.theme("light")
	b.until(`document.querySelector("#model").innerText === "needs a key"`)
	b.ask("hello")
	b.until(`document.querySelector(".turn.error")?.innerText.includes("API key")`)
	b.do(chromedp.Click(chromedp.CSS(".turn.error button")))
	b.until(`document.activeElement.name === "key"`)
	b.key("secret")
	b.enter()
	b.until(`document.querySelector("#model").innerText === "qwen3.8-flash-next"`)
	b.ask("refuse")
	b.until(`document.querySelector(".turn.error")?.innerText.includes("accepted are none, low, medium, xhigh")`)
	b.shot("error-light")
	b.key("n", alt)
	b.ask("break")
	b.until(`document.querySelector(".turn.error")?.innerText.includes("the engine has failed")`)
	if got := js[string](b, `document.querySelector(".turn.assistant > .text").innerText`); got != "The beginning" {
		t.Errorf("what came before the error: %q", got)
	}
}

func TestPagePhone(t *testing.T) {
	b := openActor(t, "", 390, 844)
	b.theme("light")
	b.ask("Explain quickselect.")
	b.until(`document.querySelector(".turn.assistant table") && ` + idle)
	b.shot("phone-light")
	if js[bool](b, `document.documentElement.scrollWidth > innerWidth`) {
		t.Error("the page is wider than the screen")
	}
	b.do(chromedp.Click(chromedp.CSS("#menu")))
	b.until(`getComputedStyle(document.querySelector("#side")).visibility === "visible"`)
	b.theme("dark")
	b.shot("phone-menu-dark")
	b.key(kb.Escape)
	b.until(`document.querySelector("#shade").hidden`)
	b.shot("phone-dark")
	b.do(chromedp.Evaluate[chromedp.Void](`document.querySelector("#open-help").click()`))
	b.until(`document.querySelector("#help").open`)
	b.shot("phone-help-dark")
}

// Themes: the system's, or the one that was chosen.
func TestPageTheme(t *testing.T) {
	b := openActor(t, "", 1200, 820)
	back := `getComputedStyle(document.body).backgroundColor`
	b.theme("light")
	light := js[string](b, back)
	b.theme("dark")
	dark := js[string](b, back)
	if light == dark {
		t.Fatalf("both are %s", light)
	}
	for _, want := range []string{light, dark, dark} { // light, dark, as the system
		b.key("t", alt)
		b.until(fmt.Sprintf("%s === %q", back, want))
	}
	b.key("t", alt)
	b.do(chromedp.Reload())
	b.until(fmt.Sprintf("%s === %q", back, light))
	if got := js[[]string](b, `[...document.querySelectorAll("button:not([hidden])")].filter((e) => !(e.innerText.trim() || e.getAttribute("aria-label"))).map((e) => e.id)`); len(got) > 0 {
		t.Errorf("buttons without a name: %v", slices.Compact(got))
	}
}

// The program itself behind its page: a question, an answer with its figures, and the history of both.
func TestPageProgram(t *testing.T) {
	path := chromium(t)
	s := serve(t, micro, "--max-context", "512", "--default-max-tokens", "40", "--api-key", "k", "--model-id", "tiny")
	b := open(t, path, s.url, 1200, 820)
	b.until(`document.querySelector("#model").innerText === "needs a key"`)
	b.key("s", alt)
	b.until(`document.querySelector("#settings").open`)
	b.do(chromedp.SetValue(chromedp.CSS("#settings [name=key]"), "k"), chromedp.SetValue(chromedp.CSS("#settings [name=seed]"), "1"))
	b.do(chromedp.Click(chromedp.CSS("#settings .main")))
	b.until(`document.querySelector("#model").innerText === "tiny"`)
	for turn := 1; turn <= 2; turn++ {
		b.ask("Hello, how are you?")
		b.until(fmt.Sprintf(`document.querySelectorAll(".figures").length === %d && [...document.querySelectorAll(".figures")].at(-1).textContent.includes("prompt") && `+idle, turn))
		if got := js[bool](b, `/^[0-9.]+ tok\/s · [0-9]+ tokens? · prompt [0-9]+ in [0-9.]+ s$/.test([...document.querySelectorAll(".figures")].at(-1).textContent)`); !got {
			t.Errorf("figures %q", js[string](b, `[...document.querySelectorAll(".figures")].at(-1).textContent`))
		}
	}
	if n := js[int](b, `document.querySelectorAll(".turn.error").length`); n != 0 {
		t.Errorf("%s", js[string](b, `document.querySelector(".turn.error").innerText`))
	}
}
