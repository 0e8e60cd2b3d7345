// The npm package openai against nano, the model inside the program. The first argument is the address, the second a file with questions
// that the model answers rightly. Every check is an assertion; what passed is printed, a line each.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import OpenAI, { APIUserAbortError, BadRequestError } from "openai";

const [address, file] = process.argv.slice(2);
const cases = JSON.parse(readFileSync(file, "utf8"));
const client = new OpenAI({ baseURL: `${address}/v1`, apiKey: "none", maxRetries: 0 });
const body = (q, rest = {}) => ({
  model: "nano", messages: q.messages, temperature: 0, max_completion_tokens: 200, enable_thinking: q.thinking,
  ...(q.tools?.length ? { tools: q.tools.map((t) => ({ type: "function", ...t })) } : {}), ...rest,
});

const checks = {
  async plain() {
    for (const q of cases.copy) {
      const got = await client.chat.completions.create(body(q));
      assert.equal(got.choices[0].message.content.trim(), q.expect.text);
      assert.equal(got.choices[0].message.reasoning_content, undefined);
      assert.equal(got.choices[0].finish_reason, "stop");
      assert.equal(got.model, "nano");
    }
  },

  async stream() {
    for (const q of cases.copy) {
      const stream = client.chat.completions.stream(body(q, { stream_options: { include_usage: true } }));
      let text = "";
      stream.on("content", (delta) => (text += delta));
      const final = await stream.finalChatCompletion();
      assert.equal(text.trim(), q.expect.text);
      assert.equal(final.choices[0].message.content, text);
      assert.ok(final.usage.completion_tokens > 0);
    }
  },

  async reasoning() {
    for (const q of cases.think) {
      const got = await client.chat.completions.create(body(q));
      assert.ok(got.choices[0].message.reasoning_content.trim());
      assert.equal(got.choices[0].message.content.trim(), q.expect.text);
      assert.ok(got.usage.completion_tokens_details.reasoning_tokens > 0);
      const none = await client.chat.completions.create({ ...body(q), enable_thinking: undefined, reasoning_effort: "none" });
      assert.equal(none.choices[0].message.reasoning_content, undefined);
    }
  },

  // The package's own loop: it calls our functions, sends their results and asks again until there is an answer.
  async tools() {
    for (const q of cases.tool) {
      for (const stream of [false, true]) {
        const asked = [];
        const tools = q.tools.map((t) => ({
          type: "function",
          function: { ...t.function, parse: JSON.parse, function: (args) => (asked.push([t.function.name, args]), "The answer is 1742.") },
        }));
        const runner = client.chat.completions.runTools({ ...body(q), tools, stream });
        const answer = await runner.finalContent();
        assert.deepEqual(asked, [[q.expect.name, q.expect.arguments]]);
        assert.ok(answer.trim());
      }
    }
  },

  async errors() {
    const q = cases.copy[0];
    for (const stream of [false, true]) {
      const long = { ...body(q), messages: [{ role: "user", content: "word ".repeat(9000) }], stream };
      await assert.rejects(client.chat.completions.create(long), (e) => e instanceof BadRequestError && e.code === "context_length_exceeded");
    }
  },

  async cancel() {
    const q = cases.think[0];
    const control = new AbortController();
    const waiting = client.chat.completions.create(body(q, { temperature: 2, seed: 1, max_completion_tokens: 1900 }), { signal: control.signal });
    setTimeout(() => control.abort(), 20);
    await assert.rejects(waiting, APIUserAbortError);
    const got = await client.chat.completions.create(body(cases.copy[0]));
    assert.equal(got.choices[0].message.content.trim(), cases.copy[0].expect.text);
  },
};

for (const [name, check] of Object.entries(checks)) {
  await check();
  console.log(name);
}
