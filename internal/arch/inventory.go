package arch

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"ninfer/internal/num"
)

// Spec is one object of an artifact: what the directory says of it, and what its content is made from. Resources have no shape,
// format or layout.
type Spec struct {
	ID       string
	Resource bool
	Shape    []int
	Format   num.Format
	Layout   num.Layout
	Source   Source
	// Holds are the canonical parameters whose rows follow each other in the object. It is empty where the object's id is the
	// parameter's name.
	Holds []Run
}

// Run is a canonical parameter inside an object: so many of its rows, counted over all dimensions but the last.
type Run struct {
	Parameter string
	Rows      int
}

// ResourceFile is a file of the checkpoint folder that is embedded byte for byte.
type ResourceFile struct{ Component, Role string }

// Object is the resource's object id.
func (r ResourceFile) Object() string { return "frontend/" + r.Role }

// Resources are the six embedded files, in the order of their objects.
func Resources() []ResourceFile {
	return []ResourceFile{
		{"text", "tokenizer.json"},
		{"text", "tokenizer_config.json"},
		{"text", "chat_template.jinja"},
		{"text", "generation_config.json"},
		{"vision", "preprocessor_config.json"},
		{"vision", "video_preprocessor_config.json"},
	}
}

// ProposalRows is how many output rows the proposal head of a config keeps, given how many ids the tokenizer has: 147,456 for the
// real vocabulary, else the largest multiple of 64 not above 0.6 of the ids. It is 0 where the tokenizer has too few.
func (c *Config) ProposalRows(ids int) int {
	if c.Text.VocabSize == 248320 {
		if ids < 147456 {
			return 0
		}
		return 147456
	}
	return ids * 6 / 10 / 64 * 64
}

// Inventory returns every object of the artifact of a config, in order: docs/format.md 4.1.2 (dialect L), and for profile Mixed 4.2.1
// (dialect E). An inventory is closed: a checkpoint or artifact with one tensor more or less is refused. proposalRows is
// Config.ProposalRows, or the rows that an artifact records; dialect E has no proposal head, and it is not used there.
//
// A config whose expert widths the bank layout cannot hold is an error that names the member.
func Inventory(c *Config, v Variant, proposalRows int) ([]Spec, error) {
	if v.Profile == Mixed {
		return mixedInventory(c, num.NVFP4)
	}
	t := &c.Text
	if proposalRows < 1 || proposalRows > t.VocabSize {
		return nil, fmt.Errorf("proposal head of %d rows does not fit a vocabulary of %d", proposalRows, t.VocabSize)
	}
	if err := t.checkBanks(); err != nil {
		return nil, err
	}
	b := builder{c: c, v: v}
	for _, r := range Resources() {
		b.specs = append(b.specs, Spec{ID: r.Object(), Resource: true, Source: Source{Op: OpResource, Name: r.Role}})
	}
	b.copied(EmbedTokens, t.VocabSize, t.HiddenSize)
	for l := range t.Layers {
		p := LayerPrefix(l)
		b.hyperConnection(AttnHCPrefix(p), true)
		if t.Full(l) {
			b.attention(AttnPrefix(p))
		} else {
			b.deltaNet(GDNPrefix(p))
		}
		if k := t.PLEIndex(l); k >= 0 {
			if err := b.ple(PLEPrefix(p), k); err != nil {
				return nil, err
			}
		}
		b.hyperConnection(MLPHCPrefix(p), true)
		b.moe(MLPPrefix(p))
		b.banks(MLPPrefix(p))
	}
	b.hyperConnection(TextMixer, false)
	b.projection(LMHead, t.VocabSize, t.HiddenSize)

	head := Source{Op: OpProposal, Name: LMHead, DType: "BF16", Shape: []int{t.VocabSize, t.HiddenSize}}
	b.add(ProposalWeight, num.Q4G64, head, proposalRows, t.HiddenSize)
	head.Op = OpProposalIDs
	b.add(ProposalIDs, num.Int32, head, proposalRows)

	b.copied(MTPEmbeddingNorm, t.HiddenSize)
	b.copied(MTPHiddenNorm, t.StreamWidth())
	b.projection(MTPFCEmbedding, t.HiddenSize, t.HiddenSize)
	b.projection(MTPFCHidden, t.HiddenSize, t.HiddenSize)
	b.hyperConnection(AttnHCPrefix(MTPLayerPrefix), true)
	b.attention(AttnPrefix(MTPLayerPrefix))
	b.hyperConnection(MLPHCPrefix(MTPLayerPrefix), true)
	b.moe(MLPPrefix(MTPLayerPrefix))
	b.draftBanks(MLPPrefix(MTPLayerPrefix))
	b.hyperConnection(MTPMixer, false)

	b.vision()
	return b.specs, nil
}

