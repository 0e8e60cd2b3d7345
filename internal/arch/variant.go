package arch

import (
	"encoding/json/v2"
	"errors"
	"fmt"

	"ninfer/internal/num"
)

// Profile names the kind of checkpoint an artifact is made from.
type Profile string

// The profiles: all have NVFP4 routed experts. The n-gram table is FP8 in the first and BF16 in the second, which give dialect L;
// the third has FP8 projections and an INT4 table in a folder of its own, and gives dialect E.
const (
	Radixark Profile = "radixark"
	Swift    Profile = "swift"
	Mixed    Profile = "mixed"
)

// Variant is a profile with the format options of convert. The zero value of an option keeps the checkpoint's format.
type Variant struct {
	Profile  Profile
	FP8PLE   bool // re-encode the BF16 n-gram table as fp8_e4m3fn with one multiplier; swift only
	FP8Proj  bool // projections as fp8_e4m3fn_row_bf16
	NVFP4MTP bool // the drafter's experts as nvfp4
}

// ParseVariant reads the spellings of convert's options --source-profile, --ple-format, --projection-format and
// --mtp-expert-format; an empty string is an absent option.
func ParseVariant(profile, ple, projection, mtp string) (Variant, error) {
	v := Variant{Profile: Profile(profile)}
	switch v.Profile {
	case Radixark, Swift:
	case Mixed:
		for _, o := range []struct{ name, value string }{{"ple format", ple}, {"projection format", projection}, {"mtp expert format", mtp}} {
			if o.value != "" {
				return v, fmt.Errorf("%s %q cannot be chosen with profile mixed: its formats are fixed", o.name, o.value)
			}
		}
		return v, nil
	case "":
		v.Profile = Radixark
	default:
		return v, fmt.Errorf("source profile %q is unknown: use radixark, swift or mixed", profile)
	}
	switch {
	case ple == "":
	case ple != "bf16" && ple != "fp8_e4m3fn":
		return v, fmt.Errorf("ple format %q is unknown: use fp8_e4m3fn", ple)
	case v.Profile == Radixark:
		return v, fmt.Errorf("ple format %s cannot be chosen with profile radixark: its table already is fp8_e4m3fn", ple)
	default:
		v.FP8PLE = ple == "fp8_e4m3fn"
	}
	switch projection {
	case "", "bf16":
	case "fp8_e4m3fn_row_bf16":
		v.FP8Proj = true
	default:
		return v, fmt.Errorf("projection format %q is unknown: use bf16 or fp8_e4m3fn_row_bf16", projection)
	}
	switch mtp {
	case "", "bf16":
	case "nvfp4":
		v.NVFP4MTP = true
	default:
		return v, fmt.Errorf("mtp expert format %q is unknown: use bf16 or nvfp4", mtp)
	}
	return v, nil
}

// suffix spells the options with the given separator, in the order fixed by the published names.
func (v Variant) suffix(sep string) string {
	var s string
	if v.FP8PLE {
		s += sep + "fp8ple"
	}
	if v.FP8Proj {
		s += sep + "fp8proj"
	}
	if v.NVFP4MTP {
		s += sep + "nvfp4mtp"
	}
	return s
}

// OutputName is the file name convert insists on, whatever the config (docs/format.md 4.1.1).
func (v Variant) OutputName() string {
	base := "qwen3_8_flash_next_125b_a6b_nvfp4"
	switch v.Profile {
	case Swift:
		base = "swift_1_5_qwen3_8_flash_next_nvfp4"
	case Mixed: // the name of both published versions before the second got .v3 in its name (docs/format.md 1.8.3)
		base = "qwen3_8_flash_next_mixed"
	}
	return base + v.suffix("_") + ".ninfer"
}

// Recipe names how the artifact was made; it is recorded in the directory.
func (v Variant) Recipe() string {
	return RecipeID + "-" + string(v.Profile) + v.suffix("-")
}

// Repository is the published checkpoint of the profile.
func (v Variant) Repository() string {
	switch v.Profile {
	case Swift:
		return "ukisai/Swift-1.5-Qwen3.8-Flash-Next-NVFP4"
	case Mixed:
		return "primitive-ai/Qwen3.8-Flash-Next-mixed-NVFP4-FP8"
	}
	return "RadixArk/Qwen3.8-Flash-Next-NVFP4"
}

// Names of the official model that reached disk.
const (
	ModelID   = "qwen3.8-flash-next-125b-a6b"
	WeightsID = "nvfp4"
	TargetKey = "qwen3_8_flash_next_125b_a6b"
	RecipeID  = "qwen3_8_flash_next_125b_a6b_nvfp4-v3"

	MixedModelID   = "qwen3.8-flash-next"
	MixedWeightsID = "mixed-nvfp4-fp8-ple-int4"
	MixedTargetKey = "qwen3_8_flash_next_mixed"
)

// TableFormat is the stored format of the n-gram table.
func (v Variant) TableFormat() num.Format {
	if v.Profile == Mixed {
		return num.U4Z8G16
	}
	if v.Profile == Swift && !v.FP8PLE {
		return num.BF16
	}
	return num.FP8
}

// tableDType is the table's dtype in the checkpoint.
func (v Variant) tableDType() string {
	if v.Profile == Swift {
		return "BF16"
	}
	return "F8_E4M3"
}

// CheckProfile refuses a config whose checkpoint is not of the variant's profile: how the experts are quantized and which dtype
// the n-gram table has. Errors name the member.
func (c *Config) CheckProfile(v Variant) error {
	if v.Profile == Mixed && c.Quantization == nil {
		return nil // the published checkpoint's converter does not ask for it
	}
	if c.Quantization.Kind() != '{' {
		return errors.New("config.json: quantization_config is not an object")
	}
	var q struct {
		Method string `json:"quant_method"`
		Algo   string `json:"quant_algo"`
	}
	if err := json.Unmarshal(c.Quantization, &q); err != nil {
		return fmt.Errorf("config.json: quantization_config: %w", err)
	}
	dtype := c.Text.PLEEmbedDType
	switch {
	case v.Profile == Mixed && q.Method != "compressed-tensors":
		return fmt.Errorf("config.json: quant_method is %q, need \"compressed-tensors\" for profile mixed", q.Method)
	case v.Profile == Mixed:
		return nil
	case q.Method != "modelopt":
		return fmt.Errorf("config.json: quant_method is %q, need \"modelopt\"", q.Method)
	case q.Algo != "NVFP4":
		return fmt.Errorf("config.json: quant_algo is %q, need \"NVFP4\"", q.Algo)
	case v.Profile == Radixark && dtype != "float8_e4m3fn":
		return fmt.Errorf("config.json: ple_embedding_dtype is %q, need \"float8_e4m3fn\" for profile radixark", dtype)
	case v.Profile == Swift && dtype != "" && dtype != "bfloat16":
		return fmt.Errorf("config.json: ple_embedding_dtype is %q, need \"bfloat16\" or none for profile swift", dtype)
	}
	return nil
}
