package artifact

import (
	"encoding/json/v2"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// saveReport writes the report that convert leaves beside an artifact.
func saveReport(t testing.TB, path string, r *Receipt) {
	t.Helper()
	objects := map[string]string{}
	for id, s := range r.ObjectSHA256.All() {
		objects[id] = s
	}
	b, err := json.Marshal(map[string]any{
		"identity": map[string]string{"model_id": "x"}, "object_sha256": objects, "directory_sha256": r.DirectorySHA256,
		"artifact_id": FormatID(r.ID),
	})
	if err != nil {
		t.Fatal(err)
	}
	save(t, path, b)
}

func verify(t testing.TB, path string, o Options) Result {
	t.Helper()
	v, err := Verify(path, o)
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range append(append(v.Failures, v.Notes...), v.Unchecked...) {
		if strings.ContainsAny(s, "\r\n") {
			t.Errorf("more than one line: %q", s)
		}
	}
	if v.Passed != (len(v.Failures) == 0) {
		t.Errorf("passed is %v with failures %q", v.Passed, v.Failures)
	}
	return v
}

func wantFailure(t testing.TB, v Result, says ...string) {
	t.Helper()
	if v.Passed {
		t.Fatalf("it passed, want failures saying %q", says)
	}
	all := strings.Join(v.Failures, "\n")
	for _, s := range says {
		if !strings.Contains(all, s) {
			t.Errorf("failures %q do not say %q", v.Failures, s)
		}
	}
}

// TestVerifyFlips flips single bytes of all kinds of regions of an artifact in
// many files. Every flip must be refused, with or without a report, and with
// the report the message must name what is damaged.
func TestVerifyFlips(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	path := filepath.Join(dir, "m.ninfer")
	d := mixedDirectory()
	r := write(t, path, d, mixedObjects(t, d, 5), PlanOptions{Limit: 12288}, WriterOptions{})
	report := filepath.Join(t.TempDir(), "report.json")
	saveReport(t, report, r)
	for _, o := range []Options{{}, {Report: report}} {
		if v := verify(t, path, o); !v.Passed || v.IDKind != "content" || len(v.Unchecked) > 0 {
			t.Fatalf("the artifact itself: %+v", v)
		}
	}

	// Regions by the framing of docs/format.md 1.1 and the known placement.
	type area struct {
		file     string
		from, to int64
		says     []string // one of these, with the report
	}
	byKind := map[string][]area{}
	add := func(kind, file string, from, to int64, says ...string) {
		if from < to {
			byKind[kind] = append(byKind[kind], area{file, from, to, says})
		}
	}
	a, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	start, jsonBytes := a.PayloadStart(), int64(len(a.DirectoryText()))
	add("magic", "m.ninfer", 0, 8, "not a version 3 entry file", "ninfer upgrade")
	add("length", "m.ninfer", 8, 16, "header", "json_bytes")
	add("id", "m.ninfer", 16, 32, "header: the artifact id")
	add("directory", "m.ninfer", 32, 32+int64(a.dir.textEnd), "directory: its sha256")
	add("directory padding", "m.ninfer", 32+int64(a.dir.textEnd), 32+jsonBytes, "directory: its sha256")
	payload := func(kind string, from, to int64, says ...string) {
		for i, p := range a.parts {
			lo, hi := max(from, p.base), min(to, p.base+p.bytes)
			add(kind, r.Files[i], p.start+lo-p.base, p.start+hi-p.base, says...)
		}
	}
	end := int64(0)
	for _, o := range a.Directory().Objects {
		payload("gap", end, o.Offset, fmt.Sprintf("gap before tensor %q", o.ID))
		payload("object", o.Offset, o.Offset+o.Bytes, fmt.Sprintf("%q: its sha256", o.ID))
		end = o.Offset + o.Bytes
	}
	for i, name := range r.Files[1:] {
		full := filepath.Join(dir, name)
		add("part header", name, 0, 8, full+": wrong part header: wrong magic")
		add("part header", name, 8, 16, full+": wrong part header: it calls itself part")
		add("part header", name, 16, 32, full+": wrong part header: its artifact id")
		add("part padding", name, 32, 4096, "of "+name+" is 0x10")
		_ = i
	}
	kinds := []string{"magic", "length", "id", "directory", "directory padding", "gap", "object", "object", "object", "part header", "part padding"}
	if a.PayloadStart() != start || len(a.parts) < 6 || len(byKind["gap"]) < 5 {
		t.Fatalf("the artifact has %d files and %d gaps", len(a.parts), len(byKind["gap"]))
	}
	a.Close()

	n := 1000
	if testing.Short() {
		n = 100
	}
	rng := rand.New(rand.NewPCG(6, 7))
	for range n {
		kind := kinds[rng.IntN(len(kinds))]
		areas := byKind[kind]
		at := areas[rng.IntN(len(areas))]
		pos := at.from + rng.Int64N(at.to-at.from)
		file := filepath.Join(dir, at.file)
		bit := byte(1) << rng.IntN(8)
		if kind == "part padding" {
			bit = 0x10
		}
		flipBit(t, file, pos, bit)
		what := fmt.Sprintf("%s: byte %d of %s, bit %#x", kind, pos, at.file, bit)
		if v := verify(t, path, Options{}); v.Passed {
			t.Errorf("%s: passed without a report", what)
		}
		v := verify(t, path, Options{Report: report})
		named := false
		for _, s := range at.says {
			named = named || strings.Contains(strings.Join(v.Failures, "\n"), s)
		}
		if v.Passed || !named {
			t.Errorf("%s: failures %q, want one of %q", what, v.Failures, at.says)
		}
		if kind == "gap" && !strings.Contains(strings.Join(v.Failures, "\n"), fmt.Sprintf("byte %d of %s", pos, at.file)) {
			t.Errorf("%s: failures %q do not give the place", what, v.Failures)
		}
		flipBit(t, file, pos, bit)
	}
	if v := verify(t, path, Options{Report: report}); !v.Passed || v.ReportEqual != len(d.Objects) {
		t.Errorf("after all flips were undone: %+v", v)
	}
}

func flipBit(t testing.TB, path string, at int64, bit byte) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var b [1]byte
	if _, err := f.ReadAt(b[:], at); err != nil {
		t.Fatal(err)
	}
	b[0] ^= bit
	if _, err := f.WriteAt(b[:], at); err != nil {
		t.Fatal(err)
	}
}

