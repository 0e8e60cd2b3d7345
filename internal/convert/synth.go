package convert

import (
	"encoding/json/jsontext"
	"fmt"

	"ninfer/internal/arch"
	"ninfer/internal/artifact"
)

// PlanSynthetic is Plan for an artifact whose weights are random: it says so in place of a source, and may have any name.
func PlanSynthetic(entry string, c *arch.Config, v arch.Variant, proposalRows int, resources map[string][]byte, seed uint64, limit int64) ([]arch.Spec, *artifact.Plan, error) {
	specs, err := arch.Inventory(c, v, proposalRows)
	if err != nil {
		return nil, nil, err
	}
	desc, err := arch.Describe(c, v, specs)
	if err != nil {
		return nil, nil, err
	}
	desc.Metadata = jsontext.Value(`{"name":"qwen4_exp synthetic"}`)
	desc.Provenance = jsontext.Value(fmt.Sprintf(`{"recipe":%q,"synthetic":{"seed":%d}}`, v.Recipe(), seed))
	sizes := map[string]int64{}
	for id, b := range resources {
		sizes[id] = int64(len(b))
	}
	p, err := artifact.NewPlan(entry, directory(specs, desc, sizes), artifact.PlanOptions{Limit: limit})
	if err != nil {
		return nil, nil, err
	}
	return specs, p, nil
}