// checkBanks refuses expert widths that the bank layout cannot hold.
func (t *Text) checkBanks() error {
	switch {
	case t.HiddenSize%128 != 0:
		return fmt.Errorf("hidden_size is %d: expert banks need a multiple of 128", t.HiddenSize)
	case t.ExpertIntermediate%64 != 0:
		return fmt.Errorf("moe_intermediate_size is %d: expert banks need a multiple of 64", t.ExpertIntermediate)
	}
	return nil
}

type builder struct {
	c     *Config
	v     Variant
	specs []Spec
}

func (b *builder) add(id string, f num.Format, s Source, shape ...int) {
	b.specs = append(b.specs, Spec{ID: id, Shape: shape, Format: f, Layout: num.LayoutOf(f, len(shape)), Source: s})
}

// copied adds a BF16 tensor of the same name and shape as in the checkpoint.
func (b *builder) copied(id string, shape ...int) {
	b.add(id, num.BF16, Source{Op: OpCopy, Name: id, DType: "BF16", Shape: shape}, shape...)
}

// projection adds a matrix that option fp8proj converts (docs/format.md 4.1.3).
func (b *builder) projection(id string, rows, cols int) {
	if !b.v.FP8Proj {
		b.copied(id, rows, cols)
		return
	}
	shape := []int{rows, cols}
	b.add(id, num.FP8RowBF16, Source{Op: OpQuantize, Name: id, DType: "BF16", Shape: shape}, shape...)
}

// convolution adds depthwise taps, stored with the channels contiguous.
func (b *builder) convolution(id string, channels, taps int) {
	b.add(id, num.BF16, Source{Op: OpTranspose, Name: id, DType: "BF16", Shape: []int{channels, 1, taps}}, taps, channels)
}

func (b *builder) widened(id string, n int) {
	b.add(id, num.FP32, Source{Op: OpWiden, Name: id, DType: "BF16", Shape: []int{n}}, n)
}

func (b *builder) hyperConnection(p string, inject bool) {
	t := &b.c.Text
	w := t.StreamWidth()
	if inject {
		b.copied(p+BlockInject, t.Streams, w)
	}
	b.copied(p+HCNorm, w)
	b.projection(p+MixDown, t.HCLowRank, w)
	b.projection(p+MixUp, w, t.HCLowRank)
}

func (b *builder) attention(p string) {
	t := &b.c.Text
	q, kv := t.Heads*t.HeadDim, t.KVHeads*t.HeadDim
	b.projection(p+QProj, 2*q, t.HiddenSize)
	b.projection(p+KProj, kv, t.HiddenSize)
	b.projection(p+VProj, kv, t.HiddenSize)
	b.projection(p+OProj, t.HiddenSize, q)
	b.copied(p+QNorm, t.HeadDim)
	b.copied(p+KNorm, t.HeadDim)
	b.copied(p+IndexQK, (t.IndexHeads+t.IndexKVHeads)*t.IndexHeadDim, t.HiddenSize)
	b.copied(p+IndexQLN, t.IndexHeadDim)
	b.copied(p+IndexKLN, t.IndexHeadDim)
}

