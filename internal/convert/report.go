package convert

import (
	"encoding/json/jsontext"
	"encoding/json/v2"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"ninfer/internal/arch"
	"ninfer/internal/artifact"
	"ninfer/internal/num"
)

// Report is what Run did: the file OUT.conversion.json (docs/format.md 4.1.6), members in order, and the digests by which verify finds
// a damaged object.
type Report struct {
	Identity  Identity `json:"identity"`
	TargetKey string   `json:"target_key"`
	RecipeID  string   `json:"recipe_id"`
	Source    struct {
		Repository string `json:"repository,omitempty"` // official config only
		Path       string `json:"path"`
		PLE        string `json:"ple,omitempty"` // folder of the INT4 table
	} `json:"source"`
	Output string `json:"output"`
	Config struct {
		Layers        int   `json:"layers"`
		HiddenSize    int   `json:"hidden_size"`
		Experts       int   `json:"experts"`
		ActiveExperts int   `json:"active_experts"`
		MaxContext    int   `json:"max_context"`
		PLERows       int64 `json:"ple_rows"` // of all tables
	} `json:"config_summary"`
	SourceDTypes map[string]int `json:"source_dtype_counts"`
	Objects      struct {
		Count        int   `json:"count"`
		PayloadBytes int64 `json:"payload_bytes"` // of the objects, without gaps
	} `json:"objects"`
	FileBytes        int64   `json:"file_bytes"`
	ElapsedSeconds   float64 `json:"elapsed_seconds"`
	Device           string  `json:"conversion_device"`
	Materialization  string  `json:"ple_materialization"`
	PLEFormat        string  `json:"ple_format"`
	ProjectionFormat string  `json:"projection_format"`
	MTPExpertFormat  string  `json:"mtp_expert_format"`
	// How the drafter's experts and the n-gram table were re-encoded, if they were.
	MTPExpertQuantization *ExpertQuantization `json:"mtp_expert_quantization,omitempty"`
	PLEQuantization       *TableQuantization  `json:"ple_quantization,omitempty"`
	ProposalShortlist     string              `json:"proposal_shortlist,omitempty"` // absent where there is no proposal head
	// The file the counts came from; without one the token id order stands in for the order of counts.
	DraftRanking *RankingFile `json:"draft_ranking"` // null without a file

	ArtifactID      string               `json:"artifact_id"`
	Files           []FileReport         `json:"files"`
	DirectorySHA256 string               `json:"directory_sha256"`
	ObjectSHA256    artifact.Map[string] `json:"-"`
	ObjectText      jsontext.Value       `json:"object_sha256"` // ObjectSHA256 in object order
}

// Identity names the model as version 2 containers did.
type Identity struct {
	ModelID   string `json:"model_id"`
	WeightsID string `json:"weights_id"`
}

// ExpertQuantization is an encoder of docs/format.md 2.8, and the largest activations that the constant divisors of profile B stand for.
type ExpertQuantization struct {
	Method    string     `json:"method"`
	InputAmax *InputAmax `json:"input_amax,omitempty"`
}

// InputAmax are largest activations by bank.
type InputAmax struct {
	GateUp float64 `json:"gate_up"`
	Down   float64 `json:"down"`
}

// TableQuantization is the encoder of docs/format.md 2.7 with what it found.
type TableQuantization struct {
	Method string  `json:"method"`
	Scale  float64 `json:"scale"` // the multiplier
	AMax   float64 `json:"amax"`  // largest magnitude of the table
}

// Names of encoders in reports. The first is also the name in published directories.
const (
	methodProfileA = "NVFP4_MAXABS_DIVISOR_RNE_V1"
	methodProfileB = "NVFP4_MAXABS_BINARY64_RNE"
	methodTable    = "FP8_E4M3FN_MAXABS_BF16_CEILING_RNE"
)

// RankingFile is a file of token counts.
type RankingFile struct {
	Path   string `json:"path"`
	SHA256 string `json:"sha256"`
}

// FileReport is one file of the artifact.
type FileReport struct {
	Name  string `json:"name"`
	Bytes int64  `json:"bytes"`
}

