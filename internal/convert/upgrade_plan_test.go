package convert

import (
	"bytes"
	"encoding/binary"
	"encoding/json/jsontext"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"

	"ninfer/internal/arch"
	"ninfer/internal/artifact"
)

// v2Names are the spellings of version 2 by those of version 3 (docs/format.md 1.7).
var v2Names = map[string]string{
	"bf16": "BF16", "fp32": "FP32", "int32": "I32", "int64": "I64", "fp8_e4m3fn": "FP8_E4M3FN",
	"q4_g64_fp16": "Q4G64_F16S", "q5_g64_fp16": "Q5G64_F16S", "q6_g64_fp16": "Q6G64_F16S", "q8_g32_fp16": "W8G32_F16S",
	"nvfp4": "NVFP4", "fp8_e4m3fn_row_fp32": "FP8_E4M3FN_ROW_F32S", "u4z8_g16_fp16": "U4Z8G16_F16S",
	"contiguous_le_v1": "contiguous-le-v1", "row_split_k128_v1": "row-split-k128-v1",
	"expert_block_scale_k16_m128x4_v1": "expert-blockscale-k16-m128x4-v1", "row_scale_fp32_v1": "row-scale-f32-v1",
	"packed_u4_g16_v1": "packed-u4-g16-v1", "raw_bytes_v1": "raw-bytes-v1",
}

// v2Directory writes a version 2 directory as its writers did (docs/format.md 1.7).
func v2Directory(model, weights string, objects []artifact.Object) []byte {
	b := fmt.Appendf(nil, `{"identity":{"model_id":%q,"weights_id":%q},"objects":[`, model, weights)
	for i, o := range objects {
		if i > 0 {
			b = append(b, ',')
		}
		if o.Resource {
			b = fmt.Appendf(b, `{"name":%q,"kind":"resource","encoding":"raw-bytes-v1","offset":%d,"bytes":%d}`, o.ID, o.Offset, o.Bytes)
			continue
		}
		var dims []string
		for _, n := range o.Shape {
			dims = append(dims, strconv.Itoa(n))
		}
		b = fmt.Appendf(b, `{"name":%q,"kind":"tensor","shape":[%s],"format":%q,"layout":%q,"offset":%d,"bytes":%d}`,
			o.ID, strings.Join(dims, ","), v2Names[o.Format], v2Names[o.Layout], o.Offset, o.Bytes)
	}
	return append(b, "]}"...)
}

// placed gives the objects of an inventory their offsets; they follow the rule of version 3.
func placed(t testing.TB, specs []arch.Spec, sizes map[string]int64) []artifact.Object {
	t.Helper()
	d := directory(specs, &arch.Description{
		Components: []arch.Component{{ID: "text", Config: jsontext.Value("{}")}}, Metadata: jsontext.Value("{}"), Provenance: jsontext.Value("{}"),
	}, sizes)
	p, err := artifact.NewPlan("x.ninfer", d, artifact.PlanOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return p.Directory.Objects
}

func mixedV2(t testing.TB, c *arch.Config) []arch.Spec {
	t.Helper()
	specs, err := arch.MixedV2Inventory(c)
	if err != nil {
		t.Fatal(err)
	}
	return specs
}

// TestOfficialV2 writes the directories of the two known version 2 files from the config alone: docs/format.md 1.7.
func TestOfficialV2(t *testing.T) {
	c := arch.Official()
	plain, err := arch.Inventory(c, arch.Variant{Profile: arch.Radixark}, 147456)
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		model, weights string
		specs          []arch.Spec
		json           int
		start, payload int64
		digest         string
	}{
		{"qwen3.8-flash-next", "mixed-nvfp4-fp8-ple-int4", mixedV2(t, c), 258385, 262144, 113298135808, "6bad9936cb3adaa4b063ef3b639a08008cb5868939f67d81d0a718154dbf5c49"},
		{"qwen3.8-flash-next-125b-a6b", "nvfp4", plain, 298519, 299008, 134755222272, "e7fa02800250ca24d25bed126db30be60eb9853fdbc450be2424336cbb3bb000"},
	} {
		objects := placed(t, tt.specs, officialResources)
		text := v2Directory(tt.model, tt.weights, objects)
		last := objects[len(objects)-1]
		if start := (16 + int64(len(text)) + 4095) / 4096 * 4096; len(text) != tt.json || start != tt.start || last.Offset+last.Bytes != tt.payload {
			t.Errorf("%s: json %d, payload %d at %d, want %d, %d, %d", tt.model, len(text), last.Offset+last.Bytes, start, tt.json, tt.payload, tt.start)
		}
		if got := digest(text); got != tt.digest {
			t.Errorf("%s: directory digest %s, want %s", tt.model, got, tt.digest)
		}
	}
}