func (b *builder) deltaNet(p string) {
	t := &b.c.Text
	b.widened(p+GDNALog, t.LinearValueHeads)
	b.widened(p+GDNDTBias, t.LinearValueHeads)
	b.convolution(p+GDNConv, t.ConvDim(), t.LinearConvKernel)
	b.copied(p+GDNA, t.LinearValueHeads, t.HiddenSize)
	b.copied(p+GDNB, t.LinearValueHeads, t.HiddenSize)
	b.projection(p+GDNQKV, t.ConvDim(), t.HiddenSize)
	b.projection(p+GDNZ, t.ValueDim(), t.HiddenSize)
	b.copied(p+GDNNorm, t.LinearValueHeadDim)
	b.projection(p+GDNOut, t.HiddenSize, t.ValueDim())
}

func (b *builder) ple(p string, k int) error {
	t := &b.c.Text
	w := t.StreamWidth()
	b.convolution(p+PLEConv, w, t.PLEConvKernel)
	b.copied(p+PLEKey, w, t.PLEEmbedDim)
	b.copied(p+PLENormConv, w)
	b.copied(p+PLENormKey, w)
	b.copied(p+PLENormQuery, w)
	b.copied(p+PLEValue, t.HiddenSize, t.PLEEmbedDim)

	g := t.Ngram(k)
	if err := t.checkParts(g); err != nil {
		return err
	}
	rows := int(g.Rows)
	table := Source{
		Op: OpCopy, Name: p + pleShard, DType: b.v.tableDType(), Shape: []int{rows / t.NgramParts, g.HeadWidth}, Count: t.NgramParts,
	}
	switch {
	case b.v.FP8PLE:
		scale := table
		scale.Op, table.Op = OpTableScale, OpEncodeTable
		b.add(p+PLETableScale, num.BF16, scale, 1)
	case b.v.TableFormat() == num.FP8:
		b.copied(p+PLETableScale, 1)
	}
	b.add(p+PLETable, b.v.TableFormat(), table, rows, g.HeadWidth)
	return nil
}

// checkParts refuses a table that its shards do not divide.
func (t *Text) checkParts(g Ngram) error {
	if g.Rows%int64(t.NgramParts) != 0 {
		return fmt.Errorf("split_ngram_parts is %d, which does not divide the %d rows of the table: unsupported or inconsistent value",
			t.NgramParts, g.Rows)
	}
	return nil
}

func (b *builder) moe(p string) {
	t := &b.c.Text
	b.projection(p+Router, t.Experts, t.HiddenSize)
	b.projection(p+SharedGate, t.SharedIntermediate, t.HiddenSize)
	b.projection(p+SharedUp, t.SharedIntermediate, t.HiddenSize)
	b.copied(p+SharedDown, t.HiddenSize, t.SharedIntermediate)
	b.copied(p+SharedSwitch, 1, t.HiddenSize)
}

func (b *builder) banks(p string) {
	t := &b.c.Text
	gateUp := Source{
		Op: OpBank, Name: p + expertsOfSource, Shape: []int{t.ExpertIntermediate, t.HiddenSize},
		Projections: []string{"gate", "up"}, Count: t.Experts,
	}
	down := Source{
		Op: OpBank, Name: p + expertsOfSource, Shape: []int{t.HiddenSize, t.ExpertIntermediate},
		Projections: []string{"down"}, Count: t.Experts,
	}
	b.bank(p+BankGateUp, gateUp, OpDivisors, t.Experts, 2*t.ExpertIntermediate, t.HiddenSize)
	b.bank(p+BankDown, down, OpDivisors, t.Experts, t.HiddenSize, t.ExpertIntermediate)
}

func (b *builder) bank(id string, s Source, divisors Op, shape ...int) {
	b.add(id, num.NVFP4, s, shape...)
	s.Op = divisors
	b.add(id+DivisorsSuffix, num.FP32, s, shape[0])
}

