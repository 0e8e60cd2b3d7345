package artifact

import (
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// The directory that the rejection tests damage. It is written by hand, so
// that these tests do not depend on the writer: a resource at an odd offset, a
// q4 tensor, a tensor of an unknown format, one in the second file.
const sampleText = `{"components":{"text":{"config":{"x":1.5},"resources":{"role":"r.odd"},"proposal":{"domain":"indexed","rows":7}},"mtp":{"config":{},"target":"text"}},` +
	`"objects":[{"id":"r.zero","kind":"resource","encoding":"raw_bytes_v1","offset":0,"bytes":3},` +
	`{"id":"r.odd","kind":"resource","encoding":"raw_bytes_v1","offset":3,"bytes":4},` +
	`{"id":"w.f","kind":"tensor","shape":[2,3],"format":"fp32","layout":"contiguous_le_v1","offset":256,"bytes":24},` +
	`{"id":"w.q","kind":"tensor","shape":[2,130],"format":"q4_g64_fp16","layout":"row_split_k128_v1","offset":512,"bytes":272},` +
	`{"id":"w.new","kind":"tensor","shape":[4],"format":"fp2","layout":"contiguous_le_v1","offset":1024,"bytes":1},` +
	`{"id":"w.second","kind":"tensor","shape":[4],"format":"bf16","layout":"contiguous_le_v1","offset":1280,"bytes":8}],` +
	`"bindings":{"p":{"object":"w.f"},"q":{"parts":[{"object":"w.f","range":[0,3]},{"object":"w.q","range":[259,260]}]}},` +
	`"uses":[{"parameter":"p","input":"i","activation_policy":"AllowA4","auxiliaries":{"d":{"object":"w.f"}}},{"parameter":"p","input":"j"}],` +
	`"metadata":{"name":"sample"},"provenance":{},` +
	`"files":[{"path":null,"payload_bytes":1152},{"path":"other","payload_bytes":136}]}`

// entryBytes frames a directory text.
func entryBytes(text string, payload int) []byte {
	b := append([]byte(entryMagic), binary.LittleEndian.AppendUint64(nil, uint64(len(text)))...)
	b = append(append(b, tinyID[:]...), text...)
	b = append(b, make([]byte, int(up(int64(len(b)), 4096))-len(b))...)
	return append(b, make([]byte, payload)...)
}

func partBytes(index, payload int, id [16]byte) []byte {
	b := append([]byte(partMagic), binary.LittleEndian.AppendUint64(nil, uint64(index))...)
	b = append(b, id[:]...)
	return append(b, make([]byte, 4096-32+payload)...)
}

func wantRule(t *testing.T, err error, rule int, says string) {
	t.Helper()
	var fe *FormatError
	if !errors.As(err, &fe) {
		t.Fatalf("got error %v, want R%d", err, rule)
	}
	if fe.Rule != rule || !strings.Contains(err.Error(), says) {
		t.Errorf("got R%d %q, want R%d saying %q", fe.Rule, err, rule, says)
	}
	if strings.ContainsAny(err.Error(), "\n\r") {
		t.Errorf("message has more than one line: %q", err)
	}
}

// TestSampleOpens makes sure that what the tables below damage is sound: an
// unknown format in an unused object and a resource at an odd offset open.
func TestSampleOpens(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "s.ninfer")
	save(t, path, entryBytes(sampleText, 1152))
	a, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	for _, id := range []string{"r.zero", "r.odd", "w.f", "w.q", "w.second"} {
		if err := a.Check(id); err != nil {
			t.Error(err)
		}
	}
	if b, err := a.Resource("r.odd"); err != nil || len(b) != 4 {
		t.Errorf("resource at an odd offset: %q, %v", b, err)
	}
	// White space is legal around the root value and counted.
	save(t, path, entryBytes(" \n"+sampleText+" \t\r\n ", 1152))
	b, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	b.Close()
	if st := a.Parts(); len(st) != 2 || st[0].Err != nil || !st[1].Missing {
		t.Errorf("parts %+v, want the second missing", st)
	}
	d := a.Directory()
	if c, ok := d.Component("mtp"); !ok || c.Target != "text" {
		t.Errorf("component mtp: %+v", c)
	}
	if q, _ := d.Bindings.Lookup("q"); len(q.Parts) != 2 || q.Parts[1] != (Part{"w.q", 259, 260}) {
		t.Errorf("binding q: %+v", q)
	}
}

