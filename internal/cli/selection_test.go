package cli

import (
	"fmt"
	"testing"

	"ninfer/internal/backend"
	"ninfer/internal/backend/cuda/drivertest"
	"ninfer/internal/model"
)

// A decoding step selects by a cluster of blocks for each row, whatever lengths its device has room for and its lanes have, in the kernel that scores where
// that is room for few tokens; where rows are too many for all clusters at once it is one block for each, as far as that can.
func TestSelection(t *testing.T) {
	l := madeUp(t, "../../testdata/micro-radixark/checkpoint/config.json", variantFlags{SourceProfile: "radixark"})
	for _, room := range []int{8704, 16384, 20480} {
		t.Run(fmt.Sprint(room), func(t *testing.T) {
			must := orFatal(t)
			gpu, m, d := opened(t, l, drivertest.H200, false, room, room)
			r := model.NewRunner(m, d, 512)
			r.Lanes, r.Round = 8, 6
			must(r.Prepare())
			program, err := m.Program(backend.Pass{Kind: backend.Decode, Lanes: 1, Rows: 1}, false)
			must(err)
			layers := 0
			for _, op := range program.Ops {
				if _, ok := op.(backend.QSA); ok {
					layers++
				}
			}
			pass := func(kind backend.Kind, lanes, rows int, want string) {
				t.Helper()
				ctl := &backend.Control{}
				for lane := range lanes {
					at := d.Lengths(backend.Lane(lane)).Target
					ctl.Lanes = append(ctl.Lanes, backend.LaneRows{Lane: lane, Tokens: make([]int32, rows), Positions: model.Positions(at, rows), Want: backend.WantAll})
				}
				gpu.Launched = nil
				_, err := r.Launch(kind, ctl)
				must(err)
				if n := gpu.Count("select_blocks") + gpu.Count("select_shared") + gpu.Count("prep_select"); n != layers || gpu.Count(want) != n {
					t.Errorf("%v of %d lanes, %d rows each: %d of %d selections by %s", kind, lanes, rows, gpu.Count(want), n, want)
				}
			}
			for lane := range r.Lanes {
				must(d.Fill(backend.Lane(lane), []int{300, room - 50}[lane%2]))
			}
			lone := "select_shared"
			if room <= 12288 {
				lone = "prep_select"
			}
			for lanes := 1; lanes <= r.Lanes; lanes++ {
				for range 4 { // launched one by one, captured, replayed, behind a beginning that waited
					pass(backend.Decode, lanes, 1, lone)
				}
			}
			many := "select_blocks"
			if room > 16384 {
				many = "select_shared"
			}
			pass(backend.Verify, 2, 4, "select_shared")
			pass(backend.Verify, 3, 3, many)
		})
	}
}
