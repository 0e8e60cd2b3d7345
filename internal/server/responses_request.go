package server

import (
	"encoding/json/jsontext"
	"encoding/json/v2"
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"

	"ninfer/internal/front"
)

// responseRequest is a body of Responses, read and checked, with what its answer repeats of it.
type responseRequest struct {
	front  front.Request
	stream bool

	model         bool // it names the model
	store         bool
	preserve      *bool // as asked for here or by the response before
	parent        *responseTurn
	parentID      *string
	items         []jsontext.Value // new input, each with an id
	instructions  *string
	maxOutput     *int64
	maxToolCalls  *int64
	effort        *string
	metadata      jsontext.Value
	tools         jsontext.Value
	toolChoice    jsontext.Value
	parallel      bool
	topP          *float64
	user          *string
	cacheKey      *string
	safety        *string
	groups        map[string]groupedTool // tools of groups by the name that the model sees
	hasGroups     bool
	previousInput int // items of the responses before
}

// groupedTool is a tool inside a group.
type groupedTool struct{ namespace, name string }

// responseReader reads the members of a body of Responses.
type responseReader struct {
	chatReader
	store *responseStore
	out   responseRequest
}

// responseFields are the names of fields in Responses by those in Chat Completions.
var responseFields = map[string]string{
	"messages": "input", "max_completion_tokens": "max_output_tokens", "reasoning_effort": "reasoning.effort",
}

// parseResponse reads a body (docs/serving.md, Responses). What is not known is refused, and so is what cannot be provided.
func parseResponse(data []byte, served string, store *responseStore) (*responseRequest, *failure) {
	body, err := parseBody(data)
	if err != nil {
		return nil, err
	}
	r := &responseReader{chatReader: chatReader{object: body, served: served}, store: store}
	for _, read := range []func() *failure{
		r.known, r.chatReader.model, r.refused, r.settings, r.limits, r.sampling, r.metadata, r.format, r.reasoning, r.tools, r.cacheHints, r.previous, r.input,
	} {
		if err := read(); err != nil {
			return nil, err
		}
	}
	q := &r.out
	f := r.chatReader.out.front
	q.front.Sampling, q.front.EnableThinking, q.front.PreserveThinking, q.front.Effort = f.Sampling, f.EnableThinking, q.preserve, f.Effort
	q.front.AddVisionID, q.front.Args = f.AddVisionID, f.Args
	return q, nil
}

// responseMembers are the fields that are read, and with a code those that are known and not supported.
var responseMembers = map[string]string{
	"model": "", "input": "", "instructions": "", "previous_response_id": "", "max_output_tokens": "", "stream": "", "store": "",
	"temperature": "", "top_p": "", "metadata": "", "client_metadata": "", "reasoning": "", "chat_template_kwargs": "",
	"preserve_thinking": "", "text": "", "tools": "", "tool_choice": "", "parallel_tool_calls": "", "tool_constraints": "",
	"max_tool_calls": "", "truncation": "", "top_logprobs": "", "service_tier": "", "background": "", "include": "",
	"stream_options": "", "safety_identifier": "", "user": "",

	"structured_outputs": codeConstrained, "conversation": "conversation_not_supported", "prompt": "prompt_template_not_supported",
	"context_management": "compaction_not_supported", "moderation": "moderation_not_supported",
}

// known refuses members that mean nothing here.
func (r *responseReader) known() *failure {
	for _, name := range slices.Sorted(keys(r.members)) {
		code, ok := responseMembers[name]
		switch {
		case !ok && !strings.HasPrefix(name, "prompt_cache_"):
			return bad(codeUnknown, name, "%s is not a field of this route", name)
		case code == "":
		default:
			if _, given := r.given(name); given {
				return bad(code, name, "%s is not supported", name)
			}
		}
	}
	return nil
}

func keys(m map[string]jsontext.Value) func(func(string) bool) {
	return func(yield func(string) bool) {
		for k := range m {
			if !yield(k) {
				return
			}
		}
	}
}

// refused turns away values that cannot be provided.
func (r *responseReader) refused() *failure {
	if v, err := r.boolean("background"); err != nil {
		return err
	} else if v != nil && *v {
		return bad("background_not_supported", "background", "background can only be false: a response is made while its client waits")
	}
	for _, c := range []struct {
		name, code string
		allowed    []string
	}{
		{"truncation", "truncation_not_supported", []string{"disabled"}},
		{"service_tier", "service_tier_not_supported", []string{"auto", "default"}},
	} {
		if v, err := r.str(c.name); err != nil {
			return err
		} else if v != nil && !slices.Contains(c.allowed, *v) {
			return bad(c.code, c.name, "%s %q is not supported, only %s", c.name, *v, strings.Join(c.allowed, " and "))
		}
	}
	if n, err := r.integer("top_logprobs"); err != nil {
		return err
	} else if n != nil && *n != 0 {
		return bad("logprobs_not_supported", "top_logprobs", "top_logprobs can only be 0; /v1/chat/completions has log-probabilities")
	}
	include, _, err := r.list("include")
	if err != nil {
		return err
	}
	for i, raw := range include {
		v, err := stringAt(raw, index("include", i))
		if err != nil {
			return err
		}
		// Who asks for sealed reasoning wants to send it back; here it is open in the item and can be.
		if *v != "reasoning.encrypted_content" {
			return bad("include_not_supported", index("include", i), "include %q is not supported", *v)
		}
	}
	_, err = r.toolConstraints()
	return err
}