// TestVerifyHeaderFlips: every bit of both kinds of header, without a report
// and in a single file, where no part repeats the id.
func TestVerifyHeaderFlips(t *testing.T) {
	path := filepath.Join(t.TempDir(), "tiny.ninfer")
	write(t, path, tinyDirectory(), tinyObjects(), PlanOptions{}, WriterOptions{})
	for i := range int64(32) {
		for bit := range 8 {
			flipBit(t, path, i, 1<<bit)
			if v := verify(t, path, Options{}); v.Passed {
				t.Errorf("byte %d bit %d: passed", i, bit)
			} else if i >= 16 {
				wantFailure(t, v, "header: the artifact id")
			}
			flipBit(t, path, i, 1<<bit)
		}
	}
	if v := verify(t, path, Options{}); !v.Passed {
		t.Error(v.Failures)
	}
}

// TestVerifyElsewhere: an artifact with a foreign id passes, but the result
// says what was not checked; a checksum list or another copy checks it.
func TestVerifyElsewhere(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "tiny.ninfer")
	r := write(t, path, tinyDirectory(), tinyObjects(), PlanOptions{Limit: 16384}, WriterOptions{ID: &tinyID})
	v := verify(t, path, Options{})
	if !v.Passed || v.IDKind != "unknown" || len(v.Unchecked) != 1 || !strings.Contains(v.Unchecked[0], "not derived from the content") {
		t.Errorf("%+v", v)
	}
	if v.Objects != 2 || v.Bindings != 1 || v.Uses != 1 || v.Files != 2 || v.PayloadBytes != 24256 || v.FileBytes != 16384+16064 || v.ArtifactID != FormatID(tinyID) {
		t.Errorf("counts: %+v", v)
	}

	other := filepath.Join(t.TempDir(), "copy.ninfer")
	write(t, other, tinyDirectory(), tinyObjects(), PlanOptions{}, WriterOptions{})
	v = verify(t, path, Options{Against: other})
	if !v.Passed || len(v.Unchecked) != 0 || len(v.Notes) != 1 {
		t.Errorf("against: %+v", v)
	}
	// Published digests of 7.2 as a checksum list.
	sums := "444f1bf68ac469684738dd4868c3ac8dd3cc780fb6cb4899127a56493126bdcf  tiny.ninfer\n" +
		"FEEE9A3C29FD997D2086582522906239D2D8E73797004309B5DCC2674D10B7D1 *tiny.ninfer.part-0001\r\n\n"
	save(t, filepath.Join(dir, "SHA256SUMS"), []byte(sums))
	v = verify(t, path, Options{FileDigests: true})
	if !v.Passed || len(v.Unchecked) != 0 || v.Sums != filepath.Join(dir, "SHA256SUMS") || len(v.FileSHA256) != 2 {
		t.Errorf("checksum list: %+v", v)
	}

	part := filepath.Join(dir, r.Files[1])
	flip(t, part, 5000)
	v = verify(t, path, Options{})
	if !v.Passed || len(v.Unchecked) != 1 { // nothing at hand can know
		t.Errorf("%+v", v)
	}
	wantFailure(t, verify(t, path, Options{FileDigests: true}), "tiny.ninfer.part-0001: its sha256 is")
	wantFailure(t, verify(t, path, Options{Against: other}), fmt.Sprintf(`tensor "w.a": byte %d is`, 12288+5000-4096-256))
	flip(t, part, 5000)

	list := filepath.Join(t.TempDir(), "list")
	save(t, list, []byte(sums[:64+2+len("tiny.ninfer")]))
	wantFailure(t, verify(t, path, Options{SHA256SUMS: list}), "tiny.ninfer.part-0001: not listed")
	save(t, list, []byte("zz  tiny.ninfer\n"))
	if _, err := Verify(path, Options{SHA256SUMS: list}); err == nil {
		t.Error("a broken checksum list was accepted")
	}
	if _, err := Verify(path, Options{SHA256SUMS: filepath.Join(dir, "none")}); err == nil {
		t.Error("a missing checksum list was accepted")
	}
	if _, err := Verify(path, Options{Report: filepath.Join(dir, "none")}); err == nil {
		t.Error("a missing report was accepted")
	}
	if _, err := Verify(filepath.Join(dir, "none"), Options{}); err == nil {
		t.Error("a missing artifact was accepted")
	}
}

