package server_test

import (
	"encoding/json/v2"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"ninfer/internal/backend"
	"ninfer/internal/backend/cpu"
	"ninfer/internal/engine"
	"ninfer/internal/front"
	flash "ninfer/internal/model"
	"ninfer/internal/model/modeltest"
)

// Every member that docs/serving.md, Log-probabilities, lists, to the letter.
func TestLogprobShapes(t *testing.T) {
	tok := tokenizer()
	part := int32(-1) // a token that is a part of a character
	for id := range int32(tok.Count()) {
		if b := tok.Bytes(id); len(b) == 1 && !utf8.Valid(b) {
			part = id
			break
		}
	}
	a, b := tok.Encode("a")[0], tok.Encode("b")[0]
	end, _ := tok.ID("<|im_end|>")
	gen := &script{ids: []int32{a, end}, logprobs: []engine.Logprob{
		{ID: a, Value: -0.5, Top: []engine.Candidate{{ID: a, Value: -0.5}, {ID: part, Value: math.Inf(-1)}}},
		{ID: b, Forced: true},
		{ID: end, Value: math.Inf(-1), Top: []engine.Candidate{{ID: b, Value: -1.25}, {ID: a, Value: -20000}}},
	}}
	s := start(t, setup{gen: gen, draft: 3})
	one := func(id int32, text, value string) string {
		var bytes []string
		for _, c := range tok.Bytes(id) {
			bytes = append(bytes, fmt.Sprint(c))
		}
		return fmt.Sprintf(`{"token":%q,"token_id":%d,"logprob":%s,"raw_logprob":%s,"bytes":[%s]`, text, id, value, value, strings.Join(bytes, ","))
	}
	content := `"content":[` +
		one(a, "a", "-0.5") + `,"top_logprobs":[` + one(a, "a", "-0.5") + `},` + one(part, "\ufffd", "-9999") + `}]},` +
		one(b, "b", "0") + `,"forced":true,"top_logprobs":[]},` +
		one(end, "<|im_end|>", "-9999") + `,"top_logprobs":[` + one(b, "b", "-1.25") + `},` + one(a, "a", "-9999") + `}]}]`
	got := s.chat(t, with(`"logprobs":true,"top_logprobs":2,"enable_thinking":false`))
	if want := `"logprobs":{` + content + `,"refusal":null},"finish_reason":"stop"`; got.status != 200 || !strings.Contains(got.body, want) {
		t.Errorf("%d %s\nwant %s", got.status, got.body, want)
	}
	if r := gen.last(); !r.Logprobs || r.Top != 2 || r.Draft != 0 {
		t.Errorf("the engine was asked for %v, %d with %d drafts", r.Logprobs, r.Top, r.Draft)
	}
	got = send(t, "POST", s.url+"/v1/completions", `{"prompt":"x","logprobs":2}`)
	// What was chosen is always there.
	want := `"logprobs":{"tokens":["a","b","<|im_end|>"],"token_logprobs":[-0.5,0,-9999],"top_logprobs":[{"a":-0.5,"` + "\ufffd" + `":-9999},{"b":0},{"<|im_end|>":-9999,"a":-9999,"b":-1.25}],"text_offset":[0,1,2],` + content + `},"finish_reason":"stop"`
	var order struct {
		Choices []struct {
			Logprobs struct {
				Top []map[string]float64 `json:"top_logprobs"`
			} `json:"logprobs"`
		} `json:"choices"`
	}
	if err := json.Unmarshal([]byte(got.body), &order); err != nil {
		t.Fatal(err)
	}
	sorted, _ := json.Marshal(order.Choices[0].Logprobs.Top, json.Deterministic(true))
	from, to := strings.Index(got.body, `"top_logprobs":[{"`), strings.Index(got.body, `,"text_offset"`)
	if from < 0 || to < from {
		t.Fatalf("%s", got.body)
	}
	if body := got.body[:from] + `"top_logprobs":` + string(sorted) + got.body[to:]; !strings.Contains(body, want) {
		t.Errorf("%s\nwant %s", body, want)
	}
	// Without candidates the request goes on to be drafted for, and the older form has null.
	gen.logprobs = []engine.Logprob{{ID: a, Value: -0.5}}
	got = send(t, "POST", s.url+"/v1/completions", `{"prompt":"x","logprobs":0}`)
	if !strings.Contains(got.body, `"token_logprobs":[-0.5],"top_logprobs":null,"text_offset":[0],"content":[`+one(a, "a", "-0.5")+`,"top_logprobs":[]}]`) {
		t.Errorf("%s", got.body)
	}
	if r := gen.last(); !r.Logprobs || r.Top != 0 || r.Draft != 3 {
		t.Errorf("the engine was asked for %v, %d with %d drafts", r.Logprobs, r.Top, r.Draft)
	}
	// Offsets count characters: those that began before the token.
	gen.logprobs = nil
	offsets, n := []string{}, 0
	for _, id := range tok.Encode("aé😀b") {
		gen.logprobs = append(gen.logprobs, engine.Logprob{ID: id})
		offsets = append(offsets, fmt.Sprint(n))
		for _, c := range tok.Bytes(id) {
			if utf8.RuneStart(c) {
				n++
			}
		}
	}
	got = send(t, "POST", s.url+"/v1/completions", `{"prompt":"x","logprobs":0}`)
	if want := `"text_offset":[` + strings.Join(offsets, ",") + `]`; n != 4 || !strings.Contains(got.body, want) {
		t.Errorf("%s\nwant %s", got.body, want)
	}
	for _, body := range []string{with(`"user":"a"`), with(`"logprobs":false,"top_logprobs":0`)} {
		if got := s.chat(t, body); !strings.Contains(got.body, `"logprobs":null`) || gen.last().Logprobs {
			t.Errorf("not asked for: %s", got.body)
		}
	}
}

