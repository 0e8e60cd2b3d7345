package server_test

import (
	"strings"
	"testing"

	"ninfer/internal/front"
)

// What is refused, with its code and its field (docs/serving.md, Responses), in Create and in the count alike; and what looks alike and is served.
func TestResponseRefusals(t *testing.T) {
	s := start(t, setup{gen: &script{text: "x"}, template: efforts, front: front.Options{Context: 2048}})
	with := func(members string) string { return `{"model":"m","input":"Q",` + members + `}` }
	input := func(items string) string { return `{"model":"m","input":[` + items + `]}` }
	const (
		user   = `{"role":"user","content":"Q"}`
		calls  = `{"type":"function_call","call_id":"a","name":"f","arguments":"{}"},{"type":"function_call","call_id":"b","name":"f","arguments":"{}"}`
		thinks = `{"type":"reasoning","summary":[],"content":[{"type":"reasoning_text","text":"r"}]}`
		says   = `{"type":"message","role":"assistant","content":"s"}`
		a, b   = `{"type":"function_call_output","call_id":"a","output":"1"}`, `{"type":"function_call_output","call_id":"b","output":"2"}`
	)
	for _, c := range []struct {
		body        string
		status      int
		code, param string
	}{
		{`[]`, 400, "invalid_json", ""},
		{`{"input":"Q"}`, 400, "missing_required_parameter", "model"},
		{`{"model":"x","input":"Q"}`, 404, "model_not_found", "model"},
		{`{"model":"m"}`, 400, "missing_required_parameter", "input"},
		{`{"model":"m","input":[]}`, 400, "missing_required_parameter", "input"},
		{`{"model":"m","instructions":"I","input":null}`, 400, "missing_required_parameter", "input"},
		{`{"model":"m","input":5}`, 400, "invalid_type", "input"},
		{with(`"messages":[]`), 400, "unknown_parameter", "messages"},
		{with(`"stop":"x"`), 400, "unknown_parameter", "stop"},
		{with(`"top_k":5`), 400, "unknown_parameter", "top_k"},
		{with(`"reasoning_effort":"low"`), 400, "unknown_parameter", "reasoning_effort"},
		{with(`"enable_thinking":false`), 400, "unknown_parameter", "enable_thinking"},
		{with(`"seed":null`), 400, "unknown_parameter", "seed"},
		{with(`"background":true`), 400, "background_not_supported", "background"},
		{with(`"truncation":"auto"`), 400, "truncation_not_supported", "truncation"},
		{with(`"top_logprobs":3`), 400, "logprobs_not_supported", "top_logprobs"},
		{with(`"service_tier":"flex"`), 400, "service_tier_not_supported", "service_tier"},
		{with(`"include":["message.output_text.logprobs"]`), 400, "include_not_supported", "include[0]"},
		{with(`"include":["reasoning.encrypted_content",5]`), 400, "invalid_type", "include[1]"},
		{with(`"conversation":"conv_1"`), 400, "conversation_not_supported", "conversation"},
		{with(`"prompt":{"id":"p"}`), 400, "prompt_template_not_supported", "prompt"},
		{with(`"context_management":[]`), 400, "compaction_not_supported", "context_management"},
		{with(`"structured_outputs":{"regex":"a"}`), 400, "constrained_decoding_not_supported", "structured_outputs"},
		{with(`"text":{"format":{"type":"json_schema","name":"n","schema":{}}}`), 400, "constrained_decoding_not_supported", "text.format"},
		{with(`"text":{"format":{"type":"json_object"}}`), 400, "constrained_decoding_not_supported", "text.format"},
		{with(`"text":{"format":{"type":"xml"}}`), 400, "invalid_value", "text.format.type"},
		{with(`"text":{"format":{}}`), 400, "missing_required_parameter", "text.format.type"},
		{with(`"text":{"verbosity":"low"}`), 400, "verbosity_not_supported", "text.verbosity"},
		{with(`"stream":"yes"`), 400, "invalid_type", "stream"},
		{with(`"store":1`), 400, "invalid_type", "store"},
		{with(`"max_output_tokens":-1`), 400, "invalid_value", "max_output_tokens"},
		{with(`"max_output_tokens":1.5`), 400, "invalid_type", "max_output_tokens"},
		{with(`"max_tool_calls":-2`), 400, "invalid_value", "max_tool_calls"},
		{with(`"temperature":3`), 400, "invalid_value", "temperature"},
		{with(`"top_p":-0.1`), 400, "invalid_value", "top_p"},
		{with(`"metadata":{"a":1}`), 400, "invalid_type", "metadata.a"},
		{with(`"metadata":{"` + strings.Repeat("k", 65) + `":""}`), 400, "invalid_value", "metadata"},
		{with(`"metadata":{"k":"` + strings.Repeat("é", 513) + `"}`), 400, "invalid_value", "metadata.k"},
		{with(`"metadata":{` + strings.Repeat(`"a":"",`, 3) + pairs(17) + `}`), 400, "invalid_value", "metadata"},
		{with(`"client_metadata":"x"`), 400, "invalid_type", "client_metadata"},
		{with(`"stream_options":5`), 400, "invalid_type", "stream_options"},
		{with(`"reasoning":{"effort":"high"}`), 400, "reasoning_effort_not_supported", "reasoning.effort"},
		{with(`"reasoning":{"effort":5}`), 400, "invalid_type", "reasoning.effort"},
		{with(`"reasoning":{"summary":"detailed"}`), 400, "reasoning_summary_not_supported", "reasoning.summary"},
		{with(`"reasoning":{"effort":"low"},"chat_template_kwargs":{"reasoning_effort":"medium"}`), 400, "conflicting_template_option", "reasoning.effort"},
		{with(`"reasoning":{"effort":"none"},"chat_template_kwargs":{"enable_thinking":true}`), 400, "conflicting_template_option", "enable_thinking"},
		{with(`"preserve_thinking":true,"chat_template_kwargs":{"preserve_thinking":false}`), 400, "conflicting_template_option", "preserve_thinking"},
		{with(`"chat_template_kwargs":{"messages":[]}`), 400, "conflicting_template_option", "chat_template_kwargs.messages"},
		{with(`"prompt_cache_key":"` + strings.Repeat("k", 65) + `"`), 400, "invalid_value", "prompt_cache_key"},
		{with(`"prompt_cache_retention":"1h"`), 400, "invalid_value", "prompt_cache_retention"},
		{with(`"previous_response_id":"resp_0"`), 404, "response_not_found", "previous_response_id"},
		{with(`"tools":[{"type":"web_search"}]`), 400, "tool_type_not_supported", "tools[0].type"},
		{with(`"tools":[{"type":"custom","name":"f"}]`), 400, "tool_type_not_supported", "tools[0].type"},
		{with(`"tools":[{"name":"f"}]`), 400, "missing_required_parameter", "tools[0].type"},
		{with(`"tools":[{"type":"function","function":{"name":"f"}}]`), 400, "invalid_value", "tools[0].name"},
		{with(`"tools":[{"type":"function","name":"a b"}]`), 400, "invalid_value", "tools[0].name"},
		{with(`"tools":[{"type":"function","name":"f","parameters":5}]`), 400, "invalid_type", "tools[0].parameters"},
		{with(`"tools":[{"type":"function","name":"f","strict":true}]`), 400, "constrained_decoding_not_supported", "tools[0].strict"},
		{with(`"tools":[{"type":"namespace","tools":[]}]`), 400, "invalid_value", "tools[0].name"},
		{with(`"tools":[{"type":"namespace","name":"n","tools":[{"type":"namespace","name":"m"}]}]`), 400, "tool_type_not_supported", "tools[0].tools[0].type"},
		{with(`"tools":[{"type":"namespace","name":"n","tools":[{"type":"function","name":"f","strict":true}]}]`), 400, "constrained_decoding_not_supported", "tools[0].tools[0].strict"},
		{with(`"tools":[{"type":"function","name":"n__f"},{"type":"namespace","name":"n","tools":[{"type":"function","name":"f"}]}]`), 400, "invalid_value", "tools[1].tools[0].name"},
		{with(`"tools":[{"type":"namespace","name":"n__","tools":[{"type":"function","name":"f"}]},{"type":"namespace","name":"n","tools":[{"type":"function","name":"f"}]}]`), 400, "invalid_value", "tools[1].tools[0].name"},
		{with(`"tools":[{"type":"namespace","name":"n","tools":[{"type":"function","name":"f"}]},{"type":"function","name":"n__f"}]`), 400, "invalid_value", "tools[1].name"},
		{with(`"tool_choice":"required",` + flat), 400, "constrained_decoding_not_supported", "tool_choice"},
		{with(`"tool_choice":"required"`), 400, "invalid_value", "tool_choice"},
		{with(`"tool_choice":"some",` + flat), 400, "invalid_value", "tool_choice"},
		{with(`"tool_choice":5,` + flat), 400, "invalid_type", "tool_choice"},
		{with(`"tool_choice":{"type":"function","name":"f"},` + flat), 400, "constrained_decoding_not_supported", "tool_choice"},
		{with(`"tool_choice":{"type":"function","name":"g"},` + flat), 400, "invalid_value", "tool_choice.name"},
		{with(`"tool_choice":{"type":"function","namespace":"n","name":"f"},` + flat), 400, "invalid_value", "tool_choice.name"},
		{with(`"tool_choice":{"type":"function","name":"f"}`), 400, "invalid_value", "tool_choice"},
		{with(`"tool_choice":{"type":"allowed_tools","mode":"auto","tools":[{"type":"function","name":"f"}]},` + flat), 400, "constrained_decoding_not_supported", "tool_choice"},
		{with(`"tool_choice":{"type":"allowed_tools","mode":"auto","tools":[{"type":"function","name":"g"}]},` + flat), 400, "invalid_value", "tool_choice.tools[0].name"},
		{with(`"tool_choice":{"type":"web_search"},` + flat), 400, "invalid_value", "tool_choice.type"},
		{with(`"tool_constraints":"basic",` + flat), 400, "constrained_decoding_not_supported", "tool_constraints"},
		{with(`"tool_constraints":"x"`), 400, "invalid_value", "tool_constraints"},
		{with(`"parallel_tool_calls":"x"`), 400, "invalid_type", "parallel_tool_calls"},

		{input(`5`), 400, "invalid_type", "input[0]"},
		{input(`{"content":"x"}`), 400, "missing_required_parameter", "input[0].type"},
		{input(user + `,{"type":"web_search_call","id":"w"}`), 400, "item_type_not_supported", "input[1].type"},
		{input(`{"type":"item_reference","id":"x"}`), 400, "item_type_not_supported", "input[0].type"},
		{input(`{"role":"tool","content":"x"}`), 400, "invalid_value", "input[0].role"},
		{input(`{"type":"message","content":"x"}`), 400, "invalid_value", "input[0].role"},
		{input(`{"role":"user"}`), 400, "missing_required_parameter", "input[0].content"},
		{input(`{"role":"user","content":{}}`), 400, "invalid_type", "input[0].content"},
		{input(`{"role":"user","content":[{"type":"text","text":"x"}]}`), 400, "modality_not_supported", "input[0].content[0].type"},
		{input(`{"role":"user","content":[{"type":"output_text","text":"x"}]}`), 400, "modality_not_supported", "input[0].content[0].type"},
		{input(`{"role":"user","content":[{"type":"refusal","refusal":"x"}]}`), 400, "modality_not_supported", "input[0].content[0].type"},
		{input(`{"role":"user","content":[{"type":"input_file","file_id":"x"}]}`), 400, "modality_not_supported", "input[0].content[0].type"},
		{input(`{"role":"user","content":[{"type":"input_audio"}]}`), 400, "modality_not_supported", "input[0].content[0].type"},
		{input(`{"role":"user","content":[{"type":"input_text"}]}`), 400, "missing_required_parameter", "input[0].content[0].text"},
		{input(`{"role":"user","content":[{"type":"input_text","text":"x","prompt_cache_breakpoint":5}]}`), 400, "invalid_cache_breakpoint", "input[0].content[0].prompt_cache_breakpoint"},
		{input(`{"role":"user","content":[{"type":"input_image","image_url":"data:x"}]}`), 400, "vision_disabled", "input[0].content[0].image_url"},
		{input(`{"role":"user","content":[{"type":"input_image","file_id":"f"}]}`), 400, "modality_not_supported", "input[0].content[0].file_id"},
		{input(`{"role":"user","content":[{"type":"input_image","image_url":"data:x","detail":"high"}]}`), 400, "image_detail_not_supported", "input[0].content[0].detail"},
		{input(`{"role":"user","content":[{"type":"input_video","video_url":"data:x"}]}`), 400, "vision_disabled", "input[0].content[0].video_url"},
		{input(`{"role":"system","content":[{"type":"input_image","image_url":"data:x"}]}`), 400, "modality_not_supported", "input[0].content[0].type"},
		{input(user + `,{"type":"reasoning","summary":[{"type":"summary_text","text":"s"}],"encrypted_content":"x"}`), 400, "missing_required_parameter", "input[1].content"},
		{input(user + `,{"type":"reasoning","content":[{"type":"text","text":"x"}]}`), 400, "invalid_value", "input[1].content[0].type"},
		{input(user + "," + says + "," + thinks), 400, "invalid_assistant_history", "input[2]"},
		{input(user + "," + thinks + "," + thinks), 400, "invalid_assistant_history", "input[2]"},
		{input(user + "," + says + "," + says), 400, "invalid_assistant_history", "input[2]"},
		{input(user + "," + calls + "," + says), 400, "invalid_assistant_history", "input[3]"},
		{input(user + "," + calls), 400, "invalid_tool_history", "input"},
		{input(user + "," + calls + "," + a), 400, "invalid_tool_history", "input"},
		{input(user + "," + calls + "," + a + "," + user), 400, "invalid_tool_history", "input"},
		{input(user + "," + calls + "," + a + "," + b + "," + a), 400, "invalid_tool_history", "input[5].call_id"},
		{input(user + "," + calls + "," + a + "," + strings.Replace(b, `"b"`, `"c"`, 1)), 400, "invalid_tool_history", "input[4].call_id"},
		{input(a), 400, "invalid_tool_history", "input[0].call_id"},
		{input(user + "," + a), 400, "invalid_tool_history", "input[1].call_id"},
		{input(user + `,{"type":"function_call","call_id":"a","name":"f","arguments":"[]"},` + a), 400, "invalid_value", "input[1].arguments"},
		{input(user + `,{"type":"function_call","call_id":"a","name":"f","arguments":{}},` + a), 400, "invalid_type", "input[1].arguments"},
		{input(user + `,{"type":"function_call","call_id":"a","name":"f"},` + a), 400, "missing_required_parameter", "input[1].arguments"},
		{input(user + `,{"type":"function_call","call_id":"a","arguments":"{}"},` + a), 400, "missing_required_parameter", "input[1].name"},
		{input(user + `,{"type":"function_call","name":"f","arguments":"{}"},` + a), 400, "missing_required_parameter", "input[1].call_id"},
		{input(user + `,` + strings.ReplaceAll(calls, `"b"`, `"a"`)), 400, "invalid_tool_history", "input[2].call_id"},
		{input(user + "," + calls + `,{"type":"function_call_output","call_id":"a"}`), 400, "missing_required_parameter", "input[3].output"},
		{input(user + "," + calls + `,{"type":"function_call_output","output":"x"}`), 400, "missing_required_parameter", "input[3].call_id"},
		{input(user + "," + calls + `,{"type":"function_call_output","call_id":"a","output":[{"type":"input_image","image_url":"data:x"}]}`), 400, "vision_disabled", "input[3].output[0].image_url"},
		{input(`{"id":"msg_1","role":"user","content":"Q"},{"id":"msg_1","role":"user","content":"Q"}`), 400, "duplicate_item_id", "input[1].id"},
		{input(user + "," + says), 400, "invalid_prompt", "input"},
	} {
		for _, path := range []string{"/v1/responses", "/v1/responses/input_tokens"} {
			if path != "/v1/responses" && c.code == "missing_required_parameter" && c.param == "model" {
				continue
			}
			r := send(t, "POST", s.url+path, c.body)
			if r.status == 200 {
				t.Errorf("%s %s: %s", path, c.body, r.body)
				continue
			}
			message, kind, param, code := errorIn(t, r.body)
			for name := range map[string]bool{"reasoning_effort": true, "max_completion_tokens": true, "messages": true} {
				if strings.HasPrefix(message, name) && param != name {
					t.Errorf("%s: %q speaks of a field of another route", c.body, message)
				}
			}
			if r.status != c.status || kind != "invalid_request_error" || code != c.code || param != c.param || message == "" {
				t.Errorf("%s %s: %d %s\nwant %d %s %s", path, c.body, r.status, r.body, c.status, c.code, c.param)
			}
		}
	}
	// Too long only where it would run.
	long := with(`"instructions":"` + strings.Repeat("long ", 2000) + `"`)
	if r := s.responses(t, long); r.status != 400 || !strings.Contains(r.body, `"param":"input","code":"context_length_exceeded"`) {
		t.Errorf("%d %s", r.status, r.body)
	}
	if r := send(t, "POST", s.url+"/v1/responses/input_tokens", long); r.status != 200 {
		t.Errorf("%d %s", r.status, r.body)
	}
	for _, body := range []string{
		with(`"background":false,"truncation":null,"include":[],"service_tier":"default","tools":null,"tool_choice":null,"metadata":null,"conversation":null,"prompt":null,"text":{},"reasoning":null`),
		with(`"reasoning":{"effort":"none"},"stream_options":{"include_obfuscation":true},"prompt_cache_options":{"mode":"explicit"},"prompt_cache_retention":"in_memory","tool_constraints":"auto"`),
		with(`"reasoning":{"effort":"low","summary":null},"chat_template_kwargs":{"reasoning_effort":"low"},"metadata":{` + pairs(16) + `}`),
		with(`"tool_choice":"none","tools":[{"type":"function","name":"f","strict":true}]`),
		with(`"tool_choice":"none"`), with(`"tools":[{"type":"namespace","name":"n","tools":[]}]`),
		input(user + "," + thinks + "," + says + "," + calls + "," + b + "," + a),
		input(user + "," + thinks + "," + user),
		input(`{"role":"system","content":"s"},` + user + `,{"role":"assistant","content":[{"type":"output_text","text":"a","annotations":[]},{"type":"refusal","refusal":"no"}],"phase":"final"},` + user),
	} {
		if r := s.responses(t, body); r.status != 200 {
			t.Errorf("%s: %d %s", body, r.status, r.body)
		}
	}
}

// pairs are n members with texts.
func pairs(n int) string {
	var all []string
	for i := range n {
		all = append(all, `"k`+strings.Repeat("x", i)+`":""`)
	}
	return strings.Join(all, ",")
}