// trimmed is a plan's text without its padding.
func trimmed(p *artifact.Plan) []byte { return bytes.TrimRight(p.Text, " ") }

// rootMembers are the values of a JSON object as they are written.
func rootMembers(t testing.TB, text []byte) map[string][]byte {
	t.Helper()
	out := map[string][]byte{}
	dec := jsontext.NewDecoder(bytes.NewReader(text))
	if _, err := dec.ReadToken(); err != nil {
		t.Fatal(err)
	}
	for dec.PeekKind() == '"' {
		name, err := dec.ReadToken()
		if err != nil {
			t.Fatal(err)
		}
		key := name.String()
		v, err := dec.ReadValue()
		if err != nil {
			t.Fatal(err)
		}
		out[key] = bytes.Clone(v)
	}
	return out
}

// canonical sorts the members of all objects; the directory's text has neither white space nor characters beyond ASCII.
func canonical(t testing.TB, v []byte) string {
	t.Helper()
	switch v[0] {
	case '{':
		m := rootMembers(t, v)
		var parts []string
		for name, x := range m {
			parts = append(parts, strconv.Quote(name)+":"+canonical(t, x))
		}
		slices.Sort(parts)
		return "{" + strings.Join(parts, ",") + "}"
	case '[':
		dec := jsontext.NewDecoder(bytes.NewReader(v))
		dec.ReadToken()
		var parts []string
		for dec.PeekKind() != ']' {
			x, err := dec.ReadValue()
			if err != nil {
				t.Fatal(err)
			}
			parts = append(parts, canonical(t, bytes.Clone(x)))
		}
		return "[" + strings.Join(parts, ",") + "]"
	}
	return string(v)
}

const publishedMixed = "3d383e51963aafd4318dfd04c8dc63ee7df11768de19d9ab58dbba44460d1d02"

// TestOfficialMixedUpgrade: the vectors of docs/format.md 1.8.3 and 1.6, from the config alone.
func TestOfficialMixedUpgrade(t *testing.T) {
	for _, tt := range []struct {
		entry       string
		json        int
		text, first string // digests of the padded JSON and of the entry up to the payload
	}{
		{
			"qwen3_8_flash_next_mixed.ninfer", 539150, "d3e45830fafb2f5cfd21025cbf24d233b7a0f39fec6ba11b97bc90ab1effb5d2",
			"6076211904d8af2612439ba40be22f23961730c5ece92feeab776ca9408399b8",
		},
		{
			"qwen3_8_flash_next_mixed.v3.ninfer", 539159, "63170a5fff7838379c64b42fbc9ac9cea3c6c0ca9c5bed4d4faed3e3c9deb339",
			"84aa9169f0fdab89eff946e59bd8fdf4b08e15551845d3b7d8b1601a7dcb85dd",
		},
	} {
		t.Run(tt.entry, func(t *testing.T) {
			p, err := planMixedUpgrade(tt.entry, arch.Official(), officialResources, publishedMixed, 0)
			if err != nil {
				t.Fatal(err)
			}
			d := &p.Directory
			if len(d.Objects) != 1566 || d.Bindings.Len() != 1668 || len(d.Uses) != 959 {
				t.Errorf("%d objects, %d bindings, %d uses", len(d.Objects), d.Bindings.Len(), len(d.Uses))
			}
			if n := len(trimmed(p)); n != tt.json || len(p.Text) != 540640 || p.PayloadStart != 540672 || p.PayloadBytes != 109680552704 {
				t.Errorf("json %d (%d), payload %d at %d", n, len(p.Text), p.PayloadBytes, p.PayloadStart)
			}
			var sizes []int64
			total := p.PayloadStart + 4096*3
			for _, f := range d.Files {
				sizes = append(sizes, f.PayloadBytes)
				total += f.PayloadBytes
			}
			if !slices.Equal(sizes, []int64{31999459328, 31999995904, 31999995904, 13681101568}) || total != 109681105664 {
				t.Errorf("files %d, %d bytes in all", sizes, total)
			}
			if got := digest(p.Text); got != tt.text {
				t.Errorf("digest of the text %s, want %s", got, tt.text)
			}
			m := rootMembers(t, trimmed(p))
			for name, want := range map[string]struct {
				n      int
				digest string
			}{
				"components": {2533, "699d8be42b5a9ecd68a1ab4a3ff139a7f675420f846ab40a11d544c3a177734b"},
				"objects":    {255514, "220b8ba76ac8a9a81025335e360ef5ade0e14e8339be83c6a0fe5acccb79a008"},
				"bindings":   {153510, "a9f802c8177e913cb1b27189ba675b740d4a0b6ed8c3e4d99fff65a5dc1fff14"},
				"uses":       {126239, "3d3de5269f66eed1dddb5917d021f00f04c13fa5760ae715fdce6b4e7b30e7e1"},
				"metadata":   {29, "85c695230986d6a5cb279dd4db684d66af1f506a9c2c3ecd4288a757ae63ad3b"},
				"provenance": {958, "82001a7556ad023d20892aeae66fe4a166f92eb796bb7206659f7475aa1e756b"},
			} {
				if len(m[name]) != want.n || digest(m[name]) != want.digest {
					t.Errorf("%s: %d bytes, digest %s, want %d, %s", name, len(m[name]), digest(m[name]), want.n, want.digest)
				}
			}

			// The canonical form of docs/format.md 1.6, made here from the text.
			var objects []string
			for _, o := range d.Objects {
				if o.Resource {
					objects = append(objects, fmt.Sprintf(`["resource",%q,"raw_bytes_v1",%d]`, o.ID, o.Bytes))
					continue
				}
				shape := strings.ReplaceAll(fmt.Sprint(o.Shape), " ", ",")
				objects = append(objects, fmt.Sprintf(`["tensor",%q,%s,%q,%q]`, o.ID, shape, o.Format, o.Layout))
			}
			m["objects"] = []byte("[" + strings.Join(objects, ",") + "]")
			var all []string
			for _, name := range []string{"bindings", "components", "metadata", "objects", "provenance", "uses"} {
				all = append(all, strconv.Quote(name)+":"+canonical(t, m[name]))
			}
			c := "{" + strings.Join(all, ",") + "}"
			if len(c) != 422848 || digest([]byte(c)) != "1aea8038fbe5a63578eece764ec16f460dd7fd4cb2c1934efaa93975bde9aa47" {
				t.Errorf("canonical form: %d bytes, digest %s", len(c), digest([]byte(c)))
			}
			id, err := p.UpgradeID(publishedMixed)
			if err != nil || artifact.FormatID(id) != "1e7e026e9f634926ae26b80f0fc8591e" {
				t.Errorf("id %x, %v", id, err)
			}
			head := append([]byte("NINFER\x00\x03"), binary.LittleEndian.AppendUint64(nil, uint64(len(p.Text)))...)
			head = append(append(head, id[:]...), p.Text...)
			if int64(len(head)) != p.PayloadStart || digest(head) != tt.first {
				t.Errorf("the first %d bytes have digest %s, want %s", len(head), digest(head), tt.first)
			}
		})
	}
}

