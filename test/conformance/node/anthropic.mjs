// The npm package @anthropic-ai/sdk against a server whose model says what it is told to (tools/actor) and, for keys and errors, against the
// program. Both addresses are arguments. Every check is an assertion; what passed is printed, a line each.

import assert from "node:assert/strict";
import Anthropic, { APIUserAbortError, AuthenticationError, BadRequestError } from "@anthropic-ai/sdk";

const [actor, program, key] = process.argv.slice(2);
const client = new Anthropic({ baseURL: actor, apiKey: "none", maxRetries: 0 });
const say = (content, rest = {}) => ({ model: "any", max_tokens: 4096, messages: [{ role: "user", content }], ...rest });
const call = (name, args) => `<tool_call>\n<function=${name}>\n${Object.entries(args).map(([k, v]) => `<parameter=${k}>\n${v}\n</parameter>\n`).join("")}</function>\n</tool_call>`;
const tools = [{ name: "weather", description: "Weather of a city", input_schema: { type: "object", properties: { city: { type: "string" }, days: { type: "integer" } }, required: ["city"] } }];
const two = `Two look-ups.</think>\n\nChecking both.\n\n${call("weather", { city: "Oslo", days: 2 })}\n${call("weather", { city: "03106" })}`;
const plain = ({ type, thinking, text, name, input, signature, id }) => {
  if (type === "thinking") return (assert.ok(signature), { thinking });
  if (type === "tool_use") return (assert.match(id, /^toolu_/), { name, input });
  return { type, text };
};
const said = [{ thinking: "Two look-ups." }, { type: "text", text: "Checking both." }, { name: "weather", input: { city: "Oslo", days: 2 } }, { name: "weather", input: { city: "03106" } }];

