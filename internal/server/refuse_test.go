package server_test

import (
	"fmt"
	"strings"
	"testing"

	"ninfer/internal/engine"
	"ninfer/internal/server"
)

// with is a good body with further members.
func with(members string) string {
	return `{"messages":[{"role":"user","content":"Q"}],` + members + `}`
}

// say is a body with one message more.
func say(message string) string {
	return `{"messages":[{"role":"user","content":"Q"},` + message + `],"enable_thinking":false}`
}

// The client's mistakes, and what this server does not do (docs/serving.md, Chat completions).
func TestRefusals(t *testing.T) {
	gen := &script{text: "x"}
	s := start(t, setup{gen: gen, template: efforts})
	deep := strings.Repeat("[", 20_000)
	for _, c := range []struct {
		name, body  string
		status      int
		code, param string
	}{
		// what is no JSON object
		{"empty", ``, 400, "invalid_json", ""},
		{"not JSON", `{"messages":`, 400, "invalid_json", ""},
		{"text after", `{} x`, 400, "invalid_json", ""},
		{"array", `[]`, 400, "invalid_json", ""},
		{"null", `null`, 400, "invalid_json", ""},
		{"string", `"x"`, 400, "invalid_json", ""},
		{"not UTF-8", "{\"messages\":[{\"role\":\"user\",\"content\":\"\xff\"}]}", 400, "invalid_json", ""},
		{"half a surrogate", `{"messages":[{"role":"user","content":"\ud800"}]}`, 400, "invalid_json", ""},
		{"deep", `{"messages":` + deep, 400, "invalid_json", ""},
		{"deep and closed", `{"messages":` + deep + strings.Repeat("]", 20_000) + `}`, 400, "invalid_json", ""},
		// types and ranges
		{"temperature's type", with(`"temperature":"1"`), 400, "invalid_type", "temperature"},
		{"temperature's range", with(`"temperature":2.1`), 400, "invalid_value", "temperature"},
		{"temperature not finite", with(`"temperature":1e999`), 400, "invalid_value", "temperature"},
		{"top_p", with(`"top_p":-0.1`), 400, "invalid_value", "top_p"},
		{"min_p", with(`"min_p":2`), 400, "invalid_value", "min_p"},
		{"presence_penalty", with(`"presence_penalty":-3`), 400, "invalid_value", "presence_penalty"},
		{"frequency_penalty", with(`"frequency_penalty":[]`), 400, "invalid_type", "frequency_penalty"},
		{"top_k", with(`"top_k":-2`), 400, "invalid_value", "top_k"},
		{"top_k far", with(`"top_k":-9000000000000000000`), 400, "invalid_value", "top_k"},
		{"top_k's type", with(`"top_k":1.5`), 400, "invalid_type", "top_k"},
		{"seed's type", with(`"seed":"7"`), 400, "invalid_type", "seed"},
		{"seed's range", with(`"seed":9223372036854775808`), 400, "invalid_value", "seed"},
		{"max_tokens", with(`"max_tokens":-2`), 400, "invalid_value", "max_tokens"},
		{"max_tokens far", with(`"max_tokens":99999999999`), 400, "invalid_value", "max_tokens"},
		{"max_completion_tokens", with(`"max_completion_tokens":"9"`), 400, "invalid_type", "max_completion_tokens"},
		{"the limit that does not count", with(`"max_completion_tokens":9,"max_tokens":true`), 400, "invalid_type", "max_tokens"},
		{"stream", with(`"stream":1`), 400, "invalid_type", "stream"},
		{"stream_options", with(`"stream":true,"stream_options":3`), 400, "invalid_type", "stream_options"},
		{"stream_options without stream", with(`"stream_options":{"include_usage":true}`), 400, "invalid_value", "stream_options"},
		{"include_usage", with(`"stream":true,"stream_options":{"include_usage":"yes"}`), 400, "invalid_type", "stream_options.include_usage"},
		{"return_progress", with(`"return_progress":"yes"`), 400, "invalid_type", "return_progress"},
		{"stop's type", with(`"stop":5`), 400, "invalid_type", "stop"},
		{"stop's items", with(`"stop":["a",5]`), 400, "invalid_type", "stop"},
		{"empty stop", with(`"stop":""`), 400, "invalid_value", "stop"},
		{"empty stop in a list", with(`"stop":["a",""]`), 400, "invalid_value", "stop"},
		{"a fifth stop", with(`"stop":["a","b","c","d","e"]`), 400, "invalid_value", "stop"},
		{"the last of two counts", with(`"temperature":1,"temperature":3`), 400, "invalid_value", "temperature"},
		// fields that cannot be provided
		{"model", with(`"model":"gpt"`), 404, "model_not_found", "model"},
		{"model's type", with(`"model":5`), 400, "invalid_type", "model"},
		{"n", with(`"n":2`), 400, "n_not_supported", "n"},
		{"n is no integer", with(`"n":1.0`), 400, "invalid_type", "n"},
		{"logit_bias", with(`"logit_bias":{"5":1}`), 400, "logit_bias_not_supported", "logit_bias"},
		{"logit_bias' type", with(`"logit_bias":{"5":"1"}`), 400, "invalid_type", "logit_bias.5"},
		{"modalities", with(`"modalities":["text","audio"]`), 400, "modality_not_supported", "modalities"},
		{"web_search_options", with(`"web_search_options":{}`), 400, "web_search_not_supported", "web_search_options"},
		{"moderation", with(`"moderation":{"model":"x"}`), 400, "moderation_not_supported", "moderation"},
		{"verbosity", with(`"verbosity":"low"`), 400, "verbosity_not_supported", "verbosity"},
		{"store", with(`"store":true`), 400, "store_not_supported", "store"},
		{"functions", with(`"functions":[{"name":"f"}]`), 400, "legacy_tools_not_supported", "functions"},
		{"function_call", with(`"function_call":{"name":"f"}`), 400, "legacy_tools_not_supported", "function_call"},
		{"repetition_penalty", with(`"repetition_penalty":1.1`), 400, "repetition_penalty_not_supported", "repetition_penalty"},
		{"mm_processor_kwargs", with(`"mm_processor_kwargs":{"fps":2}`), 400, "modality_not_supported", "mm_processor_kwargs.fps"},
		{"grammar", with(`"grammar":"root ::= x"`), 400, "constrained_decoding_not_supported", "grammar"},
		{"guided_json", with(`"guided_json":{}`), 400, "constrained_decoding_not_supported", "guided_json"},
		{"guided_choice", with(`"guided_choice":["a"]`), 400, "constrained_decoding_not_supported", "guided_choice"},
		{"structured_outputs", with(`"structured_outputs":{"choice":["a"]}`), 400, "constrained_decoding_not_supported", "structured_outputs"},
		{"json_object", with(`"response_format":{"type":"json_object"}`), 400, "constrained_decoding_not_supported", "response_format"},
		{"json_schema", with(`"response_format":{"type":"json_schema","json_schema":{"name":"a","schema":{}}}`), 400, "constrained_decoding_not_supported", "response_format"},
		{"response_format", with(`"response_format":{"type":"xml"}`), 400, "invalid_value", "response_format.type"},
		{"response_format's type", with(`"response_format":"json"`), 400, "invalid_type", "response_format"},
		{"response_format is empty", with(`"response_format":{}`), 400, "invalid_value", "response_format.type"},
		{"logprobs in a stream", with(`"logprobs":true,"stream":true`), 400, "logprobs_stream_not_supported", "logprobs"},
		{"logprobs' type", with(`"logprobs":5`), 400, "invalid_type", "logprobs"},
		{"top_logprobs alone", with(`"top_logprobs":3`), 400, "invalid_value", "top_logprobs"},
		{"top_logprobs' range", with(`"logprobs":true,"top_logprobs":21`), 400, "invalid_value", "top_logprobs"},
		{"logprob_candidates", with(`"logprob_candidates":["a"]`), 400, "logprobs_not_supported", "logprob_candidates"},
		{"effort", with(`"reasoning_effort":"high"`), 400, "reasoning_effort_not_supported", "reasoning_effort"},
		{"empty effort", with(`"reasoning_effort":""`), 400, "reasoning_effort_not_supported", "reasoning_effort"},
		{"effort's type", with(`"reasoning_effort":3`), 400, "invalid_type", "reasoning_effort"},
		{"thinking twice", with(`"enable_thinking":true,"chat_template_kwargs":{"enable_thinking":false}`), 400, "conflicting_template_option", "enable_thinking"},
		{"preserving twice", with(`"preserve_thinking":true,"chat_template_kwargs":{"preserve_thinking":false}`), 400, "conflicting_template_option", "preserve_thinking"},
		{"effort twice", with(`"reasoning_effort":"low","chat_template_kwargs":{"reasoning_effort":"xhigh"}`), 400, "conflicting_template_option", "reasoning_effort"},
		{"thinking without effort", with(`"enable_thinking":true,"reasoning_effort":"none"`), 400, "conflicting_template_option", "enable_thinking"},
		{"kwargs' type", with(`"chat_template_kwargs":[]`), 400, "invalid_type", "chat_template_kwargs"},
		{"a kwarg's type", with(`"chat_template_kwargs":{"enable_thinking":1}`), 400, "invalid_type", "chat_template_kwargs.enable_thinking"},
		{"kwargs over messages", with(`"chat_template_kwargs":{"messages":[]}`), 400, "conflicting_template_option", "chat_template_kwargs.messages"},
		{"kwargs over generation", with(`"chat_template_kwargs":{"add_generation_prompt":false}`), 400, "conflicting_template_option", "chat_template_kwargs.add_generation_prompt"},
		{"kwargs over tokens", with(`"chat_template_kwargs":{"eos_token":"x"}`), 400, "conflicting_template_option", "chat_template_kwargs.eos_token"},
		{"budget", with(`"thinking_budget_tokens":0`), 400, "invalid_value", "thinking_budget_tokens"},
		{"budget's capacity", with(`"thinking_budget_tokens":10,"max_tokens":11`), 400, "thinking_budget_capacity_insufficient", "thinking_budget_tokens"},
		{"cache key", with(`"prompt_cache_key":"` + strings.Repeat("k", 65) + `"`), 400, "invalid_value", "prompt_cache_key"},
		{"cache retention", with(`"prompt_cache_retention":"1h"`), 400, "invalid_value", "prompt_cache_retention"},
		{"cache mode", with(`"prompt_cache_options":{"mode":"never"}`), 400, "invalid_value", "prompt_cache_options.mode"},
		{"cache breakpoint", `{"messages":[{"role":"user","content":[{"type":"text","text":"Q","prompt_cache_breakpoint":5}]}]}`, 400, "invalid_cache_breakpoint", "messages[0].content[0].prompt_cache_breakpoint"},
		{"safety_identifier", with(`"safety_identifier":"` + strings.Repeat("k", 65) + `"`), 400, "invalid_value", "safety_identifier"},
		// tools
		{"tools, required", with(`"tools":[{"type":"function","function":{"name":"f"}}],"tool_choice":"required"`), 400, "constrained_decoding_not_supported", "tool_choice"},
		{"tools, named", with(`"tools":[{"type":"function","function":{"name":"f"}}],"tool_choice":{"type":"function","function":{"name":"f"}}`), 400, "constrained_decoding_not_supported", "tool_choice"},
		{"tools, allowed", with(`"tools":[{"type":"function","function":{"name":"f"}}],"tool_choice":{"type":"allowed_tools","allowed_tools":{"mode":"auto","tools":[]}}`), 400, "constrained_decoding_not_supported", "tool_choice"},
		{"undeclared tool named", with(`"tools":[{"type":"function","function":{"name":"f"}}],"tool_choice":{"type":"function","function":{"name":"g"}}`), 400, "invalid_value", "tool_choice.function.name"},
		{"nothing named", with(`"tools":[{"type":"function","function":{"name":"f"}}],"tool_choice":{"type":"function"}`), 400, "invalid_type", "tool_choice.function"},
		{"named by another type", with(`"tools":[{"type":"function","function":{"name":"f"}}],"tool_choice":{"type":"custom"}`), 400, "invalid_value", "tool_choice.type"},
		{"strict", with(`"tools":[{"type":"function","function":{"name":"e"}},{"type":"function","function":{"name":"f","strict":true}}]`), 400, "constrained_decoding_not_supported", "tools[1].function.strict"},
		{"strict's type", with(`"tools":[{"type":"function","function":{"name":"f","strict":1}}]`), 400, "invalid_type", "tools[0].function.strict"},
		{"calls well formed", with(`"tools":[{"type":"function","function":{"name":"f"}}],"tool_constraints":"basic"`), 400, "constrained_decoding_not_supported", "tool_constraints"},
		{"required without tools", with(`"tool_choice":"required"`), 400, "invalid_value", "tool_choice"},
		{"named without tools", with(`"tool_choice":{"type":"function","function":{"name":"f"}},"tools":[]`), 400, "invalid_value", "tool_choice"},
		{"no such choice", with(`"tool_choice":"some"`), 400, "invalid_value", "tool_choice"},
		{"choice's type", with(`"tool_choice":true`), 400, "invalid_type", "tool_choice"},
		{"tools' type", with(`"tools":{},"tool_choice":"none"`), 400, "invalid_type", "tools"},
		{"tool's type", with(`"tools":["f"],"tool_choice":"none"`), 400, "invalid_type", "tools[0]"},
		{"type of tool", with(`"tools":[{"type":"web_search"}],"tool_choice":"none"`), 400, "tool_type_not_supported", "tools[0].type"},
		{"tool without function", with(`"tools":[{"type":"function"}],"tool_choice":"none"`), 400, "invalid_type", "tools[0].function"},
		{"tool's name", with(`"tools":[{"type":"function","function":{"name":"a b"}}],"tool_choice":"none"`), 400, "invalid_value", "tools[0].function.name"},
		{"tool's long name", with(`"tools":[{"type":"function","function":{"name":"` + strings.Repeat("a", 65) + `"}}],"tool_choice":"none"`), 400, "invalid_value", "tools[0].function.name"},
		{"tool's parameters", with(`"tools":[{"type":"function","function":{"name":"f","parameters":[]}}],"tool_choice":"none"`), 400, "invalid_type", "tools[0].function.parameters"},
		{"tool_constraints", with(`"tool_constraints":"hard"`), 400, "invalid_value", "tool_constraints"},
		{"parallel_tool_calls", with(`"parallel_tool_calls":"no"`), 400, "invalid_type", "parallel_tool_calls"},
		// messages
		{"no messages", `{}`, 400, "missing_required_parameter", "messages"},
		{"empty messages", `{"messages":[]}`, 400, "invalid_value", "messages"},
		{"messages' type", `{"messages":"Q"}`, 400, "invalid_type", "messages"},
		{"a message's type", `{"messages":["Q"]}`, 400, "invalid_type", "messages[0]"},
		{"no role", say(`{"content":"x"}`), 400, "invalid_value", "messages[1].role"},
		{"role", say(`{"role":"critic","content":"x"}`), 400, "invalid_value", "messages[1].role"},
		{"role's type", say(`{"role":1,"content":"x"}`), 400, "invalid_type", "messages[1].role"},
		{"no content", say(`{"role":"user"}`), 400, "missing_required_parameter", "messages[1].content"},
		{"null content", say(`{"role":"assistant","content":null}`), 400, "missing_required_parameter", "messages[1].content"},
		{"content's type", say(`{"role":"user","content":5}`), 400, "invalid_type", "messages[1].content"},
		{"part's type", say(`{"role":"user","content":["x"]}`), 400, "invalid_type", "messages[1].content[0]"},
		{"part without type", say(`{"role":"user","content":[{"text":"x"}]}`), 400, "missing_required_parameter", "messages[1].content[0].type"},
		{"part without text", say(`{"role":"user","content":[{"type":"text"}]}`), 400, "missing_required_parameter", "messages[1].content[0].text"},
		{"text's type", say(`{"role":"user","content":[{"type":"text","text":5}]}`), 400, "invalid_type", "messages[1].content[0].text"},
		{"a user's refusal", say(`{"role":"user","content":[{"type":"refusal","refusal":"x"}]}`), 400, "invalid_value", "messages[1].content[0].type"},
		{"audio", say(`{"role":"user","content":[{"type":"input_audio","input_audio":{}}]}`), 400, "modality_not_supported", "messages[1].content[0]"},
		{"file", say(`{"role":"user","content":[{"type":"text","text":"x"},{"type":"file","file":{}}]}`), 400, "modality_not_supported", "messages[1].content[1]"},
		{"image", say(`{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:image/png;base64,"}}]}`), 400, "vision_disabled", "messages[1].content[0].image_url"},
		{"image as a string", say(`{"role":"user","content":[{"type":"image_url","image_url":"data:image/png;base64,"}]}`), 400, "vision_disabled", "messages[1].content[0].image_url"},
		{"image's detail", say(`{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:,","detail":"low"}}]}`), 400, "image_detail_not_supported", "messages[1].content[0].image_url.detail"},
		{"image's type", say(`{"role":"user","content":[{"type":"image_url","image_url":5}]}`), 400, "invalid_type", "messages[1].content[0].image_url"},
		{"image in a system message", say(`{"role":"system","content":[{"type":"image_url","image_url":"data:,"}]}`), 400, "modality_not_supported", "messages[1].content[0]"},
		{"video", say(`{"role":"user","content":[{"type":"video_url","video_url":"data:,"}]}`), 400, "vision_disabled", "messages[1].content[0].video_url"},
		{"name", say(`{"role":"user","content":"x","name":"joe"}`), 400, "message_name_not_supported", "messages[1].name"},
		{"function without name", say(`{"role":"function","content":"x"}`), 400, "invalid_value", "messages[1].name"},
		{"tool without id", say(`{"role":"tool","content":"x"}`), 400, "missing_required_parameter", "messages[1].tool_call_id"},
		{"history with audio", say(`{"role":"assistant","content":"x","audio":{"id":"a"}}`), 400, "assistant_history_not_supported", "messages[1].audio"},
		{"history with function_call", say(`{"role":"assistant","content":"x","function_call":{"name":"f","arguments":"{}"}}`), 400, "legacy_tools_not_supported", "messages[1].function_call"},
		{"two reasonings", say(`{"role":"assistant","content":"x","reasoning":"a","reasoning_content":"b"}`), 400, "invalid_value", "messages[1].reasoning"},
		{"reasoning's type", say(`{"role":"assistant","content":"x","reasoning":5}`), 400, "invalid_type", "messages[1].reasoning"},
		{"call without id", say(`{"role":"assistant","tool_calls":[{"type":"function","function":{"name":"f","arguments":"{}"}}]}`), 400, "missing_required_parameter", "messages[1].tool_calls[0].id"},
		{"call's type", say(`{"role":"assistant","tool_calls":[{"id":"a","type":"custom","function":{"name":"f","arguments":"{}"}}]}`), 400, "tool_type_not_supported", "messages[1].tool_calls[0].type"},
		{"call's arguments", say(`{"role":"assistant","tool_calls":[{"id":"a","type":"function","function":{"name":"f","arguments":"[]"}}]}`), 400, "invalid_value", "messages[1].tool_calls[0].function.arguments"},
		{"call's broken arguments", say(`{"role":"assistant","tool_calls":[{"id":"a","type":"function","function":{"name":"f","arguments":"{\"a\":"}}]}`), 400, "invalid_value", "messages[1].tool_calls[0].function.arguments"},
		{"call without arguments", say(`{"role":"assistant","tool_calls":[{"id":"a","type":"function","function":{"name":"f"}}]}`), 400, "invalid_value", "messages[1].tool_calls[0].function.arguments"},
		{"continuing while thinking", `{"messages":[{"role":"user","content":"Q"},{"role":"assistant","content":"A"}]}`, 400, "invalid_prompt", "messages"},
		{"too long", `{"messages":[{"role":"user","content":"` + strings.Repeat("é!", 600) + `"}]}`, 400, "context_length_exceeded", "messages"},
	} {
		for _, stream := range []bool{false, true} {
			body := c.body
			if stream { // errors before the first event keep their status
				if strings.Contains(body, `"stream"`) || strings.Contains(body, "stream_options") || !strings.HasPrefix(body, `{"`) {
					continue
				}
				body = `{"stream":true,` + body[1:]
				if c.name == "top_logprobs' range" {
					continue
				}
			}
			a := s.chat(t, body)
			message, kind, param, code := errorIn(t, a.body)
			if a.status != c.status || kind != "invalid_request_error" || code != c.code || param != c.param || message == "" || strings.Contains(message, "\n") {
				t.Errorf("%s: %d %s; want %d %s %s", c.name, a.status, a.body, c.status, c.code, c.param)
			}
			if a.header.Get("X-Request-Id") == "" || a.header.Get("Content-Type") != "application/json" {
				t.Errorf("%s: header %v", c.name, a.header)
			}
		}
	}
	if gen.requests != nil {
		t.Errorf("%d refused requests ran", len(gen.requests))
	}
	a := s.chat(t, with(`"reasoning_effort":"high"`))
	if message, _, _, _ := errorIn(t, a.body); !strings.Contains(message, "low, medium, xhigh") {
		t.Errorf("%q does not list the efforts", message)
	}
	raises := start(t, setup{gen: gen, template: strings.ReplaceAll(efforts, "['system', ", "[")})
	a = raises.chat(t, `{"messages":[{"role":"system","content":"S"},{"role":"user","content":"Q"}]}`)
	if message, _, param, code := errorIn(t, a.body); a.status != 400 || code != "invalid_prompt" || param != "messages" ||
		!strings.Contains(message, "Unexpected message role.") || !strings.Contains(message, "chat_template.jinja") {
		t.Errorf("%d %s", a.status, a.body)
	}
	if a := s.chat(t, `{"messages":[{"role":"user","content":"`+strings.Repeat("é!", 600)+`"}]}`); !strings.Contains(a.body, "512") {
		t.Errorf("%s does not name the ceiling", a.body)
	}
}

