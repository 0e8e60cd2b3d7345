// The page: one conversation on the right, all of them on the left. State is the open conversation and the answer in progress; what is
// shown is made from them.

import * as api from "./api.js";
import * as store from "./store.js";
import { copier, h, show } from "./markdown.js";

const $ = (id) => document.getElementById(id);
const log = $("log");
const input = $("input");
const icon = (name) => {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const use = document.createElementNS("http://www.w3.org/2000/svg", "use");
  use.setAttribute("href", `#i-${name}`);
  svg.append(use);
  return svg;
};

let settings = store.settings();
let open = store.create();
let served = null; // the model, once known
let answer = null; // {stop, view} while one is being written
let failed = null; // the error shown at the end of the conversation

const number = (n) => Math.round(n).toLocaleString("en-US");
const seconds = (ms) => (ms < 10_000 ? (ms / 1000).toFixed(1) : Math.round(ms / 1000)) + " s";
const tokens = (n) => `${number(n)} token${n === 1 ? "" : "s"}`;
const say = (text) => ($("say").textContent = text);

// Goes to the message box. Focus alone may leave the caret where a click in a dialog put it.
function write() {
  input.focus();
  input.setSelectionRange(input.value.length, input.value.length);
}

// ---- Turns

// The lines under an answer: how fast, how much, and why it ended.
function figures(page) {
  const t = page?.timings;
  const parts = [];
  if (t?.predicted_per_second > 0) parts.push(`${t.predicted_per_second.toFixed(1)} tok/s`);
  if (page?.usage) parts.push(tokens(page.usage.completion_tokens));
  if (page?.usage) {
    const cached = page.usage.prompt_tokens_details?.cached_tokens;
    parts.push(`prompt ${number(page.usage.prompt_tokens)}${cached ? ` (${number(cached)} cached)` : ""}${t?.prompt_ms ? ` in ${seconds(t.prompt_ms)}` : ""}`);
  }
  return parts.join(" · ");
}

const endings = { length: "The answer reached its limit.", stopped: "Stopped.", broken: "The answer broke off." };

function button(name, label, act) {
  return h("button", { type: "button", className: "quiet", title: label, "aria-label": label, onclick: act }, icon(name), label);
}

function userTurn(message, index) {
  return h("article", { className: "turn user", "aria-label": "You" },
    h("div", { className: "body" }, message.content),
    h("div", { className: "acts" }, button("edit", "Edit", () => edit(index)), copier(() => message.content)));
}

// An answer, from its message. The returned update shows what has been added since.
function answerTurn(message, index) {
  const text = h("div", { className: "text" });
  const thoughts = h("div", { className: "text" });
  const summary = h("summary", {}, "Reasoning");
  const thought = h("details", { className: "thought" }, summary, thoughts);
  const calls = h("div");
  const wait = h("div", { className: "wait" });
  const note = h("p", { className: "note" });
  const acts = h("div", { className: "acts" });
  const turn = h("article", { className: "turn assistant", "aria-label": "Answer" }, wait, thought, text, calls, note, acts);
  thought.addEventListener("toggle", () => thought.open && update());

  const update = () => {
    const live = answer !== null && answer.message === message;
    const page = message.page ?? {};
    const silent = !message.reasoning_content && !message.content && !message.tool_calls;
    wait.hidden = !(live && silent);
    if (!wait.hidden) {
      const p = page.progress;
      wait.replaceChildren(p && p.total > p.cache && p.processed < p.total
        ? h("progress", { max: p.total - p.cache, value: p.processed - p.cache, "aria-label": "Reading the prompt" })
        : h("i"), p && p.processed < p.total ? `Reading the prompt: ${number(p.processed)} of ${number(p.total)} tokens` : page.admitted ? "Reading the prompt" : "Waiting");
    }
    thought.hidden = !message.reasoning_content;
    const thinking = live && Boolean(message.reasoning_content) && !message.content && !message.tool_calls;
    thought.classList.toggle("busy", thinking);
    summary.textContent = thinking ? "Reasoning…" : page.thoughtMS ? `Reasoned for ${seconds(page.thoughtMS)}` : "Reasoning";
    if (thought.open && message.reasoning_content) show(thoughts, message.reasoning_content);
    show(text, message.content ?? "");
    text.hidden = !message.content;
    if (message.tool_calls && !live && calls.childNodes.length === 0) calls.append(...message.tool_calls.map((c) => callCard(c, index)));
    note.textContent = live ? "" : (endings[page.end] ?? "");
    note.hidden = note.textContent === "";
    acts.hidden = live;
    if (!live && acts.childNodes.length === 0) {
      acts.append(copier(() => message.content ?? ""), button("again", "Again", () => again(index)), h("span", { className: "figures" }, figures(page)));
    }
  };
  update();
  return { turn, update, thought };
}

