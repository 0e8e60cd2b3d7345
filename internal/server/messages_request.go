package server

import (
	"encoding/json/jsontext"
	"regexp"
	"slices"
	"strings"

	"ninfer/internal/front"
)

// messagesRequest is a body of Messages, read and checked.
type messagesRequest struct {
	front  front.Request
	model  string // a label that is repeated and selects nothing
	stream bool
}

// messagesReader reads the members of a body one after another; the first failure stays.
type messagesReader struct {
	object
	efforts []string // that the template knows
	out     messagesRequest
	marks   cacheMarks
	prefill string // the path of a last turn of the assistant's
}

// messagesFields are the names that Messages has for fields of Chat Completions.
var messagesFields = map[string]string{
	"max_completion_tokens": "max_tokens", "thinking_budget_tokens": "thinking.budget_tokens", "reasoning_effort": "output_config.effort",
	"enable_thinking": "thinking", "stop": "stop_sequences",
}

// parseMessages reads a body of Messages or of its count (docs/serving.md, Messages). What cannot be provided is refused, what has no meaning here is
// ignored.
func parseMessages(data []byte, f *front.Front) (*messagesRequest, *failure) {
	body, err := parseBody(data)
	if err != nil {
		return nil, err
	}
	r := &messagesReader{object: body, efforts: f.Efforts().Accepted}
	r.out.front.MaxToolName = 128
	r.out.front.FitBudget = true // a budget one below max_tokens is in order here, and what clients send
	for _, read := range []func() *failure{
		r.model, r.refused, r.limits, r.sampling, r.stops, r.thinking, r.format, r.template, r.tools, r.system, r.messages, r.cache,
	} {
		if err := read(); err != nil {
			return nil, err
		}
	}
	if r.prefill != "" {
		if on, err := f.Thinking(r.out.front); err == nil && on {
			return nil, bad(codePrefill, r.prefill, "%s is to be continued, and for that thinking must be off: send thinking {\"type\":\"disabled\"}", r.prefill)
		}
	}
	return &r.out, nil
}

const codePrefill = "assistant_prefill_not_supported"

func (r *messagesReader) model() *failure {
	label, err := r.str("model")
	switch {
	case err != nil:
		return err
	case label == nil || *label == "":
		return bad("missing_required_parameter", "model", "model is missing; any name will do, it is only repeated")
	}
	r.out.model = *label
	stream, err := r.boolean("stream")
	r.out.stream = stream != nil && *stream
	return err
}

// refused turns away what would change the result and cannot be done.
func (r *messagesReader) refused() *failure {
	for name, code := range map[string]string{
		"container": "container_not_supported", "mcp_servers": "mcp_not_supported",
		"structured_outputs": codeConstrained, "output_format": codeConstrained,
	} {
		v, ok := r.given(name)
		if !ok || name == "mcp_servers" && string(v) == "[]" {
			continue
		}
		return bad(code, name, "%s is not supported", name)
	}
	return nil
}

func (r *messagesReader) limits() *failure {
	most, err := r.integer("max_tokens")
	switch {
	case err != nil || most == nil:
		return err
	case *most < 1 || *most > 1<<31-1:
		return bad("invalid_value", "max_tokens", "max_tokens is %d, must be at least 1", *most)
	}
	n := int(*most)
	r.out.front.MaxTokens = &n
	return nil
}

func (r *messagesReader) sampling() *failure {
	s := &r.out.front.Sampling
	var err *failure
	if s.Temperature, err = r.number("temperature"); err != nil {
		return err
	}
	if t := s.Temperature; t != nil && !(*t >= 0 && *t <= 1) {
		return bad("invalid_value", "temperature", "temperature is %v, must be between 0 and 1", *t)
	}
	if s.TopP, err = r.number("top_p"); err != nil {
		return err
	}
	k, err := r.integer("top_k")
	if err != nil || k == nil {
		return err
	}
	if *k < 0 {
		return bad("invalid_value", "top_k", "top_k is %d, must be at least 0", *k)
	}
	n := int(min(*k, 1<<30))
	s.TopK = &n
	return nil
}

