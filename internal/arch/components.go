package arch

import (
	"bytes"
	"encoding/json/jsontext"
	"encoding/json/v2"
	"errors"
	"fmt"
	"io"
	"reflect"
	"slices"
	"strconv"

	"ninfer/internal/num"
)

// The strings by which dialect L is recognised; they reached disk.
const (
	textArchitecture = "Qwen3_8FlashNextForCausalLM"
	textModelType    = "qwen3_8_flash_next_text"
	mtpArchitecture  = "Qwen3_8FlashNextMTP"
	visionModelType  = "qwen3_8_flash_next_vision"
)

// bare are the members of components.text.config that every dialect L artifact has, in order. With nothing beside them they mean
// the official config.
var bare = []string{"architectures", "model_type", "hidden_size", "num_hidden_layers", "vocab_size", "num_experts"}

// Description is what a directory says beside its objects (docs/format.md 4.1.4 and 4.2).
type Description struct {
	Components []Component
	Bindings   []Binding
	Uses       []Use
	Metadata   jsontext.Value
	Provenance jsontext.Value
}

// Component is one component record, its members in the order they are written.
type Component struct {
	ID           string
	Config       jsontext.Value
	Target       string // component id, or empty
	Resources    []ResourceFile
	ProposalRows int // of an indexed proposal head, 0 for none
}

// Binding is a logical parameter: the elements [Begin, End) of an object, or all of it where End is 0.
type Binding struct {
	Name, Object string
	Begin, End   int64
}

// Use is one use record. Divisors is the object bound to the auxiliary role activation_divisor, or empty.
type Use struct{ Parameter, Input, Policy, Divisors string }

// DivisorRole is the auxiliary role of a bank's activation divisors.
const DivisorRole = "activation_divisor"

// Describe gives the directory content that belongs to an inventory made by Inventory.
func Describe(c *Config, v Variant, specs []Spec) (*Description, error) {
	if v.Profile == Mixed {
		return describeMixed(c, v, specs)
	}
	var rows int
	for _, s := range specs {
		if s.ID == ProposalIDs {
			rows = s.Shape[0]
		}
	}
	text, err := c.textComponent()
	if err != nil {
		return nil, err
	}
	vision, err := c.visionComponent()
	if err != nil {
		return nil, err
	}
	res := Resources()
	d := &Description{Components: []Component{
		{ID: "text", Config: text, Resources: res[:4], ProposalRows: rows},
		{ID: "mtp", Config: jsontext.Value(`{"architectures":["` + mtpArchitecture + `"]}`), Target: "text"},
		{ID: "vision", Config: vision, Target: "text", Resources: res[4:]},
	}}
	for _, s := range specs {
		if !s.Resource {
			d.Bindings = append(d.Bindings, Binding{Name: s.ID, Object: s.ID})
		}
		switch {
		case s.Resource || len(s.Shape) < 2 || s.Format == num.FP8:
		case s.Layout == num.ExpertBlockScale:
			d.Uses = append(d.Uses, Use{s.ID, s.ID + "/input", "AllowA4", s.ID + DivisorsSuffix})
		default:
			d.Uses = append(d.Uses, Use{s.ID, s.ID + "/input", "A16Only", ""})
		}
	}
	d.origin(c, v)
	return d, nil
}

// origin fills Metadata and Provenance.
func (d *Description) origin(c *Config, v Variant) {
	name, provenance := "qwen4_exp", `{"recipe":"`+v.Recipe()+`"}`
	if c.IsOfficial() {
		switch v.Profile {
		case Swift:
			name = v.Repository()
		case Mixed:
			name = MixedModelID
		default:
			name = ModelID
		}
		provenance = `{"source":"` + v.Repository() + `","recipe":"` + v.Recipe() + `"}`
	}
	d.Metadata = jsontext.Value(`{"name":"` + name + `"}`)
	d.Provenance = jsontext.Value(provenance)
}