func save(t testing.TB, path string, b []byte) {
	t.Helper()
	if err := os.WriteFile(path, b, 0o666); err != nil {
		t.Fatal(err)
	}
}

// TestRejectDirectory has at least one case for each of R5 to R13: one
// replacement in the sample directory and the row that it breaks.
func TestRejectDirectory(t *testing.T) {
	for _, c := range []struct {
		name, old, new string
		rule           int
		says           string
	}{
		{"R5/not JSON", `{"components"`, `{components`, 5, ""},
		{"R5/byte order mark", `{"components"`, "\xef\xbb\xbf" + `{"components"`, 5, "byte order mark"},
		{"R5/not UTF-8", `"w.f","kind"`, "\"w.\xff\",\"kind\"", 5, ""},
		{"R5/duplicate member", `"metadata":{`, `"uses":[],"metadata":{`, 5, "duplicate"},
		{"R5/duplicate in config", `{"x":1.5}`, `{"x":1.5,"x":2}`, 5, "duplicate"},
		{"R5/duplicate by escape", `{"x":1.5}`, `{"x":1.5,"\u0078":2}`, 5, "duplicate"},
		{"R5/NaN", `{"x":1.5}`, `{"x":NaN}`, 5, ""},
		{"R5/Infinity", `{"x":1.5}`, `{"x":-Infinity}`, 5, ""},
		{"R5/lone surrogate", `"name":"sample"`, `"name":"\ud800"`, 5, "surrogate"},
		{"R5/data after root", `"payload_bytes":136}]}`, `"payload_bytes":136}]}{}`, 5, "after the root"},
		{"R5/only white space", sampleText, "   ", 5, "empty"},
		{"R5/cut", `"payload_bytes":136}]}`, `"payload_bytes":136}]`, 5, ""},

		{"R6/root is an array", sampleText, `[]`, 6, "want an object"},
		{"R6/missing files", `,"files":[{"path":null,"payload_bytes":1152},{"path":"other","payload_bytes":136}]`, ``, 6, `"files"`},
		{"R6/missing uses", `"uses":[{"parameter":"p","input":"i","activation_policy":"AllowA4","auxiliaries":{"d":{"object":"w.f"}}},{"parameter":"p","input":"j"}],`, ``, 6, `"uses"`},
		{"R6/unknown root member", `"metadata":{`, `"extra":0,"metadata":{`, 6, `"extra"`},
		{"R6/unknown object member", `"bytes":24}`, `"bytes":24,"sha":""}`, 6, `"sha"`},
		{"R6/resource with shape", `"bytes":3}`, `"bytes":3,"shape":[3]}`, 6, `"shape"`},
		{"R6/tensor with encoding", `"bytes":24}`, `"bytes":24,"encoding":"raw_bytes_v1"}`, 6, `"encoding"`},
		{"R6/missing layout", `"layout":"contiguous_le_v1","offset":256`, `"offset":256`, 6, `"layout"`},
		{"R6/missing kind", `{"id":"w.f","kind":"tensor",`, `{"id":"w.f",`, 6, `"kind"`},
		{"R6/missing config", `"mtp":{"config":{},`, `"mtp":{`, 6, `"config"`},
		{"R6/fraction", `"bytes":24}`, `"bytes":24.0}`, 6, "not an integer"},
		{"R6/exponent", `"bytes":24}`, `"bytes":24e0}`, 6, "not an integer"},
		{"R6/boolean", `"bytes":24}`, `"bytes":true}`, 6, "a boolean"},
		{"R6/string", `"bytes":24}`, `"bytes":"24"}`, 6, "a string"},
		{"R6/null", `"bytes":24}`, `"bytes":null}`, 6, "null"},
		{"R6/zero bytes", `"bytes":24}`, `"bytes":0}`, 6, "less than"},
		{"R6/negative offset", `"offset":3,`, `"offset":-3,`, 6, "less than"},
		{"R6/2^64", `"bytes":24}`, `"bytes":18446744073709551616}`, 6, "out of range"},
		{"R6/fractional dimension", `[2,3]`, `[2,3.0]`, 6, "not an integer"},
		{"R6/objects is an object", `"objects":[`, `"objects":{},"x":[`, 6, "want an array"},
		{"R6/unknown component member", `"mtp":{"config":{},`, `"mtp":{"config":{},"a":1,`, 6, `"a"`},
		{"R6/config is null", `"mtp":{"config":{},`, `"mtp":{"config":null,`, 6, "null"},
		{"R6/target is empty", `"target":"text"`, `"target":""`, 6, "not an id"},
		{"R6/binding name", `"p":{"object":"w.f"}`, `"":{"object":"w.f"}`, 6, "not an id"},
		{"R6/name with NUL", `"q":{"parts"`, `"q\u0000":{"parts"`, 6, "not an id"},
		{"R6/use without input", `{"parameter":"p","input":"j"}`, `{"parameter":"p"}`, 6, `"input"`},
		{"R6/unknown use member", `"input":"j"`, `"input":"j","z":1`, 6, `"z"`},
		{"R6/policy is null", `"input":"j"`, `"input":"j","activation_policy":null`, 6, "null"},
		{"R6/unknown file member", `"payload_bytes":136}`, `"payload_bytes":136,"sha":1}`, 6, `"sha"`},
		{"R6/proposal without domain", `{"domain":"indexed","rows":7}`, `{"rows":7}`, 6, `"domain"`},

		{"R7/no files", `[{"path":null,"payload_bytes":1152},{"path":"other","payload_bytes":136}]`, `[]`, 7, "empty"},
		{"R7/first has a name", `"path":null,"payload_bytes":1152`, `"path":"x","payload_bytes":1152`, 7, "null"},
		{"R7/second has none", `"path":"other"`, `"path":null`, 7, "name"},
		{"R7/dot", `"path":"other"`, `"path":"."`, 7, "plain file name"},
		{"R7/dot dot", `"path":"other"`, `"path":".."`, 7, "plain file name"},
		{"R7/slash", `"path":"other"`, `"path":"a/b"`, 7, "plain file name"},
		{"R7/backslash", `"path":"other"`, `"path":"a\\b"`, 7, "plain file name"},
		{"R7/empty", `"path":"other"`, `"path":""`, 7, "not an id"},
		{"R7/entry's name", `"path":"other"`, `"path":"s.ninfer"`, 7, "renamed"},
		{"R7/twice", `{"path":"other","payload_bytes":136}`, `{"path":"other","payload_bytes":136},{"path":"other","payload_bytes":1}`, 7, "twice"},
		{"R7/zero size", `"payload_bytes":136`, `"payload_bytes":0`, 7, "less than"},
		{"R7/overflow", `"payload_bytes":136`, `"payload_bytes":9223372036854775807`, 7, "add up"},

		{"R8/no objects", "", "", 8, "empty"}, // text made below
		{"R8/duplicate id", `"id":"r.odd"`, `"id":"w.f"`, 8, "twice"},
		{"R8/empty id", `"id":"r.zero"`, `"id":""`, 8, "not an id"},
		{"R8/unknown kind", `"kind":"resource","encoding":"raw_bytes_v1","offset":0`, `"kind":"blob","encoding":"raw_bytes_v1","offset":0`, 8, "blob"},
		{"R8/empty encoding", `"encoding":"raw_bytes_v1","offset":0`, `"encoding":"","offset":0`, 8, "not an id"},
		{"R8/empty format", `"format":"fp2"`, `"format":""`, 8, "not an id"},
		{"R8/empty layout", `"layout":"row_split_k128_v1"`, `"layout":""`, 8, "not an id"},
		{"R8/rank 17", `[2,3]`, `[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,2,3]`, 8, "17 dimensions"},
		{"R8/zero dimension", `[2,3]`, `[2,0]`, 8, "not positive"},
		{"R8/negative dimension", `[2,3]`, `[2,-3]`, 8, "not positive"},
		{"R8/product overflow", `[2,3]`, `[4294967296,4294967296]`, 8, "64 bits"},

		{"R9/overlap", `"offset":512`, `"offset":256`, 9, "before the previous"},
		{"R9/overlap by one byte", `"offset":3,`, `"offset":2,`, 9, "before the previous"},
		{"R9/swapped", `"offset":0,"bytes":3`, `"offset":300,"bytes":3`, 9, "before the previous"},
		{"R9/after the payload", `"bytes":8}`, `"bytes":9}`, 9, "after the payload"},
		{"R9/overflow", `"bytes":8}`, `"bytes":9223372036854775807}`, 9, "after the payload"},

		{"R10/no text", `"components":{"text"`, `"components":{"texts"`, 10, `lacks "text"`},
		{"R10/target", `"target":"text"`, `"target":"vision"`, 10, "vision"},
		{"R10/missing resource", `"role":"r.odd"`, `"role":"r.none"`, 10, "does not exist"},
		{"R10/resource is a tensor", `"role":"r.odd"`, `"role":"w.f"`, 10, "tensor"},
		{"R10/proposal outside text", `"mtp":{"config":{},`, `"mtp":{"config":{},"proposal":{"domain":"full"},`, 10, "mtp"},
		{"R10/domain", `"domain":"indexed","rows":7`, `"domain":"half"`, 10, "half"},
		{"R10/full with rows", `"domain":"indexed"`, `"domain":"full"`, 10, "no rows"},
		{"R10/indexed without rows", `"domain":"indexed","rows":7`, `"domain":"indexed"`, 10, "needs rows"},

		{"R11/both forms", `"p":{"object":"w.f"}`, `"p":{"object":"w.f","parts":[{"object":"w.f","range":[0,1]}]}`, 11, "either"},
		{"R11/neither form", `"p":{"object":"w.f"}`, `"p":{}`, 11, "either"},
		{"R11/extra member", `"p":{"object":"w.f"}`, `"p":{"object":"w.f","x":1}`, 11, `"x"`},
		{"R11/empty parts", `"p":{"object":"w.f"}`, `"p":{"parts":[]}`, 11, "empty"},
		{"R11/one number", `[0,3]`, `[3]`, 11, "two integers"},
		{"R11/three numbers", `[0,3]`, `[0,1,3]`, 11, "two integers"},
		{"R11/fraction", `[0,3]`, `[0,3.0]`, 11, "not an integer"},
		{"R11/empty range", `[0,3]`, `[0,0]`, 11, "[0,0)"},
		{"R11/reversed", `[0,3]`, `[3,1]`, 11, "[3,1)"},
		{"R11/beyond the parent", `[259,260]`, `[259,261]`, 11, "260 elements"},
		{"R11/missing object", `"p":{"object":"w.f"}`, `"p":{"object":"w.g"}`, 11, "does not exist"},
		{"R11/resource", `"p":{"object":"w.f"}`, `"p":{"object":"r.odd"}`, 11, "resource"},
		{"R11/part of a resource", `{"object":"w.f","range":[0,3]}`, `{"object":"r.odd","range":[0,3]}`, 11, "resource"},
		{"R11/part without range", `{"object":"w.f","range":[0,3]}`, `{"object":"w.f"}`, 11, `"range"`},

		{
			"R11/lengths", `"shape":[4],"format":"fp2","layout":"contiguous_le_v1","offset":1024,"bytes":1},{"id":"w.second","kind":"tensor","shape":[4],"format":"bf16","layout":"contiguous_le_v1","offset":1280,"bytes":8}],"bindings":{`,
			`"shape":[9223372036854775807],"format":"fp2","layout":"contiguous_le_v1","offset":1024,"bytes":1},{"id":"w.second","kind":"tensor","shape":[4],"format":"bf16","layout":"contiguous_le_v1","offset":1280,"bytes":8}],"bindings":{` +
				`"long":{"parts":[{"object":"w.new","range":[0,9223372036854775807]},{"object":"w.new","range":[0,9223372036854775807]},{"object":"w.f","range":[0,2]}]},`,
			11, "64 bits",
		},

		{"R12/unknown parameter", `{"parameter":"p","input":"j"}`, `{"parameter":"z","input":"j"}`, 12, "not bound"},
		{"R12/duplicate pair", `{"parameter":"p","input":"j"}`, `{"parameter":"p","input":"i"}`, 12, "two uses"},
		{"R12/policy", `"AllowA4"`, `"AllowA2"`, 12, "AllowA2"},
		{"R12/empty policy", `"AllowA4"`, `""`, 12, "policy"},
		{"R12/auxiliary", `"d":{"object":"w.f"}`, `"d":{"object":"r.odd"}`, 12, "resource"},
		{"R12/auxiliary form", `"d":{"object":"w.f"}`, `"d":{}`, 12, "either"},

		{"R13/metadata", `"metadata":{"name":"sample"}`, `"metadata":[]`, 13, "want an object"},
		{"R13/provenance", `"provenance":{}`, `"provenance":null`, 13, "null"},
		{"R13/name is a number", `"name":"sample"`, `"name":1`, 13, "not a string"},
		{"R13/name is empty", `"name":"sample"`, `"name":""`, 13, "name"},
	} {
		t.Run(c.name, func(t *testing.T) {
			text := strings.Replace(sampleText, c.old, c.new, 1)
			if c.old == "" {
				text = `{"components":{"text":{"config":{}}},"objects":[],"bindings":{},"uses":[],"files":[{"path":null,"payload_bytes":1152}]}`
			} else if strings.Count(sampleText, c.old) != 1 {
				t.Fatalf("%q is not once in the sample", c.old)
			}
			path := filepath.Join(t.TempDir(), "s.ninfer")
			save(t, path, entryBytes(text, 1152))
			a, err := Open(path)
			if err == nil {
				a.Close()
			}
			wantRule(t, err, c.rule, c.says)
		})
	}
}

