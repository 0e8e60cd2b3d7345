package main

import (
	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	. "github.com/mmcloughlin/avo/reg"
)

// The delta rule on one head's matrix S [rows][cols], cols a multiple of 64. Sums over rows are sequential in every column, and
// S = fma(k, d, S*decay) is the same two roundings in deltaWrite and deltaFold.
func delta() {
	deltaRead()
	deltaWrite(true)
	deltaWrite(false)
}

// strip loops over strips of width vectors of columns, and inside over rows. body gets the address of S in the row; begin and end run
// around the rows of a strip with the byte offset of its columns.
func strip(width int, s, rows, cols Register, begin, end func(col GPVirtual), body func(at Mem, i GPVirtual)) {
	col, i, p, stride := GP64(), GP64(), GP64(), GP64()
	MOVQ(cols, stride)
	SHLQ(Imm(2), stride)
	XORQ(col, col)
	Label("strip")
	begin(col)
	LEAQ(Mem{Base: s, Index: col, Scale: 1}, p)
	XORQ(i, i)
	Label("row")
	body(Mem{Base: p}, i)
	ADDQ(stride, p)
	INCQ(i)
	CMPQ(i, rows)
	JNE(LabelRef("row"))
	end(col)
	ADDQ(U32(32*width), col)
	CMPQ(col, stride)
	JNE(LabelRef("strip"))
	VZEROUPPER()
	RET()
}

func deltaRead() {
	TEXT("deltaReadAVX2", NOSPLIT, "func(u, s, k *float32, rows, cols int)")
	Pragma("noescape")
	Doc("deltaReadAVX2: u[j] = sum over i of s[i][j]*k[i].")
	u, s, k := Load(Param("u"), GP64()), Load(Param("s"), GP64()), Load(Param("k"), GP64())
	rows, cols := Load(Param("rows"), GP64()), Load(Param("cols"), GP64())
	var acc []VecVirtual
	for range 8 {
		acc = append(acc, YMM())
	}
	strip(8, s, rows, cols, func(GPVirtual) {
		for _, a := range acc {
			VXORPS(a, a, a)
		}
	}, func(col GPVirtual) {
		for v, a := range acc {
			VMOVUPS(a, Mem{Base: u, Index: col, Scale: 1, Disp: 32 * v})
		}
	}, func(at Mem, i GPVirtual) {
		kv := YMM()
		VBROADCASTSS(Mem{Base: k, Index: i, Scale: 4}, kv)
		for v, a := range acc {
			at.Disp = 32 * v
			VFMADD231PS(at, kv, a)
		}
	})
}

func deltaWrite(out bool) {
	name, sig := "deltaFoldAVX2", "func(s, k, d *float32, rows, cols int, decay float32)"
	if out {
		name, sig = "deltaWriteAVX2", "func(out, s, k, q, d *float32, rows, cols int, decay float32)"
	}
	TEXT(name, NOSPLIT, sig)
	Pragma("noescape")
	if out {
		Doc("deltaWriteAVX2: s = s*decay + k d'; out[j] = sum over i of s[i][j]*q[i] with the new s.")
	} else {
		Doc("deltaFoldAVX2: s = s*decay + k d', the same roundings as deltaWriteAVX2.")
	}
	s, k, d := Load(Param("s"), GP64()), Load(Param("k"), GP64()), Load(Param("d"), GP64())
	rows, cols := Load(Param("rows"), GP64()), Load(Param("cols"), GP64())
	var o, q Register
	if out {
		o, q = GP64(), GP64()
		Load(Param("out"), o)
		Load(Param("q"), q)
	}
	decay := YMM()
	m, err := Param("decay").Resolve()
	if err != nil {
		panic(err)
	}
	VBROADCASTSS(m.Addr, decay)
	const width = 4
	var acc, dv [width]VecVirtual
	for i := range width {
		acc[i], dv[i] = YMM(), YMM()
	}
	strip(width, s, rows, cols, func(col GPVirtual) {
		for v := range width {
			VXORPS(acc[v], acc[v], acc[v])
			VMOVUPS(Mem{Base: d, Index: col, Scale: 1, Disp: 32 * v}, dv[v])
		}
	}, func(col GPVirtual) {
		if out {
			for v := range width {
				VMOVUPS(acc[v], Mem{Base: o, Index: col, Scale: 1, Disp: 32 * v})
			}
		}
	}, func(at Mem, i GPVirtual) {
		kv, qv := YMM(), YMM()
		VBROADCASTSS(Mem{Base: k, Index: i, Scale: 4}, kv)
		if out {
			VBROADCASTSS(Mem{Base: q, Index: i, Scale: 4}, qv)
		}
		for v := range width {
			at.Disp = 32 * v
			x := YMM()
			VMULPS(at, decay, x)
			VFMADD231PS(dv[v], kv, x)
			VMOVUPS(x, at)
			if out {
				VFMADD231PS(x, qv, acc[v])
			}
		}
	})
}