func (r *messagesReader) stops() *failure {
	items, _, err := r.list("stop_sequences")
	if err != nil {
		return err
	}
	var stops []string
	for i, item := range items {
		s, err := stringAt(item, index("stop_sequences", i))
		if err != nil {
			return err
		}
		if *s == "" {
			return bad("invalid_value", index("stop_sequences", i), "%s is empty", index("stop_sequences", i))
		}
		stops = append(stops, *s)
	}
	r.out.front.Stop, r.out.front.ReasoningStop = stops, stops
	return nil
}

// minBudget is the least thinking budget of the API.
const minBudget = 1024

func (r *messagesReader) thinking() *failure {
	o, ok, err := r.sub("thinking")
	if err != nil || !ok {
		return err
	}
	kind, err := o.str("type")
	if err != nil {
		return err
	}
	display, err := o.str("display")
	if err != nil {
		return err
	}
	budget, err := o.integer("budget_tokens")
	if err != nil {
		return err
	}
	on := true
	switch {
	case kind == nil || !slices.Contains([]string{"disabled", "adaptive", "enabled"}, *kind):
		return bad("invalid_value", "thinking.type", "thinking.type must be one of disabled, adaptive, enabled")
	case display != nil && *display == "omitted":
		return bad("thinking_display_not_supported", "thinking.display", "thinking.display omitted is not supported: what the model thinks is always sent")
	case display != nil && *display != "summarized":
		return bad("invalid_value", "thinking.display", "thinking.display %q is not one of summarized, omitted", *display)
	case *kind == "disabled":
		on = false
	case *kind == "enabled" && budget == nil:
		return bad("missing_required_parameter", "thinking.budget_tokens", "thinking.budget_tokens is missing; thinking.type adaptive needs none")
	case *kind == "enabled":
		most := int64(1 << 31)
		if n := r.out.front.MaxTokens; n != nil {
			most = int64(*n)
		}
		if *budget < minBudget || *budget >= most {
			return bad("invalid_value", "thinking.budget_tokens", "thinking.budget_tokens is %d, must be at least %d and less than max_tokens", *budget, minBudget)
		}
		n := int(*budget)
		r.out.front.ThinkingBudget = &n
	}
	r.out.front.EnableThinking = &on
	return nil
}

// format reads output_config: how much to think, and the form of the answer, of which only text is there.
func (r *messagesReader) format() *failure {
	config, _, err := r.sub("output_config")
	if err != nil {
		return err
	}
	if v, ok := config.given("format"); ok {
		format, err := objectAt(v, "output_config.format")
		if err != nil {
			return err
		}
		kind, err := format.str("type")
		switch {
		case err != nil:
			return err
		case kind == nil || *kind != "json_schema":
			return bad("invalid_value", "output_config.format.type", "output_config.format.type must be json_schema")
		}
		return bad(codeConstrained, "output_config.format", "output_config.format json_schema is not supported yet")
	}
	effort, err := config.str("effort")
	if err != nil || effort == nil {
		return err
	}
	return r.effort("output_config.effort", *effort)
}

// effort takes a wish for more or less thinking. The API says of high that it is what a request without one gets, and clients send it for
// that: where the template has no such value it means the template's own. It is a wish to think as any other.
func (r *messagesReader) effort(path, value string) *failure {
	think := r.out.front.EnableThinking
	switch {
	case value == "":
		return bad(front.CodeEffort, path, "%s is empty", path)
	case value == "none" && think != nil && *think:
		return bad(front.CodeTemplateOptions, path, "%s is none, but thinking is on", path)
	case value == "high" && !slices.Contains(r.efforts, value):
		if on := true; think == nil {
			r.out.front.EnableThinking = &on
		}
		return nil
	}
	r.out.front.Effort = value
	return nil
}

