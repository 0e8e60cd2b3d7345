// Command bench times the CUDA kernels the way a decode step meets them and writes the rows of docs/perf.
//
//	bench [-code DIR] [-match REGEXP] [-sweep] [-load FILES] [-out rows.json] [-merge docs/perf/h200.json] [-commit HASH]
//
// Every op is captured as a chain of dependent launches with programmatic edges in one graph, over enough distinct weights that none is
// in L2 when it is read again; a row is the median of eleven replays after two, divided by the launches. The same run measures
// the yardsticks: an empty dependent kernel, a read-only stream, a copy. Ratios are bytes / (read rate of this run) / time. What a row does
// not say (clocks, power, spread) is in the table on standard error.
package main

import (
	"cmp"
	"encoding/json/jsontext"
	"encoding/json/v2"
	"flag"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"ninfer/internal/backend/cuda/driver"
	"ninfer/internal/backend/cuda/nvml"
)

// row is one line of docs/perf/h200.json.
type row struct {
	What            string  `json:"what"`
	Name            string  `json:"name"`
	Variant         string  `json:"variant"`
	Context         int     `json:"context"`
	Batch           int     `json:"batch"`
	Us              float64 `json:"us"`
	Bytes           uint64  `json:"bytes"`
	FloorMs         float64 `json:"floor_ms"`
	Ratio           float64 `json:"ratio"`
	ReadGbps        float64 `json:"read_gbps"`
	DistinctExperts float64 `json:"distinct_experts"`
	TokensPerS      float64 `json:"tokens_per_s,omitzero"`
	Commit          string  `json:"commit"`
	Command         string  `json:"command"`
}

var (
	code    = flag.String("code", "", "folder with a subfolder fatbin to use instead of the built-in machine code")
	match   = flag.String("match", "", "run only ops whose name matches")
	sweep   = flag.Bool("sweep", false, "also time other tunings")
	out     = flag.String("out", "", "write rows to this file")
	into    = flag.String("merge", "", "replace rows of this file by the new ones of the same what, name, variant, context, batch")
	commit  = flag.String("commit", "", "commit to note in the rows")
	device  = flag.Int("device", 0, "GPU")
	batches = flag.String("batches", "1,2,4,8", "activation rows to time")
	files   = flag.String("load", "", "also time loading these files (comma separated) from the page cache")
	stamps  = flag.Bool("stamps", false, "the code is a debug build (-DNINFER_STAMPS): print where the time inside kernels goes")
)

func main() {
	flag.Parse()
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func run() error {
	re, err := regexp.Compile(*match)
	if err != nil {
		return err
	}
	d, err := driver.Open()
	if err != nil {
		return err
	}
	o, err := driver.StartOwner(d, *device)
	if err != nil {
		return err
	}
	defer o.Close()
	b := &bench{match: re, sweep: *sweep, commit: *commit, command: strings.Join(os.Args[1:], " ")}
	for _, s := range strings.Split(*batches, ",") {
		n, err := strconv.Atoi(s)
		if err != nil || n < 1 || n > 8 {
			return fmt.Errorf("batches %q: not numbers from 1 to 8", *batches)
		}
		b.batches = append(b.batches, uint32(n))
	}
	b.smi, _ = nvml.Open()
	err = o.Try(func(c *driver.Context) {
		fmt.Fprintf(os.Stderr, "%s, %d SMs, CUDA %v\n", c.Device.Name, c.Device.SMs, d.Version())
		b.rig = newRig(c, folder(*code))
		b.all()
		if *files != "" {
			b.load(strings.Split(*files, ","))
		}
		if *stamps {
			b.stamps()
		}
	})
	if err != nil {
		return err
	}
	if *out != "" {
		if err := write(*out, b.rows); err != nil {
			return err
		}
	}
	if *into == "" {
		return nil
	}
	var old []row
	if text, err := os.ReadFile(*into); err == nil {
		if err := json.Unmarshal(text, &old); err != nil {
			return fmt.Errorf("%s: %w", *into, err)
		}
	}
	return write(*into, merge(old, b.rows))
}

// merge replaces the rows of old that new measures again and keeps a stable order.
func merge(old, new []row) []row {
	key := func(r row) string { return fmt.Sprint(r.What, r.Name, r.Variant, r.Context, r.Batch) }
	fresh := map[string]bool{}
	for _, r := range new {
		fresh[key(r)] = true
	}
	rows := slices.DeleteFunc(slices.Clone(old), func(r row) bool { return fresh[key(r)] })
	rows = append(rows, new...)
	slices.SortStableFunc(rows, func(a, b row) int {
		return cmp.Or(cmp.Compare(a.What, b.What), cmp.Compare(a.Name, b.Name), cmp.Compare(a.Variant, b.Variant), cmp.Compare(a.Batch, b.Batch))
	})
	return rows
}

func write(path string, rows []row) error {
	text := []byte("[\n")
	for i, r := range rows {
		line, err := json.Marshal(r, jsontext.Multiline(false))
		if err != nil {
			return err
		}
		text = append(append(text, "  "...), line...)
		if i < len(rows)-1 {
			text = append(text, ',')
		}
		text = append(text, '\n')
	}
	return os.WriteFile(path, append(text, "]\n"...), 0o644)
}
