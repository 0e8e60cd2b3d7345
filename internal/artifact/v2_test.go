package artifact

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// v2Bytes frames a version 2 file by docs/format.md 1.7.
func v2Bytes(text string, payload []byte) []byte {
	b := append([]byte("NINFER\x00\x02"), binary.LittleEndian.AppendUint64(nil, uint64(len(text)))...)
	b = append(b, text...)
	for len(b)%4096 != 0 {
		b = append(b, 0)
	}
	return append(b, payload...)
}

// v2Text is a valid directory: a resource of five bytes, a tensor of six at
// 256, and trailing bytes up to 300.
const v2Text = `{"identity":{"model_id":"m","weights_id":"w"},"objects":[` +
	`{"name":"r","kind":"resource","encoding":"raw-bytes-v1","offset":0,"bytes":5},` +
	`{"name":"t","kind":"tensor","shape":[3],"format":"BF16","layout":"contiguous-le-v1","offset":256,"bytes":6}]}`

func v2Payload() []byte {
	p := make([]byte, 300)
	copy(p, "hello")
	copy(p[256:], "\x80\x3f\x00\x40\x40\x40") // 1, 2, 3
	copy(p[262:], "trailing")
	return p
}

func openV2Bytes(t testing.TB, b []byte) (*V2, error) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "x.ninfer")
	save(t, path, b)
	a, err := OpenV2(path)
	if err == nil {
		t.Cleanup(func() { a.Close() })
	}
	return a, err
}

func TestV2Read(t *testing.T) {
	a, err := openV2Bytes(t, v2Bytes(v2Text+" \n", v2Payload()))
	if err != nil {
		t.Fatal(err)
	}
	if a.ModelID != "m" || a.WeightsID != "w" || len(a.Objects) != 2 || a.PayloadStart() != 4096 || a.PayloadBytes() != 300 || a.Size() != 4396 {
		t.Errorf("%+v", a)
	}
	if r, err := a.Resource("r"); err != nil || string(r) != "hello" {
		t.Errorf("resource %q, %v", r, err)
	}
	x, err := a.file.Tensor("t")
	if err != nil {
		t.Fatal(err)
	}
	row := make([]float64, 3)
	x.DecodeRow(row, 0)
	if !slices.Equal(row, []float64{1, 2, 3}) {
		t.Errorf("tensor %v", row)
	}
	b := make([]byte, 16)
	if _, err := a.ReadFileAt(b, 0); err != nil || string(b[:8]) != "NINFER\x00\x02" {
		t.Errorf("file begins with %q, %v", b, err)
	}
	if _, ok := a.Published(); ok {
		t.Error("a published file of 4396 bytes")
	}
	if !IsV2(a.Path()) {
		t.Error("not recognised")
	}
}

// TestV2Spelling has the table of docs/format.md 1.7, with sizes by sections
// 3.2 to 3.7.
func TestV2Spelling(t *testing.T) {
	for _, c := range []struct {
		format, layout, shape string
		bytes                 int
		format3, layout3      string
	}{
		{"BF16", "contiguous-le-v1", "[2,3]", 12, "bf16", "contiguous_le_v1"},
		{"FP32", "contiguous-le-v1", "[3]", 12, "fp32", "contiguous_le_v1"},
		{"I32", "contiguous-le-v1", "[3]", 12, "int32", "contiguous_le_v1"},
		{"I64", "contiguous-le-v1", "[3]", 24, "int64", "contiguous_le_v1"},
		{"FP8_E4M3FN", "contiguous-le-v1", "[3]", 3, "fp8_e4m3fn", "contiguous_le_v1"},
		{"Q4G64_F16S", "row-split-k128-v1", "[2,130]", 272, "q4_g64_fp16", "row_split_k128_v1"},
		{"Q5G64_F16S", "row-split-k128-v1", "[2,130]", 528, "q5_g64_fp16", "row_split_k128_v1"},
		{"Q6G64_F16S", "row-split-k128-v1", "[2,130]", 528, "q6_g64_fp16", "row_split_k128_v1"},
		{"W8G32_F16S", "row-split-k128-v1", "[2,130]", 544, "q8_g32_fp16", "row_split_k128_v1"},
		{"NVFP4", "blockscale-k16-m128x4-v1", "[128,64]", 4096 + 512 + 4, "nvfp4", "block_scale_k16_m128x4_v1"},
		{"NVFP4", "expert-blockscale-k16-m128x4-v1", "[2,128,64]", 9224, "nvfp4", "expert_block_scale_k16_m128x4_v1"},
		{"FP8_E4M3FN_ROW_BF16S", "row-scale-v1", "[2,3]", 260, "fp8_e4m3fn_row_bf16", "row_scale_v1"},
		{"FP8_E4M3FN_ROW_F32S", "row-scale-f32-v1", "[2,3]", 264, "fp8_e4m3fn_row_fp32", "row_scale_fp32_v1"},
		{"U4Z8G16_F16S", "packed-u4-g16-v1", "[2,32]", 264, "u4z8_g16_fp16", "packed_u4_g16_v1"},
	} {
		t.Run(c.format+" "+c.layout, func(t *testing.T) {
			text := fmt.Sprintf(`{"identity":{"model_id":"m","weights_id":"w"},"objects":[{"name":"t","kind":"tensor","shape":%s,"format":%q,"layout":%q,"offset":0,"bytes":%d}]}`,
				c.shape, c.format, c.layout, c.bytes)
			a, err := openV2Bytes(t, v2Bytes(text, make([]byte, c.bytes)))
			if err != nil {
				t.Fatal(err)
			}
			if o := a.Objects[0]; o.Format != c.format3 || o.Layout != c.layout3 {
				t.Errorf("%s %s", o.Format, o.Layout)
			}
		})
	}
}