// What has no meaning here, and what asks for the default, is accepted.
func TestAccepted(t *testing.T) {
	gen := &script{text: "x"}
	s := start(t, setup{gen: gen, template: efforts})
	for _, members := range []string{
		`"model":"m"`, `"model":null`, `"n":1`, `"n":null`, `"stream":false`, `"stream_options":null`, `"logit_bias":{}`, `"logit_bias":{"7":0,"8":0.0}`,
		`"logprobs":false`, `"logprobs":null,"top_logprobs":0`, `"metadata":{"a":"b"}`, `"user":"u"`, `"safety_identifier":"s"`, `"service_tier":"auto"`,
		`"prediction":{"type":"content","content":"x"}`, `"store":false`, `"verbosity":"medium"`, `"functions":[]`, `"function_call":"none"`,
		`"modalities":["text"]`, `"modalities":["text"],"audio":{"voice":"alloy","format":"wav"}`, `"mm_processor_kwargs":{}`, `"mm_processor_kwargs":{"fps":null}`,
		`"repetition_penalty":1`, `"repetition_penalty":1.0`, `"grammar":null`, `"guided_json":null`, `"structured_outputs":null`, `"response_format":{"type":"text"}`,
		`"tools":[]`, `"tools":null,"tool_choice":null`, `"tools":[],"tool_choice":"auto"`, `"tool_choice":"none"`, `"parallel_tool_calls":false`,
		`"tools":[{"type":"function","function":{"name":"f"}}]`, `"tools":[{"type":"function","function":{"name":"f","strict":false}}],"tool_choice":"auto","parallel_tool_calls":true,"stop":"x"`,
		`"tools":[{"type":"function","function":{"name":"f"}}],"parallel_tool_calls":false`,
		`"tools":[{"type":"function","function":{"name":"f","strict":true}}],"tool_choice":"none","parallel_tool_calls":false,"tool_constraints":"basic"`, `"tool_constraints":"auto"`,
		`"prompt_cache_key":"k"`, `"prompt_cache_retention":"24h"`, `"prompt_cache_options":{"mode":"explicit","ttl":"30m"}`, `"prompt_cache_read_only":true`,
		`"no_such_member":{"a":[1,2,{"a":1,"a":2}]}`, `"chat_template_kwargs":null`, `"chat_template_kwargs":{"enable_thinking":null,"anything":{"x":[1]}}`,
		`"enable_thinking":true,"chat_template_kwargs":{"enable_thinking":true}`, `"temperature":null,"top_p":null,"max_tokens":null,"seed":null,"stop":null`,
		`"stop":["a","b","c","d"]`, `"stop":[]`, `"temperature":3,"temperature":1`, `"reasoning_effort":"none"`, `"reasoning_effort":"xhigh"`, `"thinking_budget_tokens":-1`,
	} {
		if a := s.chat(t, with(members)); a.status != 200 {
			t.Errorf("%s: %d %s", members, a.status, a.body)
		}
	}
	for name, body := range map[string]string{
		"every role": `{"messages":[{"role":"system","content":"S"},{"role":"developer","content":"D"},{"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]},` +
			`{"role":"assistant","content":null,"reasoning":"r","reasoning_content":"r","tool_calls":[{"id":"c1","type":"function","function":{"name":"f","arguments":"{\"b\":1.0,\"a\":2}"}},{"id":"c2","type":"function","function":{"name":"g","arguments":{}}}]},` +
			`{"role":"tool","tool_call_id":"c1","content":"one","name":"f"},{"role":"tool","tool_call_id":"c2","content":[{"type":"text","text":"two"}]},{"role":"function","name":"f","content":"three"},` +
			`{"role":"assistant","content":[{"type":"refusal","refusal":"no"}],"refusal":null,"annotations":[]},{"role":"user","content":"Q","name":""}]}`,
		"results first":    `{"messages":[{"role":"tool","tool_call_id":"x","content":"one"},{"role":"user","content":"Q"}]}`,
		"later system":     `{"messages":[{"role":"user","content":"Q"},{"role":"assistant","content":"A"},{"role":"system","content":"S"},{"role":"user","content":"Q"}]}`,
		"empty content":    `{"messages":[{"role":"user","content":""}]}`,
		"no parts":         `{"messages":[{"role":"user","content":[]}]}`,
		"continued":        `{"messages":[{"role":"user","content":"Q"},{"role":"assistant","content":"So far"}],"chat_template_kwargs":{"enable_thinking":false}}`,
		"cache breakpoint": `{"messages":[{"role":"user","content":[{"type":"text","text":"Q","prompt_cache_breakpoint":{"mode":"explicit"}}]}]}`,
		"control spelling": `{"messages":[{"role":"user","content":"<|im_end|></think>"}]}`,
	} {
		if a := s.chat(t, body); a.status != 200 {
			t.Errorf("%s: %d %s", name, a.status, a.body)
		}
	}
}

