package main

import (
	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	. "github.com/mmcloughlin/avo/reg"
)

// attention: the weighted sum of value rows, one query head at a time.
func attention() {
	TEXT("weighRowsAVX2", NOSPLIT, "func(dst, p, v *float32, stride, rows, n int)")
	Pragma("noescape")
	Doc("weighRowsAVX2: dst[c] += p[0]*v[c], then p[1]*v[stride+c] and so on, for rows value rows that lie stride floats apart; n is a multiple of 64.")
	dst, p, base := Load(Param("dst"), GP64()), Load(Param("p"), GP64()), Load(Param("v"), GP64())
	stride, rows, n := Load(Param("stride"), GP64()), Load(Param("rows"), GP64()), Load(Param("n"), GP64())
	SHLQ(Imm(2), stride)
	SHLQ(Imm(2), n)
	col, i, at := GP64(), GP64(), GP64()
	var acc [8]VecVirtual
	for j := range acc {
		acc[j] = YMM()
	}
	XORQ(col, col)
	Label("strip")
	for j, a := range acc {
		VMOVUPS(Mem{Base: dst, Index: col, Scale: 1, Disp: 32 * j}, a)
	}
	LEAQ(Mem{Base: base, Index: col, Scale: 1}, at)
	XORQ(i, i)
	Label("row")
	w := YMM()
	VBROADCASTSS(Mem{Base: p, Index: i, Scale: 4}, w)
	for j, a := range acc {
		VFMADD231PS(Mem{Base: at, Disp: 32 * j}, w, a)
	}
	ADDQ(stride, at)
	INCQ(i)
	CMPQ(i, rows)
	JNE(LabelRef("row"))
	for j, a := range acc {
		VMOVUPS(a, Mem{Base: dst, Index: col, Scale: 1, Disp: 32 * j})
	}
	ADDQ(U32(256), col)
	CMPQ(col, n)
	JNE(LabelRef("strip"))
	VZEROUPPER()
	RET()
}