func TestV2Reject(t *testing.T) {
	change := func(old, new string) []byte {
		if strings.Count(v2Text, old) == 0 {
			t.Fatalf("%q is not in the text", old)
		}
		return v2Bytes(strings.Replace(v2Text, old, new, 1), v2Payload())
	}
	header := func(n uint64) []byte {
		b := v2Bytes(v2Text, v2Payload())
		binary.LittleEndian.PutUint64(b[8:], n)
		return b
	}
	magic := func(s string) []byte {
		b := v2Bytes(v2Text, v2Payload())
		copy(b, s)
		return b
	}
	for _, c := range []struct {
		name string
		file []byte
		says string
	}{
		{"empty", nil, "header"},
		{"15 bytes", v2Bytes(v2Text, nil)[:15], "header"},
		{"version 3", magic(entryMagic), "version 3"},
		{"other magic", magic("GGUF\x03\x00\x00\x00"), "begins with 47 47 55 46"},
		{"consumed", magic(strings.Repeat("\x00", 16)), "released its input"},
		{"no directory", header(0), "json_bytes is 0"},
		{"directory beyond the file", header(4396 - 16 + 1), "json_bytes"},
		{"huge directory", header(1 << 63), "json_bytes"},
		{"no payload", v2Bytes(v2Text, nil), "payload would start at 4096"},
		{"not utf-8", change(`"m"`, "\"\xff\""), "UTF-8"},
		{"not json", change(`{"identity"`, `("identity"`), ""},
		{"byte order mark", change(`{"identity"`, "\xef\xbb\xbf{\"identity\""), "byte order mark"},
		{"data after the root", change(`"bytes":6}]}`, `"bytes":6}]}x`), "after the root"},
		{"duplicate member", change(`"model_id":"m"`, `"model_id":"m","model_id":"m"`), "duplicate"},
		{"root is an array", v2Bytes("[]", v2Payload()), "want an object"},
		{"missing identity", change(`"identity":{"model_id":"m","weights_id":"w"},`, ``), `lacks member "identity"`},
		{"missing objects", v2Bytes(`{"identity":{"model_id":"m","weights_id":"w"}}`, v2Payload()), `lacks member "objects"`},
		{"extra root member", change(`"objects"`, `"metadata":{},"objects"`), `unknown member "metadata"`},
		{"missing model_id", change(`"model_id":"m",`, ``), `lacks member "model_id"`},
		{"missing weights_id", change(`,"weights_id":"w"`, ``), `lacks member "weights_id"`},
		{"extra identity member", change(`"weights_id":"w"`, `"weights_id":"w","revision":"1"`), `unknown member "revision"`},
		{"null identity", change(`{"model_id":"m","weights_id":"w"}`, `null`), "want an object, not null"},
		{"number as identity", change(`"m"`, `7`), "want a string, not a number"},
		{"null objects", v2Bytes(`{"identity":{"model_id":"m","weights_id":"w"},"objects":null}`, v2Payload()), "want an array, not null"},
		{"no objects", v2Bytes(`{"identity":{"model_id":"m","weights_id":"w"},"objects":[]}`, v2Payload()), "objects is empty"},
		{"missing name", change(`"name":"t",`, ``), `lacks member "name"`},
		{"missing kind", change(`"kind":"tensor",`, ``), `lacks member "kind"`},
		{"missing shape", change(`"shape":[3],`, ``), `lacks member "shape"`},
		{"missing format", change(`"format":"BF16",`, ``), `lacks member "format"`},
		{"missing layout", change(`"layout":"contiguous-le-v1",`, ``), `lacks member "layout"`},
		{"missing encoding", change(`"encoding":"raw-bytes-v1",`, ``), `lacks member "encoding"`},
		{"missing offset", change(`"offset":256,`, ``), `lacks member "offset"`},
		{"missing bytes", change(`,"bytes":6`, ``), `lacks member "bytes"`},
		{"extra member of a tensor", change(`"bytes":6`, `"bytes":6,"sha256":""`), `unknown member "sha256"`},
		{"encoding of a tensor", change(`"bytes":6`, `"bytes":6,"encoding":"raw-bytes-v1"`), `a tensor has no member "encoding"`},
		{"shape of a resource", change(`"bytes":5`, `"bytes":5,"shape":[5]`), `a resource has no member "shape"`},
		{"null member", change(`[3]`, `null`), "want an array, not null"},
		{"version 3 member", change(`"name":"t"`, `"id":"t"`), `unknown member "id"`},
		{"unknown kind", change(`"kind":"tensor"`, `"kind":"table"`), "unknown kind"},
		{"fraction", change(`"bytes":6`, `"bytes":6.0`), "not an integer"},
		{"exponent", change(`"offset":256`, `"offset":2.56e2`), "not an integer"},
		{"boolean", change(`"bytes":6`, `"bytes":true`), "want a number"},
		{"string as a number", change(`"bytes":6`, `"bytes":"6"`), "want a number"},
		{"negative", change(`"offset":256`, `"offset":-256`), "less than 0"},
		{"beyond 64 bits", change(`"bytes":6`, `"bytes":18446744073709551616`), "out of range"},
		{"zero bytes", change(`"bytes":6`, `"bytes":0`), "less than 1"},
		{"zero dimension", change(`[3]`, `[0]`), "less than 1"},
		{"17 dimensions", change(`[3]`, `[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,3]`), "17 dimensions"},
		{"element count overflow", change(`[3]`, `[4611686018427387904,4611686018427387904]`), "representable"},
		{"empty name", change(`"name":"t"`, `"name":""`), "not an id"},
		{"duplicate name", change(`"name":"t"`, `"name":"r"`), "listed twice"},
		{"unknown format", change(`BF16`, `BF17`), `unknown format "BF17"`},
		{"version 3 format", change(`BF16`, `bf16`), `unknown format "bf16"`},
		{"unknown layout", change(`contiguous-le-v1`, `contiguous_le_v1`), "unknown layout"},
		{"unknown encoding", change(`raw-bytes-v1`, `raw_bytes_v1`), "unknown encoding"},
		{"illegal pair", change(`contiguous-le-v1`, `row-scale-v1`), "does not store"},
		{"wrong size", change(`"bytes":6`, `"bytes":8`), "needs 6"},
		{"misaligned", change(`"offset":256`, `"offset":260`), "multiple of 256"},
		{"overlap", change(`"offset":0,"bytes":5`, `"offset":0,"bytes":257`), "before the previous object ends"},
		{"wrong order", change(`"offset":0,"bytes":5`, `"offset":290,"bytes":5`), "before the previous object ends"},
		{"beyond the file", change(`"offset":256`, `"offset":512`), "ends after the payload"},
		{"offset near 2^63", change(`"offset":256`, `"offset":9223372036854775552`), "ends after the payload"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := openV2Bytes(t, c.file)
			var fe *FormatError
			if !errors.As(err, &fe) || fe.Rule != 0 {
				t.Fatalf("error %v, want a *FormatError without a rule", err)
			}
			if !strings.Contains(err.Error(), c.says) || strings.ContainsAny(err.Error(), "\r\n") {
				t.Errorf("%q does not say %q on one line", err, c.says)
			}
		})
	}
	if _, err := OpenV2(filepath.Join(t.TempDir(), "absent")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("absent file: %v", err)
	}
	if _, err := OpenV2(t.TempDir()); err == nil {
		t.Error("a folder was opened")
	}
}

