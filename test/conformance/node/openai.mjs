// The npm package openai against a server whose model says what it is told to (tools/actor) and, for keys and errors, against the program.
// Both addresses are arguments. Every check is an assertion; what passed is printed, a line each.

import assert from "node:assert/strict";
import OpenAI, { APIUserAbortError, AuthenticationError, BadRequestError, NotFoundError } from "openai";

const [actor, program, key] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${actor}/v1`, apiKey: "none", maxRetries: 0 });
const model = "actor";
const say = (content, rest = {}) => ({ model, messages: [{ role: "user", content }], ...rest });
const call = (name, args) => `<tool_call>\n<function=${name}>\n${Object.entries(args).map(([k, v]) => `<parameter=${k}>\n${v}\n</parameter>\n`).join("")}</function>\n</tool_call>`;
const tools = [{ type: "function", function: { name: "weather", description: "Weather of a city", parameters: { type: "object", properties: { city: { type: "string" }, days: { type: "integer" } }, required: ["city"] } } }];
const two = `Two look-ups.</think>\n\nChecking both.\n\n${call("weather", { city: "Oslo", days: 2 })}\n${call("weather", { city: "03106" })}`;

const checks = {
  async models() {
    const page = await client.models.list();
    assert.deepEqual(page.data.map((m) => m.id), [model]);
    assert.equal((await client.models.retrieve(model)).owned_by, "ninfer");
  },

  async plain() {
    const got = await client.chat.completions.create(say("Because.</think>\n\nHello, wörld 🙂 \n"));
    assert.equal(got.choices[0].message.content, "Hello, wörld 🙂 \n");
    assert.equal(got.choices[0].message.reasoning_content, "Because.");
    assert.equal(got.choices[0].finish_reason, "stop");
    assert.equal(got.usage.total_tokens, got.usage.prompt_tokens + got.usage.completion_tokens);
    assert.match(got.id, /^chatcmpl-[0-9a-f]{16}$/);
    assert.ok(got._request_id);
  },

  async stream() {
    const body = say("Because.</think>\n\nHello, wörld 🙂 \n");
    const whole = await client.chat.completions.create(body);
    const stream = client.chat.completions.stream({ ...body, stream_options: { include_usage: true } });
    let text = "";
    stream.on("content", (delta) => (text += delta));
    const final = await stream.finalChatCompletion();
    assert.equal(text, whole.choices[0].message.content);
    assert.equal(final.choices[0].message.content, text);
    assert.equal(final.choices[0].finish_reason, "stop");
    assert.deepEqual(final.usage, whole.usage);
  },

  async noReasoning() {
    const got = await client.chat.completions.create(say("Hello</think>", { reasoning_effort: "none", stop: ["</th"] }));
    assert.equal(got.choices[0].message.content, "Hello");
    assert.equal(got.choices[0].message.reasoning_content, undefined);
    assert.equal(got.usage.completion_tokens_details.reasoning_tokens, 0);
  },

  async limit() {
    const got = await client.chat.completions.create(say("COUNT 9", { max_completion_tokens: 4 }));
    assert.equal(got.choices[0].finish_reason, "length");
    assert.equal(got.usage.completion_tokens, 4);
  },

  async toolsStreamed() {
    const final = await client.chat.completions.stream(say(two, { tools })).finalChatCompletion();
    const whole = await client.chat.completions.create(say(two, { tools }));
    for (const got of [final, whole]) {
      const { message, finish_reason } = got.choices[0];
      assert.equal(finish_reason, "tool_calls");
      assert.equal(message.content, "Checking both.");
      assert.deepEqual(message.tool_calls.map((c) => [c.type, c.function.name, c.function.arguments]), [
        ["function", "weather", '{"city":"Oslo","days":2}'],
        ["function", "weather", '{"city":"03106"}'],
      ]);
      assert.equal(new Set(message.tool_calls.map((c) => c.id)).size, 2);
    }
  },

  // The package's own loop: it calls our functions, sends their results and asks again until there is an answer.
  async toolsRoundTrip() {
    const asked = [];
    const withFunction = [{ type: "function", function: { ...tools[0].function, parse: JSON.parse, function: (args) => (asked.push(args), `rain in ${args.city}`) } }];
    for (const stream of [false, true]) {
      asked.length = 0;
      const runner = client.chat.completions.runTools(say(two, { tools: withFunction, stream }));
      assert.equal(await runner.finalContent(), "Got rain in Oslo and rain in 03106");
      assert.deepEqual(asked, [{ city: "Oslo", days: 2 }, { city: "03106" }]);
    }
  },

  async toolsAsText() {
    const got = await client.chat.completions.create(say(two, { tools, tool_choice: "none", reasoning_effort: "none" }));
    assert.equal(got.choices[0].finish_reason, "stop");
    assert.equal(got.choices[0].message.tool_calls, undefined);
    assert.equal(got.choices[0].message.content, two);
    await assert.rejects(client.chat.completions.create(say("x", { tools, tool_choice: "required" })), (e) => e instanceof BadRequestError && e.param === "tool_choice");
  },

  async completions() {
    const prompt = "<|im_start|>user\nA <|im_end|>\n<|im_start|>assistant\n<think>\n";
    const body = { model, prompt: prompt.replace("A ", "so</think>\n\nText."), max_tokens: 40 };
    const whole = await client.completions.create(body);
    assert.equal(whole.choices[0].text, "so</think>\n\nText.");
    assert.equal(whole.object, "text_completion");
    let text = "";
    for await (const chunk of await client.completions.create({ ...body, stream: true })) text += chunk.choices[0].text;
    assert.equal(text, whole.choices[0].text);
  },

  async cancel() {
    const stream = await client.chat.completions.create(say("COUNT 400000", { stream: true }));
    let n = 0;
    for await (const _ of stream) if (++n === 20) break; // leaving the loop ends the request
    const control = new AbortController();
    const waiting = client.chat.completions.create(say("COUNT 400000"), { signal: control.signal });
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
    const right = new OpenAI({ baseURL: `${program}/v1`, apiKey: key, maxRetries: 0 });
    const wrong = new OpenAI({ baseURL: `${program}/v1`, apiKey: "wrong", maxRetries: 0 });
    const body = { model: "tiny", messages: [{ role: "user", content: "Q" }], max_tokens: 2 };
    assert.equal((await right.chat.completions.create(body)).usage.completion_tokens, 2);
    await assert.rejects(wrong.chat.completions.create(body), (e) => e instanceof AuthenticationError && e.code === "invalid_api_key");
    await assert.rejects(right.chat.completions.create({ ...body, model: "x" }), (e) => e instanceof NotFoundError && e.code === "model_not_found" && e.param === "model");
    for (const stream of [false, true]) {
      await assert.rejects(right.chat.completions.create({ ...body, temperature: 9, stream }), (e) => e instanceof BadRequestError && e.param === "temperature" && Boolean(e.requestID));
    }
  },
};

for (const [name, check] of Object.entries(checks)) {
  await check();
  console.log(name);
}
