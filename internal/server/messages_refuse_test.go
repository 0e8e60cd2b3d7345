package server_test

import (
	"encoding/json/v2"
	"strings"
	"testing"

	"ninfer/internal/engine"
	"ninfer/internal/front"
)

// conversation is a body of Messages with these messages.
func conversation(messages string, members ...string) string {
	return `{"model":"m","messages":[` + messages + `]` + strings.Join(members, "") + `}`
}

// said is a message with blocks.
func said(role string, blocks ...string) string {
	return `{"role":"` + role + `","content":[` + strings.Join(blocks, ",") + `]}`
}

const (
	question  = `{"role":"user","content":"Q"}`
	useF      = `{"type":"tool_use","id":"t1","name":"f","input":{"b":1.0,"a":2}}`
	useG      = `{"type":"tool_use","id":"t2","name":"g","input":{}}`
	resultF   = `{"type":"tool_result","tool_use_id":"t1","content":"one"}`
	resultG   = `{"type":"tool_result","tool_use_id":"t2","content":[{"type":"text","text":"tw"},{"type":"text","text":"o"}]}`
	notText   = `{"type":"thinking","thinking":"T","signature":"S"}`
	pictureOf = `{"type":"image","source":{"type":"base64","media_type":"image/png","data":""}}`
)

func text(s string) string { return `{"type":"text","text":"` + s + `"}` }

