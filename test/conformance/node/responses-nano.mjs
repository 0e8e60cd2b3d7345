// Responses with the npm package openai against nano, the model inside the program: its address and a file with questions are the arguments.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import OpenAI, { APIUserAbortError, BadRequestError } from "openai";

const [url, file] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const cases = JSON.parse(readFileSync(file));
const body = (q) => ({
  model: "nano", temperature: 0, max_output_tokens: 200, chat_template_kwargs: { enable_thinking: q.thinking }, input: q.messages,
  tools: (q.tools ?? []).map((t) => ({ type: "function", strict: false, ...t.function })),
});
const bare = (r) => r.output.map((o) => [o.type, o.arguments ?? o.content[0].text]);

const both = async (q) => {
  const whole = await client.responses.create(body(q));
  const streamed = await client.responses.stream(body(q)).finalResponse();
  assert.deepEqual(bare(streamed), bare(whole));
  assert.deepEqual(streamed.usage, whole.usage);
  assert.equal((await client.responses.inputTokens.count(body(q))).input_tokens, whole.usage.input_tokens);
  return whole;
};

const checks = {
  async copy() {
    for (const q of cases.copy) assert.equal((await both(q)).output_text.trim(), q.expect.text);
  },

  async think() {
    for (const q of cases.think) {
      const got = await both(q);
      assert.deepEqual(got.output.map((o) => o.type), ["reasoning", "message"]);
      assert.equal(got.output_text.trim(), q.expect.text);
      assert.ok(got.usage.output_tokens_details.reasoning_tokens > 0);
    }
  },

  async tool() {
    for (const q of cases.tool) {
      const got = await both(q);
      const call = got.output.at(-1);
      assert.equal(call.name, q.expect.name);
      assert.deepEqual(JSON.parse(call.arguments), q.expect.arguments);
      const next = await client.responses.create({ ...body(q), previous_response_id: got.id, input: [{ type: "function_call_output", call_id: call.call_id, output: "The answer is 1742." }] });
      assert.ok(next.output_text.trim());
    }
  },

  async errors() {
    for (const stream of [false, true]) {
      const long = { ...body(cases.copy[0]), input: "word ".repeat(9000), stream };
      await assert.rejects(client.responses.create(long), (e) => e instanceof BadRequestError && e.code === "context_length_exceeded");
    }
  },

  async cancel() {
    const control = new AbortController();
    const waiting = client.responses.create({ ...body(cases.think[0]), temperature: 2, max_output_tokens: 1900 }, { signal: control.signal });
    setTimeout(() => control.abort(), 20);
    await assert.rejects(waiting, APIUserAbortError);
    assert.equal((await client.responses.create(body(cases.copy[0]))).output_text.trim(), cases.copy[0].expect.text);
  },
};

for (const [name, check] of Object.entries(checks)) {
  await check();
  console.log(name);
}
