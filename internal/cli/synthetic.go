package cli

import (
	"cmp"
	"os"
	"unsafe"

	"ninfer/internal/arch"
	"ninfer/internal/artifact"
	"ninfer/internal/backend/cuda/device"
	"ninfer/internal/convert"
	"ninfer/internal/model"
	"ninfer/internal/synth"
)

// syntheticFlags make a model up instead of reading one.
type syntheticFlags struct {
	Synthetic string `placeholder:"CONFIG" help:"Instead of a file: random weights of this config.json, or official, made on the GPU."`
	variantFlags
}

// load opens the artifact at path, or makes one up for the device of f.
func (c *syntheticFlags) load(e *environment, path string, f *modelFlags) (*loaded, error) {
	if c.Synthetic == "" {
		return load(e, path)
	}
	if path != "" {
		return nil, usagef("an artifact and --synthetic exclude each other")
	}
	f.Device = cmp.Or(f.Device, "cuda") // the CPU would see zeros
	l, err := synthetic(c.Synthetic, c.variantFlags, f.Device == "cpu")
	if err == nil {
		f.made = l.made
	}
	return l, err
}

// variantFlags choose the formats of made-up weights, as in convert.
type variantFlags struct {
	SourceProfile    string `default:"radixark" placeholder:"P" help:"Of --synthetic: radixark, swift or mixed."`
	PLEFormat        string `name:"ple-format" placeholder:"F" help:"Of --synthetic, as in convert."`
	ProjectionFormat string `placeholder:"F" help:"Of --synthetic, as in convert."`
	MTPExpertFormat  string `name:"mtp-expert-format" placeholder:"F" help:"Of --synthetic, as in convert."`
}

// hostMade is the size up to which made-up tensors are made on the host: all that is not a large matrix.
const hostMade = 1 << 20

// synthetic makes a model of a configuration (a config.json, or official) whose weights are random and lie nowhere: a GPU makes its own, and
// the n-gram table is all zero. For the CPU all of them are made in memory.
func synthetic(config string, v variantFlags, onCPU bool) (*loaded, error) {
	variant, err := arch.ParseVariant(v.SourceProfile, v.PLEFormat, v.ProjectionFormat, v.MTPExpertFormat)
	if err != nil {
		return nil, usageError{err}
	}
	c := arch.Official()
	if config != "official" {
		text, err := os.ReadFile(config)
		if err != nil {
			return nil, usageError{err}
		}
		if c, err = arch.ParseConfig(text); err != nil {
			return nil, err
		}
	}
	files, err := synth.Frontend(c)
	if err != nil {
		return nil, err
	}
	ids := synth.IDs(c)
	specs, plan, err := convert.PlanSynthetic("synthetic.ninfer", c, variant, c.ProposalRows(ids), files, 1, 1<<62)
	if err != nil {
		return nil, err
	}
	made := map[*byte][]device.Plane{}
	i := -1
	f, err := artifact.Virtual(plan, func(o *artifact.Object, data []byte) error {
		i++
		if o.Resource {
			copy(data, files[o.ID])
			return nil
		}
		x, err := synth.NewObject(c, &specs[i], synth.Options{Seed: 1, SparseTable: true, IDs: ids})
		if err != nil {
			return err
		}
		planes, ok := x.Planes()
		switch {
		case x.Zero(0, o.Bytes):
		case len(data) <= hostMade || !ok:
			x.Fill(data, 0)
		case onCPU:
			if err := fits(plan); err != nil {
				return err
			}
			x.Fill(data, 0)
		default:
			list := []device.Plane{}
			for _, p := range planes {
				w := p.Words
				list = append(list, device.Plane{
					Offset: p.Offset, Bytes: p.Bytes, Width: w.Bytes, Mean: w.Mean, Deviation: w.Deviation, Mask: w.Mask, Fixed: w.Fixed,
				})
			}
			made[unsafe.SliceData(data)] = list
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	store, err := model.NewArtifact(f)
	if err != nil {
		f.Close()
		return nil, err
	}
	l := &loaded{store: store, config: store.Config(), made: func(data []byte) ([]device.Plane, bool) {
		planes, ok := made[unsafe.SliceData(data)]
		return planes, ok
	}}
	if err := l.frontend(); err != nil {
		f.Close()
		return nil, err
	}
	return l, nil
}

// fits refuses to make in memory what belongs on a GPU.
func fits(p *artifact.Plan) error {
	const most = 4 << 30
	n := int64(0)
	for i := range p.Directory.Objects {
		o := &p.Directory.Objects[i]
		if o.Bytes < 16<<30 { // the table stays zero
			n += o.Bytes
		}
	}
	if n > most {
		return usagef("made-up weights of %s are more than the CPU is given: use a GPU (--device cuda) or a smaller configuration", inUnits(n))
	}
	return nil
}