// template reads the extensions that go to the template. An option may also stand where the API has it; in both places it must be the
// same.
func (r *messagesReader) template() *failure {
	kwargs, _, err := r.sub("chat_template_kwargs")
	if err != nil {
		return err
	}
	conflict := func(path string) *failure {
		return bad(front.CodeTemplateOptions, path, "%s is not what chat_template_kwargs says", path)
	}
	preserve, err := r.boolean("preserve_thinking")
	if err != nil {
		return err
	}
	inner, err := kwargs.boolean("preserve_thinking")
	switch {
	case err != nil:
		return err
	case preserve != nil && inner != nil && *preserve != *inner:
		return conflict("preserve_thinking")
	case preserve == nil:
		preserve = inner
	}
	r.out.front.PreserveThinking = preserve
	// What thinking says for itself goes before what an effort makes of it.
	_, said := r.given("thinking")
	think, err := kwargs.boolean("enable_thinking")
	switch {
	case err != nil:
		return err
	case think == nil:
	case said && *r.out.front.EnableThinking != *think:
		return conflict("thinking")
	default:
		r.out.front.EnableThinking = think
	}
	effort, err := kwargs.str("reasoning_effort")
	if err != nil {
		return err
	}
	if effort != nil {
		config, _, _ := r.sub("output_config")
		if top, _ := config.str("effort"); top != nil && *top != *effort {
			return conflict("output_config.effort")
		}
		if err := r.effort("chat_template_kwargs.reasoning_effort", *effort); err != nil {
			return err
		}
	}
	return templateArgs(kwargs, &r.out.front)
}

var messagesToolName = regexp.MustCompile(`^[A-Za-z0-9_-]{1,128}$`)

// toolMembers are the names that the model sees for the members of a declaration. What is about serving and not about the tool is left out.
var toolMembers = map[string]string{
	"input_schema": "parameters", "type": "", "strict": "", "cache_control": "", "eager_input_streaming": "", "defer_loading": "", "allowed_callers": "",
}

// tools reads declarations and the choice.
func (r *messagesReader) tools() *failure {
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
		name, isStrict, err := r.tool(raw, index("tools", i))
		if err != nil {
			return err
		}
		if isStrict && strict == "" {
			strict = index("tools", i) + ".strict"
		}
		names = append(names, name)
		r.out.front.Tools = append(r.out.front.Tools, functionTool(raw, toolMembers))
	}
	if r.out.front.ReadCalls, err = r.toolChoice(names); err != nil || !r.out.front.ReadCalls {
		return err
	}
	return refuseConstraints(strict, constraints)
}

// tool checks one declaration.
func (r *messagesReader) tool(raw jsontext.Value, path string) (name string, strict bool, err *failure) {
	o, err := objectAt(raw, path)
	if err != nil {
		return "", false, err
	}
	kind, err := o.str("type")
	if err != nil {
		return "", false, err
	}
	if kind != nil && *kind != "custom" {
		code, what := "anthropic_tools_not_supported", "a tool that Anthropic defines"
		switch {
		case strings.HasPrefix(*kind, "mcp_"):
			code, what = "mcp_not_supported", "a set of MCP tools"
		case slices.ContainsFunc([]string{"web_search_", "web_fetch_", "code_execution_", "tool_search_"}, func(s string) bool { return strings.HasPrefix(*kind, s) }):
			code, what = "server_tools_not_supported", "a tool that the server would have to run"
		}
		return "", false, bad(code, o.at("type"), "%s %q is %s, which is not supported", o.at("type"), *kind, what)
	}
	given, err := o.str("name")
	if err != nil {
		return "", false, err
	}
	if given == nil || !messagesToolName.MatchString(*given) {
		return "", false, bad("invalid_value", o.at("name"), "%s must be 1 to 128 letters, digits, _ or -", o.at("name"))
	}
	if _, err := o.str("description"); err != nil {
		return "", false, err
	}
	if _, _, err := o.sub("input_schema"); err != nil {
		return "", false, err
	}
	examples, _, err := o.list("input_examples")
	if err != nil {
		return "", false, err
	}
	for i, example := range examples {
		if _, err := objectAt(example, index(o.at("input_examples"), i)); err != nil {
			return "", false, err
		}
	}
	deferred, err := o.boolean("defer_loading")
	if err != nil {
		return "", false, err
	}
	if deferred != nil && *deferred {
		return "", false, bad("deferred_tools_not_supported", o.at("defer_loading"), "%s true is not supported: every tool is shown to the model", o.at("defer_loading"))
	}
	callers, _, err := o.list("allowed_callers")
	if err != nil {
		return "", false, err
	}
	for i, caller := range callers {
		if string(caller) != `"direct"` {
			return "", false, bad("tool_caller_not_supported", index(o.at("allowed_callers"), i), "%s can only be direct", index(o.at("allowed_callers"), i))
		}
	}
	if err := r.marks.read(o); err != nil {
		return "", false, err
	}
	forced, err := o.boolean("strict")
	return *given, forced != nil && *forced, err
}

