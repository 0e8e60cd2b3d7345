// Responses with the npm package openai against a server whose model says what it is told to (tools/actor), whose address is the argument.
// Every check is an assertion; what passed is printed, a line each.

import assert from "node:assert/strict";
import OpenAI, { APIUserAbortError, BadRequestError, NotFoundError } from "openai";

const [actor] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${actor}/v1`, apiKey: "none", maxRetries: 0 });
const model = "actor";
const call = (name, args) => `<tool_call>\n<function=${name}>\n${Object.entries(args).map(([k, v]) => `<parameter=${k}>\n${v}\n</parameter>\n`).join("")}</function>\n</tool_call>`;
const tools = [{ type: "function", name: "weather", strict: false, parameters: { type: "object", properties: { city: { type: "string" }, days: { type: "integer" } } } }];
const two = `Two look-ups.</think>\n\nChecking both.\n\n${call("weather", { city: "Oslo", days: 2 })}\n${call("weather", { city: "03106" })}`;
const bare = (output) => output.map(({ id, call_id, ...rest }) => rest);

const checks = {
  async plain() {
    const got = await client.responses.create({ model, input: "Because.</think>\n\nHello, wörld 🙂 \n" });
    assert.equal(got.output_text, "Hello, wörld 🙂 \n");
    assert.equal(got.output[0].content[0].text, "Because.");
    assert.equal(got.status, "completed");
    assert.equal(got.usage.total_tokens, got.usage.input_tokens + got.usage.output_tokens);
    assert.match(got.id, /^resp_[0-9a-f]{32}$/);
    assert.ok(got._request_id);
  },

  async stream() {
    const body = { model, input: two, tools };
    const whole = await client.responses.create(body);
    const stream = client.responses.stream(body);
    let text = "";
    let args = "";
    stream.on("response.output_text.delta", (e) => (text += e.delta));
    stream.on("response.function_call_arguments.delta", (e) => (args += e.delta));
    const final = await stream.finalResponse();
    assert.equal(text, "Checking both.");
    assert.equal(args, '{"city":"Oslo","days":2}{"city":"03106"}');
    assert.equal(final.output_text, whole.output_text);
    assert.deepEqual(final.usage, whole.usage);
    assert.deepEqual(bare(final.output).map(({ parsed_arguments, ...rest }) => rest.type), ["reasoning", "message", "function_call", "function_call"]);
    assert.deepEqual(whole.output.slice(2).map((c) => [c.name, c.arguments, c.status]), [
      ["weather", '{"city":"Oslo","days":2}', "completed"],
      ["weather", '{"city":"03106"}', "completed"],
    ]);
  },

  // Results to the kept response, and to a history of the client's own with everything that came.
  async toolsRoundTrip() {
    const input = [{ role: "user", content: two }];
    const first = await client.responses.create({ model, input, tools });
    const results = first.output.filter((o) => o.type === "function_call").map((c) => ({ type: "function_call_output", call_id: c.call_id, output: `rain in ${JSON.parse(c.arguments).city}` }));
    const kept = await client.responses.create({ model, input: results, tools, previous_response_id: first.id });
    const own = await client.responses.create({ model, input: [...input, ...first.output, ...results], tools, store: false });
    for (const got of [kept, own]) assert.equal(got.output_text, "Got rain in Oslo and rain in 03106");
    assert.deepEqual(own.usage, kept.usage);
  },

  async reasoning() {
    const got = await client.responses.create({ model, input: "Hello</think>", reasoning: { effort: "none" } });
    assert.deepEqual(got.output.map((o) => o.type), ["message"]);
    assert.equal(got.usage.output_tokens_details.reasoning_tokens, 0);
    const cut = await client.responses.create({ model, input: "COUNT 9", max_output_tokens: 4, reasoning: { summary: "auto" } });
    assert.equal(cut.status, "incomplete");
    assert.deepEqual(cut.incomplete_details, { reason: "max_output_tokens" });
    assert.equal(cut.usage.output_tokens_details.reasoning_tokens, 4);
  },

  async count() {
    const body = { model, input: "How many?", instructions: "Count.", tools };
    const { input_tokens } = await client.responses.inputTokens.count(body);
    assert.equal(input_tokens, (await client.responses.create(body)).usage.input_tokens);
  },

  async resources() {
    const got = await client.responses.create({ model, input: "x</think>y" });
    assert.deepEqual({ ...(await client.responses.retrieve(got.id)) }, { ...got });
    const items = [];
    for await (const item of client.responses.inputItems.list(got.id)) items.push(item);
    assert.deepEqual(items.map((i) => i.content[0].text), ["x</think>y"]);
    await client.responses.delete(got.id);
    await assert.rejects(client.responses.retrieve(got.id), NotFoundError);
  },

  async cancel() {
    const stream = await client.responses.create({ model, input: "COUNT 400000", stream: true });
    let id = "";
    let n = 0;
    for await (const e of stream) {
      if (e.type === "response.created") id = e.response.id;
      if (++n === 20) break; // leaving the loop ends the request
    }
    const control = new AbortController();
    const waiting = client.responses.create({ model, input: "COUNT 400000" }, { signal: control.signal });
    setTimeout(() => control.abort(), 50);
    await assert.rejects(waiting, APIUserAbortError);
    for (let i = 0; ; i++) {
      const ready = await (await fetch(`${actor}/ready`)).json();
      if (ready.running === 0) break;
      assert.ok(i < 200, "the requests go on");
      await new Promise((done) => setTimeout(done, 20));
    }
    assert.equal((await client.responses.retrieve(id)).status, "cancelled");
    await assert.rejects(client.responses.cancel(id), (e) => e instanceof BadRequestError && e.code === "background_not_supported");
  },

  async errors() {
    const body = { model, input: "x" };
    for (const stream of [false, true]) {
      await assert.rejects(client.responses.create({ ...body, model: "y", stream }), (e) => e instanceof NotFoundError && e.code === "model_not_found");
      await assert.rejects(client.responses.create({ ...body, tools: [{ type: "web_search" }], stream }), (e) => e instanceof BadRequestError && e.code === "tool_type_not_supported" && e.param === "tools[0].type");
    }
    await assert.rejects(client.responses.create({ ...body, previous_response_id: "resp_x" }), (e) => e instanceof NotFoundError && e.code === "response_not_found");
    await assert.rejects(client.responses.create({ ...body, surprise: 1 }), (e) => e instanceof BadRequestError && e.code === "unknown_parameter" && Boolean(e.requestID));
  },
};

for (const [name, check] of Object.entries(checks)) {
  await check();
  console.log(name);
}
