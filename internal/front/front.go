package front

import (
	"encoding/json/jsontext"
	"encoding/json/v2"
	"errors"
	"fmt"
	"slices"
	"strings"

	"ninfer/internal/text/chat"
	"ninfer/internal/text/parse"
	"ninfer/internal/text/token"
)

// EarlyClose is the text that closes a think block whose budget is used up (docs/serving.md, Thinking). It is part of the documentation and must
// not change between releases: answers with a budget depend on it.
const EarlyClose = "\n\nThe time to think is over; I answer with what I have.\n" + thinkEnd + "\n\n"

const (
	thinkStart = "<think>"
	thinkEnd   = "</think>"
)

// Options are the artifact's text side and the process's settings. The zero values of the settings are the product's defaults, except
// that MaxTokens has to be given.
type Options struct {
	Tokenizer        *token.Tokenizer
	Template         *chat.Template
	TokenizerConfig  []byte // tokenizer_config.json, for the named special tokens
	GenerationConfig []byte // generation_config.json, for end ids and sampling defaults

	Context int // most tokens of a sequence, prompt and output together

	NoThinking       bool     // requests that do not say get the plain mode
	PreserveThinking bool     // requests that do not say keep the reasoning of closed turns
	Greedy           bool     // whatever a request says
	Sampling         Settings // over the defaults of model and mode, under the request's
	FreshSeeds       bool     // requests without a seed get a random one, else 0
	MaxTokens        int      // output limit of requests that give none, at least 1
	ThinkingBudget   int      // thinking budget of requests that give none; 0 is no limit
}

// Front prepares requests for one model.
type Front struct {
	opt        Options
	generation generation
	named      map[string]string // named special tokens
	efforts    chat.EffortSupport
	open, shut int32   // think markers
	closing    []int32 // EarlyClose
}

// New checks that template and tokenizer fit each other and learns which efforts the template knows.
func New(opt Options) (*Front, error) {
	f := &Front{opt: opt}
	var err error
	if opt.Context < 1 || opt.MaxTokens < 1 || opt.ThinkingBudget < 0 {
		return nil, fmt.Errorf("front: context of %d, output limit of %d, thinking budget of %d", opt.Context, opt.MaxTokens, opt.ThinkingBudget)
	}
	if f.generation, err = readGeneration(opt.GenerationConfig); err != nil {
		return nil, err
	}
	for _, id := range f.generation.stops {
		if int(id) >= opt.Tokenizer.Count() {
			return nil, fmt.Errorf("generation_config.json: eos_token_id %d is not one of the tokenizer's %d ids", id, opt.Tokenizer.Count())
		}
	}
	if f.named, err = namedTokens(opt.TokenizerConfig); err != nil {
		return nil, err
	}
	if err := opt.Sampling.check(); err != nil {
		return nil, err
	}
	var ok1, ok2 bool
	f.open, ok1 = opt.Tokenizer.ID(thinkStart)
	f.shut, ok2 = opt.Tokenizer.ID(thinkEnd)
	if !ok1 || !ok2 {
		return nil, fmt.Errorf("tokenizer: no token for %s and %s, which divide reasoning from answer", thinkStart, thinkEnd)
	}
	f.closing = opt.Tokenizer.Encode(EarlyClose)
	if err := opt.Template.Check(opt.Tokenizer); err != nil {
		return nil, err
	}
	if f.efforts, err = opt.Template.ProbeEfforts(); err != nil {
		return nil, err
	}
	return f, nil
}

// namedTokens reads the special tokens that a template may refer to by name.
func namedTokens(config []byte) (map[string]string, error) {
	named := map[string]string{}
	if len(config) == 0 {
		return named, nil
	}
	var file map[string]any
	if err := json.Unmarshal(config, &file); err != nil {
		return nil, fmt.Errorf("tokenizer_config.json: %w", err)
	}
	for _, name := range []string{"bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"} {
		switch v := file[name].(type) {
		case string:
			named[name] = v
		case map[string]any:
			if s, ok := v["content"].(string); ok {
				named[name] = s
			}
		}
	}
	return named, nil
}

