package server

import (
	"encoding/json/jsontext"
	"regexp"
	"slices"
	"strings"

	"ninfer/internal/front"
)

// codeConstrained refuses what would need the output to be held to a form.
const codeConstrained = "constrained_decoding_not_supported"

// chatRequest is a body of Chat Completions, read and checked.
type chatRequest struct {
	front        front.Request
	stream       bool
	includeUsage bool
	progress     bool // return_progress
	tokenTimings bool // timings_per_token
	logprobs     logprobWish
}

// chatReader reads the members of a body one after another; the first failure stays.
type chatReader struct {
	object
	served string
	out    chatRequest
}

// parseChat reads a body (docs/serving.md, Chat completions). What cannot be provided is refused, what has no meaning here is ignored.
func parseChat(data []byte, served string) (*chatRequest, *failure) {
	body, err := parseBody(data)
	if err != nil {
		return nil, err
	}
	r := &chatReader{object: body, served: served}
	for _, read := range []func() *failure{
		r.model, r.refused, r.logprobs, r.streaming, r.limits, r.sampling, r.stops, r.choices, r.format, r.tools, r.template, r.cacheHints, r.messages,
	} {
		if err := read(); err != nil {
			return nil, err
		}
	}
	return &r.out, nil
}

func (r *chatReader) model() *failure {
	id, err := r.str("model")
	if err == nil && id != nil && *id != r.served {
		err = noModel(*id, r.served)
	}
	return err
}

// refused turns away what would change the result and cannot be done.
func (r *chatReader) refused() *failure {
	for name, code := range map[string]string{
		"web_search_options": "web_search_not_supported", "moderation": "moderation_not_supported",
		"grammar": codeConstrained, "structured_outputs": codeConstrained,
		"logprob_candidates": "logprobs_not_supported", "logprob_prompt_positions": "logprobs_not_supported",
	} {
		if _, ok := r.given(name); ok {
			return bad(code, name, "%s is not supported", name)
		}
	}
	for name := range r.members {
		if _, ok := r.given(name); ok && strings.HasPrefix(name, "guided_") {
			return bad(codeConstrained, name, "%s is not supported", name)
		}
	}
	if v, err := r.str("verbosity"); err != nil {
		return err
	} else if v != nil && *v != "medium" {
		return bad("verbosity_not_supported", "verbosity", "verbosity can only be medium")
	}
	if v, err := r.boolean("store"); err != nil {
		return err
	} else if v != nil && *v {
		return bad("store_not_supported", "store", "completions are not stored; store can only be false")
	}
	if v, err := r.number("repetition_penalty"); err != nil {
		return err
	} else if v != nil && *v != 1 {
		return bad("repetition_penalty_not_supported", "repetition_penalty", "repetition_penalty can only be 1; presence_penalty and frequency_penalty are there")
	}
	if bias, ok, err := r.sub("logit_bias"); err != nil {
		return err
	} else if ok {
		for token := range bias.members {
			if v, err := bias.number(token); err != nil {
				return err
			} else if v != nil && *v != 0 {
				return bad("logit_bias_not_supported", "logit_bias", "logit_bias is not supported; all its values must be 0")
			}
		}
	}
	if modes, ok, err := r.list("modalities"); err != nil {
		return err
	} else if ok {
		for _, mode := range modes {
			if v, err := stringAt(mode, "modalities"); err != nil {
				return err
			} else if *v != "text" {
				return bad("modality_not_supported", "modalities", "the modality %q is not supported; the model writes text", *v)
			}
		}
	}
	if functions, ok, err := r.list("functions"); err != nil {
		return err
	} else if ok && len(functions) > 0 {
		return bad("legacy_tools_not_supported", "functions", "functions is not supported; use tools")
	}
	if v, ok := r.given("function_call"); ok && string(v) != `"none"` && string(v) != `"auto"` {
		return bad("legacy_tools_not_supported", "function_call", "function_call is not supported; use tool_choice")
	}
	if options, ok, err := r.sub("mm_processor_kwargs"); err != nil {
		return err
	} else if ok {
		for name := range options.members {
			if _, ok := options.given(name); ok {
				return bad("modality_not_supported", options.at(name), "%s is not supported", options.at(name))
			}
		}
	}
	return nil
}

