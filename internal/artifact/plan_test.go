package artifact

import (
	"bytes"
	"encoding/hex"
	"encoding/json/jsontext"
	"strings"
	"testing"
)

// TestSplit has the capacities of docs/format.md 1.5 and 7.2.
func TestSplit(t *testing.T) {
	const cap = 31_999_995_904
	for _, c := range []struct {
		name                  string
		start, payload, limit int64
		want                  []int64 // nil: error
	}{
		{"S 65536", 65536, 100_000_000_000, DefaultLimit, []int64{31_999_934_464, cap, cap, 100_000_000_000 - 31_999_934_464 - 2*cap}},
		{"published mixed", 540_672, 109_680_552_704, DefaultLimit, []int64{31_999_459_328, cap, cap, 13_681_101_568}},
		{"upgraded nvfp4", 708_608, 134_755_231_224, DefaultLimit, []int64{31_999_291_392, cap, cap, cap, 6_755_952_120}},
		{"fits exactly", 4096, 12288, 16384, []int64{12288}},
		{"one byte more", 4096, 12289, 16384, []int64{12288, 1}},
		{"last part full", 4096, 24576, 16384, []int64{12288, 12288}},
		{"S fills the limit", 4096, 1, 4096, nil},
		{"no page left", 4096, 5000, 8191, nil},
		{"single in less than a page", 4096, 4095, 8191, []int64{4095}},
	} {
		t.Run(c.name, func(t *testing.T) {
			files, err := split("n", c.start, c.payload, c.limit)
			if c.want == nil {
				if err == nil {
					t.Fatalf("got %v, want an error", files)
				}
				return
			}
			if err != nil || len(files) != len(c.want) {
				t.Fatalf("got %v, %v, want %v", files, err, c.want)
			}
			for i, f := range files {
				if f.PayloadBytes != c.want[i] {
					t.Errorf("file %d has %d bytes, want %d", i, f.PayloadBytes, c.want[i])
				}
			}
			if len(files) > 1 && (files[0].Path != "" || files[1].Path != "n.part-0001") {
				t.Errorf("names %q, %q", files[0].Path, files[1].Path)
			}
		})
	}
	if n := partName("a", 12345); n != "a.part-12345" {
		t.Errorf("part 12345 is named %s", n)
	}
}

// TestPlanGrowsReserve plans a directory whose list of files does not fit the
// page that the single file would need.
func TestPlanGrowsReserve(t *testing.T) {
	d := tinyDirectory()
	d.Objects[1].Shape = []int{2, 300_000}
	p, err := NewPlan("tiny.ninfer", d, PlanOptions{Limit: 16384})
	if err != nil {
		t.Fatal(err)
	}
	// 2,400,256 bytes: with S = 4096 that is 196 files of 12,288 bytes and a
	// list of about 10 KiB.
	if p.PayloadStart != 12288 || len(p.Text) != 12288-32 {
		t.Errorf("payload start %d, json_bytes %d", p.PayloadStart, len(p.Text))
	}
	if f := p.Directory.Files; f[0].PayloadBytes != 4096 || len(f) != 1+(2_400_256-4096+12287)/12288 {
		t.Errorf("%d files, the first with %d bytes", len(f), f[0].PayloadBytes)
	}
	if !bytes.HasPrefix(p.Text, append(bytes.Clone(p.Content), `,"files":[{"path":null,`...)) {
		t.Error("text does not begin with the content")
	}
}

