package server

import (
	"net/http"
	"unicode/utf8"

	"ninfer/internal/front"
)

// prepare serves a route that does a generation's preparation and no more. Only so many run at a time as there are processors; the others
// wait, and a client that leaves while waiting costs nothing.
func (s *Server) prepare(x *exchange, answer func(data []byte, f *front.Front) (any, error)) {
	reply, err := func() (any, error) {
		m, refused := s.available()
		if refused != nil {
			return nil, refused
		}
		data, release, refused := s.readBody(x)
		if refused != nil {
			return nil, refused
		}
		defer release()
		select {
		case s.preparing <- struct{}{}:
			defer func() { <-s.preparing }()
		case <-x.r.Context().Done():
			return nil, x.r.Context().Err()
		}
		return answer(data, m.Front)
	}()
	if err != nil {
		f := failureOf(err)
		if x.r.Context().Err() == nil {
			s.logRefusal(x, f, err)
		}
		x.fail(f)
		return
	}
	x.reply(http.StatusOK, reply)
}

// rendered is a request as the model would see it.
type rendered struct {
	RequestID string  `json:"request_id"`
	Model     string  `json:"model"`
	TokenIDs  []int32 `json:"token_ids"`
	Prompt    string  `json:"prompt"`
	MaxTokens int     `json:"max_tokens"`
}

func (s *Server) rendered(id string, p *front.Prepared) rendered {
	return rendered{id, s.opt.ModelID, p.Prompt, p.Text, p.MaxNew}
}

// renderChat serves POST /v1/chat/completions/render.
func (s *Server) renderChat(x *exchange) {
	s.prepare(x, func(data []byte, f *front.Front) (any, error) {
		req, refused := parseChat(data, s.opt.ModelID)
		if refused != nil {
			return nil, refused
		}
		p, err := f.Prepare(req.front)
		if err != nil {
			return nil, err
		}
		return s.rendered("chatcmpl-"+randomHex(8), p), nil
	})
}

// renderCompletion serves POST /v1/completions/render, whose answer is a list because other servers take several prompts.
func (s *Server) renderCompletion(x *exchange) {
	s.prepare(x, func(data []byte, f *front.Front) (any, error) {
		req, refused := s.parseCompletion(data)
		if refused != nil {
			return nil, refused
		}
		p, err := f.Prepare(req.front)
		if err != nil {
			return nil, err
		}
		return []rendered{s.rendered("cmpl-"+randomHex(8), p)}, nil
	})
}

// applyTemplate serves POST /apply-template of llama.cpp.
func (s *Server) applyTemplate(x *exchange) {
	s.prepare(x, func(data []byte, f *front.Front) (any, error) {
		req, refused := parseChat(data, s.opt.ModelID)
		if refused != nil {
			return nil, refused
		}
		p, err := f.Prepare(req.front)
		if err != nil {
			return nil, err
		}
		return struct {
			Prompt string `json:"prompt"`
		}{p.Text}, nil
	})
}

// piece is a token with its bytes: a string, or numbers if they are a part of a character.
type piece struct {
	ID    int32 `json:"id"`
	Piece any   `json:"piece"`
}

// count serves a route that says how many tokens a request's prompt has. The limits of context and output do not matter for it: who
// counts wants to know how far above a prompt is.
func (s *Server) count(x *exchange, read func(data []byte) (*front.Request, *failure), answer func(tokens int) any) {
	s.prepare(x, func(data []byte, f *front.Front) (any, error) {
		req, refused := read(data)
		if refused != nil {
			return nil, refused
		}
		n, err := f.Count(*req)
		if err != nil {
			return nil, err
		}
		return answer(n), nil
	})
}

