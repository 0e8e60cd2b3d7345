package convert

import (
	"ninfer/internal/arch"
	"ninfer/internal/artifact"
)

// Plan describes the artifact of a config before any weight is read: its objects in order, and everything that is written but
// payload and id. proposalRows is not used for profile mixed, which has no proposal head. resources gives the size in bytes of each
// resource by object id, limit the largest file in bytes or 0.
func Plan(entry string, c *arch.Config, v arch.Variant, proposalRows int, resources map[string]int64, limit int64) ([]arch.Spec, *artifact.Plan, error) {
	specs, err := arch.Inventory(c, v, proposalRows)
	if err != nil {
		return nil, nil, err
	}
	desc, err := arch.Describe(c, v, specs)
	if err != nil {
		return nil, nil, err
	}
	p, err := artifact.NewPlan(entry, directory(specs, desc, resources), artifact.PlanOptions{Limit: limit})
	if err != nil {
		return nil, nil, err
	}
	return specs, p, nil
}

// directory is the directory of an inventory and its description, without sizes of tensors, offsets and files.
func directory(specs []arch.Spec, desc *arch.Description, resources map[string]int64) *artifact.Directory {
	d := &artifact.Directory{Uses: make([]artifact.Use, 0, len(desc.Uses)), Metadata: desc.Metadata, Provenance: desc.Provenance}
	for _, a := range desc.Components {
		b := artifact.Component{ID: a.ID, Config: a.Config, Target: a.Target}
		for _, r := range a.Resources {
			b.Resources.Set(r.Role, r.Object())
		}
		if a.ProposalRows > 0 {
			b.Proposal = &artifact.Proposal{Domain: "indexed", Rows: int64(a.ProposalRows)}
		}
		d.Components = append(d.Components, b)
	}
	for _, s := range specs {
		if s.Resource {
			d.Objects = append(d.Objects, artifact.Object{ID: s.ID, Resource: true, Bytes: resources[s.ID]})
			continue
		}
		d.Objects = append(d.Objects, artifact.Object{ID: s.ID, Shape: s.Shape, Format: s.Format.String(), Layout: s.Layout.String()})
	}
	for _, b := range desc.Bindings {
		if b.End == 0 {
			d.Bindings.Set(b.Name, artifact.Binding{Object: b.Object})
			continue
		}
		d.Bindings.Set(b.Name, artifact.Binding{Parts: []artifact.Part{{Object: b.Object, Begin: b.Begin, End: b.End}}})
	}
	for _, a := range desc.Uses {
		b := artifact.Use{Parameter: a.Parameter, Input: a.Input, Policy: a.Policy}
		if a.Divisors != "" {
			b.Auxiliaries.Set(arch.DivisorRole, artifact.Binding{Object: a.Divisors})
		}
		d.Uses = append(d.Uses, b)
	}
	return d
}
