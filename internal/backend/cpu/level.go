package cpu

// Level is an instruction set of the fast device.
type Level uint8

// The instruction sets. Results of different levels differ in the last bits; each level agrees with itself whatever the batch.
const (
	Best   Level = iota // the best one this processor has
	Plain               // plain Go
	AVX2                // AVX2, FMA and F16C
	AVX512              // AVX-512 F, BW, DQ and VL for matrices, AVX2 for the rest
)

func (l Level) String() string {
	return [...]string{"best", "plain", "avx2", "avx512"}[l]
}

// Levels lists the instruction sets that this processor has, the best one last.
func Levels() []Level {
	var all []Level
	for l := Plain; l <= best(); l++ {
		all = append(all, l)
	}
	return all
}