// settings reads plain members.
func (r *responseReader) settings() *failure {
	q := &r.out
	_, q.model = r.given("model")
	q.store = true
	for name, dst := range map[string]*bool{"stream": &q.stream, "store": &q.store} {
		v, err := r.boolean(name)
		if err != nil {
			return err
		}
		if v != nil {
			*dst = *v
		}
	}
	var err *failure
	if q.instructions, err = r.str("instructions"); err != nil {
		return err
	}
	if q.user, err = r.str("user"); err != nil {
		return err
	}
	if q.cacheKey, err = r.str("prompt_cache_key"); err != nil {
		return err
	}
	if q.safety, err = r.str("safety_identifier"); err != nil {
		return err
	}
	if _, _, err = r.sub("client_metadata"); err != nil {
		return err
	}
	options, _, err := r.sub("stream_options")
	if err != nil {
		return err
	}
	_, err = options.boolean("include_obfuscation")
	return err
}

func (r *responseReader) limits() *failure {
	n, err := r.integer("max_output_tokens")
	if err != nil {
		return err
	}
	if n != nil {
		if *n < 0 || *n > 1<<31-1 {
			return bad("invalid_value", "max_output_tokens", "max_output_tokens is %d, must be at least 0", *n)
		}
		most := int(*n)
		r.out.maxOutput, r.out.front.MaxTokens = n, &most
	}
	r.out.maxToolCalls, err = r.integer("max_tool_calls")
	if err == nil && r.out.maxToolCalls != nil && *r.out.maxToolCalls < 0 {
		err = bad("invalid_value", "max_tool_calls", "max_tool_calls is %d, must be at least 0", *r.out.maxToolCalls)
	}
	return err
}

func (r *responseReader) sampling() *failure {
	err := r.chatReader.sampling() // of its members only two can be given
	r.out.topP = r.chatReader.out.front.Sampling.TopP
	return err
}

func (r *responseReader) metadata() *failure {
	r.out.metadata = jsontext.Value("{}")
	pairs, ok, err := r.sub("metadata")
	if err != nil || !ok {
		return err
	}
	if len(pairs.members) > 16 {
		return bad("invalid_value", "metadata", "metadata has %d pairs, at most 16 are allowed", len(pairs.members))
	}
	for name := range pairs.members {
		value, err := stringAt(pairs.members[name], "metadata."+name)
		switch {
		case err != nil:
			return err
		case utf8.RuneCountInString(name) > 64:
			return bad("invalid_value", "metadata", "metadata has a name of more than 64 characters")
		case utf8.RuneCountInString(*value) > 512:
			return bad("invalid_value", "metadata."+name, "metadata.%s has more than 512 characters", name)
		}
	}
	// Without the members that lost to others of their name.
	var kept map[string]string
	json.Unmarshal(r.members["metadata"], &kept, jsontext.AllowDuplicateNames(true))
	r.out.metadata, _ = json.Marshal(kept, json.Deterministic(true))
	return nil
}

// format takes text only: constraints are not there yet, and a promise of JSON must not be dropped.
func (r *responseReader) format() *failure {
	text, ok, err := r.sub("text")
	if err != nil || !ok {
		return err
	}
	if v, err := text.str("verbosity"); err != nil {
		return err
	} else if v != nil && *v != "medium" {
		return bad("verbosity_not_supported", "text.verbosity", "text.verbosity can only be medium")
	}
	format, ok, err := text.sub("format")
	if err != nil || !ok {
		return err
	}
	kind, err := format.str("type")
	switch {
	case err != nil:
		return err
	case kind == nil:
		return bad("missing_required_parameter", "text.format.type", "text.format.type is missing")
	case *kind == "text":
		return nil
	case *kind == "json_object", *kind == "json_schema":
		return bad(codeConstrained, "text.format", "text.format %s is not supported yet; only text is", *kind)
	}
	return bad("invalid_value", "text.format.type", "text.format.type %q is not one of text, json_object, json_schema", *kind)
}