// TestRejectFraming has the rows R1 to R4 and R14, on the bytes of the entry.
func TestRejectFraming(t *testing.T) {
	good := entryBytes(sampleText, 1152)
	edit := func(off int, b ...byte) []byte {
		out := append([]byte(nil), good...)
		copy(out[off:], b)
		return out
	}
	for _, c := range []struct {
		name  string
		bytes []byte
		rule  int
		says  string
	}{
		{"R1/empty", nil, 1, "0 bytes"},
		{"R1/31 bytes", good[:31], 1, "31 bytes"},
		{"R2", edit(7, 2), 2, "ninfer upgrade "},
		{"R3/part", partBytes(1, 4, tinyID), 3, "name the entry file"},
		{"R3/other", edit(0, 'M'), 3, "begins with 4d"},
		{"R3/version 4", edit(7, 4), 3, ""},
		{"R4/zero", edit(8, 0, 0), 4, "json_bytes is 0"},
		{"R4/beyond the file", edit(8, 0, 0, 1), 4, "65536"},
		{"R4/huge", edit(15, 0x80), 4, ""},
		{"R14/short", good[:len(good)-1], 14, ""},
		{"R14/long", append(edit(0), 0), 14, ""},
		{"R14/directory only", good[:32+len(sampleText)], 14, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "s.ninfer")
			save(t, path, c.bytes)
			a, err := Open(path)
			if err == nil {
				a.Close()
			}
			wantRule(t, err, c.rule, c.says)
		})
	}
	t.Run("R2/command", func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "my model.ninfer")
		save(t, path, edit(7, 2))
		_, err := Open(path)
		out := strings.TrimSuffix(path, ".ninfer") + ".v3.ninfer"
		wantRule(t, err, 2, "ninfer upgrade '"+path+"' '"+out+"'")
	})
	t.Run("R4/more than is read", func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "s.ninfer")
		save(t, path, edit(8, 1, 0, 0, 0x40))
		if err := os.Truncate(path, 1<<31); err != nil { // a hole
			t.Skip(err)
		}
		_, err := Open(path)
		wantRule(t, err, 4, "1073741825")
	})
	t.Run("missing", func(t *testing.T) {
		if _, err := Open(filepath.Join(t.TempDir(), "none")); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("got %v", err)
		}
	})
}