func (c *conversion) report(receipt *artifact.Receipt, elapsed time.Duration) *Report {
	r := &Report{
		Identity: Identity{"qwen4_exp", arch.WeightsID}, TargetKey: "qwen4_exp", RecipeID: arch.RecipeID, Output: c.Out,
		SourceDTypes: c.model.DTypes(), FileBytes: receipt.FileBytes, ElapsedSeconds: elapsed.Seconds(), Device: "cpu",
		Materialization: "file-backed-read-only", PLEFormat: c.variant.TableFormat().String(), ProjectionFormat: "bf16", MTPExpertFormat: "bf16",
		ProposalShortlist: "token-id-rank-plus-lm-head-norm-rank",
		ArtifactID:        artifact.FormatID(receipt.ID), DirectorySHA256: receipt.DirectorySHA256, ObjectSHA256: receipt.ObjectSHA256,
	}
	if c.config.IsOfficial() {
		r.Identity.ModelID, r.TargetKey, r.Source.Repository = arch.ModelID, arch.TargetKey, c.variant.Repository()
	}
	if c.variant.FP8Proj {
		r.ProjectionFormat = "fp8_e4m3fn_row_bf16"
	}
	if c.variant.NVFP4MTP {
		r.MTPExpertFormat = "nvfp4"
		// f32(2688/amax) is the divisor: docs/format.md 2.8.
		r.MTPExpertQuantization = &ExpertQuantization{methodProfileB, &InputAmax{24, 2720}}
	}
	for _, t := range c.tables { // all alike but for models with several
		if q := r.PLEQuantization; q == nil || float64(t.amax) > q.AMax {
			r.PLEQuantization = &TableQuantization{methodTable, float64(num.FromBF16(t.multiplier)), float64(t.amax)}
		}
	}
	if c.variant.Profile == arch.Mixed {
		r.Identity.WeightsID, r.ProposalShortlist = arch.MixedWeightsID, ""
		if c.config.IsOfficial() {
			r.Identity.ModelID, r.TargetKey = arch.MixedModelID, arch.MixedTargetKey
		}
		r.ProjectionFormat, r.MTPExpertFormat = "fp8_e4m3fn_row_fp32", "nvfp4"
		r.MTPExpertQuantization = &ExpertQuantization{Method: methodProfileA}
		r.Source.PLE = c.PLE
	}
	if c.DraftRanking != "" {
		r.ProposalShortlist = "frequency-rank-plus-lm-head-norm-rank"
		r.DraftRanking = &RankingFile{c.DraftRanking, c.ranking}
	}
	r.Source.Path = c.Model
	t := &c.config.Text
	r.Config.Layers, r.Config.HiddenSize, r.Config.Experts, r.Config.ActiveExperts = t.Layers, t.HiddenSize, t.Experts, t.ExpertsPerToken
	r.Config.MaxContext = t.MaxPositions
	for k := range t.PLELayerIDs {
		r.Config.PLERows += t.Ngram(k).Rows
	}
	r.Objects.Count = len(c.specs)
	for _, o := range c.plan.Directory.Objects {
		r.Objects.PayloadBytes += o.Bytes
	}
	for i, f := range c.plan.Directory.Files {
		n := f.PayloadBytes + 4096
		if i == 0 {
			n = f.PayloadBytes + c.plan.PayloadStart
		}
		r.Files = append(r.Files, FileReport{receipt.Files[i], n})
	}
	return r
}

// write puts the report into a file, replacing an older one; a reader sees the old or the new one whole.
func (r *Report) write(path string) error {
	text := []byte{'{'}
	for id, sum := range r.ObjectSHA256.All() {
		if len(text) > 1 {
			text = append(text, ',')
		}
		name, err := jsontext.AppendQuote(nil, id)
		if err != nil {
			return err
		}
		text = append(append(text, name...), ':', '"')
		text = append(append(text, sum...), '"')
	}
	r.ObjectText = append(text, '}')
	out, err := json.Marshal(r, jsontext.WithIndent("  "), json.Deterministic(true))
	if err != nil {
		return err
	}
	temp := reportTemp(path)
	err = os.WriteFile(temp, append(out, '\n'), 0o666)
	if err == nil {
		err = os.Rename(temp, path)
	}
	if err != nil {
		os.Remove(temp)
		return fmt.Errorf("report %s: %w", path, err)
	}
	return nil
}

// reportTemp is the name under which a report is written. It is fixed, so that the next conversion to the same place finds what a
// killed one left.
func reportTemp(path string) string {
	return filepath.Join(filepath.Dir(path), "."+filepath.Base(path)+".tmp")
}