// The client's mistakes, and what this server does not do (docs/serving.md, Messages). The message begins with the place and ends with the code;
// the count refuses the same.
func TestMessagesRefusals(t *testing.T) {
	gen := &script{text: "x"}
	s := start(t, setup{gen: gen, template: efforts, front: front.Options{MaxTokens: 4096}})
	marked := func(ttl string) string {
		return `{"type":"text","text":"Q","cache_control":{"type":"ephemeral"` + ttl + `}}`
	}
	four := strings.Join([]string{marked(""), marked(""), marked(""), marked("")}, ",")
	tool := func(members string) string { return `,"tools":[{"name":"f"` + members + `}]` }
	block := func(b string) string { return conversation(said("user", b)) }
	for _, c := range []struct{ name, body, code, place string }{
		// what is no JSON object
		{"empty", ``, "invalid_json", "the body"},
		{"array", `[]`, "invalid_json", "the body"},
		{"not UTF-8", "{\"model\":\"\xff\"}", "invalid_json", "the body"},
		{"the last of two counts", asked(`,"temperature":1,"temperature":3`), "invalid_value", "temperature"},
		// fields
		{"no model", `{"messages":[` + question + `]}`, "missing_required_parameter", "model"},
		{"empty model", `{"model":"","messages":[` + question + `]}`, "missing_required_parameter", "model"},
		{"model's type", `{"model":5,"messages":[` + question + `]}`, "invalid_type", "model"},
		{"max_tokens 0", asked(`,"max_tokens":0`), "invalid_value", "max_tokens"},
		{"max_tokens -1", asked(`,"max_tokens":-1`), "invalid_value", "max_tokens"},
		{"max_tokens far", asked(`,"max_tokens":99999999999`), "invalid_value", "max_tokens"},
		{"max_tokens' type", asked(`,"max_tokens":1.5`), "invalid_type", "max_tokens"},
		{"stream", asked(`,"stream":1`), "invalid_type", "stream"},
		{"temperature above 1", asked(`,"temperature":1.1`), "invalid_value", "temperature"},
		{"temperature below 0", asked(`,"temperature":-0.1`), "invalid_value", "temperature"},
		{"temperature's type", asked(`,"temperature":"1"`), "invalid_type", "temperature"},
		{"top_p", asked(`,"top_p":1.1`), "invalid_value", "top_p"},
		{"top_k", asked(`,"top_k":-1`), "invalid_value", "top_k"},
		{"top_k's type", asked(`,"top_k":1.5`), "invalid_type", "top_k"},
		{"stop's type", asked(`,"stop_sequences":"a"`), "invalid_type", "stop_sequences"},
		{"stop's items", asked(`,"stop_sequences":["a",5]`), "invalid_type", "stop_sequences[1]"},
		{"empty stop", asked(`,"stop_sequences":["a",""]`), "invalid_value", "stop_sequences[1]"},
		{"thinking's type", asked(`,"thinking":true`), "invalid_type", "thinking"},
		{"type of thinking", asked(`,"thinking":{"type":"on"}`), "invalid_value", "thinking.type"},
		{"no type of thinking", asked(`,"thinking":{}`), "invalid_value", "thinking.type"},
		{"no budget", asked(`,"thinking":{"type":"enabled"}`), "missing_required_parameter", "thinking.budget_tokens"},
		{"small budget", asked(`,"max_tokens":4000,"thinking":{"type":"enabled","budget_tokens":1023}`), "invalid_value", "thinking.budget_tokens"},
		{"budget as large as the limit", asked(`,"max_tokens":2000,"thinking":{"type":"enabled","budget_tokens":2000}`), "invalid_value", "thinking.budget_tokens"},
		{"budget's type", asked(`,"thinking":{"type":"adaptive","budget_tokens":"x"}`), "invalid_type", "thinking.budget_tokens"},
		{"thinking not shown", asked(`,"thinking":{"type":"adaptive","display":"omitted"}`), "thinking_display_not_supported", "thinking.display"},
		{"no such display", asked(`,"thinking":{"type":"adaptive","display":"bright"}`), "invalid_value", "thinking.display"},
		{"effort", asked(`,"output_config":{"effort":"max"}`), "reasoning_effort_not_supported", "output_config.effort"},
		{"empty effort", asked(`,"output_config":{"effort":""}`), "reasoning_effort_not_supported", "output_config.effort"},
		{"effort's type", asked(`,"output_config":{"effort":3}`), "invalid_type", "output_config.effort"},
		{"no effort, but thinking", asked(`,"output_config":{"effort":"none"},"thinking":{"type":"adaptive"}`), "conflicting_template_option", "output_config.effort"},
		{"output_config's type", asked(`,"output_config":[]`), "invalid_type", "output_config"},
		{"json_schema", asked(`,"output_config":{"format":{"type":"json_schema","schema":{}}}`), "constrained_decoding_not_supported", "output_config.format"},
		{"type of format", asked(`,"output_config":{"format":{"type":"json"}}`), "invalid_value", "output_config.format.type"},
		{"older format", asked(`,"output_format":{"type":"json_schema","schema":{}}`), "constrained_decoding_not_supported", "output_format"},
		{"structured_outputs", asked(`,"structured_outputs":{"choice":["a"]}`), "constrained_decoding_not_supported", "structured_outputs"},
		{"container", asked(`,"container":"c"`), "container_not_supported", "container"},
		{"mcp_servers", asked(`,"mcp_servers":[{"type":"url"}]`), "mcp_not_supported", "mcp_servers"},
		{"kwargs' type", asked(`,"chat_template_kwargs":[]`), "invalid_type", "chat_template_kwargs"},
		{"kwargs over messages", asked(`,"chat_template_kwargs":{"messages":[]}`), "conflicting_template_option", "chat_template_kwargs"},
		{"thinking twice", asked(`,"thinking":{"type":"disabled"},"chat_template_kwargs":{"enable_thinking":true}`), "conflicting_template_option", "thinking"},
		{"preserving twice", asked(`,"preserve_thinking":true,"chat_template_kwargs":{"preserve_thinking":false}`), "conflicting_template_option", "preserve_thinking"},
		{"effort twice", asked(`,"output_config":{"effort":"low"},"chat_template_kwargs":{"reasoning_effort":"xhigh"}`), "conflicting_template_option", "output_config.effort"},
		{"kwarg's effort", asked(`,"chat_template_kwargs":{"reasoning_effort":""}`), "reasoning_effort_not_supported", "chat_template_kwargs.reasoning_effort"},
		{"preserve_thinking", asked(`,"preserve_thinking":1`), "invalid_type", "preserve_thinking"},
		// tools
		{"tools' type", asked(`,"tools":{}`), "invalid_type", "tools"},
		{"tool's type", asked(`,"tools":["f"]`), "invalid_type", "tools[0]"},
		{"tool without name", asked(`,"tools":[{"input_schema":{}}]`), "invalid_value", "tools[0].name"},
		{"tool's name", asked(`,"tools":[{"name":"a b"}]`), "invalid_value", "tools[0].name"},
		{"tool's long name", asked(`,"tools":[{"name":"` + strings.Repeat("a", 129) + `"}]`), "invalid_value", "tools[0].name"},
		{"tool's description", asked(tool(`,"description":5`)), "invalid_type", "tools[0].description"},
		{"tool's schema", asked(tool(`,"input_schema":[]`)), "invalid_type", "tools[0].input_schema"},
		{"tool's examples", asked(tool(`,"input_examples":[{},5]`)), "invalid_type", "tools[0].input_examples[1]"},
		{"strict", asked(tool(`},{"name":"g","strict":true`)), "constrained_decoding_not_supported", "tools[1].strict"},
		{"strict's type", asked(tool(`,"strict":1`)), "invalid_type", "tools[0].strict"},
		{"deferred", asked(tool(`,"defer_loading":true`)), "deferred_tools_not_supported", "tools[0].defer_loading"},
		{"callers", asked(tool(`,"allowed_callers":["direct","code_execution_20250825"]`)), "tool_caller_not_supported", "tools[0].allowed_callers[1]"},
		{"bash", asked(`,"tools":[{"type":"bash_20250124","name":"bash"}]`), "anthropic_tools_not_supported", "tools[0].type"},
		{"computer", asked(`,"tools":[{"type":"computer_20250124","name":"computer"}]`), "anthropic_tools_not_supported", "tools[0].type"},
		{"web search", asked(`,"tools":[{"type":"web_search_20250305","name":"web_search"}]`), "server_tools_not_supported", "tools[0].type"},
		{"code execution", asked(`,"tools":[{"type":"code_execution_20250825","name":"c"}],"tool_choice":{"type":"none"}`), "server_tools_not_supported", "tools[0].type"},
		{"tool search", asked(`,"tools":[{"type":"tool_search_tool_regex_20251119","name":"c"}]`), "server_tools_not_supported", "tools[0].type"},
		{"tool set", asked(`,"tools":[{"type":"mcp_toolset","mcp_server_name":"c"}]`), "mcp_not_supported", "tools[0].type"},
		{"any", asked(tool("") + `,"tool_choice":{"type":"any"}`), "constrained_decoding_not_supported", "tool_choice"},
		{"one tool", asked(tool("") + `,"tool_choice":{"type":"tool","name":"f"}`), "constrained_decoding_not_supported", "tool_choice"},
		{"another tool", asked(tool("") + `,"tool_choice":{"type":"tool","name":"g"}`), "invalid_value", "tool_choice.name"},
		{"no tool", asked(tool("") + `,"tool_choice":{"type":"tool"}`), "invalid_value", "tool_choice.name"},
		{"any without tools", asked(`,"tool_choice":{"type":"any"}`), "invalid_value", "tool_choice"},
		{"type of choice", asked(tool("") + `,"tool_choice":{"type":"some"}`), "invalid_value", "tool_choice.type"},
		{"choice's type", asked(`,"tool_choice":"auto"`), "invalid_type", "tool_choice"},
		{"parallel use", asked(tool("") + `,"tool_choice":{"type":"auto","disable_parallel_tool_use":1}`), "invalid_type", "tool_choice.disable_parallel_tool_use"},
		{"calls well formed", asked(tool("") + `,"tool_constraints":"basic"`), "constrained_decoding_not_supported", "tool_constraints"},
		{"tool_constraints", asked(`,"tool_constraints":"hard"`), "invalid_value", "tool_constraints"},
		// blocks
		{"system's type", asked(`,"system":5`), "invalid_type", "system"},
		{"system's block", asked(`,"system":["x"]`), "invalid_type", "system[0]"},
		{"system's picture", asked(`,"system":[` + pictureOf + `]`), "invalid_value", "system[0].type"},
		{"system without text", asked(`,"system":[{"type":"text"}]`), "missing_required_parameter", "system[0].text"},
		{"no messages", `{"model":"m"}`, "missing_required_parameter", "messages"},
		{"empty messages", conversation(""), "invalid_value", "messages"},
		{"messages' type", `{"model":"m","messages":"Q"}`, "invalid_type", "messages"},
		{"a message's type", conversation(`"Q"`), "invalid_type", "messages[0]"},
		{"role", conversation(`{"role":"tool","content":"x"}`), "invalid_value", "messages[0].role"},
		{"no role", conversation(`{"content":"x"}`), "invalid_value", "messages[0].role"},
		{"no content", conversation(`{"role":"user"}`), "missing_required_parameter", "messages[0].content"},
		{"content's type", conversation(`{"role":"user","content":5}`), "invalid_type", "messages[0].content"},
		{"block's type", conversation(said("user", `"x"`)), "invalid_type", "messages[0].content[0]"},
		{"block without type", block(`{"text":"x"}`), "missing_required_parameter", "messages[0].content[0].type"},
		{"block without text", block(`{"type":"text"}`), "missing_required_parameter", "messages[0].content[0].text"},
		{"text's type", block(`{"type":"text","text":5}`), "invalid_type", "messages[0].content[0].text"},
		{"no such block", block(`{"type":"song"}`), "invalid_value", "messages[0].content[0].type"},
		{"document", block(`{"type":"document","source":{"type":"text","media_type":"text/plain","data":"x"}}`), "documents_not_supported", "messages[0].content[0].type"},
		{"document in a file", block(`{"type":"document","source":{"type":"file","file_id":"x"}}`), "files_not_supported", "messages[0].content[0].type"},
		{"search result", block(`{"type":"search_result","source":"x","title":"t","content":[]}`), "search_results_not_supported", "messages[0].content[0].type"},
		{"container upload", block(`{"type":"container_upload","file_id":"x"}`), "container_not_supported", "messages[0].content[0].type"},
		{"server tool", conversation(question + "," + said("assistant", `{"type":"server_tool_use","id":"s","name":"web_search","input":{}}`)), "server_tools_not_supported", "messages[1].content[0].type"},
		{"server tool's result", conversation(question + "," + said("assistant", `{"type":"web_search_tool_result","tool_use_id":"s","content":[]}`)), "server_tools_not_supported", "messages[1].content[0].type"},
		{"MCP", conversation(question + "," + said("assistant", `{"type":"mcp_tool_use","id":"s","name":"x","server_name":"y","input":{}}`)), "mcp_not_supported", "messages[1].content[0].type"},
		{"picture", block(pictureOf), "vision_disabled", "messages[0].content[0]"},
		{"picture elsewhere", block(`{"type":"image","source":{"type":"url","url":"http://a"},"transformations":{"oversized_image":"error"}}`), "vision_disabled", "messages[0].content[0]"},
		{"picture in a file", block(`{"type":"image","source":{"type":"file","file_id":"x"}}`), "files_not_supported", "messages[0].content[0].source.type"},
		{"picture without source", block(`{"type":"image"}`), "missing_required_parameter", "messages[0].content[0].source"},
		{"picture without data", block(`{"type":"image","source":{"type":"base64","media_type":"image/png"}}`), "missing_required_parameter", "messages[0].content[0].source.data"},
		{"picture's source", block(`{"type":"image","source":{"type":"disk"}}`), "invalid_value", "messages[0].content[0].source.type"},
		{"picture's size", block(`{"type":"image","source":{"type":"url","url":"x"},"transformations":{"oversized_image":"crop"}}`), "invalid_value", "messages[0].content[0].transformations.oversized_image"},
		{"an assistant's picture", conversation(question + "," + said("assistant", pictureOf)), "invalid_value", "messages[1].content[0].type"},
		{"a user's thoughts", block(notText), "invalid_value", "messages[0].content[0].type"},
		{"thoughts without text", conversation(question + "," + said("assistant", `{"type":"thinking"}`) + "," + question), "missing_required_parameter", "messages[1].content[0].thinking"},
		{"a user's call", block(useF), "invalid_value", "messages[0].content[0].type"},
		{"call without id", conversation(question + "," + said("assistant", `{"type":"tool_use","name":"f","input":{}}`) + "," + question), "missing_required_parameter", "messages[1].content[0].id"},
		{"call without name", conversation(question + "," + said("assistant", `{"type":"tool_use","id":"a","input":{}}`) + "," + question), "missing_required_parameter", "messages[1].content[0].name"},
		{"call without input", conversation(question + "," + said("assistant", `{"type":"tool_use","id":"a","name":"f"}`) + "," + question), "missing_required_parameter", "messages[1].content[0].input"},
		{"call's input", conversation(question + "," + said("assistant", `{"type":"tool_use","id":"a","name":"f","input":"{}"}`) + "," + question), "invalid_type", "messages[1].content[0].input"},
		{"call's caller", conversation(question + "," + said("assistant", `{"type":"tool_use","id":"a","name":"f","input":{},"caller":{"type":"code_execution_20250825","tool_id":"x"}}`) + "," + question), "tool_caller_not_supported", "messages[1].content[0].caller.type"},
		{"two calls of one id", conversation(question + "," + said("assistant", useF, useF) + "," + said("user", resultF)), "invalid_tool_history", "messages[1].content[1].id"},
		{"no result", conversation(question + "," + said("assistant", useF) + "," + question), "invalid_tool_history", "messages[2]"},
		{"one result of two", conversation(question + "," + said("assistant", useF, useG) + "," + said("user", resultF)), "invalid_tool_history", "messages[2]"},
		{"nothing after a call", conversation(question + "," + said("assistant", useF)), "assistant_prefill_not_supported", "messages[1]"},
		{"two results of one call", conversation(question + "," + said("assistant", useF) + "," + said("user", resultF, resultF)), "invalid_tool_history", "messages[2].content[1]"},
		{"two first results of one call", conversation(said("user", resultF, resultF)), "invalid_tool_history", "messages[0].content[1]"},
		{"result of nothing", conversation(question + "," + said("assistant", useF) + "," + said("user", resultF, resultG)), "invalid_tool_history", "messages[2].content[1]"},
		{"result much later", conversation(question + "," + said("assistant", text("A")) + "," + said("user", resultF)), "invalid_tool_history", "messages[2].content[0]"},
		{"result behind text", conversation(question + "," + said("assistant", useF) + "," + said("user", text("x"), resultF)), "invalid_tool_history", "messages[2].content[1]"},
		{"result without id", conversation(said("user", `{"type":"tool_result","content":"x"}`)), "missing_required_parameter", "messages[0].content[0].tool_use_id"},
		{"result's content", conversation(said("user", `{"type":"tool_result","tool_use_id":"a","content":5}`)), "invalid_type", "messages[0].content[0].content"},
		{"result's error", conversation(said("user", `{"type":"tool_result","tool_use_id":"a","is_error":"yes"}`)), "invalid_type", "messages[0].content[0].is_error"},
		{"result's document", conversation(said("user", `{"type":"tool_result","tool_use_id":"a","content":[{"type":"document"}]}`)), "documents_not_supported", "messages[0].content[0].content[0].type"},
		{"result's picture", conversation(said("user", `{"type":"tool_result","tool_use_id":"a","content":[`+pictureOf+`]}`)), "vision_disabled", "messages[0].content[0].content[0]"},
		{"result's reference", conversation(said("user", `{"type":"tool_result","tool_use_id":"a","content":[{"type":"tool_reference","tool_name":"f"}]}`)), "deferred_tools_not_supported", "messages[0].content[0].content[0].type"},
		// turns of the system's, last turns of the assistant's
		{"system first", conversation(`{"role":"system","content":"S"},` + question), "invalid_message_order", "messages[0]"},
		{"system before a user", conversation(question + `,{"role":"system","content":"S"},` + question), "invalid_message_order", "messages[1]"},
		{"system behind an assistant", conversation(question + `,{"role":"assistant","content":"A"},{"role":"system","content":"S"}`), "invalid_message_order", "messages[2]"},
		{"continued thoughts", conversation(question+","+said("assistant", notText, text("A")), `,"thinking":{"type":"disabled"}`), "assistant_prefill_not_supported", "messages[1]"},
		{"continued while thinking", conversation(question+`,{"role":"assistant","content":"A"}`, `,"thinking":{"type":"adaptive"}`), "assistant_prefill_not_supported", "messages[1]"},
		{"continued while thinking by default", conversation(question + `,{"role":"assistant","content":"A"}`), "assistant_prefill_not_supported", "messages[1]"},
		{"continued while thinking by effort", conversation(question+`,{"role":"assistant","content":"A"}`, `,"output_config":{"effort":"low"}`), "assistant_prefill_not_supported", "messages[1]"},
		// cache marks
		{"a fifth mark", conversation(said("user", four, marked(""))), "too_many_cache_breakpoints", "messages[0].content[4].cache_control"},
		{"a fifth mark elsewhere", conversation(said("user", four), `,"system":[{"type":"text","text":"S","cache_control":{"type":"ephemeral","ttl":"1h"}}]`), "too_many_cache_breakpoints", "messages[0].content[3].cache_control"},
		{"a fifth mark in a result", conversation(said("user", `{"type":"tool_result","tool_use_id":"a","content":[{"type":"text","text":"x","cache_control":{"type":"ephemeral"}}]}`, four)), "too_many_cache_breakpoints", "messages[0].content[4].cache_control"},
		{"a fifth mark at the top", conversation(said("user", four, text("x")), `,"cache_control":{"type":"ephemeral"}`), "too_many_cache_breakpoints", "cache_control"},
		{"two times at the end", conversation(said("user", marked(`,"ttl":"1h"`)), `,"cache_control":{"type":"ephemeral"}`), "conflicting_cache_ttl", "cache_control.ttl"},
		{"mark's type", conversation(said("user", `{"type":"text","text":"Q","cache_control":5}`)), "invalid_cache_control", "messages[0].content[0].cache_control"},
		{"type of mark", conversation(said("user", `{"type":"text","text":"Q","cache_control":{"type":"eternal"}}`)), "invalid_cache_control", "messages[0].content[0].cache_control"},
		{"mark's time", conversation(said("user", marked(`,"ttl":"2h"`))), "invalid_cache_control", "messages[0].content[0].cache_control"},
		{"tool's mark", asked(tool(`,"cache_control":{"ttl":"5m"}`)), "invalid_cache_control", "tools[0].cache_control"},
		{"top mark", asked(`,"cache_control":true`), "invalid_cache_control", "cache_control"},
		{"mark on thoughts", conversation(question + "," + said("assistant", `{"type":"thinking","thinking":"T","cache_control":{"type":"ephemeral"}}`, text("A")) + "," + question), "invalid_cache_control", "messages[1].content[0].cache_control"},
	} {
		for _, path := range []string{"/v1/messages", "/v1/messages?beta=true", "/v1/messages/count_tokens"} {
			body := c.body
			if strings.HasSuffix(path, "true") { // errors before the first event keep their status
				if strings.Contains(body, `"stream"`) || !strings.HasPrefix(body, `{"`) {
					continue
				}
				body = `{"stream":true,` + body[1:]
			}
			a := send(t, "POST", s.url+path, body)
			kind, message := anthropicError(t, a)
			place, rest, _ := strings.Cut(message, " ")
			place = strings.TrimSuffix(place, ":")
			if c.place == "the body" {
				place = strings.Join(strings.Fields(message)[:2], " ")
			}
			if a.status != 400 || kind != "invalid_request_error" || place != c.place || !strings.HasSuffix(rest, " ("+c.code+")") || strings.Contains(message, "\n") {
				t.Errorf("%s: %s: %d %s; want %s at %s", path, c.name, a.status, a.body, c.code, c.place)
			}
		}
	}
	if gen.requests != nil {
		t.Errorf("%d refused requests ran", len(gen.requests))
	}
	if _, message := anthropicError(t, s.messages(t, asked(`,"output_config":{"effort":"max"}`))); !strings.Contains(message, "low, medium, xhigh") {
		t.Errorf("%q does not list the efforts", message)
	}
}