// IsOfficial reports whether the config describes the published 125B model: every member this program reads has its value.
func (c *Config) IsOfficial() bool {
	plain := func(c *Config) Config {
		p := Config{
			Text: c.Text, Vision: c.Vision, ImageTokenID: c.ImageTokenID, VideoTokenID: c.VideoTokenID,
			VisionStartTokenID: c.VisionStartTokenID, VisionEndTokenID: c.VisionEndTokenID,
		}
		// Spellings of one meaning, and what tells profiles apart rather than models.
		p.Text.PLEEmbedDType = ""
		p.Text.TopPartialRotary, p.Text.RopeParameters.PartialRotary = nil, nil
		p.Text.RopeParameters.Type = ""
		if len(p.Vision.Deepstack) == 0 {
			p.Vision.Deepstack = nil
		}
		return p
	}
	return reflect.DeepEqual(plain(c), plain(Official()))
}

// member is one name and value of a JSON object, the value as spelled.
type member struct {
	name  string
	value jsontext.Value
}

// members lists an object's members in order.
func members(object jsontext.Value) ([]member, error) {
	d := jsontext.NewDecoder(bytes.NewReader(object))
	if t, err := d.ReadToken(); err != nil {
		return nil, err
	} else if t.Kind() != '{' {
		return nil, errors.New("not an object")
	}
	var out []member
	for d.PeekKind() != '}' {
		t, err := d.ReadToken()
		if err != nil {
			return nil, err
		}
		name := t.String()
		v, err := d.ReadValue()
		if err != nil {
			return nil, err
		}
		v = v.Clone()
		if err := v.Compact(); err != nil {
			return nil, err
		}
		out = append(out, member{name, v})
	}
	if _, err := d.ReadToken(); err != nil {
		return nil, err
	}
	if _, err := d.ReadToken(); err != io.EOF {
		return nil, errors.New("something follows the object")
	}
	return out, nil
}

// object writes members in order.
func object(list []member) (jsontext.Value, error) {
	var b bytes.Buffer
	b.WriteByte('{')
	for i, m := range list {
		if i > 0 {
			b.WriteByte(',')
		}
		name, err := jsontext.AppendQuote(nil, m.name)
		if err != nil {
			return nil, err
		}
		b.Write(name)
		b.WriteByte(':')
		b.Write(m.value)
	}
	b.WriteByte('}')
	return b.Bytes(), nil
}

func number(n int) jsontext.Value { return jsontext.Value(strconv.Itoa(n)) }

func (c *Config) textComponent() (jsontext.Value, error) {
	t := &c.Text
	list := []member{
		{bare[0], jsontext.Value(`["` + textArchitecture + `"]`)},
		{bare[1], jsontext.Value(`"` + textModelType + `"`)},
		{bare[2], number(t.HiddenSize)},
		{bare[3], number(t.Layers)},
		{bare[4], number(t.VocabSize)},
		{bare[5], number(t.Experts)},
	}
	if !c.IsOfficial() {
		var err error
		if list, err = c.appendOther(list); err != nil {
			return nil, err
		}
	}
	return object(list)
}

// appendOther adds what a config other than the official one records besides the members in list: every further member of
// text_config, in source order and spelling, and the token ids.
func (c *Config) appendOther(list []member) ([]member, error) {
	ids := []member{
		{"image_token_id", number(int(c.ImageTokenID))},
		{"video_token_id", number(int(c.VideoTokenID))},
		{"vision_start_token_id", number(int(c.VisionStartTokenID))},
		{"vision_end_token_id", number(int(c.VisionEndTokenID))},
	}
	list, err := appendRest(list, c.TextSource, ids...)
	if err != nil {
		return nil, fmt.Errorf("text_config: %w", err)
	}
	return append(list, ids...), nil
}

// appendRest adds the members of an object that are neither in list nor among the others.
func appendRest(list []member, source jsontext.Value, others ...member) ([]member, error) {
	all, err := members(source)
	if err != nil {
		return nil, err
	}
	there := slices.Concat(list, others)
	for _, m := range all {
		if !slices.ContainsFunc(there, func(o member) bool { return o.name == m.name }) {
			list = append(list, m)
		}
	}
	return list, nil
}