// tokenize serves POST /tokenize with the bodies of vLLM (prompt or messages) and of llama.cpp (content). A prompt's control tokens may be
// spelled out, as in Completions; content is plain unless parse_special says otherwise, as there.
func (s *Server) tokenize(x *exchange) {
	s.prepare(x, func(data []byte, f *front.Front) (any, error) {
		body, refused := parseBody(data)
		if refused != nil {
			return nil, refused
		}
		r := &chatReader{object: body, served: s.opt.ModelID}
		if refused := r.model(); refused != nil {
			return nil, refused
		}
		given := ""
		for _, name := range []string{"prompt", "content", "messages"} {
			if _, ok := r.given(name); !ok {
				continue
			}
			if given != "" {
				return nil, bad("invalid_value", name, "%s and %s exclude each other", given, name)
			}
			given = name
		}
		var options [4]bool // of members that are booleans
		for i, name := range []string{"parse_special", "with_pieces", "return_token_strs", "add_generation_prompt"} {
			v, refused := r.boolean(name)
			if refused != nil {
				return nil, refused
			}
			if name == "add_generation_prompt" && v != nil && !*v {
				return nil, bad("invalid_value", name, "%s can only be true", name)
			}
			options[i] = v != nil && *v
		}
		var ids []int32
		switch given {
		case "":
			return nil, bad("missing_required_parameter", "prompt", "prompt, content or messages is needed")
		case "messages":
			req, refused := parseChat(data, s.opt.ModelID)
			if refused != nil {
				return nil, refused
			}
			p, err := f.Prepare(req.front)
			if err != nil {
				return nil, err
			}
			ids = p.Prompt
		default:
			text, refused := r.str(given)
			if refused != nil {
				return nil, refused
			}
			ids = f.Tokens(*text, given == "content" && !options[0])
		}
		answer := struct {
			Count   int      `json:"count"`
			MaxLen  int      `json:"max_model_len"`
			Tokens  any      `json:"tokens"`
			Strings []string `json:"token_strs,omitzero"`
		}{Count: len(ids), MaxLen: f.Context()}
		if ids == nil {
			ids = []int32{}
		}
		answer.Tokens = ids
		if options[1] {
			pieces := make([]piece, len(ids))
			for i, id := range ids {
				pieces[i] = piece{id, pieceOf(f.TokenBytes(id))}
			}
			answer.Tokens = pieces
		}
		if options[2] {
			answer.Strings = make([]string, len(ids))
			for i := range ids {
				answer.Strings[i], _ = f.TokenText(ids[i : i+1]) // they come from the tokenizer
			}
		}
		return answer, nil
	})
}

func pieceOf(b []byte) any {
	if utf8.Valid(b) {
		return string(b)
	}
	numbers := make([]int, len(b))
	for i, c := range b {
		numbers[i] = int(c)
	}
	return numbers
}

// detokenize serves POST /detokenize. The text stands under both names that clients look for.
func (s *Server) detokenize(x *exchange) {
	s.prepare(x, func(data []byte, f *front.Front) (any, error) {
		body, refused := parseBody(data)
		if refused != nil {
			return nil, refused
		}
		r := &chatReader{object: body, served: s.opt.ModelID}
		if refused := r.model(); refused != nil {
			return nil, refused
		}
		v, ok := r.given("tokens")
		if !ok {
			return nil, bad("missing_required_parameter", "tokens", "tokens is missing")
		}
		ids, refused := tokensAt(v, "tokens")
		if refused != nil {
			return nil, refused
		}
		text, err := f.TokenText(ids)
		if err != nil {
			return nil, err
		}
		return struct {
			Prompt  string `json:"prompt"`
			Content string `json:"content"`
		}{text, text}, nil
	})
}

// props serves GET /props, which llama.cpp's page asks.
func (s *Server) props(x *exchange) {
	m, refused := s.available()
	if refused != nil {
		x.fail(refused)
		return
	}
	type modalities struct {
		Vision bool `json:"vision"`
		Audio  bool `json:"audio"`
	}
	type settings struct {
		Context int `json:"n_ctx"`
	}
	x.reply(http.StatusOK, struct {
		Settings   settings   `json:"default_generation_settings"`
		Slots      int        `json:"total_slots"`
		Alias      string     `json:"model_alias"`
		Path       string     `json:"model_path"`
		Role       string     `json:"role"`
		Modalities modalities `json:"modalities"`
		Template   string     `json:"chat_template"`
	}{settings{m.Front.Context()}, m.Concurrency, s.opt.ModelID, m.File, "model", modalities{}, m.Front.TemplateSource()})
}
