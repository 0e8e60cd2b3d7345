package kernels

import (
	"math"
	"os"
	"strconv"
	"strings"
	"testing"

	"ninfer/internal/backend/cuda/driver"
	"ninfer/internal/backend/cuda/kernels/digest"
)

// The committed machine code belongs to the sources beside it, and its kernels spill no registers.
func TestFresh(t *testing.T) {
	for _, line := range digest.Stale(".", &table) {
		t.Error(line)
	}
}

// Plans exist for the official sizes on both cards and stay inside their limits; what they cannot do is an error, not a launch.
func TestPlans(t *testing.T) {
	report, err := os.ReadFile("resources.txt")
	if err != nil {
		t.Fatal(err)
	}
	static := map[string]uint32{} // shared memory that the machine code has of its own
	for line := range strings.Lines(string(report)) {
		if f := strings.Fields(line); len(f) > 4 && strings.HasPrefix(f[2], "sm_") {
			n, err := strconv.ParseUint(f[4], 10, 32)
			if err != nil {
				t.Fatalf("%q: %v", line, err)
			}
			static[f[1]] = max(static[f[1]], uint32(n))
		}
	}
	for name, l := range map[string]Limits{
		"H200": {SMs: 132, SharedPerBlock: 227 << 10, SharedPerSM: 228 << 10}, "RTX PRO 6000": {SMs: 188, SharedPerBlock: 99 << 10, SharedPerSM: 100 << 10},
	} {
		for r := uint32(1); r <= MaxRows; r++ {
			check := func(what string, p Plan, err error) {
				t.Helper()
				if err != nil {
					// small shared memory takes fewer rows of long matrices at a time: the caller loops
					if name == "H200" || r == 1 || !strings.HasPrefix(what, "gdn_out") && !strings.HasPrefix(what, "hc_down") {
						t.Errorf("%s %s R %d: %v", name, what, r, err)
					}
					return
				}
				if p.Grid > l.SMs && 2*(p.Shared+1024) > l.SharedPerSM && p.Kernel >= GemvBf16 && p.Kernel <= GemvQ4 {
					t.Errorf("%s %s R %d: a second wave of blocks: %+v", name, what, r, p)
				}
				if fixed := static[p.Kernel.Name()]; p.Shared+fixed > l.SharedPerBlock || p.Grid == 0 {
					t.Errorf("%s %s R %d: %+v, %d bytes of shared memory besides", name, what, r, p, fixed)
				}
			}
			for _, f := range []Format{FormatBF16, FormatE4M3} {
				p, _, err := l.Gemv(f, r, 2560, []Part{{Rows: 16384}, {Rows: 96}}, 1+int(1-f), Tuning{})
				check("gdn_in", p, err)
				p, _, err = l.Gemv(f, r, 6144, []Part{{Rows: 2560}}, 1, Tuning{})
				check("gdn_out", p, err)
				p, _, err = l.Gemv(f, r, 2560, []Part{{Rows: 248320}}, 1, Tuning{})
				check("head", p, err)
				p, _, err = l.HcDown(f == FormatE4M3, r, 2560, 320)
				check("hc_down", p, err)
				p, _, err = l.HcUp(f == FormatE4M3, r, 2560, 320)
				check("hc_up", p, err)
				p, _, err = l.Router(f == FormatE4M3, r, 2560, 512, 640)
				check("router", p, err)
			}
			p, _, err := l.Gemv(FormatQ4, r, 2560, []Part{{Rows: 147456}}, 1, Tuning{})
			check("proposal head", p, err)
			p, _, err = l.ExpertUp(r, 2560, 512, 10, 640, Tuning{})
			check("expert_gate_up", p, err)
			p, _, err = l.ExpertDown(r, 2560, 512, 10, 640, true)
			check("expert_down", p, err)
		}
		for what, err := range map[string]error{
			"9 rows":    second(l.Gemv(FormatBF16, 9, 2560, []Part{{Rows: 1}}, 1, Tuning{})),
			"odd k":     second(l.Gemv(FormatBF16, 1, 33, []Part{{Rows: 1}}, 1, Tuning{})),
			"window":    second(l.Gemv(FormatBF16, 8, 2560, []Part{{Rows: 1}}, 1, Tuning{Window: 64})),
			"no parts":  second(l.Gemv(FormatBF16, 1, 64, nil, 0, Tuning{})),
			"top 17":    second(l.ExpertUp(1, 2560, 512, 17, 640, Tuning{})),
			"513":       second(l.ExpertDown(1, 2560, 513, 10, 640, true)),
			"long rows": second(l.HcDown(false, 1, 1<<20, 320)),
		} {
			if err == nil {
				t.Errorf("%s: a plan for %s", name, what)
			}
		}
	}
}

