// Markdown as models write it, turned into elements. Text never becomes markup: elements are made one by one, and links lead to http,
// https and mailto only.

// An element with properties and children; strings become text.
export function h(tag, props = {}, ...children) {
  const e = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) e.addEventListener(name.slice(2), value);
    else if (name in e) e[name] = value;
    else e.setAttribute(name, value);
  }
  e.append(...children.flat().filter((c) => c !== null && c !== undefined && c !== false));
  return e;
}

// Shows text in a place. Blocks that have not changed keep their elements, so that an answer that grows costs its last block only.
export function show(place, text) {
  const blocks = split(text);
  const old = place.blocks ?? [];
  let same = 0;
  while (same < blocks.length && same < old.length && blocks[same] === old[same]) same++;
  while (place.childNodes.length > same) place.lastChild.remove();
  for (const block of blocks.slice(same)) place.append(render(block));
  place.blocks = blocks;
}

const fence = /^( {0,3})(`{3,}|~{3,})(.*)$/;
const item = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const row = /^\s*\|.*\|\s*$/;

// Top-level blocks as source text. A fenced block ends at its closing fence or with the text.
function split(text) {
  const blocks = [];
  let block = [];
  let open = null;
  const end = () => {
    if (block.length > 0) blocks.push(block.join("\n"));
    block = [];
  };
  for (const line of text.split(/\r?\n/)) {
    const f = fence.exec(line);
    if (open) {
      block.push(line);
      if (f && f[2].startsWith(open) && f[3].trim() === "") {
        open = null;
        end();
      }
    } else if (f && !(block.length > 0 && item.test(block[0]) && f[1].length > 1)) {
      end();
      open = f[2];
      block.push(line);
    } else if (line.trim() === "") {
      // A blank line ends a block, but not a list that goes on with an indented line.
      if (block.length > 0 && item.test(block[0])) block.push("");
      else end();
    } else {
      const inList = block.length > 0 && item.test(block[0]);
      if (inList && block.at(-1) === "" && !item.test(line) && !/^\s{2,}/.test(line)) end();
      else if (!inList && block.length > 0 && /^\s{0,3}(#{1,6}\s|[-*+]\s|\d{1,9}[.)]\s|>)/.test(line) && !/^>/.test(block[0])) end();
      else if (block.length > 0 && /^#{1,6}\s/.test(block[0])) end();
      else if (block.length > 0 && row.test(block[0]) !== row.test(line) && !inList) end();
      block.push(line);
    }
  }
  end();
  return blocks;
}

function render(source) {
  const lines = source.split("\n");
  const f = fence.exec(lines[0]);
  if (f) return code(lines, f);
  const heading = /^\s{0,3}(#{1,6})\s+(.*?)\s*#*$/.exec(lines[0]);
  if (heading && lines.length === 1) return h(`h${Math.min(heading[1].length + 2, 6)}`, {}, inline(heading[2]));
  if (lines.length === 1 && /^\s{0,3}([-*_])(\s*\1){2,}\s*$/.test(lines[0])) return h("hr");
  if (item.test(lines[0])) return listOf(lines);
  if (/^\s{0,3}>/.test(lines[0])) {
    const quote = h("blockquote");
    for (const b of split(lines.map((l) => l.replace(/^\s{0,3}> ?/, "")).join("\n"))) quote.append(render(b));
    return quote;
  }
  if (row.test(lines[0]) && lines.length > 1 && /^[\s|:-]+$/.test(lines[1]) && lines[1].includes("-")) return table(lines);
  return h("p", {}, broken(lines.join("\n")));
}

// Inline text with its line ends.
const broken = (text) => text.split("\n").flatMap((line, i) => (i > 0 ? [h("br"), ...inline(line.trim())] : inline(line.trim())));

function code(lines, f) {
  const language = f[3].trim().split(/\s+/)[0] || "text";
  const closed = lines.length > 1 && fence.exec(lines.at(-1))?.[2].startsWith(f[2]);
  const text = lines.slice(1, closed ? -1 : undefined).map((l) => (l.startsWith(f[1]) ? l.slice(f[1].length) : l)).join("\n");
  return h("figure", { className: "code" }, h("figcaption", {}, h("span", {}, language), copier(() => text)), h("pre", { tabIndex: 0 }, h("code", {}, text)));
}

// A button that copies.
export function copier(text, label = "Copy") {
  const button = h("button", { type: "button", className: "quiet", title: label }, label);
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text());
      button.textContent = "Copied";
    } catch {
      button.textContent = "Not allowed";
    }
    setTimeout(() => (button.textContent = label), 1500);
  });
  return button;
}

// A list and those in it, by indentation.
function listOf(lines) {
  const first = item.exec(lines[0]);
  const ordered = /\d/.test(first[2]);
  const list = h(ordered ? "ol" : "ul", ordered && parseInt(first[2]) !== 1 ? { start: parseInt(first[2]) } : {});
  const indent = first[1].length;
  for (let i = 0; i < lines.length; ) {
    const m = item.exec(lines[i]);
    const text = [m ? m[3] : lines[i].trim()];
    const inside = [];
    for (i++; i < lines.length; i++) {
      const n = item.exec(lines[i]);
      if (n && n[1].length <= indent + 1) break;
      inside.push(lines[i]);
    }
    // Lines before the first nested block belong to the item's own text.
    while (inside.length > 0 && inside[0] !== "" && !item.test(inside[0]) && !fence.test(inside[0].trim())) text.push(inside.shift());
    const li = h("li", {}, broken(text.join("\n")));
    const box = /^\[([ xX])\] /.exec(text[0]);
    if (box) {
      li.replaceChildren(h("input", { type: "checkbox", disabled: true, checked: box[1] !== " " }), ...broken(text.join("\n").slice(4)));
      li.className = "task";
    }
    if (inside.some((l) => l !== "")) {
      const least = Math.min(...inside.filter((l) => l !== "").map((l) => /^\s*/.exec(l)[0].length));
      for (const b of split(inside.map((l) => l.slice(least)).join("\n"))) li.append(render(b));
    }
    list.append(li);
  }
  return list;
}

function table(lines) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map((c) => c.trim().replaceAll("\\|", "|"));
  const align = cells(lines[1]).map((c) => (/^:-+:$/.test(c) ? "center" : /-:$/.test(c) ? "right" : ""));
  const one = (line, tag) => h("tr", {}, cells(line).map((c, i) => h(tag, { className: align[i] ?? "" }, inline(c))));
  return h("div", { className: "table", tabIndex: 0 }, h("table", {}, h("thead", {}, one(lines[0], "th")), h("tbody", {}, lines.slice(2).map((l) => one(l, "td")))));
}

// The spans of a line; of those that start at one place the first counts.
const spans = [
  [/(`+)(.+?)\1(?!`)/, (m) => h("code", {}, m[2].trim() || m[2])],
  [/!?\[([^\]\n]*)\]\(\s*<?([^\s)>]+)>?(?:\s+"[^"]*")?\s*\)/, (m) => link(m[2], m[1] ? inline(m[1]) : [m[2]])],
  [/\*\*(?=\S)(.+?)(?<=\S)\*\*/, (m) => h("strong", {}, inline(m[1]))],
  [/(?<![\w_])__(?=\S)(.+?)(?<=\S)__(?![\w_])/, (m) => h("strong", {}, inline(m[1]))],
  [/\*(?=[^\s*])(.+?)(?<=[^\s*])\*(?!\*)/, (m) => h("em", {}, inline(m[1]))],
  [/(?<![\w_])_(?=[^\s_])(.+?)(?<=[^\s_])_(?![\w_])/, (m) => h("em", {}, inline(m[1]))],
  [/~~(?=\S)(.+?)(?<=\S)~~/, (m) => h("del", {}, inline(m[1]))],
  [/\bhttps?:\/\/[^\s<>"'`\])]*[^\s<>"'`\]).,;:!?]/, (m) => link(m[0], [m[0]])],
  [/\\([!-/:-@[-`{-~])/, (m) => m[1]],
];

function link(to, children) {
  if (!/^(https?:|mailto:)/i.test(to)) return h("span", {}, children);
  return h("a", { href: to, target: "_blank", rel: "noopener noreferrer" }, children);
}

function inline(text) {
  const out = [];
  while (text !== "") {
    let best = null;
    let make = null;
    for (const [pattern, maker] of spans) {
      const m = pattern.exec(text);
      if (m && (best === null || m.index < best.index)) [best, make] = [m, maker];
      if (best?.index === 0) break;
    }
    if (best === null) break;
    if (best.index > 0) out.push(text.slice(0, best.index));
    out.push(make(best));
    text = text.slice(best.index + best[0].length);
  }
  if (text !== "") out.push(text);
  return out;
}