// Context is the most tokens of a sequence.
func (f *Front) Context() int { return f.opt.Context }

// Efforts are the values of reasoning_effort that the template knows, and its default. "none" is not among them and always allowed.
func (f *Front) Efforts() chat.EffortSupport { return f.efforts }

// Defaults are the sampling values of requests that choose none, by mode.
func (f *Front) Defaults(thinking bool) Sampling {
	s := plainDefaults
	if thinking {
		s = f.generation.settings.over(thinkingDefaults)
	}
	s = f.opt.Sampling.over(s)
	if f.opt.Greedy {
		s.Temperature = 0
	}
	return s
}

// The parts of a conversation. Protocols read their messages into these.
type (
	Message  = chat.Message
	Part     = chat.Part // text if its Kind is not set
	ToolCall = chat.ToolCall
	Arg      = chat.Arg
)

// Text is the content of a message that is just text.
func Text(text string) []Part { return chat.TextContent(text) }

// Request is one generation as a client asks for it. Nil and empty are "not given".
type Request struct {
	// Prompt, if not nil, is the prompt as it is, instead of a conversation.
	Prompt []int32
	// Messages is the conversation. A last message of the assistant's is continued.
	Messages []Message
	// NewTurn has a last message of the assistant's followed by another one instead.
	NewTurn bool
	// Tools are shown to the model in the form, order and spelling they have here. Calls of them are looked for in the answer only if
	// ReadCalls is set; without it, without tools or with Raw they stay text. OneCall ends the output behind the first call. MaxToolName is
	// the most characters of a name, 0 is 64.
	Tools       []jsontext.Value
	ReadCalls   bool
	OneCall     bool
	MaxToolName int

	EnableThinking   *bool
	PreserveThinking *bool
	Effort           string // reasoning_effort
	AddVisionID      bool   // template option
	Args             []Arg  // further template variables

	Sampling       Settings
	MaxTokens      *int // nil the default, -1 up to the end of the context, 0 only the prompt
	ThinkingBudget *int // nil the default, -1 no limit
	// FitBudget lowers a budget that the output limit holds, but not with what closes it. Without it that is refused.
	FitBudget bool

	Stop, ReasoningStop []string // not empty ones
	StopIDs             []int32  // beside the model's own
	Raw                 bool     // undivided text, control tokens spelled out
	// Undivided is for prompts that follow no template: all output is the answer, think markers are a part of its text, no budget applies,
	// and the sampling defaults are those of thinking, which are the model's own.
	Undivided bool
}

// Prepared is a request ready for the engine.
type Prepared struct {
	Prompt   []int32 // never empty
	Text     string  // the prompt as text; not to be encoded
	Thinking bool    // the prompt leaves a think block open
	MaxNew   int     // output limit as asked for; the context may end it earlier. 0 is only the prompt
	Sampling Sampling
	StopIDs  []int32
	Budget   int // most thinking tokens, 0 if nothing will be inserted
	Closing  []int32
	Effort   string // as rendered; empty is the template's default

	front *Front
	req   Request
	tools *parse.Tools // nil: calls are not looked for
}

var errContinue = errors.New("a last message of the assistant's is continued, and for that thinking must be off (enable_thinking false or reasoning_effort none)")

// Count is how many tokens the prompt of a request has. It refuses what Prepare refuses, save for the limits of context and output.
func (f *Front) Count(req Request) (int, error) {
	p, _, err := f.prompt(req)
	if err != nil {
		return 0, err
	}
	return len(p.Prompt), nil
}

// Prepare renders and checks a request. Refusals are *Error.
func (f *Front) Prepare(req Request) (*Prepared, error) {
	p, thinking, err := f.prompt(req)
	if err != nil {
		return nil, err
	}
	if err := p.limits(); err != nil {
		return nil, err
	}
	p.StopIDs = slices.Concat(f.generation.stops, req.StopIDs)
	p.Sampling = f.Defaults(thinking || req.Undivided)
	if req.Sampling.Seed == nil && f.opt.Sampling.Seed == nil && f.opt.FreshSeeds {
		p.Sampling.Seed = freshSeed()
	}
	p.Sampling = req.Sampling.over(p.Sampling)
	if f.opt.Greedy {
		p.Sampling.Temperature = 0
	}
	p.req.Prompt, p.req.Messages, p.req.Tools, p.req.Args = nil, nil, nil, nil // large, and not needed for the output
	return p, nil
}

