package kernels

import (
	"os"
	"strconv"
	"strings"
	"testing"

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
					if name == "H200" || r == 1 || !strings.HasPrefix(what, "gdn_out") {
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