// TestStringSpelling compares with Python's json.dumps(s, ensure_ascii=False)
// for all characters up to U+0021 and some others.
func TestStringSpelling(t *testing.T) {
	const want = "225c75303030305c75303030315c75303030325c75303030335c75303030345c75303030355c75303030365c75303030375c625c745c6e5c75303030625c665c725c75303030655c75303030665c75303031305c75303031315c75303031325c75303031335c75303031345c75303031355c75303031365c75303031375c75303031385c75303031395c75303031615c75303031625c75303031635c75303031645c75303031655c753030316620215c5c7f3c3e26e280a8c3a9f09d849e22"
	var s strings.Builder
	for c := range rune(0x22) {
		s.WriteRune(c)
	}
	s.WriteString("\\\x7f<>&\u2028é𝄞")
	if got := hex.EncodeToString(appendString(nil, s.String())); got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

// TestRawValues: order, number spelling and characters of open objects are
// kept, white space and needless escapes are not.
func TestRawValues(t *testing.T) {
	in := "{ \"b\" : [ 9.999999974752427e-07 , 10000000.0,1E5,-0 ],\n\"a\":{\"\\u0041\\/\":\"\\u00e9<\",\"\":[]},\"c\":{},\"n\":null,\"t\":true}"
	want := `{"b":[9.999999974752427e-07,10000000.0,1E5,-0],"a":{"A/":"é<","":[]},"c":{},"n":null,"t":true}`
	got, err := appendRaw(nil, jsontext.Value(in))
	if err != nil || string(got) != want {
		t.Errorf("got %s, %v, want %s", got, err, want)
	}
	for _, bad := range []string{"[]", "1", "{", "{}x", `{"a":1,"a":2}`, "{}{}"} {
		if got, err := appendRaw(nil, jsontext.Value(bad)); err == nil {
			t.Errorf("%s was accepted as %s", bad, got)
		}
	}
}

// TestMemberOrder fixes the order of all members in both spellings
// (docs/format.md 1.5, 4.1.4 and 1.9).
func TestMemberOrder(t *testing.T) {
	d := tinyDirectory()
	text := &d.Components[0]
	text.Proposal = &Proposal{Domain: "indexed", Rows: 3}
	mtp := Component{ID: "mtp", Target: "text"}
	mtp.Resources.Set("z", "r.hello")
	d.Components = append(d.Components, mtp)
	d.Bindings.Set("b", Binding{Parts: []Part{{"w.a", 0, 5}, {"w.a", 7, 8}}})
	d.Uses[0].Auxiliaries.Set("divisor", Binding{Object: "w.a"})
	d.Metadata = jsontext.Value(`{"name": "x"}`)
	components := `"components":{"text":{"config":{"architectures":["Demo"]},"resources":{"hello.txt":"r.hello"},"proposal":{"domain":"indexed","rows":3}},` +
		`"mtp":{"config":{},"target":"text","resources":{"z":"r.hello"}}}`
	bindings := `"bindings":{"text/a":{"object":"w.a"},"b":{"parts":[{"object":"w.a","range":[0,5]},{"object":"w.a","range":[7,8]}]}}`
	uses := `"uses":[{"parameter":"text/a","input":"text/x","activation_policy":"A16Only","auxiliaries":{"divisor":{"object":"w.a"}}}]`
	rest := `"metadata":{"name":"x"},"provenance":{}`
	files := `,"files":[{"path":null,"payload_bytes":24256}]}`

	p, err := NewPlan("n", d, PlanOptions{})
	if err != nil {
		t.Fatal(err)
	}
	want := "{" + components + `,"objects":[{"id":"r.hello","encoding":"raw_bytes_v1","offset":0,"bytes":5,"kind":"resource"},` +
		`{"id":"w.a","shape":[2,3000],"format":"fp32","layout":"contiguous_le_v1","offset":256,"bytes":24000,"kind":"tensor"}],` +
		bindings + "," + uses + "," + rest
	if string(p.Content) != want {
		t.Errorf("content\n%s, want\n%s", p.Content, want)
	}
	if got := strings.TrimRight(string(p.Text), " "); got != want+files {
		t.Errorf("text\n%s", got)
	}

	d.Objects[1].Offset = 512 // leaves a hole
	d.Objects[1].Bytes = 24000
	p, err = NewPlan("n", d, PlanOptions{Upgrade: true})
	if err != nil {
		t.Fatal(err)
	}
	want = "{" + components + "," + bindings + "," + uses +
		`,"objects":[{"id":"r.hello","kind":"resource","offset":0,"bytes":5,"encoding":"raw_bytes_v1"},` +
		`{"id":"w.a","kind":"tensor","offset":512,"bytes":24000,"shape":[2,3000],"format":"fp32","layout":"contiguous_le_v1"}],` + rest
	if string(p.Content) != want {
		t.Errorf("content\n%s, want\n%s", p.Content, want)
	}
	if len(p.Holes) != 1 || p.Holes[0] != (Region{5, 507}) {
		t.Errorf("holes %v", p.Holes)
	}
}

// TestPlanRefuses: what must not be written is refused before anything is.
func TestPlanRefuses(t *testing.T) {
	for _, c := range []struct {
		name string
		edit func(d *Directory)
		says string
	}{
		{"no objects", func(d *Directory) { d.Objects = nil }, "no objects"},
		{"empty resource", func(d *Directory) { d.Objects[0].Bytes = 0 }, "empty"},
		{"encoding", func(d *Directory) { d.Objects[0].Encoding = "zstd" }, "zstd"},
		{"format", func(d *Directory) { d.Objects[1].Format = "fp2" }, "fp2"},
		{"pair", func(d *Directory) { d.Objects[1].Layout = "row_scale_v1" }, "row_scale_v1"},
		{"size", func(d *Directory) { d.Objects[1].Bytes = 24004 }, "24004"},
		{"duplicate id", func(d *Directory) { d.Objects[0].ID = "w.a" }, "twice"},
		{"binding to nothing", func(d *Directory) { d.Bindings.Set("x", Binding{Object: "y"}) }, "does not exist"},
		{"use of nothing", func(d *Directory) { d.Uses[0].Parameter = "y" }, "not bound"},
		{"policy", func(d *Directory) { d.Uses[0].Policy = "A8" }, "A8"},
		{"no text", func(d *Directory) { d.Components[0].ID = "vision" }, "text"},
		{"config", func(d *Directory) { d.Components[0].Config = jsontext.Value("[]") }, "object"},
		{"name not UTF-8", func(d *Directory) { d.Uses[0].Input = "\xff" }, "UTF-8"},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := tinyDirectory()
			c.edit(d)
			if _, err := NewPlan("n", d, PlanOptions{}); err == nil || !strings.Contains(err.Error(), c.says) {
				t.Errorf("got %v, want an error saying %q", err, c.says)
			}
		})
	}
	for _, entry := range []string{"", ".", "..", "a/b", `a\b`} {
		if _, err := NewPlan(entry, tinyDirectory(), PlanOptions{}); err == nil {
			t.Errorf("entry name %q was accepted", entry)
		}
	}
	d := tinyDirectory()
	d.Objects[1].Offset = 128
	if _, err := NewPlan("n", d, PlanOptions{Upgrade: true}); err == nil {
		t.Error("a tensor at offset 128 was accepted")
	}
}