func second[P any](_ Plan, _ P, err error) error { return err }

// What is brought into L2 ahead lies in the matrices, at the beginning of some block's share, and is about all that was asked for.
func TestAhead(t *testing.T) {
	l := Limits{SMs: 132, SharedPerBlock: 227 << 10, SharedPerSM: 228 << 10}
	for _, c := range []struct {
		f    Format
		k    uint32
		rows []uint32 // of parts
		gap  []uint64 // before each part
		own  int      // parts in format f
		most uint64   // bytes that are left out: stretches beyond two, and a share at every end
	}{
		{FormatE4M3, 2560, []uint32{2048, 2048, 6144, 6144, 48, 48}, []uint64{0, 0, 0, 4096, 256, 256}, 4, 2 << 16},
		{FormatBF16, 2560, []uint32{2048, 2048, 6144, 6144, 48, 48}, []uint64{0, 0, 0, 4096, 256, 256}, 6, 3 << 16},
		{FormatE4M3, 2560, []uint32{512, 512, 640, 12288}, []uint64{0, 512, 512, 512}, 4, 3 << 19},
		{FormatBF16, 128, []uint32{3}, []uint64{0}, 1, 1 << 10},
	} {
		var parts []Part
		at := driver.Ptr(1 << 20)
		var bytes uint64
		for i, r := range c.rows {
			at += driver.Ptr(c.gap[i])
			parts = append(parts, Part{W: at, Rows: r})
			if i < c.own {
				bytes += uint64(r * c.f.rowBytes(c.k))
			}
			at += driver.Ptr(r * 2 * c.k)
			if c.f == FormatE4M3 && i < c.own {
				at -= driver.Ptr(r * c.k)
			}
		}
		_, p, err := l.Gemv(c.f, 1, c.k, parts, c.own, Tuning{})
		if err != nil {
			t.Fatal(err)
		}
		a := p.Ahead(c.f, 64<<10)
		if a.N == 0 && bytes > 1<<20 || a.Bytes%16 != 0 {
			t.Errorf("%+v: nothing, or odd pieces: %+v", c, a)
		}
		for i := range a.N {
			from := a.At[0] + driver.Ptr(i)*driver.Ptr(a.Pitch)
			if i >= a.First {
				from = a.At[1] + driver.Ptr(i-a.First)*driver.Ptr(a.Pitch)
			}
			var before, where uint64
			inside := false
			for left, j := uint64(a.Bytes), 0; j < c.own; j++ { // through parts that follow each other
				end := parts[j].W + driver.Ptr(parts[j].Rows*c.f.rowBytes(c.k))
				if from >= parts[j].W && from < end {
					if !inside {
						where = before + uint64(from-parts[j].W)
					}
					n := min(left, uint64(end-from))
					from, left, inside = from+driver.Ptr(n), left-n, true
					if left == 0 {
						break
					}
					inside = j+1 < c.own && parts[j+1].W == end
				}
				before += uint64(parts[j].Rows * c.f.rowBytes(c.k))
			}
			if !inside || from%16 != 0 {
				t.Fatalf("%+v: piece %d of %+v lies outside", c, i, a)
			}
			share := float64(bytes) / float64(p.FirstBlocks)
			if b := float64(where) / share; math.Abs(b-math.Round(b)) > 0.05 { // pitches are a little shorter than shares
				t.Fatalf("%+v: piece %d begins at %.2f shares", c, i, b)
			}
		}
		if got, want := uint64(a.N)*uint64(a.Bytes), min(64<<10, bytes/uint64(p.FirstBlocks))*uint64(p.FirstBlocks); got > want || got+c.most < want {
			t.Errorf("%+v: %d bytes of %d", c, got, want)
		}
	}
	q := GemvParams{K: 2560, FirstParts: 1, FirstBlocks: 132, Part: [8]Part{{W: 1 << 20, Rows: 4096}}}
	if a := q.Ahead(FormatQ4, 64<<10); a != (Ahead{}) {
		t.Errorf("Q4: %+v", a)
	}
}