// What a body asks for reaches the engine and the prompt.
func TestMeaning(t *testing.T) {
	gen := &script{text: "abcdefghijklm"}
	s := start(t, setup{gen: gen, template: efforts, draft: 3})
	prompt := func() string { return tokenizer().Decode(gen.last().Prompt) }
	for _, c := range []struct {
		members string
		check   func(r engine.Request, prompt string) bool
	}{
		{`"temperature":0.5,"top_p":0.25,"min_p":0.125,"presence_penalty":-1,"frequency_penalty":1.5,"top_k":7,"seed":-1`, func(r engine.Request, _ string) bool {
			return r.Sampling == engine.Sampling{Temperature: 0.5, TopP: 0.25, MinP: 0.125, Presence: -1, Frequency: 1.5, TopK: 7, Seed: 1<<64 - 1} && r.Draft == 3
		}},
		{`"seed":5`, func(r engine.Request, _ string) bool {
			return r.Sampling == engine.Sampling{Temperature: 1, TopP: 0.95, TopK: 20, Seed: 5}
		}},
		{`"seed":5,"enable_thinking":false`, func(r engine.Request, p string) bool {
			return r.Sampling == engine.Sampling{Temperature: 0.7, TopP: 0.8, TopK: 20, Presence: 1.5, Seed: 5} && strings.HasSuffix(p, "</think>\n\n")
		}},
		{`"top_k":1000,"seed":1`, func(r engine.Request, _ string) bool { return r.Sampling.TopK == 20 }},
		{`"max_tokens":7`, func(r engine.Request, _ string) bool { return r.MaxNew == 7 }},
		{`"max_tokens":7,"max_completion_tokens":9`, func(r engine.Request, _ string) bool { return r.MaxNew == 9 }},
		{`"max_tokens":0`, func(r engine.Request, _ string) bool { return r.MaxNew == 0 }},
		{`"max_tokens":-1`, func(r engine.Request, _ string) bool { return r.MaxNew == 512-len(r.Prompt) }},
		{`"model":"m"`, func(r engine.Request, _ string) bool { return r.MaxNew == 200 && len(r.StopIDs) == 2 }},
		{`"reasoning_effort":"low"`, func(_ engine.Request, p string) bool { return strings.Contains(p, "assistant\nlow<think>") }},
		{`"chat_template_kwargs":{"reasoning_effort":"medium"}`, func(_ engine.Request, p string) bool { return strings.Contains(p, "assistant\nmedium<think>") }},
		{`"tools":[{"type":"function","function":{"name":"f","parameters":{"z":1.0,"a":1e3}}}],"tool_choice":"none"`, func(_ engine.Request, p string) bool {
			return strings.Contains(p, `[{"type": "function", "function": {"name": "f", "parameters": {"z": 1.0, "a": 1e3}}}]`)
		}},
	} {
		a := s.chat(t, with(c.members))
		if a.status != 200 {
			t.Fatalf("%s: %d %s", c.members, a.status, a.body)
		}
		if !c.check(gen.last(), prompt()) {
			t.Errorf("%s: %+v, prompt %q", c.members, gen.last(), prompt())
		}
	}
	// Without a seed there are different ones.
	s.chat(t, with(`"user":"a"`))
	first := gen.last().Sampling.Seed
	s.chat(t, with(`"user":"a"`))
	if gen.last().Sampling.Seed == first {
		t.Error("two requests without a seed have the same")
	}
}