// What has no meaning here, and what asks for the default, is accepted.
func TestMessagesAccepted(t *testing.T) {
	s := start(t, setup{gen: &script{text: "x"}, template: efforts, front: front.Options{MaxTokens: 4096, Context: 8192}})
	mark := `,"cache_control":{"type":"ephemeral"}`
	for _, members := range []string{
		`,"max_tokens":null`, `,"stream":false`, `,"temperature":1,"top_p":0.5,"top_k":500,"stop_sequences":[]`, `,"metadata":{"user_id":"u"}`, `,"service_tier":"auto"`,
		`,"inference_geo":"us"`, `,"no_such_member":{"a":1}`, `,"context_management":{"edits":[{"type":"clear_thinking_20251015","keep":"all"}]}`, `,"mcp_servers":[]`, `,"container":null`,
		`,"thinking":null`, `,"thinking":{"type":"adaptive","display":"summarized"}`, `,"thinking":{"type":"disabled","budget_tokens":5}`,
		`,"max_tokens":1025,"thinking":{"type":"enabled","budget_tokens":1024}`, `,"max_tokens":null,"thinking":{"type":"enabled","budget_tokens":1024}`,
		`,"output_config":{}`, `,"output_config":{"effort":"none"}`, `,"output_config":{"effort":"low"},"thinking":{"type":"disabled"}`, `,"output_config":{"effort":"low","format":null},"chat_template_kwargs":{"reasoning_effort":"low"}`,
		`,"thinking":{"type":"adaptive"},"chat_template_kwargs":{"enable_thinking":true,"add_vision_id":false,"x":1}`, `,"preserve_thinking":true,"chat_template_kwargs":{"preserve_thinking":true}`,
		`,"system":""`, `,"system":[]`, `,"system":"S"`, `,"cache_control":{"type":"ephemeral","ttl":"1h"}`, `,"cache_control":null`,
		`,"tools":[]`, `,"tools":null,"tool_choice":null`, `,"tool_choice":{"type":"none"}`, `,"tool_choice":{"type":"auto"}`, `,"tool_constraints":"auto"`,
		`,"tools":[{"type":"custom","name":"` + strings.Repeat("a", 128) + `","description":null,"input_schema":{"type":"object"},"input_examples":[{"a":1}],"strict":false,"defer_loading":false,"allowed_callers":["direct"],"eager_input_streaming":true` + mark + `}]`,
		`,"tools":[{"name":"f","strict":true}],"tool_choice":{"type":"none"},"tool_constraints":"basic"`,
	} {
		if a := s.messages(t, asked(members)); a.status != 200 {
			t.Errorf("%s: %d %s", members, a.status, a.body)
		}
	}
	marked := `{"type":"text","text":"Q"` + mark + `}`
	for name, body := range map[string]string{
		"results first":           conversation(said("user", resultF, resultG, text("x"))),
		"results in two messages": conversation(question + "," + said("assistant", useF, useG) + "," + said("user", resultG) + "," + said("user", resultF, text("x"))),
		"empty result":            conversation(said("user", `{"type":"tool_result","tool_use_id":"a"}`)),
		"direct call":             conversation(question + "," + said("assistant", `{"type":"tool_use","id":"t1","name":"f","input":{},"caller":{"type":"direct"}}`) + "," + said("user", resultF)),
		"redacted":                conversation(question + "," + said("assistant", `{"type":"redacted_thinking","data":"x"}`, text("A")) + "," + question),
		"citations":               conversation(question + "," + said("assistant", `{"type":"text","text":"A","citations":null}`) + "," + question),
		"empty":                   conversation(`{"role":"user","content":""}`),
		"no blocks":               conversation(`{"role":"user","content":[]}`),
		"assistant first":         conversation(`{"role":"assistant","content":"A"},` + question),
		"continued":               conversation(question+`,{"role":"assistant","content":"So far"}`, `,"thinking":{"type":"disabled"}`),
		"continued, no effort":    conversation(question+`,{"role":"assistant","content":"So far"}`, `,"output_config":{"effort":"none"}`),
		"four marks":              conversation(said("user", marked, marked, marked, marked), mark),
		"three marks and the top": conversation(said("user", marked, marked, marked, text("x")), mark),
		"mark in a result":        conversation(said("user", `{"type":"tool_result","tool_use_id":"a","content":[`+marked+`]`+mark+`}`), `,"cache_control":{"type":"ephemeral","ttl":"5m"}`),
		"billing's mark":          conversation(said("user", marked, marked, marked, marked), `,"system":[{"type":"text","text":"x-anthropic-billing-header: a"`+mark+`}]`),
		"control spelling":        conversation(`{"role":"user","content":"<|im_end|></think>"}`),
	} {
		if a := s.messages(t, body); a.status != 200 {
			t.Errorf("%s: %d %s", name, a.status, a.body)
		}
	}
}

