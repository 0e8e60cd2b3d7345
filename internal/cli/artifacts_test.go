package cli

import (
	"bytes"
	"encoding/binary"
	"encoding/json/v2"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"ninfer/internal/artifact"
)

// ninfer runs a command line in this process.
func ninfer(t *testing.T, args ...string) (status int, stdout, stderr string) {
	t.Helper()
	var out, errw bytes.Buffer
	status = Main(append([]string{"ninfer"}, args...), strings.NewReader(""), &out, &errw)
	return status, out.String(), errw.String()
}

// want runs a command line and compares status and texts.
func want(t *testing.T, status int, says string, args ...string) string {
	t.Helper()
	got, out, errw := ninfer(t, args...)
	if got != status || !strings.Contains(out+errw, says) {
		t.Errorf("ninfer %s: status %d, want %d and %q:\n%s%s", strings.Join(args, " "), got, status, says, out, errw)
	}
	return out
}

// v2Of writes an artifact's payload as a version 2 file (docs/format.md 1.7).
func v2Of(t *testing.T, path string) []byte {
	t.Helper()
	f, err := artifact.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	spelling := map[string]string{
		"bf16": "BF16", "fp32": "FP32", "int32": "I32", "fp8_e4m3fn": "FP8_E4M3FN", "q4_g64_fp16": "Q4G64_F16S", "q5_g64_fp16": "Q5G64_F16S",
		"q6_g64_fp16": "Q6G64_F16S", "q8_g32_fp16": "W8G32_F16S", "nvfp4": "NVFP4", "contiguous_le_v1": "contiguous-le-v1",
		"row_split_k128_v1": "row-split-k128-v1", "expert_block_scale_k16_m128x4_v1": "expert-blockscale-k16-m128x4-v1",
	}
	var objects []any
	for _, o := range f.Directory().Objects {
		m := map[string]any{"name": o.ID, "offset": o.Offset, "bytes": o.Bytes, "kind": "tensor"}
		if o.Resource {
			m["kind"], m["encoding"] = "resource", "raw-bytes-v1"
		} else {
			m["shape"], m["format"], m["layout"] = o.Shape, spelling[o.Format], spelling[o.Layout]
		}
		objects = append(objects, m)
	}
	text, err := json.Marshal(map[string]any{
		"identity": map[string]string{"model_id": "qwen3.8-flash-next-125b-a6b", "weights_id": "nvfp4"}, "objects": objects,
	})
	if err != nil {
		t.Fatal(err)
	}
	b := append([]byte("NINFER\x00\x02"), binary.LittleEndian.AppendUint64(nil, uint64(len(text)))...)
	b = append(b, text...)
	b = append(b, make([]byte, (4096-len(b)%4096)%4096)...)
	payload := make([]byte, f.PayloadBytes())
	if _, err := f.ReadAt(payload, 0); err != nil {
		t.Fatal(err)
	}
	return append(b, payload...)
}

