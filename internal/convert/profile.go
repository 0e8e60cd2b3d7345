package convert

import (
	"encoding/json/jsontext"
	"encoding/json/v2"
	"fmt"
	"slices"
	"strings"

	"ninfer/internal/arch"
	"ninfer/internal/artifact"
	"ninfer/internal/num"
)

// ProfileCheck is what CheckProfile found. Its JSON form is part of the command line.
type ProfileCheck struct {
	Dialect  string   `json:"dialect"`  // L or E, empty if the model is unknown
	Profile  string   `json:"profile"`  // with options, such as swift-fp8ple-fp8proj
	Official bool     `json:"official"` // of the published 125B configuration
	Upgraded bool     `json:"upgraded"` // in the order that the upgrade of a version 2 file leaves
	Notes    []string `json:"notes,omitzero"`
	Failures []string `json:"failures"` // one line each
}

// knownModels are the values of model_type in the two dialects.
var knownModels = []string{"qwen3_8_flash_next_text", "qwen4_exp_text"}

// CheckProfile compares an artifact with the inventory that follows from its own config (docs/format.md 4.1, 4.2): ids, order, shapes,
// formats and layouts of objects, bindings, uses, components. What readers accept though the converter writes it otherwise is a note.
// It reads the directory only. An artifact of another model gives an empty dialect and no failures.
func CheckProfile(f *artifact.File) *ProfileCheck {
	p := &ProfileCheck{Failures: []string{}}
	d := f.Directory()
	text, _ := d.Component("text")
	var head struct {
		ModelType string `json:"model_type"`
	}
	if json.Unmarshal(text.Config, &head) != nil || !slices.Contains(knownModels, head.ModelType) {
		return p
	}
	vision, _ := d.Component("vision")
	c, mixed, err := arch.FromComponents(text.Config, vision.Config)
	if err != nil {
		p.Dialect = "?"
		p.failf("%v", err)
		return p
	}
	v := variantOf(f, mixed)
	p.Dialect, p.Profile, p.Official = "L", strings.TrimPrefix(v.Recipe(), arch.RecipeID+"-"), c.IsOfficial()
	if mixed {
		p.Dialect = "E"
	}
	rows := 0
	if o, ok := f.Object(arch.ProposalWeight); ok && len(o.Shape) == 2 {
		rows = o.Shape[0]
	}
	if !mixed && rows == 0 {
		p.failf("tensor %q is missing or not a matrix", arch.ProposalWeight)
		return p
	}
	specs, err := arch.Inventory(c, v, rows)
	if err == nil {
		var desc *arch.Description
		if desc, err = arch.Describe(c, v, specs); err == nil {
			p.compare(f, specs, desc)
			return p
		}
	}
	p.failf("%v", err)
	return p
}

func (p *ProfileCheck) failf(format string, args ...any) {
	p.Failures = append(p.Failures, "profile: "+fmt.Sprintf(format, args...))
}

// variantOf recognises the variant by the formats that are there; the names decide only between what has the same formats.
func variantOf(f *artifact.File, mixed bool) arch.Variant {
	if mixed {
		return arch.Variant{Profile: arch.Mixed}
	}
	v := arch.Variant{Profile: arch.Radixark}
	d := f.Directory()
	var origin struct {
		Name   string `json:"name"`
		Recipe string `json:"recipe"`
		Source string `json:"source"`
	}
	_ = json.Unmarshal(d.Metadata, &origin)
	_ = json.Unmarshal(d.Provenance, &origin)
	swift := arch.Variant{Profile: arch.Swift}
	if origin.Name == swift.Repository() || origin.Source == swift.Repository() || strings.HasPrefix(origin.Recipe, swift.Recipe()) {
		v.Profile = arch.Swift
	}
	for i := range d.Objects {
		switch o := &d.Objects[i]; {
		case strings.HasSuffix(o.ID, arch.PLETable) && o.Format == num.BF16.String():
			v.Profile = arch.Swift
		case strings.HasSuffix(o.ID, arch.PLETable) && v.Profile == arch.Swift:
			v.FP8PLE = true
		case o.ID == arch.LMHead:
			v.FP8Proj = o.Format == num.FP8RowBF16.String()
		case o.ID == arch.MLPPrefix(arch.MTPLayerPrefix)+arch.BankGateUp:
			v.NVFP4MTP = true
		}
	}
	return v
}

func (p *ProfileCheck) compare(f *artifact.File, specs []arch.Spec, desc *arch.Description) {
	d := f.Directory()
	// The dialect L upgrade stores the chat template again, after everything else (docs/format.md 1.9).
	if n := len(d.Objects); p.Dialect == "L" && d.Objects[n-1].ID == chatTemplate {
		p.Upgraded = true
		i := slices.IndexFunc(specs, func(s arch.Spec) bool { return s.ID == chatTemplate })
		moved := specs[i]
		specs = append(slices.Delete(slices.Clone(specs), i, i+1), moved)
	}
	if err := sameInventory(specs, d.Objects); err != nil {
		p.failf("%v", err)
	}
	sizes := map[string]int64{}
	for i := range d.Objects {
		if o := &d.Objects[i]; o.Resource {
			sizes[o.ID] = o.Bytes
		}
	}
	want := directory(specs, desc, sizes)
	p.compareComponents(d, want)
	p.compareBindings(d, want)
	p.compareUses(d, want, specs)
	if len(p.Failures) > 0 || p.Upgraded {
		return
	}
	plan, err := artifact.NewPlan("x", want, artifact.PlanOptions{})
	if err != nil {
		p.failf("%v", err)
		return
	}
	for i, o := range plan.Directory.Objects {
		if got := d.Objects[i].Offset; got != o.Offset {
			p.Notes = append(p.Notes, fmt.Sprintf("object %q lies at %d, the converter would place it at %d", o.ID, got, o.Offset))
			break
		}
	}
}

