package convert

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"testing"

	"ninfer/internal/arch"
)

// officialResources are the sizes of the six files in the official repository (docs/format.md 4).
var officialResources = map[string]int64{
	"frontend/tokenizer.json": 12809320, "frontend/tokenizer_config.json": 17928, "frontend/chat_template.jinja": 8952,
	"frontend/generation_config.json": 202, "frontend/preprocessor_config.json": 390, "frontend/video_preprocessor_config.json": 385,
}

// TestOfficialPlan: the tables of docs/format.md 4.1.5, from the config alone.
func TestOfficialPlan(t *testing.T) {
	const radixark, swift = "radixark", "swift"
	const fp8, row, nvfp4 = "fp8_e4m3fn", "fp8_e4m3fn_row_bf16", "nvfp4"
	for _, tt := range []struct {
		profile, ple, proj, mtp string
		objects, bindings, uses int
		payload                 int64
		json                    int
		start                   int64
		files                   int
		total                   int64
		digest                  string
	}{
		{radixark, "", "", "", 1633, 1627, 1042, 134755222272, 706873, 708608, 5, 134755947264, "85364c9fd631e8f73d4db9aa89713fc4a4467b9019af64127cd467dd4e8de360"},
		{radixark, "", row, "", 1633, 1627, 1042, 130507175168, 712492, 712704, 5, 130507904256, "27e6dd104fc21c09b3deeb5ccc5b60b4dfa436ba73fa5ff280482598fbf45992"},
		{radixark, "", "", nvfp4, 1635, 1629, 1042, 131137643264, 707638, 708608, 5, 131138368256, "74f9881e4160c6a5e552db26a706ab87d0ae2cfae790c96a3871e97b8d9613c5"},
		{radixark, "", row, nvfp4, 1635, 1629, 1042, 126889596160, 713151, 716800, 4, 126890325248, "6a822c4a9d03cb6f25d510bfbab459a3ee966fed1b8d7e5976c854f7a0a8cca2"},
		{swift, "", "", "", 1632, 1626, 1043, 185955467776, 707594, 708608, 6, 185956196864, "5128bb474c1a6c83b4dec72835060fed08b467e04ed88f73283ecfbbaee054cf"},
		{swift, fp8, "", "", 1633, 1627, 1042, 134755222272, 706931, 708608, 5, 134755947264, "acca8e9a3120470b41f4cc61b3edce36d864dbe40ab6f3e6da665c47e8df34bf"},
		{swift, "", row, "", 1632, 1626, 1043, 181707420672, 713249, 716800, 6, 181708157952, "5f23b831d6af1124d04e2313b425283d354f4eaf83f9cee4ff25aea62480e6bc"},
		{swift, "", "", nvfp4, 1634, 1628, 1043, 182337888768, 708368, 708608, 6, 182338617856, "8e378f3ca438b512ee03827976bc879053f7e9fd555031ee9518b6c22190c9ab"},
		{swift, fp8, row, "", 1633, 1627, 1042, 130507175168, 712550, 712704, 5, 130507904256, "fa6e8b4ff23209be31bf66cbc3a4e9b5fdae256df41121bcfbe2b2faa72eeffb"},
		{swift, fp8, "", nvfp4, 1635, 1629, 1042, 131137643264, 707696, 708608, 5, 131138368256, "1b64c15b0012a0818b47fda6e6497f10df5f0deec412192ccab651f5fdf3eca0"},
		{swift, "", row, nvfp4, 1634, 1628, 1043, 178089841664, 714023, 716800, 6, 178090578944, "41c8a8a94bd475899e0f5dd05ec4b245c1ccf2838574f318a20afc45cf764557"},
		{swift, fp8, row, nvfp4, 1635, 1629, 1042, 126889596160, 713201, 716800, 4, 126890325248, "0e30720bdad6049e813f49ea803cf0a48cbf355e1df079616b67ef8c597d01cc"},
	} {
		v, err := arch.ParseVariant(tt.profile, tt.ple, tt.proj, tt.mtp)
		if err != nil {
			t.Fatal(err)
		}
		t.Run(v.OutputName(), func(t *testing.T) {
			c := arch.Official()
			_, p, err := Plan(v.OutputName(), c, v, c.ProposalRows(248077), officialResources, 0)
			if err != nil {
				t.Fatal(err)
			}
			d := &p.Directory
			if len(d.Objects) != tt.objects || d.Bindings.Len() != tt.bindings || len(d.Uses) != tt.uses {
				t.Errorf("%d objects, %d bindings, %d uses, want %d, %d, %d", len(d.Objects), d.Bindings.Len(), len(d.Uses), tt.objects, tt.bindings, tt.uses)
			}
			length := len(p.Text)
			for p.Text[length-1] == ' ' {
				length--
			}
			if p.PayloadBytes != tt.payload || length != tt.json || p.PayloadStart != tt.start || int64(len(p.Text)) != tt.start-32 {
				t.Errorf("payload %d, json %d, start %d, want %d, %d, %d", p.PayloadBytes, length, p.PayloadStart, tt.payload, tt.json, tt.start)
			}
			total := p.PayloadBytes + p.PayloadStart + 4096*int64(len(d.Files)-1)
			if len(d.Files) != tt.files || total != tt.total {
				t.Errorf("%d files of %d bytes, want %d of %d", len(d.Files), total, tt.files, tt.total)
			}
			first := map[int64]int64{708608: 31999291392, 712704: 31999287296, 716800: 31999283200}[tt.start]
			for i, f := range d.Files[:len(d.Files)-1] {
				if want := []int64{first, 31999995904}[min(i, 1)]; f.PayloadBytes != want {
					t.Errorf("file %d holds %d, want %d", i, f.PayloadBytes, want)
				}
			}
			sum := sha256.Sum256(p.Text)
			if got := hex.EncodeToString(sum[:]); got != tt.digest {
				t.Errorf("directory digest %s, want %s", got, tt.digest)
			}
		})
	}
}