const checks = {
  async plain() {
    const got = await client.messages.create(say("Because.</think>\n\nHello, wörld 🙂 \n"));
    assert.deepEqual(got.content.map(plain), [{ thinking: "Because." }, { type: "text", text: "Hello, wörld 🙂 \n" }]);
    assert.equal(got.stop_reason, "end_turn");
    assert.equal(got.model, "any");
    assert.match(got.id, /^msg_/);
    assert.match(got._request_id, /^req_/);
    const off = await client.messages.create(say("Hello END", { thinking: { type: "disabled" }, stop_sequences: ["END"] }));
    assert.deepEqual(off.content.map(plain), [{ type: "text", text: "Hello " }]);
    assert.deepEqual([off.stop_reason, off.stop_sequence], ["stop_sequence", "END"]);
    const cut = await client.messages.create(say("COUNT 9", { thinking: { type: "disabled" }, max_tokens: 4 }));
    assert.deepEqual([cut.stop_reason, cut.usage.output_tokens], ["max_tokens", 4]);
  },

  async stream() {
    const body = say("Because.</think>\n\nHello, wörld 🙂 \n");
    const whole = await client.messages.create(body);
    const stream = client.messages.stream(body);
    let text = "", thinking = "";
    const order = [];
    stream.on("text", (delta) => (text += delta));
    stream.on("thinking", (delta) => (thinking += delta));
    stream.on("streamEvent", (e) => order.at(-1) === e.type || order.push(e.type));
    const final = await stream.finalMessage();
    assert.equal(text, "Hello, wörld 🙂 \n");
    assert.equal(thinking, "Because.");
    assert.deepEqual(final.content, whole.content);
    assert.deepEqual(final.usage, whole.usage);
    assert.equal(final.stop_reason, "end_turn");
    const block = ["content_block_start", "content_block_delta", "content_block_stop"];
    assert.deepEqual(order, ["message_start", ...block, ...block, "message_delta", "message_stop"]);
  },

  async tools() {
    const body = say(two, { tools });
    const whole = await client.messages.create(body);
    const final = await client.messages.stream(body).finalMessage();
    for (const got of [whole, final]) {
      assert.deepEqual(got.content.map(plain), said);
      assert.equal(got.stop_reason, "tool_use");
    }
    const uses = final.content.filter((b) => b.type === "tool_use");
    const answer = await client.messages.create({
      ...body,
      messages: [...body.messages, { role: "assistant", content: final.content }, { role: "user", content: uses.map((u) => ({ type: "tool_result", tool_use_id: u.id, content: `rain in ${u.input.city}` })).reverse() }],
    });
    assert.deepEqual(answer.content.map(plain), [{ type: "text", text: "Got rain in Oslo and rain in 03106" }]);
    const text = await client.messages.create(say(two, { tools, tool_choice: { type: "none" }, thinking: { type: "disabled" } }));
    assert.deepEqual(text.content.map(plain), [{ type: "text", text: two }]);
    await assert.rejects(client.messages.create(say("x", { tools, tool_choice: { type: "any" } })), (e) => e instanceof BadRequestError && e.message.includes("tool_choice"));
  },

  // The package's own loop: it calls our functions, sends their results and asks again until there is an answer.
  async toolRunner() {
    for (const stream of [false, true]) {
      const asked = [];
      const runnable = [{ ...tools[0], parse: (x) => x, run: async (args) => (asked.push(args), `rain in ${args.city}`) }];
      const runner = client.beta.messages.toolRunner(say(two, { tools: runnable, stream }));
      const final = await runner.runUntilDone();
      assert.deepEqual(final.content.map(plain), [{ type: "text", text: "Got rain in Oslo and rain in 03106" }]);
      assert.deepEqual(asked, [{ city: "Oslo", days: 2 }, { city: "03106" }]);
    }
  },

  async budget() {
    const got = await client.messages.create(say("T</think>\n\nA", { thinking: { type: "enabled", budget_tokens: 4095 } }));
    assert.deepEqual(got.content.map(plain), [{ thinking: "T" }, { type: "text", text: "A" }]);
    assert.ok(got.usage.output_tokens_details.thinking_tokens > 0);
    await assert.rejects(client.messages.create(say("x", { thinking: { type: "enabled", budget_tokens: 4096 } })), (e) => e instanceof BadRequestError && e.message.includes("thinking.budget_tokens"));
  },

  async count() {
    for (const rest of [{}, { system: "S", tools }, { thinking: { type: "disabled" } }]) {
      const { max_tokens, ...body } = say("Count me</think>", rest);
      const { input_tokens } = await client.messages.countTokens(body);
      const { usage } = await client.messages.create({ ...body, max_tokens });
      assert.equal(input_tokens, usage.input_tokens + usage.cache_read_input_tokens);
    }
  },

  async cancel() {
    const stream = client.messages.stream(say("COUNT 400000", { max_tokens: 400000, thinking: { type: "disabled" } }));
    let n = 0;
    for await (const e of stream) if (e.type === "content_block_delta" && ++n === 20) break; // leaving the loop ends the request
    const control = new AbortController();
    const waiting = client.messages.create(say("COUNT 400000", { max_tokens: 400000 }), { signal: control.signal, timeout: 60_000 });
    setTimeout(() => control.abort(), 50);
    await assert.rejects(waiting, APIUserAbortError);
    for (let i = 0; ; i++) {
      const ready = await (await fetch(`${actor}/ready`)).json();
      if (ready.running === 0) break;
      assert.ok(i < 200, "the requests go on");
      await new Promise((done) => setTimeout(done, 20));
    }
  },

  async errors() {
    const right = new Anthropic({ baseURL: program, apiKey: key, maxRetries: 0 });
    const wrong = new Anthropic({ baseURL: program, apiKey: "wrong", maxRetries: 0 });
    const bearer = new Anthropic({ baseURL: program, apiKey: null, authToken: key, maxRetries: 0 });
    const body = say("Q", { max_tokens: 2 });
    for (const c of [right, bearer]) assert.equal((await c.messages.create(body)).usage.output_tokens, 2);
    await assert.rejects(wrong.messages.create(body), (e) => e instanceof AuthenticationError && e.error.error.type === "authentication_error");
    for (const stream of [false, true]) {
      await assert.rejects(right.messages.create({ ...body, temperature: 1.5, stream }), (e) => e instanceof BadRequestError && e.error.error.type === "invalid_request_error" && e.requestID === e.error.request_id && /temperature/.test(e.message));
      await assert.rejects(right.messages.create({ ...say("word ".repeat(3000)), max_tokens: 2, stream }), (e) => e instanceof BadRequestError && /prompt is too long: \d+ tokens > 256 maximum/.test(e.message));
    }
  },
};

for (const [name, check] of Object.entries(checks)) {
  await check();
  console.log(name);
}
