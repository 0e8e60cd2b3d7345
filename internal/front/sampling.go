package front

import (
	"encoding/json/v2"
	"fmt"
	"math"
	"math/rand/v2"
)

// Sampling says how tokens are drawn. It has the fields of engine.Sampling, with the same meaning, and converts to it.
type Sampling struct {
	Temperature float64
	TopP        float64
	TopK        int
	MinP        float64
	Presence    float64
	Frequency   float64
	Seed        uint64
}

// Settings are sampling values that somebody chose; nil is not chosen.
type Settings struct {
	Temperature, TopP, MinP, Presence, Frequency *float64
	TopK                                         *int // above 20 acts as 20; 0 and -1 mean the same
	Seed                                         *uint64
}

// Range is a value that was chosen, or nil, and the limits it must keep to.
type Range struct {
	Param     string // as in requests; flags have hyphens
	Value     *float64
	Low, High float64
}

// Holds tells whether the value is inside or not chosen. NaN is never inside.
func (r Range) Holds() bool { return r.Value == nil || *r.Value >= r.Low && *r.Value <= r.High }

// Ranges are those of all settings but TopK and Seed.
func (s Settings) Ranges() [5]Range {
	return [5]Range{
		{"temperature", s.Temperature, 0, 2},
		{"top_p", s.TopP, 0, 1},
		{"min_p", s.MinP, 0, 1},
		{"presence_penalty", s.Presence, -2, 2},
		{"frequency_penalty", s.Frequency, -2, 2},
	}
}

func (s Settings) check() error {
	for _, r := range s.Ranges() {
		if !r.Holds() {
			return refuse(CodeInvalidValue, r.Param, "%s is %v, must be between %v and %v", r.Param, *r.Value, r.Low, r.High)
		}
	}
	if s.TopK != nil && *s.TopK < -1 {
		return refuse(CodeInvalidValue, "top_k", "top_k is %d, must be 0 to 20, or -1", *s.TopK)
	}
	return nil
}

// over puts the chosen values over s.
func (s Settings) over(base Sampling) Sampling {
	set := func(dst, v *float64) {
		if v != nil {
			*dst = *v
		}
	}
	set(&base.Temperature, s.Temperature)
	set(&base.TopP, s.TopP)
	set(&base.MinP, s.MinP)
	set(&base.Presence, s.Presence)
	set(&base.Frequency, s.Frequency)
	if s.TopP != nil && *s.TopP == 0 {
		// The shortest prefix that reaches no weight at all is the best token; zero would read as not given.
		base.TopP = math.SmallestNonzeroFloat64
	}
	if s.TopK != nil {
		base.TopK = min(max(*s.TopK, 0), 20)
	}
	if s.Seed != nil {
		base.Seed = *s.Seed
	}
	return base
}

// The defaults by mode (docs/serving.md, Sampling defaults).
var (
	thinkingDefaults = Sampling{Temperature: 1, TopP: 0.95, TopK: 20}
	plainDefaults    = Sampling{Temperature: 0.7, TopP: 0.8, TopK: 20, Presence: 1.5}
)

// generation is what is read of generation_config.json: the ids that end an answer, and the model's own sampling values, which are
// those of its thinking mode.
type generation struct {
	stops    []int32
	settings Settings
}

func readGeneration(data []byte) (generation, error) {
	var g generation
	if len(data) == 0 {
		return g, nil
	}
	var file struct {
		EOS         any      `json:"eos_token_id"`
		Sample      *bool    `json:"do_sample"`
		Temperature *float64 `json:"temperature"`
		TopP        *float64 `json:"top_p"`
		TopK        *int     `json:"top_k"`
		MinP        *float64 `json:"min_p"`
	}
	if err := json.Unmarshal(data, &file); err != nil {
		return g, fmt.Errorf("generation_config.json: %w", err)
	}
	list, many := file.EOS.([]any)
	if !many && file.EOS != nil {
		list = []any{file.EOS}
	}
	for _, v := range list {
		id, ok := v.(float64)
		if !ok || id != math.Trunc(id) || id < 0 || id > math.MaxInt32 {
			return g, fmt.Errorf("generation_config.json: eos_token_id %v is not an id", v)
		}
		g.stops = append(g.stops, int32(id))
	}
	g.settings = Settings{Temperature: file.Temperature, TopP: file.TopP, TopK: file.TopK, MinP: file.MinP}
	if file.Sample != nil && !*file.Sample {
		zero := 0.0
		g.settings.Temperature = &zero
	}
	if err := g.settings.check(); err != nil {
		return g, fmt.Errorf("generation_config.json: %w", err)
	}
	return g, nil
}

// freshSeed is a seed nobody chose.
func freshSeed() uint64 { return rand.Uint64() }