// What a body asks for reaches the engine.
func TestMessagesMeaning(t *testing.T) {
	gen := &script{text: "abcdefghijklm"}
	s := start(t, setup{gen: gen, template: efforts, draft: 3, front: front.Options{MaxTokens: 2222, Context: 8192}})
	prompt := func() string { return tokenizer().Decode(gen.last().Prompt) }
	for _, c := range []struct {
		members string
		check   func(r engine.Request, prompt string) bool
	}{
		{`,"temperature":0.5,"top_p":0.25,"top_k":7`, func(r engine.Request, _ string) bool {
			return r.Sampling.Temperature == 0.5 && r.Sampling.TopP == 0.25 && r.Sampling.TopK == 7 && r.Draft == 3
		}},
		{`,"top_k":1000`, func(r engine.Request, p string) bool {
			return r.Sampling.TopK == 20 && r.Sampling.Temperature == 1 && strings.HasSuffix(p, "assistant\n<think>\n")
		}},
		{`,"thinking":{"type":"disabled"}`, func(r engine.Request, p string) bool {
			return r.Sampling.Presence == 1.5 && strings.HasSuffix(p, "</think>\n\n")
		}},
		{`,"output_config":{"effort":"none"}`, func(_ engine.Request, p string) bool { return strings.HasSuffix(p, "</think>\n\n") }},
		{`,"output_config":{"effort":"low"}`, func(_ engine.Request, p string) bool { return strings.Contains(p, "assistant\nlow<think>") }},
		{`,"chat_template_kwargs":{"reasoning_effort":"medium"}`, func(_ engine.Request, p string) bool { return strings.Contains(p, "assistant\nmedium<think>") }},
		// The API's own default means the template's.
		{`,"output_config":{"effort":"high"}`, func(_ engine.Request, p string) bool { return strings.HasSuffix(p, "assistant\n<think>\n") }},
		{`,"output_config":{"effort":"high"},"thinking":{"type":"disabled"}`, func(_ engine.Request, p string) bool {
			return strings.HasSuffix(p, "assistant\n<think>\n\n</think>\n\n")
		}},
		{`,"max_tokens":7`, func(r engine.Request, _ string) bool { return r.MaxNew == 7 }},
		{`,"max_tokens":null`, func(r engine.Request, _ string) bool { return r.MaxNew == 2222 }},
		{`,"seed":5,"reasoning_effort":"low"`, func(r engine.Request, p string) bool {
			return r.Sampling.Seed != 5 && strings.HasSuffix(p, "assistant\n<think>\n")
		}},
		{
			`,"tools":[{"cache_control":{"type":"ephemeral"},"type":"custom","name":"f","input_schema":{"z":1.0,"a":1e3},"description":"D","input_examples":[{"x":1.50}],"strict":false}],"tool_choice":{"type":"none"}`,
			func(_ engine.Request, p string) bool {
				return strings.Contains(p, `[{"type": "function", "function": {"name": "f", "parameters": {"z": 1.0, "a": 1e3}, "description": "D", "input_examples": [{"x": 1.50}]}}]`)
			},
		},
	} {
		if a := s.messages(t, asked(c.members)); a.status != 200 {
			t.Fatalf("%s: %d %s", c.members, a.status, a.body)
		}
		if !c.check(gen.last(), prompt()) {
			t.Errorf("%s: %+v, prompt %q", c.members, gen.last(), prompt())
		}
	}
	// On a server that does not think by default an effort is a wish to, as in Chat Completions.
	plain := start(t, setup{gen: gen, template: efforts, front: front.Options{NoThinking: true}})
	for members, thinks := range map[string]bool{``: false, `,"output_config":{"effort":"high"}`: true, `,"output_config":{"effort":"low"}`: true, `,"thinking":{"type":"adaptive"}`: true} {
		plain.messages(t, asked(members))
		if got := !strings.HasSuffix(prompt(), "</think>\n\n"); got != thinks {
			t.Errorf("%s: prompt %q", members, prompt())
		}
	}
	// A budget that the limit just holds is lowered so that an answer fits behind it.
	gen.ids = tokenizer().Encode(strings.Repeat("x", 1024))
	a := s.messages(t, asked(`,"max_tokens":1025,"thinking":{"type":"enabled","budget_tokens":1024}`))
	var got struct {
		Content []struct{ Type, Thinking, Text string } `json:"content"`
		Usage   struct {
			Output int `json:"output_tokens"`
		} `json:"usage"`
	}
	if err := json.Unmarshal([]byte(a.body), &got, json.MatchCaseInsensitiveNames(true)); err != nil {
		t.Fatal(err)
	}
	closing, _, _ := strings.Cut(front.EarlyClose, "</think>")
	if len(got.Content) != 2 || !strings.HasSuffix(got.Content[0].Thinking, closing) || got.Content[1].Text != "x" || got.Usage.Output != 1025 {
		t.Errorf("%d %s", a.status, a.body)
	}
}