// A call, with its result or with a place to write one.
function callCard(call, index) {
  let shown = call.function.arguments;
  try {
    // Only white space changes: numbers keep their digits.
    shown = spread(shown);
  } catch {
    // Shown as it is.
  }
  const card = h("section", { className: "call", "aria-label": `Call of ${call.function.name}` },
    h("header", {}, icon("tool"), call.function.name, h("small", {}, "tool call")),
    h("pre", {}, shown));
  const result = open.messages.slice(index + 1).find((m) => m.role === "tool" && m.tool_call_id === call.id);
  if (result) {
    card.append(h("div", { className: "result" }, "Result", h("pre", {}, result.content)));
    return card;
  }
  const box = h("textarea", { rows: 1, "aria-label": `Result of ${call.function.name}`, placeholder: "What the tool returns" });
  const send = () => giveResult(index, call, box.value);
  box.addEventListener("keydown", (e) => {
    if (e.key === "Enter" && !e.shiftKey && !e.isComposing) {
      e.preventDefault();
      send();
    }
  });
  card.append(h("div", { className: "result" }, "Result", box, h("div", { className: "row" }, h("button", { type: "button", className: "main", onclick: send }, "Give result"))));
  return card;
}

// JSON over several lines, its tokens as they are.
function spread(text) {
  JSON.parse(text);
  let out = "";
  let depth = 0;
  const line = () => "\n" + "  ".repeat(depth);
  for (const [token] of text.matchAll(/"(?:[^"\\]|\\.)*"|[{}[\],:]|[^\s{}[\],:"]+/g)) {
    if (token === "{" || token === "[") {
      depth++;
      out += token + line();
    } else if (token === "}" || token === "]") {
      depth--;
      out = /[{[]\s*$/.test(out) ? out.trimEnd() + token : out + line() + token;
    } else {
      out += token === "," ? token + line() : token === ":" ? ": " : token;
    }
  }
  return out;
}

// ---- The conversation

function draw() {
  const turns = open.messages.map((m, i) => (m.role === "user" ? userTurn(m, i) : m.role === "assistant" ? answerTurn(m, i).turn : null));
  if (failed) turns.push(h("article", { className: "turn error", role: "alert" }, h("span", {}, failed.message), h("button", { type: "button", className: "quiet", onclick: retry }, failed.status === 401 ? "Set the key" : "Try again")));
  if (turns.length === 0) {
    turns.push(h("div", { className: "empty" }, h("img", { src: "assets/icon.svg", alt: "" }), h("h2", {}, "What is on your mind?"),
      h("p", {}, "Conversations stay in this browser. The model runs on your server.")));
  }
  log.replaceChildren(...turns.filter(Boolean));
  title();
  bottom();
  controls();
}

function title() {
  $("title").textContent = open.title || "New conversation";
  document.title = open.title ? `${open.title} · ninfer` : "ninfer";
}

function controls() {
  document.documentElement.dataset.state = answer ? "busy" : "idle";
  $("stop").hidden = !answer;
  $("send").hidden = Boolean(answer);
  $("send").disabled = input.value.trim() === "" || pendingCalls().length > 0;
  if (!answer) $("rate").textContent = "";
}

const days = (t) => {
  const start = new Date().setHours(0, 0, 0, 0);
  return t >= start ? "Today" : t >= start - 86_400_000 ? "Yesterday" : t >= start - 6 * 86_400_000 ? "This week" : "Older";
};

function drawList() {
  let day = "";
  const items = [];
  for (const c of store.list()) {
    const now = c.id === open.id;
    if (days(c.changed) !== day) items.push(h("li", { className: "day" }, (day = days(c.changed))));
    items.push(h("li", { className: now ? "now" : "" },
      h("button", { type: "button", className: "open", "aria-current": now ? "true" : null, onclick: () => go(c.id) }, c.title || "Conversation"),
      h("button", { type: "button", className: "icon", "aria-label": `Delete ${c.title}`, title: "Delete", onclick: () => drop(c.id) }, icon("bin"))));
  }
  $("list").replaceChildren(...items);
}

// Keeps to the end of the conversation unless the reader has gone up.
let following = true;
log.addEventListener("scroll", () => (following = log.scrollHeight - log.scrollTop - log.clientHeight < 80));
const bottom = () => following && (log.scrollTop = log.scrollHeight);

function keep() {
  open.changed = Date.now();
  if (!store.save(open)) say("This conversation could not be saved: the browser has no room.");
}

function go(id) {
  const found = id ? store.load(id) : null;
  answer?.stop();
  open = found ?? store.create();
  failed = null;
  following = true;
  draw();
  drawList();
  closeSide();
  write();
}

function drop(id) {
  store.remove(id);
  if (id === open.id) go(null);
  else drawList();
}

// Calls of the last answer that have no result yet.
function pendingCalls() {
  const at = open.messages.findLastIndex((m) => m.role === "assistant");
  const given = new Set(open.messages.slice(at + 1).map((m) => m.tool_call_id));
  const after = open.messages.slice(at + 1).some((m) => m.role === "user");
  return at < 0 || after ? [] : (open.messages[at].tool_calls ?? []).filter((c) => !given.has(c.id));
}

function giveResult(index, call, content) {
  if (answer) return;
  let at = index + 1;
  while (open.messages[at]?.role === "tool") at++;
  open.messages.splice(at, 0, { role: "tool", tool_call_id: call.id, content });
  keep();
  draw();
  if (pendingCalls().length === 0) ask();
  else log.querySelector(".call textarea")?.focus();
}

function edit(index) {
  answer?.stop();
  input.value = open.messages[index].content;
  open.messages.length = index;
  failed = null;
  draw();
  fit();
  write();
}

function again(index) {
  if (answer) return;
  open.messages.length = index;
  failed = null;
  draw();
  ask();
}

function retry() {
  const { status } = failed;
  if (status === 401) {
    openSettings();
    $("settings").querySelector("[name=key]").focus();
    return;
  }
  failed = null;
  draw();
  ask();
}

// ---- Asking

function request() {
  const messages = open.messages.map(({ page, ...m }) => m);
  if (settings.system.trim()) messages.unshift({ role: "system", content: settings.system });
  const body = { messages, stream_options: { include_usage: true }, return_progress: true, timings_per_token: true };
  if (served) body.model = served.id;
  if (settings.effort) body.reasoning_effort = settings.effort;
  const given = { temperature: settings.temperature, top_p: settings.topP, max_completion_tokens: settings.limit, seed: settings.seed, thinking_budget_tokens: settings.budget };
  for (const [name, value] of Object.entries(given)) if (value !== "") body[name] = Number(value);
  if (settings.tools.trim()) body.tools = JSON.parse(settings.tools);
  return body;
}

async function ask() {
  const conversation = open;
  const message = { role: "assistant", content: "", page: {} };
  const control = new AbortController();
  const body = request();
  conversation.messages.push(message);
  const mine = (answer = { message, stop: () => control.abort() });
  const view = answerTurn(message, conversation.messages.length - 1);
  failed = null;
  for (const e of log.querySelectorAll(".empty, .error")) e.remove();
  log.append(view.turn);
  following = true;
  bottom();
  controls();
  const begun = performance.now();
  let thinkingSince = 0;
  let frame = 0;
  let saved = begun;
  const refresh = () => {
    frame = 0;
    if (!view.turn.isConnected) return;
    view.update();
    const t = message.page.timings;
    if (t && answer === mine) $("rate").textContent = t.predicted_per_second > 0 ? `${t.predicted_per_second.toFixed(1)} tok/s · ${tokens(t.predicted_n)}` : "";
    bottom();
  };
  let error = null;
  try {
    for await (const chunk of api.chat(body, settings.key, control.signal)) {
      const page = message.page;
      if (chunk.prompt_progress) {
        page.progress = chunk.prompt_progress;
        page.admitted = true;
      }
      if (chunk.timings) page.timings = chunk.timings;
      if (chunk.usage) page.usage = chunk.usage;
      const choice = chunk.choices[0];
      if (choice) {
        if (choice.delta.reasoning_content) thinkingSince ||= performance.now();
        if (thinkingSince && !page.thoughtMS && (choice.delta.content || choice.delta.tool_calls || choice.finish_reason)) page.thoughtMS = performance.now() - thinkingSince;
        api.grow(message, choice.delta);
        if (choice.finish_reason) page.end = choice.finish_reason;
      }
      frame ||= requestAnimationFrame(refresh);
      if (performance.now() - saved > 2000) {
        saved = performance.now();
        store.save(conversation);
      }
    }
  } catch (e) {
    error = e;
    message.page.end = control.signal.aborted ? "stopped" : "broken";
  }
  cancelAnimationFrame(frame);
  delete message.page.progress;
  if (answer === mine) answer = null;
  const nothing = !message.content && !message.reasoning_content && !message.tool_calls;
  if (nothing && error) conversation.messages.splice(conversation.messages.indexOf(message), 1);
  if (conversation.messages.length > 0 && store.load(conversation.id)) {
    conversation.changed = Date.now();
    if (!store.save(conversation)) say("This conversation could not be saved: the browser has no room.");
  }
  drawList();
  if (conversation !== open) return;
  if (error && !control.signal.aborted) {
    failed = error instanceof api.ServerError ? error : new api.ServerError(0, { error: { message: "the server cannot be reached" } });
    say(`Error: ${failed.message}`);
    draw();
    check();
    return;
  }
  if (nothing && error) draw();
  view.update();
  bottom();
  controls();
  say(message.tool_calls ? "The model calls a tool." : error ? "Stopped." : "The answer is complete.");
  if (message.tool_calls) log.querySelector(".call textarea")?.focus();
}

function send() {
  const text = input.value.trim();
  if (text === "" || answer || pendingCalls().length > 0) return;
  if (!open.title) open.title = text.replace(/\s+/g, " ").slice(0, 80);
  open.messages.push({ role: "user", content: text });
  input.value = "";
  fit();
  keep();
  failed = null;
  following = true;
  draw();
  drawList();
  ask();
}

// ---- The rest

// Grows the box with its text where CSS cannot.
function fit() {
  if (!CSS.supports("field-sizing", "content")) {
    input.style.height = "auto";
    input.style.height = `${input.scrollHeight}px`;
  }
  controls();
}

async function check() {
  const chip = $("model");
  try {
    served = await api.model(settings.key);
    chip.className = "up";
    chip.querySelector("b").textContent = served.id;
    chip.title = `Context of ${number(served.max_model_len)} tokens`;
  } catch (e) {
    chip.className = "down";
    chip.querySelector("b").textContent = e.status === 401 ? "needs a key" : e.status === 503 ? "loading" : "not reachable";
    chip.title = e.message;
    setTimeout(check, 3000);
  }
}

const themes = { "": "as the system", light: "light", dark: "dark" };

function applyTheme() {
  if (settings.theme) document.documentElement.dataset.theme = settings.theme;
  else delete document.documentElement.dataset.theme;
  $("theme").setAttribute("aria-label", `Theme: ${themes[settings.theme] ?? themes[""]}`);
}

function nextTheme() {
  const names = Object.keys(themes);
  settings.theme = names[(names.indexOf(settings.theme) + 1) % names.length];
  store.saveSettings(settings);
  applyTheme();
  say(`Theme: ${themes[settings.theme]}`);
}

const form = $("settings").querySelector("form");
const complaint = form.querySelector(".error");

function openSettings() {
  for (const [name, value] of Object.entries(settings)) if (form.elements[name]) form.elements[name].value = value;
  complaint.hidden = true;
  $("settings").showModal();
}

// What is wrong with the settings, or nothing.
function complain(s) {
  for (const [name, label] of [["temperature", "Temperature"], ["topP", "Top-p"], ["limit", "The limit"], ["budget", "The budget"], ["seed", "The seed"]]) {
    if (s[name] !== "" && !Number.isFinite(Number(s[name]))) return `${label} is not a number.`;
  }
  if (s.tools.trim() === "") return "";
  try {
    if (!Array.isArray(JSON.parse(s.tools))) return "Tools must be a JSON array.";
  } catch (e) {
    return `Tools are not JSON: ${e.message}`;
  }
  return "";
}

form.addEventListener("submit", (e) => {
  e.preventDefault();
  const next = { ...settings };
  for (const name of Object.keys(settings)) if (form.elements[name]) next[name] = form.elements[name].value.trim();
  complaint.textContent = complain(next);
  complaint.hidden = complaint.textContent === "";
  if (!complaint.hidden) return;
  settings = next;
  store.saveSettings(settings);
  $("settings").close();
  check();
});
for (const dialog of document.querySelectorAll("dialog")) dialog.addEventListener("close", write);
form.querySelector(".cancel").addEventListener("click", () => $("settings").close());
$("clear").addEventListener("click", () => {
  if (!confirm("Delete all conversations?")) return;
  for (const c of store.list()) store.remove(c.id);
  $("settings").close();
  go(null);
});

const openSide = () => {
  document.body.classList.add("side");
  $("menu").setAttribute("aria-expanded", "true");
  $("shade").hidden = false;
  $("new").focus();
};
const closeSide = () => {
  document.body.classList.remove("side");
  $("menu").setAttribute("aria-expanded", "false");
  $("shade").hidden = true;
};

$("menu").addEventListener("click", openSide);
$("shade").addEventListener("click", closeSide);
$("new").addEventListener("click", () => go(null));
$("theme").addEventListener("click", nextTheme);
$("open-settings").addEventListener("click", openSettings);
$("open-help").addEventListener("click", () => $("help").showModal());
$("stop").addEventListener("click", () => answer?.stop());
$("composer").addEventListener("submit", (e) => {
  e.preventDefault();
  send();
});
input.addEventListener("input", fit);
input.addEventListener("keydown", (e) => {
  if (e.key === "Enter" && !e.shiftKey && !e.isComposing) {
    e.preventDefault();
    send();
  } else if (e.key === "ArrowUp" && !e.altKey && input.value === "" && !answer) {
    const last = open.messages.findLastIndex((m) => m.role === "user");
    if (last >= 0) {
      e.preventDefault();
      edit(last);
    }
  }
});

// Keys that work everywhere. Those without Alt do not while something is being written.
const withAlt = {
  KeyN: () => go(null),
  KeyS: openSettings,
  KeyT: nextTheme,
  KeyR: () => {
    const last = open.messages.findLastIndex((m) => m.role === "assistant");
    if (last >= 0 && !answer) again(last);
  },
  KeyO: () => {
    const all = [...log.querySelectorAll(".thought:not([hidden])")];
    if (all.length > 0) all.at(-1).open = !all.at(-1).open;
  },
  KeyC: () => log.querySelector(".turn.assistant:last-of-type .acts .quiet")?.click(),
  ArrowUp: () => step(-1),
  ArrowDown: () => step(1),
};

function step(by) {
  const all = store.list();
  const at = all.findIndex((c) => c.id === open.id);
  const next = all[at < 0 ? (by > 0 ? 0 : all.length - 1) : at + by];
  if (next) go(next.id);
}

addEventListener("keydown", (e) => {
  if (document.querySelector("dialog[open]")) return;
  const writing = e.target.matches?.("input, textarea, select");
  if (e.key === "Escape") {
    if (document.body.classList.contains("side")) closeSide();
    else if (answer) answer.stop();
    else write();
  } else if (e.altKey && !e.ctrlKey && !e.metaKey && withAlt[e.code]) {
    e.preventDefault();
    withAlt[e.code]();
  } else if (!writing && !e.ctrlKey && !e.metaKey && !e.altKey && e.key === "/") {
    e.preventDefault();
    write();
  } else if (!e.ctrlKey && !e.metaKey && !e.altKey && e.key === "?" && (!writing || (e.target === input && input.value === ""))) {
    e.preventDefault();
    $("help").showModal();
  }
});
addEventListener("pagehide", () => answer && store.save(open));
store.watch(() => {
  settings = store.settings();
  applyTheme();
  drawList();
});

applyTheme();
draw();
drawList();
check();
