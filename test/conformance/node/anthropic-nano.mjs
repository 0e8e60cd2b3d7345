// The npm package @anthropic-ai/sdk against nano, the model inside the program. The first argument is the address, the second a file with
// questions that the model answers rightly. Every check is an assertion; what passed is printed, a line each.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import Anthropic, { APIUserAbortError, BadRequestError } from "@anthropic-ai/sdk";

const [address, file] = process.argv.slice(2);
const cases = JSON.parse(readFileSync(file, "utf8"));
const client = new Anthropic({ baseURL: address, apiKey: "none", maxRetries: 0 });
const body = (q, rest = {}) => ({
  model: "nano", max_tokens: 200, temperature: 0, thinking: { type: q.thinking ? "adaptive" : "disabled" },
  system: q.messages.filter((m) => m.role === "system").map((m) => ({ type: "text", text: m.content })),
  messages: q.messages.filter((m) => m.role !== "system"),
  ...(q.tools?.length ? { tools: q.tools.map(({ function: f }) => ({ name: f.name, description: f.description, input_schema: f.parameters })) } : {}), ...rest,
});

const checks = {
  async plain() {
    for (const q of cases.copy) {
      const got = await client.messages.create(body(q));
      assert.deepEqual(got.content.map((b) => [b.type, b.text.trim()]), [["text", q.expect.text]]);
      assert.equal(got.stop_reason, "end_turn");
    }
  },

  async stream() {
    for (const q of [...cases.copy, ...cases.think]) {
      const final = await client.messages.stream(body(q)).finalMessage();
      assert.deepEqual(final.content, (await client.messages.create(body(q))).content);
      assert.equal(final.content.at(-1).text.trim(), q.expect.text);
      assert.equal(final.content[0].type, q.thinking ? "thinking" : "text");
    }
  },

  async tools() {
    for (const q of cases.tool) {
      for (const stream of [false, true]) {
        const asked = [];
        const { tools, ...rest } = body(q);
        const runnable = tools.map((t) => ({ ...t, parse: (x) => x, run: async (args) => (asked.push([t.name, args]), "The answer is 1742.") }));
        const final = await client.beta.messages.toolRunner({ ...rest, tools: runnable, stream }).runUntilDone();
        assert.deepEqual(asked, [[q.expect.name, q.expect.arguments]]);
        assert.ok(final.content.at(-1).text.trim());
      }
    }
  },

  async count() {
    for (const q of [...cases.copy, ...cases.think, ...cases.tool]) {
      const { max_tokens, temperature, ...rest } = body(q);
      const { input_tokens } = await client.messages.countTokens(rest);
      const { usage } = await client.messages.create(body(q, { max_tokens: 1 }));
      assert.equal(input_tokens, usage.input_tokens + usage.cache_read_input_tokens);
    }
  },

  async errors() {
    const long = body({ ...cases.copy[0], messages: [{ role: "user", content: "word ".repeat(9000) }] });
    for (const stream of [false, true]) {
      await assert.rejects(client.messages.create({ ...long, stream }), (e) => e instanceof BadRequestError && /prompt is too long: \d+ tokens > \d+ maximum/.test(e.message));
    }
  },

  async cancel() {
    const control = new AbortController();
    const waiting = client.messages.create(body(cases.think[0], { temperature: 1, max_tokens: 1900 }), { signal: control.signal });
    setTimeout(() => control.abort(), 20);
    await assert.rejects(waiting, APIUserAbortError);
    const got = await client.messages.create(body(cases.copy[0]));
    assert.equal(got.content[0].text.trim(), cases.copy[0].expect.text);
  },
};

for (const [name, check] of Object.entries(checks)) {
  await check();
  console.log(name);
}