// A body's size is decided before it is parsed, also where the length is not announced.
func TestBodySize(t *testing.T) {
	s := start(t, setup{gen: &script{text: "x"}, opt: server.Options{MaxBody: 1 << 20}})
	for _, size := range []int{1 << 20, 1<<20 + 1, 3 << 20} {
		body := hello + strings.Repeat(" ", size-len(hello))
		for name, a := range map[string]answer{
			"announced": s.chat(t, body),
			"chunked":   send(t, "POST", s.url+"/v1/chat/completions", body, "Transfer-Encoding", "chunked"),
		} {
			if size <= 1<<20 {
				if a.status != 200 {
					t.Errorf("%s of %d bytes: %d %s", name, size, a.status, a.body)
				}
				continue
			}
			if _, kind, _, code := errorIn(t, a.body); a.status != 413 || kind != "invalid_request_error" || code != "request_too_large" {
				t.Errorf("%s of %d bytes: %d %s", name, size, a.status, a.body)
			}
		}
	}
	if a := s.chat(t, strings.Repeat("x", 3<<20)); a.status != 413 {
		t.Errorf("a large body that is not JSON: %d", a.status)
	}
	if a := s.chat(t, hello); a.status != 200 {
		t.Errorf("after: %d %s", a.status, a.body)
	}
}

func TestErrorBodiesAreOneLine(t *testing.T) {
	s := start(t, setup{gen: &script{text: "x"}})
	for _, text := range []string{"a\nb", "\x00", "\u2028", `"quoted"`} {
		a := s.chat(t, with(fmt.Sprintf(`"model":%q`, text)))
		if a.status == 200 || strings.Count(a.body, "\n") != 0 {
			t.Errorf("%q: %d %s", text, a.status, a.body)
		}
	}
	for line := range strings.Lines(s.log.String()) {
		if !strings.Contains(line, "  info  request refused | ") {
			t.Errorf("log line %q", line)
		}
	}
}
