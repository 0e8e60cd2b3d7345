package main

import (
	"math"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	. "github.com/mmcloughlin/avo/reg"
)

// Element-wise kernels take n, a multiple of 8; an element's result does not depend on its place.

func constant(name string, v float64) Mem {
	m := GLOBL(name, RODATA|NOPTR)
	for i := range 8 {
		DATA(4*i, U32(math.Float32bits(float32(v))))
	}
	return m
}

// expConsts are the constants of exp in registers or memory. exp(x) = 2^n * e^r with n = round(x*log2 e), r = x - n*ln 2 in two
// pieces (the first has so few bits that n times it is exact), and the polynomial of Cephes' expf for e^r. The error is below 2 ulp.
type expConsts struct {
	most, least, log2e, hi, lo, one Mem
	poly                            [6]Mem
	zeroBelow                       Mem
}

var ex expConsts

func expTables() {
	ex.most, ex.least = constant("expMost", 88.02), constant("expLeast", -87.33)
	ex.log2e = constant("expLog2e", math.Log2E)
	ex.hi, ex.lo = constant("expLn2Hi", 0.693359375), constant("expLn2Lo", -2.12194440e-4)
	ex.one = constant("expOne", 1)
	for i, v := range []float64{1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1} {
		ex.poly[i] = constant("expPoly"+string(rune('0'+i)), v)
	}
}

// exp replaces x by e^x; below -87.33 it gives 0, above 88.02 what 88.02 gives; NaN stays NaN (MIN and MAX return their first Go
// operand if one is NaN).
func exp(x VecVirtual) {
	small := YMM()
	VCMPPS(Imm(1), ex.least, x, small) // x < least, false for NaN
	c, n, p := YMM(), YMM(), YMM()
	VMOVUPS(ex.most, c)
	VMINPS(x, c, x)
	VMOVUPS(ex.least, c)
	VMAXPS(x, c, x)
	VMULPS(ex.log2e, x, n)
	VROUNDPS(Imm(0), n, n)
	VFNMADD231PS(ex.hi, n, x)
	VFNMADD231PS(ex.lo, n, x)
	VMOVUPS(ex.poly[0], p)
	for _, m := range ex.poly[1:] {
		VFMADD213PS(m, x, p)
	}
	VMULPS(x, p, p)
	VFMADD213PS(x, x, p) // p*r + r with p already times r: r + r^2*poly
	VADDPS(ex.one, p, p)
	VCVTPS2DQ(n, n)
	VPSLLD(Imm(23), n, n)
	VPADDD(n, p, p)
	VANDNPS(p, small, x)
}

// sigmoid replaces x by 1/(1+e^-x).
func sigmoid(x VecVirtual) {
	z, one := YMM(), YMM()
	VXORPS(z, z, z)
	VSUBPS(x, z, x)
	exp(x)
	VMOVUPS(ex.one, one)
	VADDPS(one, x, x)
	VDIVPS(x, one, x)
}

// each writes a kernel that runs body on eight elements at a time. names are the pointer parameters, dst first.
func each(name, doc string, names []string, scalar bool, body func(p map[string]Mem, a VecVirtual)) {
	sig := "func("
	for i, s := range names {
		if i > 0 {
			sig += ", "
		}
		sig += s
	}
	sig += " *float32, n int"
	if scalar {
		sig += ", a float32"
	}
	TEXT(name+"AVX2", NOSPLIT, sig+")")
	Pragma("noescape")
	Doc(name + "AVX2: " + doc)
	at := GP64()
	XORQ(at, at)
	ptr := map[string]Mem{}
	for _, s := range names {
		ptr[s] = Mem{Base: Load(Param(s), GP64()), Index: at, Scale: 1}
	}
	end := Load(Param("n"), GP64())
	SHLQ(Imm(2), end)
	var a VecVirtual
	if scalar {
		a = YMM()
		m, err := Param("a").Resolve()
		if err != nil {
			panic(err)
		}
		VBROADCASTSS(m.Addr, a)
	}
	JMP(LabelRef("test"))
	Label("loop")
	body(ptr, a)
	ADDQ(U32(32), at)
	Label("test")
	CMPQ(at, end)
	JNE(LabelRef("loop"))
	VZEROUPPER()
	RET()
}

func load(m Mem) VecVirtual {
	v := YMM()
	VMOVUPS(m, v)
	return v
}