// Values through a real engine are those of the logits that the sequence has when it runs as one prompt, greedy or drawn, drafted or not.
func TestLogprobValues(t *testing.T) {
	m := modeltest.Micro(t)
	open := func() (*flash.Runner, func() error) {
		dev := cpu.NewFast(cpu.Options{States: m.States, Lanes: 1, Tokens: 256, Verify: 4, Carry: 260})
		return flash.NewRunner(m, dev, 256), dev.Close
	}
	runner, done := open()
	t.Cleanup(func() { done() }) // after the server's end
	batch, err := engine.NewBatch(runner, engine.BatchOptions{Limits: engine.Limits{Lanes: 1, Pages: 4, Pending: 4}, Context: 256})
	if err != nil {
		t.Fatal(err)
	}
	s := start(t, setup{worker: batch, front: front.Options{Context: 256}, draft: 3})
	closing := tokenizer().Encode(front.EarlyClose)
	for _, c := range []struct {
		members string
		top     int
		budget  int // thinking tokens before the insertion; 0 is none
	}{
		{`"temperature":0,"enable_thinking":false,"max_tokens":12`, 0, 0},
		{`"temperature":0,"enable_thinking":false,"max_tokens":12`, 5, 0},
		{`"temperature":1.3,"seed":5,"presence_penalty":2,"max_tokens":12`, 0, 0},
		{`"temperature":1.3,"seed":5,"presence_penalty":2,"max_tokens":12`, 20, 0},
		{`"temperature":0,"thinking_budget_tokens":3,"max_tokens":60`, 2, 3},
	} {
		body := with(fmt.Sprintf(`%s,"logprobs":true,"top_logprobs":%d`, c.members, c.top))
		var prompt struct {
			IDs []int32 `json:"token_ids"`
		}
		if err := json.Unmarshal([]byte(send(t, "POST", s.url+"/v1/chat/completions/render", body).body), &prompt); err != nil {
			t.Fatal(err)
		}
		type chance struct {
			Token string  `json:"token"`
			ID    int32   `json:"token_id"`
			Value float64 `json:"logprob"`
			Raw   float64 `json:"raw_logprob"`
			Bytes []int   `json:"bytes"`
		}
		var got struct {
			Choices []struct {
				Logprobs struct {
					Content []struct {
						chance
						Forced bool     `json:"forced"`
						Top    []chance `json:"top_logprobs"`
					} `json:"content"`
				} `json:"logprobs"`
			} `json:"choices"`
			Usage struct {
				Completion int `json:"completion_tokens"`
			} `json:"usage"`
			Timings map[string]float64 `json:"timings"`
		}
		a := s.chat(t, body)
		if err := json.Unmarshal([]byte(a.body), &got); err != nil || a.status != 200 {
			t.Fatalf("%d %s: %v", a.status, a.body, err)
		}
		content := got.Choices[0].Logprobs.Content
		if len(content) != got.Usage.Completion || len(content) == 0 {
			t.Fatalf("%d tokens, %d log-probabilities", got.Usage.Completion, len(content))
		}
		if _, drafted := got.Timings["draft_n"]; drafted != (c.top == 0) {
			t.Errorf("top %d: timings %v", c.top, got.Timings)
		}
		all := prompt.IDs
		for _, p := range content {
			all = append(all, p.ID)
		}
		check, done := open()
		res, err := check.Launch(backend.Prefill, &backend.Control{Lanes: []backend.LaneRows{
			{Tokens: all, Positions: flash.Positions(0, len(all)), Want: backend.WantLogitsAll},
		}})
		if err != nil {
			t.Fatal(err)
		}
		forced := 0
		for i, p := range content {
			row := res.Lanes[0].Logits[len(prompt.IDs)+i-1][:tokenizer().Count()]
			sum := 0.0
			for _, v := range row {
				sum += math.Exp(float64(v))
			}
			value := func(id int32) float64 { return float64(row[id]) - math.Log(sum) }
			if inside := c.budget > 0 && i >= c.budget && i < c.budget+len(closing); p.Forced != inside {
				t.Errorf("%s: token %d: forced %v", c.members, i, p.Forced)
			}
			if p.Forced {
				if forced++; p.Value != 0 || p.Raw != 0 || len(p.Top) != 0 || p.ID != closing[i-c.budget] {
					t.Errorf("forced: %+v", p)
				}
				continue
			}
			if len(p.Top) != c.top {
				t.Errorf("%d candidates, want %d", len(p.Top), c.top)
			}
			order := slices.Clone(row)
			slices.Sort(order)
			for j, q := range append(p.Top, p.chance) {
				if math.Abs(q.Value-value(q.ID)) > 1e-5 || q.Raw != q.Value || q.Token != tokenizer().Decode([]int32{q.ID}) || len(q.Bytes) != len(tokenizer().Bytes(q.ID)) {
					t.Errorf("%s: token %d: %+v, want %v", c.members, i, q, value(q.ID))
				}
				if j < c.top && row[q.ID] != order[len(order)-1-j] {
					t.Errorf("%s: token %d: candidate %d is %d", c.members, i, j, q.ID)
				}
			}
		}
		if c.budget > 0 && forced != len(closing) {
			t.Errorf("%d forced tokens, want %d", forced, len(closing))
		}
		done()
	}
}