// reasoning reads the effort with the options of the template.
func (r *responseReader) reasoning() *failure {
	reasoning, _, err := r.sub("reasoning")
	if err != nil {
		return err
	}
	if r.out.effort, err = reasoning.str("effort"); err != nil {
		return err
	}
	for _, name := range []string{"summary", "generate_summary"} {
		// auto leaves it to the server whether there is one.
		if v, err := reasoning.str(name); err != nil {
			return err
		} else if v != nil && *v != "auto" && *v != "none" {
			return bad("reasoning_summary_not_supported", reasoning.at(name), "%s %q is not supported: the reasoning itself is in the answer", reasoning.at(name), *v)
		}
	}
	options := object{members: map[string]jsontext.Value{}}
	for _, name := range []string{"chat_template_kwargs", "preserve_thinking"} {
		if v, ok := r.given(name); ok {
			options.members[name] = v
		}
	}
	if v, ok := reasoning.given("effort"); ok {
		options.members["reasoning_effort"] = v
	}
	inner := chatReader{object: options}
	if err := inner.template(); err != nil {
		return err
	}
	f := inner.out.front
	out := &r.chatReader.out.front
	out.EnableThinking, out.Effort, out.AddVisionID, out.Args = f.EnableThinking, f.Effort, f.AddVisionID, f.Args
	r.out.preserve = f.PreserveThinking
	return nil
}

// previous finds the response that this one goes on from.
func (r *responseReader) previous() *failure {
	id, err := r.str("previous_response_id")
	if err != nil || id == nil {
		return err
	}
	record, ok := r.store.get(*id)
	if !ok {
		return noResponse("previous_response_id", *id)
	}
	r.out.parent, r.out.parentID = record.turn, id
	if r.out.preserve == nil {
		r.out.preserve = record.preserve
	}
	return nil
}

func noResponse(param, id string) *failure {
	return &failure{status: 404, code: "response_not_found", param: param, message: fmt.Sprintf("there is no response %q: it was deleted, not stored, or had to make room for others", id)}
}

// tools reads declarations, flat ones and groups of them.
func (r *responseReader) tools() *failure {
	parallel, err := r.boolean("parallel_tool_calls")
	if err != nil {
		return err
	}
	q := &r.out
	q.parallel = parallel == nil || *parallel
	q.front.OneCall = !q.parallel
	q.tools, q.toolChoice, q.groups = jsontext.Value("[]"), jsontext.Value(`"auto"`), map[string]groupedTool{}
	list, given, err := r.list("tools")
	if err != nil {
		return err
	}
	if given {
		q.tools = r.members["tools"]
	}
	declared := map[string]bool{}
	strict := ""
	add := func(raw jsontext.Value, path, namespace, about string) *failure {
		name, isStrict, err := flatTool(raw, path)
		if err != nil {
			return err
		}
		seen := joined(namespace, name)
		if namespace != "" {
			if other, ok := q.groups[seen]; ok && other != (groupedTool{namespace, name}) || !ok && declared[seen] {
				return bad("invalid_value", path+".name", "%s.name: two tools would look alike to the model, as %s", path, seen)
			}
			q.groups[seen], q.hasGroups = groupedTool{namespace, name}, true
		} else if _, ok := q.groups[seen]; ok {
			return bad("invalid_value", path+".name", "%s.name: two tools would look alike to the model, as %s", path, seen)
		}
		declared[seen] = true
		if isStrict && strict == "" {
			strict = path + ".strict"
		}
		tool := functionTool(raw, map[string]string{"type": "", "strict": ""})
		if namespace != "" {
			tool = regrouped(tool, seen, about)
		}
		q.front.Tools = append(q.front.Tools, tool)
		return nil
	}
	for i, raw := range list {
		path := index("tools", i)
		tool, err := objectAt(raw, path)
		if err != nil {
			return err
		}
		kind, err := tool.str("type")
		if err != nil {
			return err
		}
		switch {
		case kind != nil && *kind == "function":
			err = add(raw, path, "", "")
		case kind != nil && *kind == "namespace":
			err = r.group(tool, add)
		case kind == nil:
			err = bad("missing_required_parameter", tool.at("type"), "%s is missing", tool.at("type"))
		default:
			err = bad("tool_type_not_supported", tool.at("type"), "%s %q is not supported, only function and namespace", tool.at("type"), *kind)
		}
		if err != nil {
			return err
		}
	}
	if q.hasGroups {
		q.front.MaxToolName = 2*64 + len(groupSeparator)
	}
	if q.front.ReadCalls, err = r.choice(declared); err != nil || !q.front.ReadCalls {
		return err
	}
	constraints, _ := r.str("tool_constraints")
	return refuseConstraints(strict, constraints)
}