// TestVerifyReport: reports beside the artifact, and what they may say wrong.
func TestVerifyReport(t *testing.T) {
	path := filepath.Join(t.TempDir(), "tiny.ninfer")
	r := write(t, path, tinyDirectory(), tinyObjects(), PlanOptions{}, WriterOptions{ID: &tinyID})
	saveReport(t, ReportPath(path), r)
	if v := verify(t, path, Options{}); !v.Passed || v.ReportEqual != 2 || len(v.Unchecked) != 0 || v.Report != path+".conversion.json" {
		t.Errorf("%+v", v)
	}
	b, err := os.ReadFile(ReportPath(path))
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ name, old, new, says string }{
		{"missing object", `"r.hello"`, `"r.hullo"`, `resource "r.hello": the report`},
		{"surplus object", `"r.hello"`, `"r.hullo"`, `"r.hullo", which the artifact lacks`},
		{"digest", sha([]byte("hello")), sha([]byte("hullo")), `resource "r.hello": its sha256`},
		{"directory", r.DirectorySHA256, sha(nil), `directory: its sha256`},
		{"id", FormatID(tinyID), strings.Repeat("0", 32), `header: the artifact id`},
		{"no digests", `sha256":`, `sha512":`, `holds no digests`},
		{"not JSON", `{`, ``, `report`},
	} {
		t.Run(c.name, func(t *testing.T) {
			save(t, ReportPath(path), []byte(strings.ReplaceAll(string(b), c.old, c.new)))
			wantFailure(t, verify(t, path, Options{}), c.says)
		})
	}
	os.Remove(ReportPath(path))

	// An upgrade report has the digests of the old objects and of the banks.
	save(t, UpgradeReportPath(path), fmt.Appendf(nil, `{"v2_objects":{"r.hello":%q,"w.a":%q},"mtp_banks":{"w.a":{"sha256":%q,"bytes":24000}}}`,
		sha([]byte("hello")), sha(nil), sha(tinyObjects()["w.a"])))
	if v := verify(t, path, Options{}); !v.Passed || v.ReportEqual != 2 {
		t.Errorf("upgrade report: %+v", v)
	}
}

// TestVerifyUpgradeID: the id of docs/format.md 1.6 covers the directory only.
func TestVerifyUpgradeID(t *testing.T) {
	d := tinyDirectory()
	v2 := strings.Repeat("ab", 32)
	d.Provenance = []byte(`{"upgraded_from":{"version":2,"sha256":"` + v2 + `"}}`)
	p, err := NewPlan("tiny.ninfer", d, PlanOptions{})
	if err != nil {
		t.Fatal(err)
	}
	id, err := p.UpgradeID(v2)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "tiny.ninfer")
	write(t, path, d, tinyObjects(), PlanOptions{}, WriterOptions{ID: &id})
	v := verify(t, path, Options{})
	if !v.Passed || v.IDKind != "upgrade" || len(v.Unchecked) != 1 {
		t.Errorf("%+v", v)
	}
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	save(t, path, []byte(strings.Replace(string(b), "text/x", "text/y", 1)))
	wantFailure(t, verify(t, path, Options{}), "the directory of this upgraded artifact gives")
}