// TestV2NotRun: a reader of version 3 says what to type.
func TestV2NotRun(t *testing.T) {
	path := filepath.Join(t.TempDir(), "old.ninfer")
	save(t, path, v2Bytes(v2Text, v2Payload()))
	_, err := Open(path)
	want := "ninfer upgrade " + path + " " + strings.TrimSuffix(path, ".ninfer") + ".v3.ninfer"
	if err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("%v, want %s", err, want)
	}
}

func TestV2Verify(t *testing.T) {
	good := v2Bytes(v2Text, v2Payload())
	bank := `{"identity":{"model_id":"m","weights_id":"w"},"objects":[{"name":"t","kind":"tensor","shape":[128,64],"format":"NVFP4","layout":"blockscale-k16-m128x4-v1","offset":0,"bytes":4612}]}`
	words := make([]byte, 4612)
	words[4096+17] = 0x7f // a scale that is NaN
	words[4610], words[4611] = 0x80, 0x3f
	flip := func(at int) []byte {
		b := bytes.Clone(good)
		b[at] ^= 1
		return b
	}
	for _, c := range []struct {
		name string
		file []byte
		sums string // %s is the good file's digest
		says string // empty: passes
	}{
		{"good", good, "", ""},
		{"listed", good, "%s  x.ninfer\n", ""},
		{"padding", flip(4000), "", "padding: byte 4000"},
		{"gap", flip(4096 + 100), "", "gap before tensor"},
		{"object", flip(4096 + 257), "%s  x.ninfer\n", "its sha256 is"},
		{"object without a list", flip(4096 + 257), "", ""}, // nothing can tell
		{"words", v2Bytes(bank, words), "", "scale 0x7f"},
		{"not listed", good, "%s  y.ninfer\n", "not listed"},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			path := filepath.Join(dir, "x.ninfer")
			save(t, path, c.file)
			o := Options{FileDigests: true}
			if c.sums != "" {
				o.SHA256SUMS = filepath.Join(dir, "list")
				save(t, o.SHA256SUMS, fmt.Appendf(nil, c.sums, sha(good)))
			}
			r, err := VerifyV2(path, o)
			if err != nil {
				t.Fatal(err)
			}
			if r.Passed != (c.says == "") || !strings.Contains(strings.Join(r.Failures, "\n"), c.says) {
				t.Errorf("%+v, want %q", r, c.says)
			}
			if r.FileSHA256[0].SHA256 != sha(c.file) {
				t.Errorf("digest %s, want %s", r.FileSHA256[0].SHA256, sha(c.file))
			}
			if vouched := c.name == "listed"; vouched == (len(r.Unchecked) > 0) {
				t.Errorf("unchecked %q", r.Unchecked)
			}
			if c.name == "good" {
				if d, _ := r.ObjectSHA256.Lookup("r"); d != sha([]byte("hello")) || r.ObjectSHA256.Len() != 2 || len(r.Notes) != 1 {
					t.Errorf("object digest %s, notes %q", d, r.Notes)
				}
			}
		})
	}
	if _, err := VerifyV2("x", Options{Against: "y"}); err == nil {
		t.Error("comparison with another artifact was accepted")
	}
}