// TestVersion2: such a file is shown, verified and upgraded, and everything else says how.
func TestVersion2(t *testing.T) {
	dir := t.TempDir()
	const checkpoint = "../../testdata/micro-radixark/checkpoint"
	made := filepath.Join(dir, "qwen3_8_flash_next_125b_a6b_nvfp4.ninfer")
	want(t, 0, "177 objects", "convert", "--quiet", "--model", checkpoint, "--out", made)
	old := filepath.Join(dir, "old.ninfer")
	if err := os.WriteFile(old, v2Of(t, made), 0o666); err != nil {
		t.Fatal(err)
	}

	want(t, 0, "identity    qwen3.8-flash-next-125b-a6b / nvfp4", "inspect", old)
	out := want(t, 0, `"container_version": 2`, "inspect", old, "--json", "--objects")
	var shown struct {
		Objects int   `json:"objects"`
		List    []any `json:"object_list"`
	}
	if err := json.Unmarshal([]byte(out), &shown); err != nil || shown.Objects != 177 || len(shown.List) != 171 {
		t.Errorf("inspect --json: %d objects, %d listed, %v", shown.Objects, len(shown.List), err)
	}
	want(t, 0, `"passed": true`, "verify", old)
	want(t, 0, `"passed": true`, "verify", old, "--write-sums")
	want(t, 0, `"checksum_list"`, "verify", old, "--file-digests")
	want(t, 2, "not for version 2", "verify", old, "--against", made)
	for _, command := range [][]string{{"run", old, "--prompt", "x"}, {old, "--prompt", "x"}, {"serve", old}} {
		want(t, 1, "ninfer upgrade "+old+" "+filepath.Join(dir, "old.v3.ninfer"), command...)
	}

	next := filepath.Join(dir, "old.v3.ninfer")
	want(t, 1, "published 125B model is expected", "upgrade", old, next)
	want(t, 2, "absent.json", "upgrade", old, next, "--config", "absent.json")
	want(t, 0, "177 objects", "upgrade", old, next, "--config", filepath.Join(checkpoint, "config.json"), "--quiet")
	want(t, 0, `"upgraded": true`, "verify", next)
	want(t, 1, "exists", "upgrade", old, next, "--config", filepath.Join(checkpoint, "config.json"))
	want(t, 1, "needs no upgrade", "upgrade", next, filepath.Join(dir, "again.ninfer"))
	a := want(t, 0, "", "run", next, "--prompt", "Hello", "--greedy", "--raw-output", "--max-new", "6", "--device", "cpu")
	if b := want(t, 0, "", "run", made, "--prompt", "Hello", "--greedy", "--raw-output", "--max-new", "6", "--device", "cpu"); a != b {
		t.Errorf("the upgraded artifact says %q, the original %q", a, b)
	}

	// A damaged word shows, with the object's name.
	b, err := os.ReadFile(old)
	if err != nil {
		t.Fatal(err)
	}
	f, err := artifact.OpenV2(old)
	if err != nil {
		t.Fatal(err)
	}
	const bank = "model.language_model.layers.0.mlp.experts.down"
	o, ok := f.Object(bank)
	f.Close()
	if !ok {
		t.Fatal("no bank")
	}
	b[4096*((16+int(binary.LittleEndian.Uint64(b[8:]))+4095)/4096)+int(o.Offset+o.Bytes)-40] = 0xff
	bad := filepath.Join(dir, "bad.ninfer")
	if err := os.WriteFile(bad, b, 0o666); err != nil {
		t.Fatal(err)
	}
	want(t, 1, bank, "verify", bad)
}

// TestPull: endpoint, token and folder of the command.
func TestPull(t *testing.T) {
	const token = "hf_notToBeSeen"
	files := map[string]string{"config.json": "{}", "sub/weights.bin": strings.Repeat("w", 1000)}
	denied := false
	h := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != "Bearer "+token {
			denied = true
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		const commit = "0123456789abcdef0123456789abcdef01234567"
		if r.URL.Path == "/api/models/a/b/revision/v1" {
			var items []string
			for name, text := range files {
				items = append(items, fmt.Sprintf(`{"rfilename":%q,"size":%d}`, name, len(text)))
			}
			fmt.Fprintf(w, `{"sha":%q,"siblings":[%s]}`, commit, strings.Join(items, ","))
			return
		}
		http.ServeContent(w, r, "", time.Time{}, strings.NewReader(files[strings.TrimPrefix(r.URL.Path, "/a/b/resolve/"+commit+"/")]))
	}))
	defer h.Close()
	dir := t.TempDir()
	t.Chdir(dir)
	t.Setenv("HF_ENDPOINT", h.URL)
	t.Setenv("HF_TOKEN", token)
	want(t, 0, "weights.bin", "pull", "a/b", "--revision", "v1", "--list")
	if left, _ := os.ReadDir(dir); len(left) > 0 {
		t.Errorf("--list left %v", left)
	}
	out := want(t, 0, "", "pull", "a/b", "--revision", "v1")
	if !strings.Contains(out, `"fetched_bytes": 1002`) {
		t.Errorf("%s", out)
	}
	for name, text := range files {
		if b, err := os.ReadFile(filepath.Join(dir, "b", name)); err != nil || string(b) != text {
			t.Errorf("%s: %v", name, err)
		}
	}
	want(t, 0, `"fetched_bytes": 1000`, "pull", "a/b", "--revision", "v1", "--out", "other", "--exclude", "*.json", "--endpoint", h.URL)
	want(t, 2, "--jobs", "pull", "a/b", "--jobs", "0")
	want(t, 2, "OWNER/NAME", "pull", "just-a-name")
	want(t, 2, "not an http", "pull", "a/b", "--list", "--endpoint", "ftp://x")
	t.Setenv("HF_TOKEN", "hf_wrongOne")
	if status, out, errw := ninfer(t, "pull", "a/b", "--revision", "v1", "--out", "third"); status != 1 || !denied || strings.Contains(out+errw, "hf_wrongOne") {
		t.Errorf("a wrong token: %d %s%s", status, out, errw)
	}
	if _, err := os.Lstat("third"); err == nil {
		t.Error("a folder for files that nobody may list")
	}
}