func (c *Config) visionComponent() (jsontext.Value, error) {
	list := []member{{"model_type", jsontext.Value(`"` + visionModelType + `"`)}}
	if !c.IsOfficial() {
		var err error
		if list, err = appendRest(list, c.VisionSource); err != nil {
			return nil, fmt.Errorf("vision_config: %w", err)
		}
	}
	return object(list)
}

// FromComponents rebuilds the config from the config objects of an artifact's components text and vision, and says whether they are of
// dialect E: architectures and model_type of text decide, nothing else. What every artifact of a dialect records, without the further
// members that other configs have, means the built-in official config. Errors name the component and the member.
func FromComponents(text, vision jsontext.Value) (c *Config, mixed bool, err error) {
	var head struct {
		Architectures []string `json:"architectures"`
		ModelType     string   `json:"model_type"`
	}
	if err := json.Unmarshal(text, &head); err != nil {
		return nil, false, fmt.Errorf("component text: config: %w", err)
	}
	is := func(architecture, modelType string) bool {
		return slices.Equal(head.Architectures, []string{architecture}) && head.ModelType == modelType
	}
	switch {
	case is(textArchitecture, textModelType):
		c, err = fromPlain(text, vision)
		return c, false, err
	case is(mixedTextArchitecture, mixedTextModelType):
		c, err = fromMixed(text, vision)
		return c, true, err
	}
	return nil, false, fmt.Errorf("component text: architectures %q with model_type %q is not a model this program runs",
		head.Architectures, head.ModelType)
}

// fromPlain is FromComponents for dialect L.
func fromPlain(text, vision jsontext.Value) (*Config, error) {
	list, err := members(text)
	if err != nil {
		return nil, fmt.Errorf("component text: config: %w", err)
	}
	if len(list) > len(bare) {
		return fromOther(text, vision)
	}
	var head struct {
		HiddenSize int `json:"hidden_size"`
		Layers     int `json:"num_hidden_layers"`
		VocabSize  int `json:"vocab_size"`
		Experts    int `json:"num_experts"`
	}
	if err := json.Unmarshal(text, &head); err != nil {
		return nil, fmt.Errorf("component text: config: %w", err)
	}
	c := Official()
	for _, m := range []struct {
		name      string
		has, need int
	}{
		{bare[2], head.HiddenSize, c.Text.HiddenSize},
		{bare[3], head.Layers, c.Text.Layers},
		{bare[4], head.VocabSize, c.Text.VocabSize},
		{bare[5], head.Experts, c.Text.Experts},
	} {
		if m.has != m.need {
			return nil, fmt.Errorf("component text: %s is %d, need %d: a config of six members is the official one", m.name, m.has, m.need)
		}
	}
	return c, nil
}

// fromOther rebuilds a config that is recorded whole.
func fromOther(text, vision jsontext.Value) (*Config, error) {
	var ids struct {
		Image       *int32 `json:"image_token_id"`
		Video       *int32 `json:"video_token_id"`
		VisionStart *int32 `json:"vision_start_token_id"`
		VisionEnd   *int32 `json:"vision_end_token_id"`
	}
	if err := json.Unmarshal(text, &ids); err != nil {
		return nil, fmt.Errorf("component text: config: %w", err)
	}
	if ids.Image == nil || ids.Video == nil || ids.VisionStart == nil || ids.VisionEnd == nil {
		return nil, errors.New("component text: config lacks a token id of image_token_id, video_token_id, vision_start_token_id, vision_end_token_id")
	}
	if vision.Kind() != '{' {
		return nil, errors.New("component vision is missing: its config is needed")
	}
	c := &Config{
		ImageTokenID: *ids.Image, VideoTokenID: *ids.Video, VisionStartTokenID: *ids.VisionStart, VisionEndTokenID: *ids.VisionEnd,
		TextSource: text.Clone(), VisionSource: vision.Clone(),
	}
	if err := c.parse(); err != nil {
		return nil, fmt.Errorf("component config: %w", err)
	}
	return c, nil
}