// TestOfficialUpgrade: the numbers of docs/format.md 1.9, from the config alone.
func TestOfficialUpgrade(t *testing.T) {
	c := arch.Official()
	specs, err := arch.Inventory(c, arch.Variant{Profile: arch.Radixark}, 147456)
	if err != nil {
		t.Fatal(err)
	}
	p, err := planUpgrade("qwen3_8_flash_next_125b_a6b_nvfp4.ninfer", c, 147456, placed(t, specs, officialResources), 134755222272, 0)
	if err != nil {
		t.Fatal(err)
	}
	if n := len(trimmed(p)); n != 706867 || len(p.Text) != 708576 || p.PayloadStart != 708608 || p.PayloadBytes != 134755231224 {
		t.Errorf("json %d (%d), payload %d at %d", n, len(p.Text), p.PayloadBytes, p.PayloadStart)
	}
	var sizes []int64
	total := p.PayloadStart + 4096*4
	for _, f := range p.Directory.Files {
		sizes = append(sizes, f.PayloadBytes)
		total += f.PayloadBytes
	}
	if !slices.Equal(sizes, []int64{31999291392, 31999995904, 31999995904, 31999995904, 6755952120}) || total != 134755956216 {
		t.Errorf("files %d, %d bytes in all", sizes, total)
	}
	last := p.Directory.Objects[len(p.Directory.Objects)-1]
	if last.ID != "frontend/chat_template.jinja" || last.Offset != 134755222272 || last.Bytes != 8952 {
		t.Errorf("last object %+v", last)
	}
	// Its old place, after tokenizer.json and tokenizer_config.json, is the only hole.
	if len(p.Holes) != 1 || p.Holes[0] != (artifact.Region{Offset: 12809320 + 17928, Bytes: 8952}) {
		t.Errorf("holes %+v", p.Holes)
	}
	order := []string{"components", "bindings", "uses", "objects", "metadata", "provenance", "files"}
	at := -1
	for _, name := range order {
		i := bytes.Index(p.Text, []byte(`"`+name+`":`))
		if i < at {
			t.Errorf("member %s is out of order", name)
		}
		at = i
	}
	if want := `{"upgraded_from":{"version":2,"model_id":"qwen3.8-flash-next-125b-a6b","weights_id":"nvfp4"}}`; string(p.Directory.Provenance) != want {
		t.Errorf("provenance %s", p.Directory.Provenance)
	}
}