// TestIDs compares both derivations with values computed by Python's hashlib
// and json modules.
func TestIDs(t *testing.T) {
	d := tinyDirectory()
	path := t.TempDir() + "/tiny.ninfer"
	r := write(t, path, d, tinyObjects(), PlanOptions{}, WriterOptions{})
	if got := FormatID(r.ID); got != "849da42eb4088356bd690f567ab88369" {
		t.Errorf("content id %s", got)
	}
	// Neither name nor split enters.
	r = write(t, t.TempDir()+"/x", d, tinyObjects(), PlanOptions{Limit: 8192}, WriterOptions{})
	if got := FormatID(r.ID); got != "849da42eb4088356bd690f567ab88369" || len(r.Files) != 6 {
		t.Errorf("content id %s, %d files", got, len(r.Files))
	}

	d.Metadata = jsontext.Value(`{"name":"zwölf 𝄞` + "\x7f" + `\u0001","eps":9.999999974752427e-07,"b":[1,{"z":0.25,"a":10000000.0}]}`)
	p, err := NewPlan("n", d, PlanOptions{})
	if err != nil {
		t.Fatal(err)
	}
	id, err := p.UpgradeID(strings.Repeat("ab", 32))
	if err != nil || FormatID(id) != "97be902c88031d1ff61368ee1ebf3d28" {
		t.Errorf("upgrade id %s, %v", FormatID(id), err)
	}
}