// TestVerifyStructure: what readers tolerate and writers must not do, missing
// parts, bad objects and bad words.
func TestVerifyStructure(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "s.ninfer")
	save(t, path, entryBytes(sampleText, 1152))
	v := verify(t, path, Options{})
	wantFailure(t, v, "header: json_bytes", "part header: artifact "+filepath.Join(dir, "other")+": missing or truncated part",
		`tensor "w.new": unsupported format`)
	if !strings.Contains(strings.Join(v.Unchecked, "\n"), "2 objects and gaps that lie in files that could not be opened") {
		t.Errorf("unchecked: %q", v.Unchecked)
	}
	wantFailure(t, verify(t, save2(t, "R9", strings.Replace(sampleText, `"offset":512`, `"offset":256`, 1)), Options{}), "before the previous object")

	padded := sampleText + strings.Repeat(" ", int(up(32+int64(len(sampleText)), 4096))-32-len(sampleText))
	save(t, filepath.Join(dir, "other"), partBytes(1, 136, tinyID))
	for _, c := range []struct {
		name, text string
		edit       func(b []byte)
		says       string
	}{
		{"tab after the text", padded[:len(padded)-1] + "\t", nil, "only spaces"},
		{"space before the text", " " + padded[:len(padded)-1], nil, "begin at once"},
		{"two pages too many", padded + strings.Repeat(" ", 8192), nil, "is written with"},
		{"zero padding", sampleText, func(b []byte) { b[32+len(sampleText)+5] = 1 }, "entry padding: byte"},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := entryBytes(c.text, 1152)
			if c.edit != nil {
				c.edit(b)
			}
			save(t, path, b)
			wantFailure(t, verify(t, path, Options{}), c.says)
		})
	}

	d := mixedDirectory()
	for _, c := range []struct {
		object string
		at     int
		value  byte
		says   string
	}{
		{"table", 777, 0x7f, "offset 777 is NaN"},
		{"table", 15999, 0xff, "offset 15999 is NaN"},
		{"row16", 3, 0xff, "NaN"},
		{"bank", 2*128*64/2 + 5, 0x7f, "scale 0x7f"},
		{"matrix", 300, 0, ""},
	} {
		objects := mixedObjects(t, d, 9)
		if c.object == "matrix" {
			for i := range 4 { // the divisor is the last word
				objects["matrix"][len(objects["matrix"])-1-i] = 0
			}
		}
		objects[c.object][c.at] = c.value
		for _, limit := range []int64{0, 12288} {
			path := filepath.Join(t.TempDir(), "m.ninfer")
			write(t, path, d, objects, PlanOptions{Limit: limit}, WriterOptions{})
			v := verify(t, path, Options{})
			wantFailure(t, v, fmt.Sprintf("tensor %q: ", c.object), c.says)
			if len(v.Failures) != 1 {
				t.Errorf("failures %q, want one", v.Failures)
			}
		}
	}
}

func save2(t testing.TB, name, text string) string {
	path := filepath.Join(t.TempDir(), name+".ninfer")
	save(t, path, entryBytes(text, 1152))
	return path
}

// TestResultJSON fixes the members of the JSON form.
func TestResultJSON(t *testing.T) {
	path := filepath.Join(t.TempDir(), "tiny.ninfer")
	write(t, path, tinyDirectory(), tinyObjects(), PlanOptions{}, WriterOptions{})
	var calls int
	var last, total int64
	v := verify(t, path, Options{FileDigests: true, Progress: func(d, n int64) { calls++; last, total = max(last, d), n }})
	if calls == 0 || last != total || total != 24256+28352 {
		t.Errorf("%d progress calls up to %d of %d", calls, last, total)
	}
	v.Artifact, v.Seconds = "tiny.ninfer", 0.5
	v.FileSHA256[0].SHA256 = ""
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	want := `{"artifact":"tiny.ninfer","objects":2,"bindings":1,"uses":1,"files":1,"payload_bytes":24256,"file_bytes":28352,` +
		`"artifact_id":"849da42eb4088356bd690f567ab88369","artifact_id_kind":"content","file_sha256":[{"file":"tiny.ninfer","sha256":""}],` +
		`"objects_equal_to_report":0,"seconds":0.5,"unchecked":[],"failures":[],"passed":true}`
	if string(b) != want {
		t.Errorf("got  %s\nwant %s", b, want)
	}
}
