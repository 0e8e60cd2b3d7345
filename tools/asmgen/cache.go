package main

import (
	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	. "github.com/mmcloughlin/avo/reg"
)

func word(name string, v uint32) Mem {
	m := GLOBL(name, RODATA|NOPTR)
	for i := range 8 {
		DATA(4*i, U32(v))
	}
	return m
}

// convert writes a kernel that turns n values, a multiple of 8, into another form. from and to are the bytes of a value before and after;
// before comes before the first.
func convert(name, signature, doc string, from, to uint8, before func(), body func(src, dst Mem)) {
	TEXT(name+"AVX2", NOSPLIT, signature)
	Pragma("noescape")
	Doc(name + "AVX2: " + doc)
	dst, src, n := Load(Param("dst"), GP64()), Load(Param("src"), GP64()), Load(Param("n"), GP64())
	before()
	at := GP64()
	XORQ(at, at)
	Label("loop")
	body(Mem{Base: src, Index: at, Scale: from}, Mem{Base: dst, Index: at, Scale: to})
	ADDQ(Imm(8), at)
	CMPQ(at, n)
	JNE(LabelRef("loop"))
	VZEROUPPER()
	RET()
}

// cache: what caches and states in fewer bytes need. n is positive.
func cache() {
	one, half, quiet := word("bf16One", 1), word("bf16Half", 0x7fff), word("bf16Quiet", 0x40)
	half16 := words("fp8Half", 8, func(int) uint16 { return 0xbf80 })
	up := constant("fp8Up", 256)

	convert("expandBF16", "func(dst *float32, src *uint16, n int)", "dst = src, exact.", 2, 4, func() {}, func(src, dst Mem) {
		x := YMM()
		VPMOVZXWD(src, x)
		VPSLLD(Imm(16), x, x)
		VMOVDQU(x, dst)
	})
	convert("shrinkBF16", "func(dst *uint16, src *float32, n int)", "dst = src, ties to even; NaN stays NaN.", 4, 2, func() {}, func(src, dst Mem) {
		x, r, nan := YMM(), YMM(), YMM()
		VMOVDQU(src, x)
		VCMPPS(Imm(3), x, x, nan) // unordered
		VPSRLD(Imm(16), x, r)
		kept := YMM()
		VPOR(quiet, r, kept)
		VPAND(one, r, r)
		VPADDD(half, r, r)
		VPADDD(x, r, r)
		VPSRLD(Imm(16), r, r)
		VPBLENDVB(nan, kept, r, r)
		high := XMM()
		VEXTRACTI128(Imm(1), r, high)
		VPACKUSDW(high, r.AsX(), high)
		VMOVDQU(high, dst)
	})
	var scale VecVirtual
	convert("expandFP8", "func(dst *float32, src *byte, n int, scale *float32)", "dst = scale * src, by way of binary16 as in the matrix kernels.", 1, 4, func() {
		scale = YMM()
		VBROADCASTSS(Mem{Base: Load(Param("scale"), GP64())}, scale)
	}, func(src, dst Mem) {
		h, x := XMM(), YMM()
		VPMOVSXBW(src, h)
		VPSLLW(Imm(7), h, h)
		VPAND(half16, h, h)
		VCVTPH2PS(h, x)
		VMULPS(up, x, x)
		VMULPS(scale, x, x)
		VMOVUPS(x, dst)
	})
}