// TestRejectObject has the lazy rows R15 to R20: the entry opens, the object
// is refused when it is asked for, and the others are not.
func TestRejectObject(t *testing.T) {
	for _, c := range []struct {
		name, old, new, object string
		rule                   int
		says                   string
	}{
		{"R15", "", "", "w.none", 15, "w.none"},
		{"R16/format", "", "", "w.new", 16, "fp2"},
		{"R16/layout", `"layout":"contiguous_le_v1","offset":256`, `"layout":"tiles_v1","offset":256`, "w.f", 16, "tiles_v1"},
		{"R16/pair", `"format":"q4_g64_fp16"`, `"format":"bf16"`, "w.q", 16, "w.q"},
		{"R17/rank", `[2,130]`, `[260]`, "w.q", 17, "w.q"},
		{"R17/divisibility", `"shape":[2,130],"format":"q4_g64_fp16","layout":"row_split_k128_v1"`, `"shape":[2,130],"format":"u4z8_g16_fp16","layout":"packed_u4_g16_v1"`, "w.q", 17, "16"},
		{"R18/size", `"bytes":272`, `"bytes":271`, "w.q", 18, "needs 272"},
		{"R18/not representable", `[2,3]`, `[4611686018427387904,3]`, "w.f", 18, "w.f"},
		{"R19", `"offset":512`, `"offset":640`, "w.q", 19, "256"},
		{"R19/128", `"offset":256`, `"offset":128`, "w.f", 19, "128"},
		{"R20", `"encoding":"raw_bytes_v1","offset":3`, `"encoding":"zstd","offset":3`, "r.odd", 20, "zstd"},
	} {
		t.Run(c.name, func(t *testing.T) {
			text := strings.Replace(sampleText, c.old, c.new, 1)
			if c.old != "" && strings.Count(sampleText, c.old) != 1 {
				t.Fatalf("%q is not once in the sample", c.old)
			}
			path := filepath.Join(t.TempDir(), "s.ninfer")
			save(t, path, entryBytes(text, 1152))
			a, err := Open(path)
			if err != nil {
				t.Fatal(err)
			}
			defer a.Close()
			wantRule(t, a.Check(c.object), c.rule, c.says)
			if o, _ := a.Object(c.object); o.Resource {
				_, err = a.Resource(c.object)
			} else {
				_, err = a.Tensor(c.object)
			}
			wantRule(t, err, c.rule, c.says)
			if _, err := a.Resource("r.zero"); err != nil {
				t.Errorf("another object: %v", err)
			}
		})
	}
}