// prompt makes the prompt, and says which mode was asked for.
func (f *Front) prompt(req Request) (p *Prepared, thinking bool, err error) {
	p = &Prepared{front: f, req: req}
	if thinking, err = f.Thinking(req); err != nil {
		return nil, false, err
	}
	if err := req.Sampling.check(); err != nil {
		return nil, false, err
	}
	for _, s := range slices.Concat(req.Stop, req.ReasoningStop) {
		if s == "" {
			return nil, false, refuse(CodeInvalidValue, "stop", "a stop string is empty")
		}
	}
	for _, id := range req.StopIDs {
		if id < 0 || int(id) >= f.opt.Tokenizer.Count() {
			return nil, false, refuse(CodeInvalidValue, "stop_token_ids", "stop id %d is not one of 0 to %d", id, f.opt.Tokenizer.Count()-1)
		}
	}
	if err := p.readTools(); err != nil {
		return nil, false, err
	}
	if req.Prompt != nil {
		err = p.given()
	} else {
		err = p.render(thinking)
	}
	if err != nil {
		return nil, false, err
	}
	if !req.Undivided {
		p.markers()
	}
	return p, thinking, nil
}

// Thinking decides whether a request thinks. An effort is a wish to think unless the request says otherwise; "none" is the wish not to.
func (f *Front) Thinking(req Request) (bool, error) {
	if req.Effort != "" && req.Effort != "none" && !slices.Contains(f.efforts.Accepted, req.Effort) {
		known := "the model's chat template knows no efforts"
		if len(f.efforts.Accepted) > 0 {
			known = "accepted are none, " + strings.Join(f.efforts.Accepted, ", ")
		}
		return false, refuse(CodeEffort, "reasoning_effort", "reasoning_effort %q is not supported: %s", req.Effort, known)
	}
	switch {
	case req.EnableThinking != nil && *req.EnableThinking && req.Effort == "none":
		return false, refuse(CodeTemplateOptions, "enable_thinking", "enable_thinking is true and reasoning_effort is none")
	case req.EnableThinking != nil:
		return *req.EnableThinking, nil
	case req.Effort != "":
		return req.Effort != "none", nil
	}
	return !f.opt.NoThinking, nil
}

// readTools notes what reading calls needs of the declared tools.
func (p *Prepared) readTools() error {
	if !p.req.ReadCalls || p.req.Raw || len(p.req.Tools) == 0 {
		return nil
	}
	declared := make([]parse.Tool, len(p.req.Tools))
	for i, raw := range p.req.Tools {
		var tool struct {
			Function struct {
				Name       string         `json:"name"`
				Parameters jsontext.Value `json:"parameters"`
			} `json:"function"`
		}
		if err := json.Unmarshal(raw, &tool, jsontext.AllowDuplicateNames(true)); err != nil || tool.Function.Name == "" {
			return refuse(CodeInvalidValue, fmt.Sprintf("tools[%d]", i), "tools[%d] must be an object with a function that has a name", i)
		}
		declared[i] = parse.Tool{Name: tool.Function.Name, Parameters: tool.Function.Parameters}
	}
	p.tools = parse.NewTools(declared)
	return nil
}