// FuzzV2 opens whatever comes; what opens can be read whole.
func FuzzV2(f *testing.F) {
	f.Add(v2Text, []byte("hello"))
	f.Add(strings.Replace(v2Text, "256", "0", 1), v2Payload())
	f.Add(strings.Replace(v2Text, "[3]", "[1,3]", 1), v2Payload())
	f.Add(`{"objects":[{}]}`, v2Payload())
	path := filepath.Join(f.TempDir(), "x.ninfer")
	f.Fuzz(func(t *testing.T, text string, payload []byte) {
		save(t, path, v2Bytes(text, payload))
		a, err := OpenV2(path)
		if err != nil {
			if strings.ContainsAny(err.Error(), "\r\n") {
				t.Errorf("message has more than one line: %q", err)
			}
			return
		}
		defer a.Close()
		for _, o := range a.Objects {
			if o.Resource {
				if b, err := a.Resource(o.ID); err != nil || int64(len(b)) != o.Bytes {
					t.Errorf("resource %q: %v", o.ID, err)
				}
			} else if x, err := a.file.Tensor(o.ID); err != nil || int64(len(x.Data)) != o.Bytes {
				t.Errorf("tensor %q: %v", o.ID, err)
			}
		}
		if _, err := VerifyV2(path, Options{}); err != nil {
			t.Error(err)
		}
	})
}