// TestRejectPart has the rows R21 to R23: the entry and objects outside the
// part are usable, an object in the part is not.
func TestRejectPart(t *testing.T) {
	good := partBytes(1, 136, tinyID)
	foreign := tinyID
	foreign[15]++
	for _, c := range []struct {
		name  string
		bytes []byte // nil: no such file
		rule  int
		says  string
	}{
		{"R21/missing", nil, 21, "missing"},
		{"R21/empty", []byte{}, 21, "0 bytes"},
		{"R21/short header", good[:31], 21, "31 bytes"},
		{"R22/entry as part", entryBytes(sampleText, 1152), 22, "magic"},
		{"R22/index", partBytes(2, 136, tinyID), 22, "part 2"},
		{"R22/id", partBytes(1, 136, foreign), 22, FormatID(foreign)},
		{"R23/short", good[:len(good)-1], 23, ""},
		{"R23/long", append(append([]byte(nil), good...), 0), 23, ""},
		{"good", good, 0, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			path := filepath.Join(dir, "s.ninfer")
			save(t, path, entryBytes(sampleText, 1152))
			if c.bytes != nil {
				save(t, filepath.Join(dir, "other"), c.bytes)
			}
			a, err := Open(path)
			if err != nil {
				t.Fatal(err)
			}
			defer a.Close()
			if _, err := a.Tensor("w.f"); err != nil {
				t.Errorf("tensor in the entry: %v", err)
			}
			_, err = a.Tensor("w.second")
			_, readErr := a.ReadAt(make([]byte, 2), 1151)
			if c.rule == 0 {
				if err != nil || readErr != nil {
					t.Errorf("tensor: %v, read: %v", err, readErr)
				}
				return
			}
			wantRule(t, err, c.rule, c.says)
			wantRule(t, readErr, c.rule, c.says)
			if !strings.Contains(err.Error(), filepath.Join(dir, "other")) {
				t.Errorf("error %q does not name the part", err)
			}
			if st := a.Parts()[1]; st.Err == nil || st.Missing != (c.bytes == nil) {
				t.Errorf("status %+v", st)
			}
		})
	}
	t.Run("R21/folder", func(t *testing.T) {
		dir := t.TempDir()
		path := filepath.Join(dir, "s.ninfer")
		save(t, path, entryBytes(sampleText, 1152))
		if err := os.Mkdir(filepath.Join(dir, "other"), 0o777); err != nil {
			t.Fatal(err)
		}
		a, err := Open(path)
		if err != nil {
			t.Fatal(err)
		}
		defer a.Close()
		_, err = a.Tensor("w.second")
		wantRule(t, err, 21, "not a regular file")
	})
}