func (r *chatReader) logprobs() *failure {
	want, err := r.boolean("logprobs")
	if err != nil {
		return err
	}
	top, err := r.integer("top_logprobs")
	switch {
	case err != nil:
		return err
	case top != nil && (*top < 0 || *top > 20):
		return bad("invalid_value", "top_logprobs", "top_logprobs is %d, must be 0 to 20", *top)
	case want != nil && *want:
		if top == nil {
			return r.wantLogprobs(0)
		}
		return r.wantLogprobs(*top)
	case top != nil && *top > 0:
		return bad("invalid_value", "top_logprobs", "top_logprobs needs logprobs true")
	}
	return nil
}

func (r *chatReader) streaming() *failure {
	for name, dst := range map[string]*bool{"stream": &r.out.stream, "return_progress": &r.out.progress, "timings_per_token": &r.out.tokenTimings} {
		v, err := r.boolean(name)
		if err != nil {
			return err
		}
		*dst = v != nil && *v
	}
	options, ok, err := r.sub("stream_options")
	if err != nil || !ok {
		return err
	}
	if !r.out.stream {
		return bad("invalid_value", "stream_options", "stream_options needs stream true")
	}
	usage, err := options.boolean("include_usage")
	r.out.includeUsage = usage != nil && *usage
	return err
}

func (r *chatReader) limits() *failure {
	tokens := func(name string) (*int, *failure) {
		v, err := r.integer(name)
		if err != nil || v == nil {
			return nil, err
		}
		if *v < -1 || *v > 1<<31-1 {
			return nil, bad("invalid_value", name, "%s is %d, must be at least 0, or -1", name, *v)
		}
		n := int(*v)
		return &n, nil
	}
	// The first that is given counts; the other must still make sense.
	most, err := tokens("max_completion_tokens")
	if err != nil {
		return err
	}
	older, err := tokens("max_tokens")
	if err != nil {
		return err
	}
	if r.out.front.MaxTokens = most; most == nil {
		r.out.front.MaxTokens = older
	}
	r.out.front.ThinkingBudget, err = tokens("thinking_budget_tokens")
	return err
}

func (r *chatReader) sampling() *failure {
	s := &r.out.front.Sampling
	for _, f := range []struct {
		name string
		dst  **float64
	}{
		{"temperature", &s.Temperature}, {"top_p", &s.TopP}, {"min_p", &s.MinP}, {"presence_penalty", &s.Presence}, {"frequency_penalty", &s.Frequency},
	} {
		var err *failure
		if *f.dst, err = r.number(f.name); err != nil {
			return err
		}
	}
	k, err := r.integer("top_k")
	if err != nil {
		return err
	}
	if k != nil {
		n := int(min(max(*k, -2), 1<<30))
		s.TopK = &n
	}
	seed, err := r.integer("seed")
	if seed != nil {
		n := uint64(*seed)
		s.Seed = &n
	}
	return err
}

func (r *chatReader) stops() *failure {
	v, ok := r.given("stop")
	if !ok {
		return nil
	}
	items := []jsontext.Value{v}
	if v.Kind() == '[' {
		items, _, _ = r.list("stop")
	} else if v.Kind() != '"' {
		return wrongType("stop", "a string or an array of strings")
	}
	if len(items) > 4 {
		return bad("invalid_value", "stop", "stop has %d strings, at most 4 are allowed", len(items))
	}
	var stops []string
	for _, item := range items {
		s, err := stringAt(item, "stop")
		if err != nil {
			return err
		}
		if *s == "" {
			return bad("invalid_value", "stop", "a stop string is empty")
		}
		stops = append(stops, *s)
	}
	r.out.front.Stop, r.out.front.ReasoningStop = stops, stops
	return nil
}

