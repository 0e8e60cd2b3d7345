package convert

import (
	"bytes"
	"context"
	"encoding/binary"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"ninfer/internal/artifact"
)

// FuzzUpgrade changes a run of a version 2 file's directory, and one byte of its payload: no panic, no message of two lines, and either an
// artifact that opens or nothing at all.
func FuzzUpgrade(f *testing.F) {
	v, config := randomMixed(f)
	text := v2Directory(v.model, v.weights, v.objects)
	find := func(s string) int { return max(0, bytes.Index(text, []byte(s))) }
	f.Add(0, 0, "", 0, byte(0))
	f.Add(find(`"identity"`), 1, `"x":1,"`, 0, byte(1))
	f.Add(find(`"offset":0`), len(`"offset":0`), `"offset":1`, 0, byte(0))
	f.Add(find(`"offset":256`), len(`"offset":256`), `"offset":18446744073709551615`, 0, byte(0))
	f.Add(find(`"shape":[`), len(`"shape":[`), `"shape":[1,`, 0, byte(0))
	f.Add(find(`BF16`), 4, `NVFP4`, 5000, byte(0xff))
	f.Add(find(`experts/gate_up`), 1, `E`, len(v.payload)-1, byte(0x80))
	f.Add(len(text)-1, 1, ` } `, len(v.payload)/2, byte(1))
	f.Add(len(text)-1, 0, strings.Repeat(" ", 4096), len(v.payload)/2, byte(1))
	dir := f.TempDir()
	in, out := filepath.Join(dir, "in.ninfer"), filepath.Join(dir, "out", "out.ninfer")
	f.Fuzz(func(t *testing.T, at, n int, with string, pos int, flip byte) {
		at = min(max(0, at), len(text))
		n = min(max(0, n), len(text)-at)
		changed := append(append(bytes.Clone(text[:at]), with...), text[at+n:]...)
		b := append([]byte("NINFER\x00\x02"), binary.LittleEndian.AppendUint64(nil, uint64(len(changed)))...)
		b = append(b, changed...)
		b = append(b, make([]byte, -len(b)&4095)...)
		b = append(b, v.payload...)
		b[len(b)-1-min(max(0, pos), len(v.payload)-1)] ^= flip
		for _, err := range []error{os.RemoveAll(filepath.Dir(out)), os.Mkdir(filepath.Dir(out), 0o777), os.WriteFile(in, b, 0o666)} {
			if err != nil {
				t.Fatal(err)
			}
		}
		_, err := Upgrade(context.Background(), UpgradeOptions{In: in, Out: out, Config: config})
		if err == nil {
			a, err := artifact.Open(out)
			if err != nil {
				t.Fatal(err)
			}
			a.Close()
			return
		}
		if strings.ContainsAny(err.Error(), "\r\n") {
			t.Errorf("message has more than one line: %q", err)
		}
		left, err := os.ReadDir(filepath.Dir(out))
		if err != nil || len(left) > 0 {
			t.Errorf("left after a failure: %v, %v", left, err)
		}
	})
}
