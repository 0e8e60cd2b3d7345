package arch

import (
	"iter"
	"strconv"
	"strings"

	"ninfer/internal/num"
)

// Op says how an object's content is made from the checkpoint (docs/format.md 5.5).
type Op uint8

// The transformations. Words are copied bit for bit unless the operation says otherwise.
const (
	OpResource    Op = iota // the file Name of the checkpoint folder
	OpCopy                  // words of the source tensors, one after another
	OpWiden                 // BF16 to FP32, exact
	OpTranspose             // [channels, 1, taps] to [taps, channels]
	OpQuantize              // a BF16 tensor, read as rows x columns of the object, encoded into the object's format
	OpBank                  // ModelOpt experts: codes and block scales copied, divisor 1/weight_scale_2
	OpDivisors              // ModelOpt experts: activation divisors 1/input_scale
	OpEncodeBank            // a BF16 bank encoded as NVFP4 by Encoder, one divisor an expert (docs/format.md 2.8)
	OpConstant              // every value is Constant
	OpEncodeTable           // BF16 table shards encoded with the one multiplier of the whole table (docs/format.md 2.7)
	OpTableScale            // that multiplier
	OpProposal              // the chosen rows of the BF16 output head, encoded (docs/format.md 2.9)
	OpProposalIDs           // which rows were chosen
	OpRowScaled             // FP8 matrices one below the other, codes copied, then their FP32 row multipliers (docs/format.md 5.6)
	OpPackedBank            // compressed-tensors experts: codes, block scales and divisors copied (docs/format.md 2.4)
	OpPackedTable           // shard Index of the INT4 table, which lies in a folder of its own: codes, then scales (docs/format.md 5.6)
)

// Source is where an object's content comes from: a compact description, since the banks of the official model are made from
// 294,912 tensors. The zero value is a resource without a name.
type Source struct {
	Op    Op
	Name  string // tensor; for banks the prefix of all experts; for tables the prefix of all shards; for resources the file
	DType string // safetensors spelling; empty for banks, whose four tensors differ
	Shape []int  // of one source tensor; for banks [rows, columns] of one projection

	// Parts are tensors whose rows follow each other; Name, DType and Shape are then empty.
	Parts []SourceTensor

	Projections []string // banks: the projections whose rows follow each other in an expert
	Count       int      // experts of a bank or shards of a table, else 0
	Constant    float32
	Encoder     num.Profile // of OpEncodeBank
	Index       int         // of OpPackedTable
}

// SourceTensor is one tensor a checkpoint must hold.
type SourceTensor struct {
	Name  string
	DType string
	Shape []int
}

// Expert names the four tensors of projection p of expert e in a ModelOpt checkpoint.
func (s *Source) Expert(e int, p string) (weight, scale, scale2, input string) {
	n := s.Name + strconv.Itoa(e) + "." + p + "_proj."
	return n + "weight", n + "weight_scale", n + "weight_scale_2", n + "input_scale"
}

// PackedExpert names the four tensors of projection p of expert e in a compressed-tensors checkpoint.
func (s *Source) PackedExpert(e int, p string) (packed, scale, global, input string) {
	n := s.Name + strconv.Itoa(e) + "." + p + "_proj."
	return n + "weight_packed", n + "weight_scale", n + "weight_global_scale", n + "input_global_scale"
}

// RowScale names the multipliers of a row-scaled FP8 matrix, one a row, shape [rows, 1].
func RowScale(matrix string) string { return matrix + "_scale" }

// Shard names shard i of a table.
func (s *Source) Shard(i int) string { return s.Name + strconv.Itoa(i) + ".weight" }

// Tensors yields every tensor the object is made from, in the order of its content.
func (s *Source) Tensors() iter.Seq[SourceTensor] {
	return func(yield func(SourceTensor) bool) {
		switch s.Op {
		case OpResource, OpConstant, OpPackedTable:
		case OpPackedBank:
			one := []int{1}
			codes, scales := []int{s.Shape[0], s.Shape[1] / 2}, []int{s.Shape[0], s.Shape[1] / 16}
			for e := range s.Count {
				for _, p := range s.Projections {
					packed, scale, global, input := s.PackedExpert(e, p)
					if !yield(SourceTensor{packed, "U8", codes}) || !yield(SourceTensor{scale, "F8_E4M3", scales}) ||
						!yield(SourceTensor{global, "F32", one}) || !yield(SourceTensor{input, "F32", one}) {
						return
					}
				}
			}
		case OpBank, OpDivisors:
			codes := []int{s.Shape[0], s.Shape[1] / 2}
			scales := []int{s.Shape[0], s.Shape[1] / 16}
			scalar := []int{}
			for e := range s.Count {
				for _, p := range s.Projections {
					weight, scale, scale2, input := s.Expert(e, p)
					if s.Op == OpDivisors {
						if !yield(SourceTensor{input, "F32", scalar}) {
							return
						}
						continue
					}
					if !yield(SourceTensor{weight, "U8", codes}) || !yield(SourceTensor{scale, "F8_E4M3", scales}) ||
						!yield(SourceTensor{scale2, "F32", scalar}) {
						return
					}
				}
			}
		default:
			for _, t := range s.Parts {
				if !yield(t) || s.Op == OpRowScaled && !yield(SourceTensor{RowScale(t.Name), "F32", []int{t.Shape[0], 1}}) {
					return
				}
			}
			if s.Parts != nil {
				return
			}
			if s.Count == 0 {
				yield(SourceTensor{s.Name, s.DType, s.Shape})
				return
			}
			for i := range s.Count {
				if !yield(SourceTensor{s.Shard(i), s.DType, s.Shape}) {
					return
				}
			}
		}
	}
}

// IndexTensors are the int64 tensors of a checkpoint that hold the hash constants of the n-gram tables: multipliers, offsets and sizes
// of each module. Ngram derives them; only dialect E stores them.
func (c *Config) IndexTensors() []SourceTensor {
	var out []SourceTensor
	for _, id := range c.Text.PLELayerIDs {
		p := PLEPrefix(LayerPrefix(id - 1))
		heads := []int{c.Text.PLEHeads()}
		out = append(out,
			SourceTensor{p + pleIndexMul, "I64", []int{c.Text.NgramSize}},
			SourceTensor{p + pleIndexOff, "I64", heads},
			SourceTensor{p + pleIndexSize, "I64", heads})
	}
	return out
}

// IsTableShard reports whether a tensor of a checkpoint is a shard of an n-gram table.
func (c *Config) IsTableShard(name string) bool {
	for _, id := range c.Text.PLELayerIDs {
		rest, ok := strings.CutPrefix(name, PLEPrefix(LayerPrefix(id-1))+pleShard)
		number, ok2 := strings.CutSuffix(rest, ".weight")
		i, err := strconv.Atoi(number)
		if ok && ok2 && err == nil && i >= 0 && i < c.Text.NgramParts && strconv.Itoa(i) == number {
			return true
		}
	}
	return false
}
