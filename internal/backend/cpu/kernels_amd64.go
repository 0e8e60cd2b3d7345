package cpu

import "ninfer/internal/num"

func kernelsOf(l Level) *kernels {
	switch l {
	case AVX2:
		return &kernelsAVX2
	case AVX512:
		return &kernelsAVX512
	}
	return nil
}

var (
	kernelsAVX2   = kernels{dot: [3]dotFunc{dot1AVX2, dot2AVX2, dot3AVX2}}
	kernelsAVX512 = kernels{dot: [3]dotFunc{dot1AVX512, dot2AVX512, dot3AVX512}}
)

func init() {
	add := func(ks *kernels, k kernel, fs ...num.Format) {
		k.dot = &ks.dot
		for _, f := range fs {
			ks.formats[f] = &k
		}
	}
	a := &kernelsAVX2
	a.formats = map[num.Format]*kernel{}
	add(a, kernel{block: 16, bytes: 32, gemv: [2]gemvFunc{gemv1BF16AVX2, gemv2BF16AVX2}, decode: decodeBF16AVX2}, num.BF16)
	add(a, kernel{block: 16, bytes: 64, gemv: [2]gemvFunc{gemv1FP32AVX2, gemv2FP32AVX2}}, num.FP32)
	add(a, kernel{order: bytes8, block: 32, bytes: 32, gemv: [2]gemvFunc{gemv1FP8AVX2, gemv2FP8AVX2}, decode: decodeFP8AVX2}, num.FP8, num.FP8RowBF16, num.FP8RowFP32)
	add(a, kernel{block: 32, bytes: 32, scales: 2, gemv: [2]gemvFunc{gemv1Q8AVX2, gemv2Q8AVX2}, decode: decodeQ8AVX2}, num.Q8G32)
	add(a, kernel{order: nibbles, block: 64, bytes: 32, scales: 512, gemv: [2]gemvFunc{gemv1NVFP4AVX2, gemv2NVFP4AVX2}, decode: decodeNVFP4AVX2}, num.NVFP4)
	add(a, kernel{order: nibbles, block: 64, bytes: 32, scales: 2, gemv: [2]gemvFunc{gemv1Q4AVX2, gemv2Q4AVX2}, decode: decodeQ4AVX2}, num.Q4G64)
	add(a, kernel{order: evenOdd, block: 64, bytes: 32, high: 8, scales: 2, gemv: [2]gemvFunc{gemv1Q5AVX2}, decode: decodeQ5AVX2}, num.Q5G64)
	add(a, kernel{order: evenOdd, block: 64, bytes: 32, high: 16, scales: 2, gemv: [2]gemvFunc{gemv1Q6AVX2}, decode: decodeQ6AVX2}, num.Q6G64)

	b := &kernelsAVX512
	b.formats = map[num.Format]*kernel{num.Q5G64: a.formats[num.Q5G64], num.Q6G64: a.formats[num.Q6G64]}
	add(b, kernel{block: 16, bytes: 32, gemv: [2]gemvFunc{gemv1BF16AVX512, gemv2BF16AVX512}, decode: decodeBF16AVX512}, num.BF16)
	add(b, kernel{block: 16, bytes: 64, gemv: [2]gemvFunc{gemv1FP32AVX512, gemv2FP32AVX512}}, num.FP32)
	add(b, kernel{order: bytes16, block: 64, bytes: 64, gemv: [2]gemvFunc{gemv1FP8AVX512, gemv2FP8AVX512}, decode: decodeFP8AVX512}, num.FP8, num.FP8RowBF16, num.FP8RowFP32)
	add(b, kernel{block: 32, bytes: 32, scales: 2, gemv: [2]gemvFunc{gemv1Q8AVX512, gemv2Q8AVX512}, decode: decodeQ8AVX512}, num.Q8G32)
	add(b, kernel{order: interleaved, block: 64, bytes: 32, scales: 512, gemv: [2]gemvFunc{gemv1NVFP4AVX512, gemv2NVFP4AVX512}, decode: decodeNVFP4AVX512}, num.NVFP4)
	add(b, kernel{order: interleaved, block: 64, bytes: 32, scales: 2, gemv: [2]gemvFunc{gemv1Q4AVX512, gemv2Q4AVX512}, decode: decodeQ4AVX512}, num.Q4G64)
}