// draftBanks adds the drafter's experts. Re-encoded ones have constant activation divisors: no calibration is run for them.
func (b *builder) draftBanks(p string) {
	t := &b.c.Text
	gateUp := []int{t.Experts, 2 * t.ExpertIntermediate, t.HiddenSize}
	down := []int{t.Experts, t.HiddenSize, t.ExpertIntermediate}
	if !b.v.NVFP4MTP {
		b.copied(p+BankGateUpBF16, gateUp...)
		b.copied(p+BankDownBF16, down...)
		return
	}
	s := Source{Op: OpEncodeBank, Name: p + BankGateUpBF16, DType: "BF16", Shape: gateUp, Encoder: num.ProfileB, Constant: num.GateUpActivationDivisor}
	b.bank(p+BankGateUp, s, OpConstant, gateUp...)
	s = Source{Op: OpEncodeBank, Name: p + BankDownBF16, DType: "BF16", Shape: down, Encoder: num.ProfileB, Constant: num.DownActivationDivisor}
	b.bank(p+BankDown, s, OpConstant, down...)
}

// vision adds the tower, quantized but in dialect E.
func (b *builder) vision() {
	v := &b.c.Vision
	const visual = "model.visual."
	h, inner := v.HiddenSize, v.IntermediateSize
	merged := h * v.SpatialMergeSize * v.SpatialMergeSize

	quantized := func(id string, f num.Format, source string, sourceShape []int, shape ...int) {
		if b.v.Profile == Mixed {
			b.add(id, num.BF16, Source{Op: OpCopy, Name: visual + source, DType: "BF16", Shape: sourceShape}, shape...)
			return
		}
		b.add(id, f, Source{Op: OpQuantize, Name: visual + source, DType: "BF16", Shape: sourceShape}, shape...)
	}
	direct := func(id, source string, shape ...int) {
		b.add(id, num.BF16, Source{Op: OpCopy, Name: visual + source, DType: "BF16", Shape: shape}, shape...)
	}
	matrix := func(id string, f num.Format, source string, rows, cols int) {
		quantized(id, f, source+".weight", []int{rows, cols}, rows, cols)
		direct(id+"_bias", source+".bias", rows)
	}
	patch := []int{h, v.InChannels, v.TemporalPatchSize, v.PatchSize, v.PatchSize}
	quantized(VisionPatch, num.Q6G64, "patch_embed.proj.weight", patch, h, patch[1]*patch[2]*patch[3]*patch[4])
	direct(VisionPatchBias, "patch_embed.proj.bias", h)
	direct(VisionPositions, "pos_embed.weight", v.PositionEmbeddings, h)
	for i := range v.Depth {
		p, s := VisionBlockPrefix(i), "blocks."+strconv.Itoa(i)+"."
		matrix(p+VisionQKV, num.Q4G64, s+"attn.qkv", 3*h, h)
		matrix(p+VisionOut, num.Q5G64, s+"attn.proj", h, h)
		matrix(p+VisionFC1, num.Q4G64, s+"mlp.linear_fc1", inner, h)
		matrix(p+VisionFC2, num.Q5G64, s+"mlp.linear_fc2", h, inner)
		direct(p+VisionNorm1, s+"norm1.weight", h)
		direct(p+VisionNorm1B, s+"norm1.bias", h)
		direct(p+VisionNorm2, s+"norm2.weight", h)
		direct(p+VisionNorm2B, s+"norm2.bias", h)
	}
	matrix(MergerFC1, num.Q8G32, "merger.linear_fc1", merged, merged)
	matrix(MergerFC2, num.Q8G32, "merger.linear_fc2", v.OutHiddenSize, merged)
	direct(MergerNorm, "merger.norm.weight", h)
	direct(MergerNormBias, "merger.norm.bias", h)
}

// SourceTensors returns every tensor that the specs are made from, each once, sorted by name.
func SourceTensors(specs []Spec) []SourceTensor {
	var out []SourceTensor
	for i := range specs {
		for t := range specs[i].Source.Tensors() {
			out = append(out, t)
		}
	}
	slices.SortFunc(out, func(a, b SourceTensor) int { return strings.Compare(a.Name, b.Name) })
	return slices.CompactFunc(out, func(a, b SourceTensor) bool { return a.Name == b.Name })
}