func (p *ProfileCheck) compareComponents(have, want *artifact.Directory) {
	for _, w := range want.Components {
		h, ok := have.Component(w.ID)
		switch {
		case !ok:
			p.failf("component %q is missing", w.ID)
			continue
		case !sameJSON(h.Config, w.Config):
			p.failf("component %q: its config differs from %s", w.ID, w.Config)
		case h.Target != w.Target:
			p.failf("component %q has target %q, need %q", w.ID, h.Target, w.Target)
		case (h.Proposal == nil) != (w.Proposal == nil) || h.Proposal != nil && *h.Proposal != *w.Proposal:
			p.failf("component %q: its proposal head differs", w.ID)
		}
		for role, id := range w.Resources.All() {
			if got, ok := h.Resources.Lookup(role); !ok || got != id {
				p.failf("component %q: resource %q is %q, need %q", w.ID, role, got, id)
			}
		}
		if h.Resources.Len() != w.Resources.Len() {
			p.failf("component %q has %d resources, need %d", w.ID, h.Resources.Len(), w.Resources.Len())
		}
	}
	if len(have.Components) > len(want.Components) {
		p.failf("%d components, need %d", len(have.Components), len(want.Components))
	}
}

// sameJSON compares values; the order of members and the spelling of numbers are free.
func sameJSON(a, b jsontext.Value) bool {
	a, b = a.Clone(), b.Clone()
	return a.Canonicalize() == nil && b.Canonicalize() == nil && string(a) == string(b)
}

func sameBinding(a, b artifact.Binding) bool {
	return a.Object == b.Object && slices.Equal(a.Parts, b.Parts)
}

// few adds a failure for each of the first items and counts the rest.
func (p *ProfileCheck) few(list []string) {
	const most = 5
	for _, s := range list[:min(most, len(list))] {
		p.failf("%s", s)
	}
	if n := len(list) - most; n > 0 {
		p.failf("%d more of these", n)
	}
}

func (p *ProfileCheck) compareBindings(have, want *artifact.Directory) {
	var differ []string
	for name, w := range want.Bindings.All() {
		if h, ok := have.Bindings.Lookup(name); !ok {
			differ = append(differ, fmt.Sprintf("parameter %q is not bound", name))
		} else if !sameBinding(h, w) {
			differ = append(differ, fmt.Sprintf("parameter %q is bound otherwise", name))
		}
	}
	for name := range have.Bindings.All() {
		if _, ok := want.Bindings.Lookup(name); !ok {
			differ = append(differ, fmt.Sprintf("parameter %q is not expected", name))
		}
	}
	p.few(differ)
}

// compareUses: of matrices with FP8 rows a use may allow 8-bit activations, and a BF16 table may have none (docs/format.md 6.1).
func (p *ProfileCheck) compareUses(have, want *artifact.Directory, specs []arch.Spec) {
	format := map[string]num.Format{}
	for _, s := range specs {
		format[s.ID] = s.Format
	}
	type key struct{ parameter, input string }
	there := map[key]artifact.Use{}
	for _, u := range have.Uses {
		there[key{u.Parameter, u.Input}] = u
	}
	var differ []string
	noted := map[string]bool{}
	note := func(s string) {
		if !noted[s] {
			noted[s] = true
			p.Notes = append(p.Notes, s)
		}
	}
	for _, w := range want.Uses {
		k := key{w.Parameter, w.Input}
		h, ok := there[k]
		delete(there, k)
		switch {
		case !ok && strings.HasSuffix(w.Parameter, arch.PLETable):
			note("the n-gram table has no use")
		case !ok:
			differ = append(differ, fmt.Sprintf("use of %q with input %q is missing", w.Parameter, w.Input))
		case h.Policy != w.Policy && h.Policy == "AllowA8" && format[w.Parameter] == num.FP8RowBF16:
			note("uses of matrices with FP8 rows allow 8-bit activations")
		case h.Policy != w.Policy:
			differ = append(differ, fmt.Sprintf("use of %q has activation policy %q, need %q", w.Parameter, h.Policy, w.Policy))
		default:
			same := h.Auxiliaries.Len() == w.Auxiliaries.Len()
			for role, b := range w.Auxiliaries.All() {
				got, ok := h.Auxiliaries.Lookup(role)
				same = same && ok && sameBinding(got, b)
			}
			if !same {
				differ = append(differ, fmt.Sprintf("use of %q has other auxiliaries", w.Parameter))
			}
		}
	}
	for _, u := range have.Uses {
		if _, extra := there[key{u.Parameter, u.Input}]; extra {
			differ = append(differ, fmt.Sprintf("use of %q with input %q is not expected", u.Parameter, u.Input))
		}
	}
	p.few(differ)
}