// flatTool checks a declaration that has its members beside its type.
func flatTool(raw jsontext.Value, path string) (name string, strict bool, err *failure) {
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
	given, err := tool.str("name")
	if err != nil {
		return "", false, err
	}
	if given == nil || !toolName.MatchString(*given) {
		return "", false, bad("invalid_value", tool.at("name"), "%s must be 1 to 64 letters, digits, _ or -", tool.at("name"))
	}
	if _, err := tool.str("description"); err != nil {
		return "", false, err
	}
	if _, _, err := tool.sub("parameters"); err != nil {
		return "", false, err
	}
	forced, err := tool.boolean("strict")
	return *given, forced != nil && *forced, err
}

// group reads a namespace.
func (r *responseReader) group(o object, add func(raw jsontext.Value, path, namespace, about string) *failure) *failure {
	name, err := o.str("name")
	if err != nil {
		return err
	}
	if name == nil || !toolName.MatchString(*name) {
		return bad("invalid_value", o.at("name"), "%s must be 1 to 64 letters, digits, _ or -", o.at("name"))
	}
	about, err := o.str("description")
	if err != nil {
		return err
	}
	if about == nil {
		about = new(string)
	}
	tools, _, err := o.list("tools")
	if err != nil {
		return err
	}
	for i, raw := range tools {
		if err := add(raw, index(o.at("tools"), i), *name, *about); err != nil {
			return err
		}
	}
	return nil
}

// groupSeparator stands between the names of a group and of its tool in the name that the model sees.
const groupSeparator = "__"

// joined is the name that the model sees of a tool. A group whose name already ends like the separator needs none.
func joined(namespace, name string) string {
	if namespace == "" || strings.HasSuffix(namespace, groupSeparator) {
		return namespace + name
	}
	return namespace + groupSeparator + name
}

// regrouped gives a declaration the joined name, and puts what is said of the group before what is said of the tool.
func regrouped(tool jsontext.Value, name, about string) jsontext.Value {
	var outer struct {
		Function jsontext.Value `json:"function"`
	}
	json.Unmarshal(tool, &outer, jsontext.AllowDuplicateNames(true)) // functionTool wrote it
	out := []byte(`{"type":"function","function":{`)
	first, described := true, false
	put := func(member string, value jsontext.Value) {
		if !first {
			out = append(out, ',')
		}
		first = false
		out, _ = jsontext.AppendQuote(out, member)
		out = append(append(out, ':'), value...)
	}
	quote := func(s string) jsontext.Value {
		v, _ := jsontext.AppendQuote(nil, s)
		return v
	}
	each(outer.Function, func(member string, value jsontext.Value) {
		switch member {
		case "name":
			value = quote(name)
		case "description":
			described = true
			var own string
			if about != "" && json.Unmarshal(value, &own) == nil {
				value = quote(about + "\n\n" + own)
			}
		}
		put(member, value)
	})
	if !described && about != "" {
		put("description", quote(about))
	}
	return append(out, '}', '}')
}

// choice says whether the model may make calls. To be made to is refused.
func (r *responseReader) choice(declared map[string]bool) (bool, *failure) {
	v, ok := r.given("tool_choice")
	if !ok {
		return len(declared) > 0, nil
	}
	r.out.toolChoice = v
	if v.Kind() == '"' {
		names := make([]string, len(declared))
		return r.toolChoice(names) // of a string only their number matters
	}
	choice, err := objectAt(v, "tool_choice")
	if err != nil {
		return false, wrongType("tool_choice", "a string or an object")
	}
	kind, err := choice.str("type")
	if err != nil {
		return false, err
	}
	if kind == nil || *kind != "function" && *kind != "allowed_tools" {
		return false, bad("invalid_value", "tool_choice.type", "tool_choice.type must be function or allowed_tools")
	}
	if len(declared) == 0 {
		return false, bad("invalid_value", "tool_choice", "tool_choice names a tool, but there are no tools")
	}
	named := func(o object) *failure {
		name, err := o.str("name")
		if err != nil {
			return err
		}
		namespace, err := o.str("namespace")
		if err != nil {
			return err
		}
		if namespace == nil {
			namespace = new(string)
		}
		if name == nil || !declared[joined(*namespace, *name)] {
			return bad("invalid_value", o.at("name"), "%s is not the name of a declared tool", o.at("name"))
		}
		return nil
	}
	if *kind == "function" {
		if err := named(choice); err != nil {
			return false, err
		}
	} else {
		tools, _, err := choice.list("tools")
		if err != nil {
			return false, err
		}
		for i, raw := range tools {
			o, err := objectAt(raw, index("tool_choice.tools", i))
			if err != nil {
				return false, err
			}
			if err := named(o); err != nil {
				return false, err
			}
		}
	}
	return false, bad(codeConstrained, "tool_choice", "tool_choice of certain tools is not supported yet; only none and auto are")
}
