package cli

import (
	"flag"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"ninfer/internal/backend"
	"ninfer/internal/backend/cuda/device"
	"ninfer/internal/backend/cuda/drivertest"
	"ninfer/internal/model"
)

var (
	machinesFlag = flag.String("machines", "", "NAME=FOLDER,...: on a GPU, machine code to time steps with beside what is built in; kernels/fatbin and device/fatbin of a folder are all files, or not there")
	formatFlag   = flag.String("machine-format", "fp8_e4m3fn_row_bf16", "projections of those steps")
	lanesFlag    = flag.String("machine-lanes", "1,2,4,8", "their lanes")
	lengthFlag   = flag.Int("machine-length", 8192, "their tokens before it")
	roundsFlag   = flag.Int("machine-rounds", 5, "how often each has its turn")
)

// machine is machine code in turn with others: what a replay takes on the GPU in each round, and the ids that steps picked.
type machine struct {
	name  string
	code  device.Machine
	us    []float64
	picks []string
}

// turns gives each machine code its turns at a step of so many lanes: some steps of random sequences, the same for all in a round, then replays.
func turns(t *testing.T, m *model.Model, d *device.Device, list []*machine, lanes, length, rounds int) {
	t.Helper()
	must := orFatal(t)
	program, err := m.Program(backend.Pass{Kind: backend.Decode, Lanes: lanes, Rows: lanes}, false)
	must(err)
	step, err := d.Compile(program)
	must(err)
	for _, x := range list {
		x.us, x.picks = nil, nil
	}
	for round := range rounds {
		for i := range list {
			x := list[(i+round)%len(list)]
			must(d.Use(x.code))
			ctl := &backend.Control{}
			for lane := range lanes {
				must(d.Fill(backend.Lane(lane), length))
				ctl.Lanes = append(ctl.Lanes, backend.LaneRows{Lane: lane, Tokens: []int32{int32(7*round + lane)}, Want: backend.WantLast})
			}
			picks := ""
			const steps = 16
			for n := range steps + 1 {
				for lane := range ctl.Lanes {
					ctl.Lanes[lane].Positions = model.Positions(length+n, 1)
				}
				if n == steps {
					break
				}
				q, err := d.Launch(step, ctl)
				must(err)
				res, err := d.Wait(q)
				must(err)
				for lane := range ctl.Lanes {
					ctl.Lanes[lane].Tokens[0] = res.Lanes[lane].Picks[0]
					picks += strconv.Itoa(int(res.Lanes[lane].Picks[0])) + " "
				}
			}
			_, us, err := d.Kernels(step, ctl, 9, false)
			must(err)
			x.us, x.picks = append(x.us, us), append(x.picks, picks)
		}
	}
}

// Machine code in turns, on one device, at one place of all buffers: what is built in and again what is built in, or what -machines names.
func TestMachines(t *testing.T) {
	if *machinesFlag != "" {
		compareMachines(t)
		return
	}
	l := madeUp(t, "../../testdata/micro-radixark/checkpoint/config.json", variantFlags{SourceProfile: "radixark"})
	gpu, m, d := opened(t, l, drivertest.H200, false, 2048, 512)
	var list []*machine
	for _, name := range []string{"built in", "again"} {
		code, err := d.Machine(nil, nil)
		if err != nil {
			t.Fatal(err)
		}
		list = append(list, &machine{name: name, code: code})
	}
	gpu.Launched = nil
	turns(t, m, d, list, 2, 300, 3)
	a, b := list[0], list[1]
	if len(a.us) != 3 || !slices.Equal(a.us, b.us) || a.us[0] <= 0 || !slices.Equal(a.picks, b.picks) {
		t.Errorf("the same code twice: %v, %v; picks %q, %q", a.us, b.us, a.picks, b.picks)
	}
	if gpu.Count("prep_select") == 0 {
		t.Error("no step was launched")
	}
	if _, err := d.Machine(os.DirFS(t.TempDir()), nil); err == nil {
		t.Error("a folder without machine code was loaded")
	}
	if err := d.Use(a.code); err != nil { // a folder that is not there costs nothing
		t.Error(err)
	}
}

// compareMachines says what each of -machines takes more or less than what is built in: the median, and that of the differences in a round.
func compareMachines(t *testing.T) {
	l := madeUp(t, "official", variantFlags{SourceProfile: "radixark", ProjectionFormat: *formatFlag})
	m, err := l.bind(model.Options{})
	if err != nil {
		t.Fatal(err)
	}
	lanes, err := counts("-machine-lanes", *lanesFlag, 8)
	if err != nil {
		t.Fatal(err)
	}
	d, err := device.Open(device.Options{States: m.States, Lanes: slices.Max(lanes), Tokens: *lengthFlag + 512, Verify: 1, Carry: 1, Made: l.made})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	var list []*machine
	for _, one := range strings.Split("built in,"+*machinesFlag, ",") {
		name, folder, _ := strings.Cut(one, "=")
		of := func(kind string) fs.FS {
			at := filepath.Join(folder, kind)
			if _, err := os.Stat(filepath.Join(at, "fatbin")); folder == "" || err != nil {
				return nil
			}
			return os.DirFS(at)
		}
		plain, tuned := of("device"), of("kernels")
		if len(list) > 0 && plain == nil && tuned == nil {
			t.Fatalf("-machines %s: no machine code in %q: device/fatbin or kernels/fatbin is wanted there", one, folder)
		}
		code, err := d.Machine(plain, tuned)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		list = append(list, &machine{name: name, code: code})
	}
	middle := func(v []float64) float64 { return slices.Sorted(slices.Values(v))[len(v)/2] }
	for _, n := range lanes {
		turns(t, m, d, list, n, *lengthFlag, *roundsFlag)
		for _, x := range list {
			var less []float64
			same := 0
			for i := range x.us {
				less = append(less, x.us[i]-list[0].us[i])
				if x.picks[i] == list[0].picks[i] {
					same++
				}
			}
			t.Logf("%d lanes, %-16s %8.1f us on the GPU (%+6.1f), same picks in %d of %d rounds", n, x.name, middle(x.us), middle(less), same, len(x.us))
		}
	}
}