// toolChoice says whether the model may make calls of the tools with these names. To be made to is refused.
func (r *messagesReader) toolChoice(names []string) (bool, *failure) {
	choice, ok, err := r.sub("tool_choice")
	if err != nil || !ok {
		return len(names) > 0, err
	}
	kind, err := choice.str("type")
	if err != nil {
		return false, err
	}
	single, err := choice.boolean("disable_parallel_tool_use")
	if err != nil {
		return false, err
	}
	r.out.front.OneCall = single != nil && *single
	switch {
	case kind == nil || !slices.Contains([]string{"auto", "none", "any", "tool"}, *kind):
		return false, bad("invalid_value", "tool_choice.type", "tool_choice.type must be one of auto, none, any, tool")
	case *kind == "none":
		return false, nil
	case *kind == "auto":
		return len(names) > 0, nil
	case len(names) == 0:
		return false, bad("invalid_value", "tool_choice", "tool_choice is %s, but there are no tools", *kind)
	case *kind == "tool":
		name, err := choice.str("name")
		if err != nil {
			return false, err
		}
		if name == nil || !slices.Contains(names, *name) {
			return false, bad("invalid_value", "tool_choice.name", "tool_choice.name is not the name of a declared tool")
		}
	}
	return false, bad(codeConstrained, "tool_choice", "tool_choice %s is not supported yet; only none and auto are", *kind)
}

// cacheMarks are the blocks that could carry a mark for the cache, in the order of the prompt. Marks are hints: they are checked and have
// no effect.
type cacheMarks struct {
	marked []string // paths
	last   string   // ttl of the last block that could carry one, empty if it carries none
}

// read reads the mark of a block that may have one.
func (c *cacheMarks) read(o object) *failure {
	ttl, err := cacheMark(o)
	if err != nil {
		return err
	}
	if c.last = ttl; ttl != "" {
		c.marked = append(c.marked, o.at("cache_control"))
	}
	return nil
}

// plain counts a block that cannot have a mark because it is written as a string.
func (c *cacheMarks) plain() { c.last = "" }

// cacheMark is the ttl of an object's mark; empty is none.
func cacheMark(o object) (ttl string, err *failure) {
	v, ok := o.given("cache_control")
	if !ok {
		return "", nil
	}
	path := o.at("cache_control")
	malformed := bad("invalid_cache_control", path, "%s must be {\"type\":\"ephemeral\"}, with ttl 5m or 1h", path)
	mark, err := objectAt(v, path)
	if err != nil {
		return "", malformed
	}
	kind, err := mark.str("type")
	if err != nil || kind == nil || *kind != "ephemeral" {
		return "", malformed
	}
	given, err := mark.str("ttl")
	switch {
	case err != nil || given != nil && *given != "5m" && *given != "1h":
		return "", malformed
	case given == nil:
		return "5m", nil
	}
	return *given, nil
}

// maxMarks is how many blocks may carry a mark.
const maxMarks = 4

// cache checks the marks together (docs/serving.md, Messages). The one at the top stands for a mark on the last block.
func (r *messagesReader) cache() *failure {
	n := len(r.marks.marked)
	if n > maxMarks {
		path := r.marks.marked[maxMarks]
		return bad("too_many_cache_breakpoints", path, "%s is one mark too many: at most %d blocks may have cache_control", path, maxMarks)
	}
	top, err := cacheMark(r.object)
	switch {
	case err != nil || top == "":
		return err
	case r.marks.last != "" && r.marks.last != top:
		return bad("conflicting_cache_ttl", "cache_control.ttl", "cache_control.ttl is %s, but that of the last block is %s", top, r.marks.last)
	case r.marks.last == "" && n == maxMarks:
		return bad("too_many_cache_breakpoints", "cache_control", "cache_control is one mark too many: at most %d blocks may have one", maxMarks)
	}
	return nil
}