func (r *chatReader) choices() *failure {
	n, err := r.integer("n")
	if err == nil && n != nil && *n != 1 {
		err = bad("n_not_supported", "n", "n is %d, only 1 is supported", *n)
	}
	return err
}

// format refuses every form of answer but text: constraints are not there yet, and a promise of JSON must not be dropped.
func (r *chatReader) format() *failure {
	format, ok, err := r.sub("response_format")
	if err != nil || !ok {
		return err
	}
	kind, err := format.str("type")
	switch {
	case err != nil:
		return err
	case kind == nil:
		return bad("invalid_value", "response_format.type", "response_format.type is missing")
	case *kind == "text":
		return nil
	case *kind == "json_object", *kind == "json_schema":
		return bad(codeConstrained, "response_format", "response_format %s is not supported yet; only text is", *kind)
	}
	return bad("invalid_value", "response_format.type", "response_format.type %q is not one of text, json_object, json_schema", *kind)
}

var toolName = regexp.MustCompile(`^[A-Za-z0-9_-]{1,64}$`)

// tools reads declarations (docs/serving.md, Tools). Calls are read out of the answer; what would need the output to be constrained is refused.
func (r *chatReader) tools() *failure {
	parallel, err := r.boolean("parallel_tool_calls")
	if err != nil {
		return err
	}
	constraints, err := r.toolConstraints()
	if err != nil {
		return err
	}
	tools, _, err := r.list("tools")
	if err != nil {
		return err
	}
	var names []string
	strict := ""
	for i, raw := range tools {
		name, isStrict, err := tool(raw, index("tools", i))
		if err != nil {
			return err
		}
		if isStrict && strict == "" {
			strict = index("tools", i) + ".function.strict"
		}
		names = append(names, name)
	}
	r.out.front.Tools = tools
	r.out.front.OneCall = parallel != nil && !*parallel
	if r.out.front.ReadCalls, err = r.toolChoice(names); err != nil || !r.out.front.ReadCalls {
		return err
	}
	return refuseConstraints(strict, constraints)
}

// tool checks one declaration.
func tool(raw jsontext.Value, path string) (name string, strict bool, err *failure) {
	tool, err := objectAt(raw, path)
	if err != nil {
		return "", false, err
	}
	kind, err := tool.str("type")
	if err != nil {
		return "", false, err
	}
	if kind == nil || *kind != "function" {
		return "", false, bad("tool_type_not_supported", tool.at("type"), "%s must be function", tool.at("type"))
	}
	function, ok, err := tool.sub("function")
	if err != nil {
		return "", false, err
	}
	if !ok {
		return "", false, wrongType(tool.at("function"), "an object")
	}
	given, err := function.str("name")
	if err != nil {
		return "", false, err
	}
	if given == nil || !toolName.MatchString(*given) {
		return "", false, bad("invalid_value", function.at("name"), "%s must be 1 to 64 letters, digits, _ or -", function.at("name"))
	}
	if _, _, err := function.sub("parameters"); err != nil {
		return "", false, err
	}
	forced, err := function.boolean("strict")
	return *given, forced != nil && *forced, err
}

