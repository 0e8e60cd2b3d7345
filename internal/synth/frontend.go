package synth

import (
	"encoding/json/jsontext"
	"encoding/json/v2"
	"fmt"
	"strconv"

	"ninfer/internal/arch"
)

// pattern splits text into the pieces that become tokens. The model family has it in its tokenizer.json.
const pattern = `(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`

// template is a chat template in the family's form: roles between markers, an open think block before the answer.
const template = `{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}` +
	`{%- if m.content is string %}{{- m.content }}{%- else %}{%- for p in m.content %}` +
	`{%- if p.type == 'text' %}{{- p.text }}{%- elif p.type == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}` +
	`{%- elif p.type == 'video' %}{{- '<|vision_start|><|video_pad|><|vision_end|>' }}{%- endif %}{%- endfor %}{%- endif %}` +
	`{{- '<|im_end|>\n' }}{%- endfor %}` +
	`{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}` +
	`{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- else %}{{- '<think>\n' }}{%- endif %}{%- endif %}`

// IDs is how many token ids the generated tokenizer of a config has.
func IDs(c *arch.Config) int {
	if c.IsOfficial() {
		return 248077
	}
	return c.Text.VocabSize
}

// Frontend makes the six embedded files of a config, by object id: a tokenizer that knows bytes, the control tokens of the family where
// the config says they are, and for every other id a word that no text gives; a plain chat template; and the media limits.
func Frontend(c *arch.Config) (map[string][]byte, error) {
	names := map[int]string{}
	taken := map[string]bool{}
	place := func(id int, name string) {
		if _, ok := names[id]; !ok && !taken[name] {
			names[id], taken[name] = name, true
		}
	}
	place(int(c.ImageTokenID), "<|image_pad|>")
	place(int(c.VideoTokenID), "<|video_pad|>")
	place(int(c.VisionStartTokenID), "<|vision_start|>")
	place(int(c.VisionEndTokenID), "<|vision_end|>")
	place(int(c.Text.ResetID()), "<|endoftext|>")
	ids := IDs(c)
	free := ids - 1
	for _, name := range []string{
		"</tool_response>", "<tool_response>", "</tool_call>", "<tool_call>", "</think>", "<think>", "<|im_end|>", "<|im_start|>",
		"<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>", "<|endoftext|>",
	} {
		for names[free] != "" {
			free--
		}
		place(free, name)
	}
	if ids < 256+len(names) {
		return nil, fmt.Errorf("synth: a vocabulary of %d has no room for the bytes and %d control tokens: give a frontend", ids, len(names))
	}

	var added, vocab []byte
	id := func(name string) (n int) {
		for k, s := range names {
			if s == name {
				n = k
			}
		}
		return n
	}
	b := 0
	for i := range ids {
		if i > 0 {
			vocab = append(vocab, ',')
		}
		name, control := names[i]
		switch {
		case control:
			if len(added) > 0 {
				added = append(added, ',')
			}
			added = fmt.Appendf(added, `{"id":%d,"content":%q,"single_word":false,"lstrip":false,"rstrip":false,"normalized":false,"special":true}`, i, name)
		case b < 256:
			name = byteSpelling(b)
			b++
		default:
			name = "w" + strconv.Itoa(i)
		}
		quoted, err := jsontext.AppendQuote(nil, name)
		if err != nil {
			return nil, err
		}
		vocab = fmt.Appendf(append(vocab, quoted...), ":%d", i)
	}
	regex, err := json.Marshal(pattern)
	if err != nil {
		return nil, err
	}
	tokenizer := fmt.Appendf(nil, `{"version":"1.0","truncation":null,"padding":null,"added_tokens":[%s],"normalizer":{"type":"NFC"},`+
		`"pre_tokenizer":{"type":"Sequence","pretokenizers":[{"type":"Split","pattern":{"Regex":%s},"behavior":"Isolated","invert":false},`+
		`{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":false}]},"post_processor":null,`+
		`"decoder":{"type":"ByteLevel","add_prefix_space":true,"trim_offsets":true,"use_regex":true},`+
		`"model":{"type":"BPE","dropout":null,"unk_token":null,"continuing_subword_prefix":null,"end_of_word_suffix":null,`+
		`"fuse_unk":false,"byte_fallback":false,"ignore_merges":false,"vocab":{%s},"merges":[]}}`, added, regex, vocab)

	v := &c.Vision
	edge := v.PatchSize * v.SpatialMergeSize
	media := func(longest int, more string) []byte {
		return fmt.Appendf(nil, `{"patch_size":%d,"temporal_patch_size":%d,"merge_size":%d,"image_mean":[0.5,0.5,0.5],"image_std":[0.5,0.5,0.5],`+
			`"size":{"shortest_edge":%d,"longest_edge":%d}%s}`, v.PatchSize, v.TemporalPatchSize, v.SpatialMergeSize, 4*edge*edge, longest, more)
	}
	files := map[string][]byte{
		"tokenizer.json": tokenizer,
		"tokenizer_config.json": fmt.Appendf(nil, `{"tokenizer_class":"Qwen2Tokenizer","eos_token":"<|im_end|>","pad_token":"<|endoftext|>",`+
			`"model_max_length":%d,"add_prefix_space":false}`, c.Text.MaxPositions),
		"chat_template.jinja": []byte(template),
		"generation_config.json": fmt.Appendf(nil, `{"do_sample":true,"eos_token_id":[%d,%d],"pad_token_id":%d,"temperature":1.0,"top_k":20,"top_p":0.95}`,
			id("<|im_end|>"), id("<|endoftext|>"), id("<|endoftext|>")),
		"preprocessor_config.json":       media(16384*edge*edge, `,"image_processor_type":"Qwen2VLImageProcessorFast","processor_class":"Qwen3VLProcessor"`),
		"video_preprocessor_config.json": media(24576*edge*edge, `,"video_processor_type":"Qwen3VLVideoProcessor","fps":2,"min_frames":4,"max_frames":768`),
	}
	out := map[string][]byte{}
	for _, r := range arch.Resources() {
		data, ok := files[r.Role]
		if !ok {
			return nil, fmt.Errorf("synth: no content for %s", r.Role)
		}
		out[r.Object()] = data
	}
	return out, nil
}

// byteSpelling is how a byte is written in a vocabulary: printable Latin-1 as itself, all others from U+0100 on.
func byteSpelling(b int) string {
	printable := func(b int) bool { return b >= '!' && b <= '~' || b >= 0xa1 && b <= 0xac || b >= 0xae && b <= 0xff }
	if printable(b) {
		return string(rune(b))
	}
	r := rune(0x100)
	for i := range b {
		if !printable(i) {
			r++
		}
	}
	return string(r)
}