func elementwise() {
	expTables()
	each("expShift", "dst = exp(x - a).", []string{"dst", "x"}, true, func(p map[string]Mem, a VecVirtual) {
		x := load(p["x"])
		VSUBPS(a, x, x)
		exp(x)
		VMOVUPS(x, p["dst"])
	})
	each("sigmoidMul", "dst = x * sigmoid(a*g).", []string{"dst", "x", "gate"}, true, func(p map[string]Mem, a VecVirtual) {
		g := load(p["gate"])
		VMULPS(a, g, g)
		sigmoid(g)
		VMULPS(p["x"], g, g)
		VMOVUPS(g, p["dst"])
	})
	each("silu", "dst = a*x * sigmoid(a*x).", []string{"dst", "x"}, true, func(p map[string]Mem, a VecVirtual) {
		x := load(p["x"])
		VMULPS(a, x, x)
		g := YMM()
		VMOVAPS(x, g)
		sigmoid(g)
		VMULPS(x, g, g)
		VMOVUPS(g, p["dst"])
	})
	each("siluMul", "dst = silu(g) * u.", []string{"dst", "gate", "u"}, false, func(p map[string]Mem, _ VecVirtual) {
		x := load(p["gate"])
		g := YMM()
		VMOVAPS(x, g)
		sigmoid(g)
		VMULPS(x, g, g)
		VMULPS(p["u"], g, g)
		VMOVUPS(g, p["dst"])
	})
	each("sigmoidMulAdd", "dst += x * sigmoid(g).", []string{"dst", "x", "gate"}, false, func(p map[string]Mem, _ VecVirtual) {
		g := load(p["gate"])
		sigmoid(g)
		d := load(p["dst"])
		VFMADD231PS(p["x"], g, d)
		VMOVUPS(d, p["dst"])
	})
	each("mul", "dst = x * y.", []string{"dst", "x", "y"}, false, func(p map[string]Mem, _ VecVirtual) {
		x := load(p["x"])
		VMULPS(p["y"], x, x)
		VMOVUPS(x, p["dst"])
	})
	each("mulAdd", "dst += x * y.", []string{"dst", "x", "y"}, false, func(p map[string]Mem, _ VecVirtual) {
		x, d := load(p["x"]), load(p["dst"])
		VFMADD231PS(p["y"], x, d)
		VMOVUPS(d, p["dst"])
	})
	each("scale", "dst = a * x.", []string{"dst", "x"}, true, func(p map[string]Mem, a VecVirtual) {
		x := load(p["x"])
		VMULPS(a, x, x)
		VMOVUPS(x, p["dst"])
	})
	each("scaleMul", "dst = (a * x) * y.", []string{"dst", "x", "y"}, true, func(p map[string]Mem, a VecVirtual) {
		x := load(p["x"])
		VMULPS(a, x, x)
		VMULPS(p["y"], x, x)
		VMOVUPS(x, p["dst"])
	})
	each("axpy", "dst += a * x.", []string{"dst", "x"}, true, func(p map[string]Mem, a VecVirtual) {
		d := load(p["dst"])
		VFMADD231PS(p["x"], a, d)
		VMOVUPS(d, p["dst"])
	})
	inner()
	scan()
	pause()
}

// inner: the inner product of two vectors.
func inner() {
	TEXT("innerAVX2", NOSPLIT, "func(x, y *float32, n int) float32")
	Pragma("noescape")
	Doc("innerAVX2 is the sum of x*y; n is a multiple of 8. Element i goes to lane i%32; the 32 lanes are added in a fixed tree.")
	x, y := Load(Param("x"), GP64()), Load(Param("y"), GP64())
	n := Load(Param("n"), GP64())
	acc := [4]VecVirtual{YMM(), YMM(), YMM(), YMM()}
	for _, a := range acc {
		VXORPS(a, a, a)
	}
	CMPQ(n, U32(32))
	JL(LabelRef("rest"))
	Label("loop")
	for i, a := range acc {
		v := YMM()
		VMOVUPS(Mem{Base: x, Disp: 32 * i}, v)
		VFMADD231PS(Mem{Base: y, Disp: 32 * i}, v, a)
	}
	ADDQ(U32(128), x)
	ADDQ(U32(128), y)
	SUBQ(U32(32), n)
	CMPQ(n, U32(32))
	JGE(LabelRef("loop"))
	Label("rest")
	for i := range 3 {
		CMPQ(n, U32(8))
		JL(LabelRef("sum"))
		v := YMM()
		VMOVUPS(Mem{Base: x, Disp: 32 * i}, v)
		VFMADD231PS(Mem{Base: y, Disp: 32 * i}, v, acc[i])
		SUBQ(U32(8), n)
	}
	Label("sum")
	VADDPS(acc[1], acc[0], acc[0])
	VADDPS(acc[3], acc[2], acc[2])
	VADDPS(acc[2], acc[0], acc[0])
	hi, s := XMM(), XMM()
	VEXTRACTF128(Imm(1), acc[0], hi)
	VADDPS(hi, acc[0].AsX(), s)
	VHADDPS(s, s, s)
	VHADDPS(s, s, s)
	Store(s, ReturnIndex(0))
	VZEROUPPER()
	RET()
}

// scan is the yardstick of the benchmarks: it only loads.
func scan() {
	TEXT("scanAVX2", NOSPLIT, "func(p *byte, n int) uint64")
	Pragma("noescape")
	Doc("scanAVX2 reads n bytes, a multiple of 256, and returns something that depends on them. Benchmarks compare with it.")
	p, n := Load(Param("p"), GP64()), Load(Param("n"), GP64())
	acc := [4]VecVirtual{YMM(), YMM(), YMM(), YMM()}
	for _, a := range acc {
		VPXOR(a, a, a)
	}
	Label("loop")
	for i := range 8 {
		VPOR(Mem{Base: p, Disp: 32 * i}, acc[i%4], acc[i%4])
	}
	ADDQ(U32(256), p)
	SUBQ(U32(256), n)
	JNZ(LabelRef("loop"))
	for i := 1; i < 4; i++ {
		VPOR(acc[i], acc[0], acc[0])
	}
	r := GP64()
	VMOVQ(acc[0].AsX(), r)
	Store(r, ReturnIndex(0))
	VZEROUPPER()
	RET()
}

func pause() {
	TEXT("pause", NOSPLIT, "func()")
	Doc("pause tells the processor that this is a waiting loop.")
	PAUSE()
	RET()
}