// toolChoice says whether the model may make calls of the tools with these names. To be made to is refused.
func (r *chatReader) toolChoice(names []string) (bool, *failure) {
	v, ok := r.given("tool_choice")
	if !ok {
		return len(names) > 0, nil
	}
	switch v.Kind() {
	case '"':
		choice, err := stringAt(v, "tool_choice")
		switch {
		case err != nil:
			return false, err
		case *choice == "none":
			return false, nil
		case *choice == "auto":
			return len(names) > 0, nil
		case *choice != "required":
			return false, bad("invalid_value", "tool_choice", "tool_choice %q is not one of none, auto, required", *choice)
		case len(names) == 0:
			return false, bad("invalid_value", "tool_choice", "tool_choice is required, but there are no tools")
		}
		return false, bad(codeConstrained, "tool_choice", "tool_choice required is not supported yet; only none and auto are")
	case '{':
	default:
		return false, wrongType("tool_choice", "a string or an object")
	}
	choice, err := objectAt(v, "tool_choice")
	if err != nil {
		return false, err
	}
	kind, err := choice.str("type")
	if err != nil {
		return false, err
	}
	if kind == nil || *kind != "function" && *kind != "allowed_tools" {
		return false, bad("invalid_value", "tool_choice.type", "tool_choice.type must be function or allowed_tools")
	}
	if len(names) == 0 {
		return false, bad("invalid_value", "tool_choice", "tool_choice names a tool, but there are no tools")
	}
	if *kind == "function" {
		function, ok, err := choice.sub("function")
		if err != nil {
			return false, err
		}
		if !ok {
			return false, wrongType("tool_choice.function", "an object")
		}
		name, err := function.str("name")
		if err != nil {
			return false, err
		}
		if name == nil || !slices.Contains(names, *name) {
			return false, bad("invalid_value", "tool_choice.function.name", "tool_choice.function.name is not the name of a declared tool")
		}
	}
	return false, bad(codeConstrained, "tool_choice", "tool_choice of certain tools is not supported yet; only none and auto are")
}

// template reads what goes to the template. An option may stand at the top or in chat_template_kwargs; in both it must be the same.
func (r *chatReader) template() *failure {
	kwargs, _, err := r.sub("chat_template_kwargs")
	if err != nil {
		return err
	}
	for name, dst := range map[string]**bool{"enable_thinking": &r.out.front.EnableThinking, "preserve_thinking": &r.out.front.PreserveThinking} {
		top, err := r.boolean(name)
		if err != nil {
			return err
		}
		inner, err := kwargs.boolean(name)
		if err != nil {
			return err
		}
		if top != nil && inner != nil && *top != *inner {
			return bad(front.CodeTemplateOptions, name, "%s is %v at the top and %v in chat_template_kwargs", name, *top, *inner)
		}
		if *dst = top; top == nil {
			*dst = inner
		}
	}
	top, err := r.str("reasoning_effort")
	if err != nil {
		return err
	}
	inner, err := kwargs.str("reasoning_effort")
	if err != nil {
		return err
	}
	if top != nil && inner != nil && *top != *inner {
		return bad(front.CodeTemplateOptions, "reasoning_effort", "reasoning_effort is %q at the top and %q in chat_template_kwargs", *top, *inner)
	}
	for _, v := range []*string{inner, top} {
		if v != nil {
			r.out.front.Effort = *v
		}
	}
	if v := r.out.front.Effort; v == "" && (top != nil || inner != nil) {
		return bad(front.CodeEffort, "reasoning_effort", "reasoning_effort is empty")
	}
	return templateArgs(kwargs, &r.out.front)
}

// cacheHints are checked and have no effect.
func (r *chatReader) cacheHints() *failure {
	for _, name := range []string{"prompt_cache_key", "safety_identifier"} {
		v, err := r.str(name)
		if err != nil {
			return err
		}
		if v != nil && len([]rune(*v)) > 64 {
			return bad("invalid_value", name, "%s is longer than 64 characters", name)
		}
	}
	oneOf := func(o object, name string, values ...string) *failure {
		v, err := o.str(name)
		if err == nil && v != nil && !slices.Contains(values, *v) {
			err = bad("invalid_value", o.at(name), "%s %q is not one of %s", o.at(name), *v, strings.Join(values, ", "))
		}
		return err
	}
	if err := oneOf(r.object, "prompt_cache_retention", "in_memory", "24h"); err != nil {
		return err
	}
	options, _, err := r.sub("prompt_cache_options")
	if err != nil {
		return err
	}
	if err := oneOf(options, "mode", "implicit", "explicit"); err != nil {
		return err
	}
	if err := oneOf(options, "ttl", "30m"); err != nil {
		return err
	}
	_, err = r.boolean("prompt_cache_read_only")
	return err
}