// render makes the prompt.
func (p *Prepared) render(thinking bool) error {
	f, req := p.front, p.req
	if len(req.Messages) == 0 {
		return refuse(CodeInvalidPrompt, "messages", "messages is empty")
	}
	in := chat.Input{
		Messages: req.Messages, AddGenerationPrompt: true, EnableThinking: &thinking,
		PreserveThinking: f.opt.PreserveThinking, AddVisionID: req.AddVisionID, Tokens: f.named, Args: req.Args,
	}
	if req.PreserveThinking != nil {
		in.PreserveThinking = *req.PreserveThinking
	}
	if req.Effort != "none" {
		in.ReasoningEffort, p.Effort = req.Effort, req.Effort
	}
	if len(req.Tools) > 0 {
		in.Tools = req.Tools
	}
	for _, arg := range req.Args {
		_, token := f.named[arg.Name]
		if token || slices.Contains([]string{"messages", "tools", "add_generation_prompt"}, arg.Name) {
			return refuse(CodeTemplateOptions, "chat_template_kwargs."+arg.Name, "chat_template_kwargs may not set %s", arg.Name)
		}
	}
	if req.Messages[len(req.Messages)-1].Role == "assistant" && !req.NewTurn {
		if thinking {
			return refuse(CodeInvalidPrompt, "messages", "%v", errContinue)
		}
		in.Continue = true
	}
	prompt, err := f.opt.Template.Render(in)
	if err != nil {
		return refuse(CodeInvalidPrompt, "messages", "%v", err)
	}
	p.Text, p.Prompt = prompt.Text(), prompt.Encode(f.opt.Tokenizer)
	if len(p.Prompt) == 0 {
		return refuse(CodeInvalidPrompt, "messages", "the prompt has no tokens")
	}
	return nil
}

// given takes a prompt of ids.
func (p *Prepared) given() error {
	p.Prompt = p.req.Prompt
	if len(p.Prompt) == 0 {
		return refuse(CodeInvalidPrompt, "prompt", "the prompt has no tokens")
	}
	for _, id := range p.Prompt {
		if n := p.front.opt.Tokenizer.Count(); id < 0 || int(id) >= n {
			return refuse(CodeInvalidPrompt, "prompt", "prompt id %d is not one of 0 to %d", id, n-1)
		}
	}
	p.Text = p.front.opt.Tokenizer.Decode(p.Prompt)
	return nil
}

// markers finds whether a think block is open. The prompt says so, not the option: a template may ignore it, and user text cannot hold
// the markers.
func (p *Prepared) markers() {
	for _, id := range slices.Backward(p.Prompt) {
		if id == p.front.open || id == p.front.shut {
			p.Thinking = id == p.front.open
			return
		}
	}
}

// limits resolves output limit and thinking budget.
func (p *Prepared) limits() error {
	f, req := p.front, p.req
	room := f.opt.Context - len(p.Prompt)
	if room < 0 {
		param := "messages"
		if req.Prompt != nil {
			param = "prompt"
		}
		e := refuse(CodeContextLength, param, "the prompt has %d tokens, the context is limited to %d", len(p.Prompt), f.opt.Context)
		e.Tokens, e.Limit = len(p.Prompt), f.opt.Context
		return e
	}
	p.MaxNew = f.opt.MaxTokens
	if req.MaxTokens != nil {
		if *req.MaxTokens < -1 {
			return refuse(CodeInvalidValue, "max_completion_tokens", "the output limit is %d, must be at least 0, or -1 for the rest of the context", *req.MaxTokens)
		}
		p.MaxNew = *req.MaxTokens
	}
	if p.MaxNew == -1 || room == 0 {
		p.MaxNew = room
	}
	budget := f.opt.ThinkingBudget
	if req.ThinkingBudget != nil {
		switch budget = *req.ThinkingBudget; {
		case budget == -1:
			budget = 0
		case budget < 1:
			return refuse(CodeInvalidValue, "thinking_budget_tokens", "thinking_budget_tokens is %d, must be positive, or -1 for none", budget)
		}
	}
	// A limit that is not larger than the budget ends the output before anything is inserted.
	limit := min(p.MaxNew, room)
	if !p.Thinking || budget == 0 || limit <= budget {
		return nil
	}
	need := budget + len(f.closing) + 1
	switch {
	case limit >= need:
	case req.FitBudget:
		if budget -= need - limit; budget < 1 {
			return nil
		}
	default:
		return refuse(CodeBudgetCapacity, "thinking_budget_tokens",
			"the output limit of %d tokens holds the thinking budget of %d, but not the %d tokens that close it and one of an answer: raise the limit to %d or lower the budget",
			limit, budget, len(f.closing), need)
	}
	p.Budget, p.Closing = budget, f.closing
	return nil
}