// TestMixedPlan: what docs/format.md 1.8.3 says of the published artifact of dialect E, from the config alone. Its provenance, which tells of
// an upgrade, and with it the length of the directory belong to that upgrade; so does its id.
func TestMixedPlan(t *testing.T) {
	v := arch.Variant{Profile: arch.Mixed}
	_, p, err := Plan(v.OutputName(), arch.Official(), v, 0, officialResources, 0)
	if err != nil {
		t.Fatal(err)
	}
	d := &p.Directory
	if len(d.Objects) != 1566 || d.Bindings.Len() != 1668 || len(d.Uses) != 959 || p.PayloadBytes != 109680552704 || len(d.Files) != 4 {
		t.Errorf("%d objects, %d bindings, %d uses, %d payload bytes in %d files", len(d.Objects), d.Bindings.Len(), len(d.Uses), p.PayloadBytes, len(d.Files))
	}
	// The members follow each other in this order, separated by a comma, a quoted name and a colon.
	rest := p.Text
	for i, m := range []struct {
		name   string
		bytes  int
		digest string
	}{
		{"components", 2533, "699d8be42b5a9ecd68a1ab4a3ff139a7f675420f846ab40a11d544c3a177734b"},
		{"objects", 255514, "220b8ba76ac8a9a81025335e360ef5ade0e14e8339be83c6a0fe5acccb79a008"},
		{"bindings", 153510, "a9f802c8177e913cb1b27189ba675b740d4a0b6ed8c3e4d99fff65a5dc1fff14"},
		{"uses", 126239, "3d3de5269f66eed1dddb5917d021f00f04c13fa5760ae715fdce6b4e7b30e7e1"},
		{"metadata", 29, "85c695230986d6a5cb279dd4db684d66af1f506a9c2c3ecd4288a757ae63ad3b"},
	} {
		head := []byte("{,"[min(i, 1):][:1] + `"` + m.name + `":`)
		if !bytes.HasPrefix(rest, head) || len(rest) < len(head)+m.bytes {
			t.Fatalf("%s does not begin where it should, but %.60q", m.name, rest)
		}
		value := rest[len(head):][:m.bytes]
		if sum := sha256.Sum256(value); hex.EncodeToString(sum[:]) != m.digest {
			t.Errorf("%s of %d bytes has digest %x, want %s", m.name, m.bytes, sum, m.digest)
		}
		rest = rest[len(head)+m.bytes:]
	}
	if want := `,"provenance":{"source":"primitive-ai/Qwen3.8-Flash-Next-mixed-NVFP4-FP8","recipe":"qwen3_8_flash_next_125b_a6b_nvfp4-v3-mixed"},"files":`; !bytes.HasPrefix(rest, []byte(want)) {
		t.Errorf("then %.200q", rest)
	}
}
