#include "textflag.h"

// AVX2. Y12 is the order of dwords after two packs, Y13 and up are constants of each function. A pack works in halves of 16 bytes, so
// that of four vectors a, b, c, d it leaves dwords a0 b0 c0 d0 a1 b1 c1 d1.

DATA order<>+0(SB)/8, $0x0000000400000000
DATA order<>+8(SB)/8, $0x0000000500000001
DATA order<>+16(SB)/8, $0x0000000600000002
DATA order<>+24(SB)/8, $0x0000000700000003
GLOBL order<>(SB), RODATA|NOPTR, $32

DATA nibbles<>+0(SB)/8, $0x1001100110011001 // weights of two codes in a byte
GLOBL nibbles<>(SB), RODATA|NOPTR, $8

DATA pairs<>+0(SB)/8, $0x0401040104010401 // of two codes of two bits
GLOBL pairs<>(SB), RODATA|NOPTR, $8

DATA quads<>+0(SB)/8, $0x0010000100100001 // of two such pairs
GLOBL quads<>(SB), RODATA|NOPTR, $8

// func groupMaxAVX2(dst *uint16, src *byte, groups, vectors int)
TEXT ·groupMaxAVX2(SB), NOSPLIT, $0-32
	MOVQ     dst+0(FP), DI
	MOVQ     src+8(FP), SI
	MOVQ     groups+16(FP), CX
	MOVQ     vectors+24(FP), DX
	VPCMPEQW Y15, Y15, Y15
	VPSRLW   $1, Y15, Y14      // no signs

group:
	VPXOR Y0, Y0, Y0
	MOVQ  DX, BX

vector:
	VPAND   (SI), Y14, Y1
	VPMAXUW Y1, Y0, Y0
	ADDQ    $32, SI
	DECQ    BX
	JNZ     vector

	// The least of the complements.
	VEXTRACTI128 $1, Y0, X1
	VPMAXUW      X1, X0, X0
	VPXOR        X15, X0, X0
	VPHMINPOSUW  X0, X0
	VPXOR        X15, X0, X0
	VPEXTRW      $0, X0, (DI)
	ADDQ         $2, DI
	DECQ         CX
	JNZ          group
	VZEROUPPER
	RET

// FLOATS widens 32 BF16 words at off(SI) to Y0 to Y3.
#define FLOATS(off) \
	VPMOVZXWD (off+0)(SI), Y0  \
	VPMOVZXWD (off+16)(SI), Y1 \
	VPMOVZXWD (off+32)(SI), Y2 \
	VPMOVZXWD (off+48)(SI), Y3 \
	VPSLLD    $16, Y0, Y0      \
	VPSLLD    $16, Y1, Y1      \
	VPSLLD    $16, Y2, Y2      \
	VPSLLD    $16, Y3, Y3

// CODES rounds the products of 32 values at off(SI) and Y13 to bytes.
#define CODES(off, out) \
	FLOATS(off)              \
	VMULPS    Y13, Y0, Y0    \
	VMULPS    Y13, Y1, Y1    \
	VMULPS    Y13, Y2, Y2    \
	VMULPS    Y13, Y3, Y3    \
	VCVTPS2DQ Y0, Y0         \
	VCVTPS2DQ Y1, Y1         \
	VCVTPS2DQ Y2, Y2         \
	VCVTPS2DQ Y3, Y3         \
	VPACKSSDW Y1, Y0, Y0     \
	VPACKSSDW Y3, Y2, Y2     \
	VPACKSSWB Y2, Y0, Y0     \
	VPERMD    Y0, Y12, out

// NIBBLES stores the low halves of the codes in Y4 and Y5 at (DI).
#define NIBBLES \
	VPAND      Y15, Y4, Y6   \
	VPAND      Y15, Y5, Y7   \
	VPMADDUBSW Y14, Y6, Y6   \
	VPMADDUBSW Y14, Y7, Y7   \
	VPACKUSWB  Y7, Y6, Y6    \
	VPERMQ     $0xd8, Y6, Y6 \
	VMOVDQU    Y6, (DI)

#define CONSTANTS \
	VMOVDQU      order<>(SB), Y12   \
	VPBROADCASTQ nibbles<>(SB), Y14 \
	VPCMPEQW     Y15, Y15, Y15      \
	VPSRLW       $12, Y15, Y15      \
	VPACKUSWB    Y15, Y15, Y15      // 15 in every byte

// NEXT moves on by a group of so many source and high bytes.
#define NEXT(n, h) \
	ADDQ $32, DI \
	ADDQ $n, SI  \
	ADDQ $h, R8  \
	ADDQ $4, R9  \
	DECQ CX

// func q4GroupsAVX2(codes, high, src *byte, inv *float32, groups int)
TEXT ·q4GroupsAVX2(SB), NOSPLIT, $0-40
	MOVQ codes+0(FP), DI
	MOVQ high+8(FP), R8
	MOVQ src+16(FP), SI
	MOVQ inv+24(FP), R9
	MOVQ groups+32(FP), CX
	CONSTANTS

group:
	VBROADCASTSS (R9), Y13
	CODES(0, Y4)
	CODES(64, Y5)
	NIBBLES
	NEXT(128, 0)
	JNZ          group
	VZEROUPPER
	RET

// func q5GroupsAVX2(codes, high, src *byte, inv *float32, groups int)
TEXT ·q5GroupsAVX2(SB), NOSPLIT, $0-40
	MOVQ codes+0(FP), DI
	MOVQ high+8(FP), R8
	MOVQ src+16(FP), SI
	MOVQ inv+24(FP), R9
	MOVQ groups+32(FP), CX
	CONSTANTS

group:
	VBROADCASTSS (R9), Y13
	CODES(0, Y4)
	CODES(64, Y5)
	NIBBLES
	VPMOVMSKB    Y4, AX         // the fifth bit is the sign too
	VPMOVMSKB    Y5, BX
	MOVL         AX, (R8)
	MOVL         BX, 4(R8)
	NEXT(128, 8)
	JNZ          group
	VZEROUPPER
	RET

// func q6GroupsAVX2(codes, high, src *byte, inv *float32, groups int)
TEXT ·q6GroupsAVX2(SB), NOSPLIT, $0-40
	MOVQ codes+0(FP), DI
	MOVQ high+8(FP), R8
	MOVQ src+16(FP), SI
	MOVQ inv+24(FP), R9
	MOVQ groups+32(FP), CX
	CONSTANTS
	VPCMPEQW     Y10, Y10, Y10
	VPSRLW       $14, Y10, Y10
	VPACKUSWB    Y10, Y10, Y11      // 3 in every byte
	VPBROADCASTQ pairs<>(SB), Y10
	VPBROADCASTQ quads<>(SB), Y9

group:
	VBROADCASTSS (R9), Y13
	CODES(0, Y4)
	CODES(64, Y5)
	NIBBLES
	VPSRLW       $4, Y4, Y4
	VPSRLW       $4, Y5, Y5
	VPAND        Y11, Y4, Y4
	VPAND        Y11, Y5, Y5
	VPMADDUBSW   Y10, Y4, Y4
	VPMADDUBSW   Y10, Y5, Y5
	VPMADDWD     Y9, Y4, Y4
	VPMADDWD     Y9, Y5, Y5
	VPACKUSDW    Y5, Y4, Y4
	VPACKUSWB    Y4, Y4, Y4
	VPERMD       Y4, Y12, Y4
	VMOVDQU      X4, (R8)
	NEXT(128, 16)
	JNZ          group
	VZEROUPPER
	RET

// func q8GroupsAVX2(codes, high, src *byte, inv *float32, groups int)
TEXT ·q8GroupsAVX2(SB), NOSPLIT, $0-40
	MOVQ codes+0(FP), DI
	MOVQ high+8(FP), R8
	MOVQ src+16(FP), SI
	MOVQ inv+24(FP), R9
	MOVQ groups+32(FP), CX
	CONSTANTS

group:
	VBROADCASTSS (R9), Y13
	CODES(0, Y4)
	VMOVDQU      Y4, (DI)
	NEXT(64, 0)
	JNZ          group
	VZEROUPPER
	RET

// REACHED adds -1 to the words of Y2 whose magnitude in Y1 is above boundary i of the row of the table at R10.
#define REACHED(i) \
	VPBROADCASTW (2*i)(R10), Y3 \
	VPCMPGTW     Y3, Y1, Y3     \
	VPADDW       Y3, Y2, Y2

// CODES16 leaves the codes of 16 values, two in each dword, in out. The last boundary is where signs begin.
#define CODES16(i, out) \
	MOVBLZX      i(R8), R10            \
	SHLQ         $4, R10               \
	ADDQ         R9, R10               \
	VMOVDQU      (32*i)(SI), Y0        \
	VPAND        Y14, Y0, Y1           \
	VPBROADCASTW (R10), Y3             \
	VPCMPGTW     Y3, Y1, Y2            \
	REACHED(1)                         \
	REACHED(2)                         \
	REACHED(3)                         \
	REACHED(4)                         \
	REACHED(5)                         \
	REACHED(6)                         \
	VPABSW       Y2, Y2                \
	VPBROADCASTW 14(R10), Y3           \
	VPCMPGTW     Y3, Y1, Y3            \
	VPAND        Y3, Y0, Y0            \
	VPSRLW       $15, Y0, Y0           \
	VPSLLW       $3, Y0, Y0            \
	VPOR         Y0, Y2, Y2            \
	VPSRLD       $12, Y2, Y3           \
	VPOR         Y3, Y2, Y2            \
	VPAND        Y13, Y2, out

// func nvfp4GroupsAVX2(codes, src, words *byte, table *[8]int16, quads int)
TEXT ·nvfp4GroupsAVX2(SB), NOSPLIT, $0-40
	MOVQ     codes+0(FP), DI
	MOVQ     src+8(FP), SI
	MOVQ     words+16(FP), R8
	MOVQ     table+24(FP), R9
	MOVQ     quads+32(FP), CX
	VMOVDQU  order<>(SB), Y12
	VPCMPEQW Y15, Y15, Y15
	VPSRLW   $1, Y15, Y14
	VPSRLD   $24, Y15, Y13

quad:
	CODES16(0, Y4)
	CODES16(1, Y5)
	CODES16(2, Y6)
	CODES16(3, Y7)
	VPACKUSDW Y5, Y4, Y4
	VPACKUSDW Y7, Y6, Y6
	VPACKUSWB Y6, Y4, Y4
	VPERMD    Y4, Y12, Y4
	VMOVDQU   Y4, (DI)
	ADDQ      $32, DI
	ADDQ      $128, SI
	ADDQ      $4, R8
	DECQ      CX
	JNZ       quad
	VZEROUPPER
	RET

// E4M3 leaves the codes of the 8 binary32 values of x, clamped to 448, in its dwords; a NaN is taken for 448.
//
// As in ToE4M3: both cases are computed and one selected. Y4 to Y7 are used.
#define E4M3(x) \
	VPSRLD    $24, x, Y4      \
	VPAND     Y8, Y4, Y4      \
	VPAND     Y14, x, x       \
	VPMINSD   Y13, x, x       \
	VPSRLD    $20, x, Y5      \
	VPAND     Y9, Y5, Y5      \
	VPADDD    Y10, Y5, Y5     \
	VPADDD    x, Y5, Y5       \
	VPSRLD    $20, Y5, Y5     \
	VADDPS    Y11, x, Y6      \
	VPSUBD    Y11, Y6, Y6     \
	VPCMPGTD  x, Y15, Y7      \
	VPBLENDVB Y7, Y6, Y5, x   \
	VPOR      Y4, x, x

// fp8 constants: sign bit of a code, the last bit that stays, what rounds up and moves the exponent, 2^14, no sign, 448, 2^-6.
DATA fp8<>+0(SB)/4, $0x00000080
DATA fp8<>+4(SB)/4, $0x00000001
DATA fp8<>+8(SB)/4, $0xc407ffff // 0x7ffff - (127-7)<<23
DATA fp8<>+12(SB)/4, $0x46800000
DATA fp8<>+16(SB)/4, $0x7fffffff
DATA fp8<>+20(SB)/4, $0x43e00000
DATA fp8<>+24(SB)/4, $0x3c800000
GLOBL fp8<>(SB), RODATA|NOPTR, $28

#define FP8CONSTANTS \
	VPBROADCASTD fp8<>+0(SB), Y8      \
	VPBROADCASTD fp8<>+4(SB), Y9      \
	VPBROADCASTD fp8<>+8(SB), Y10     \
	VPBROADCASTD fp8<>+12(SB), Y11    \
	VPBROADCASTD fp8<>+16(SB), Y14    \
	VPBROADCASTD fp8<>+20(SB), Y13    \
	VPBROADCASTD fp8<>+24(SB), Y15

// FP8STORE encodes and stores Y0 to Y3.
#define FP8STORE \
	E4M3(Y0)                          \
	E4M3(Y1)                          \
	E4M3(Y2)                          \
	E4M3(Y3)                          \
	VPACKUSDW Y1, Y0, Y0              \
	VPACKUSDW Y3, Y2, Y2              \
	VPACKUSWB Y2, Y0, Y0              \
	VMOVDQU   order<>(SB), Y4         \
	VPERMD    Y0, Y4, Y0              \
	VMOVDQU   Y0, (DI)                \
	ADDQ      $32, DI                 \
	ADDQ      $64, SI                 \
	SUBQ      $32, CX

// func fp8TimesAVX2(codes, src *byte, n int, by float32)
TEXT ·fp8TimesAVX2(SB), NOSPLIT, $0-28
	MOVQ         codes+0(FP), DI
	MOVQ         src+8(FP), SI
	MOVQ         n+16(FP), CX
	VBROADCASTSS by+24(FP), Y12
	FP8CONSTANTS

vector:
	FLOATS(0)
	VMULPS Y12, Y0, Y0
	VMULPS Y12, Y1, Y1
	VMULPS Y12, Y2, Y2
	VMULPS Y12, Y3, Y3
	FP8STORE
	JNZ    vector
	VZEROUPPER
	RET

// OUTSIDE notes in R8 whether a magnitude of x is above 448.
#define OUTSIDE(x) \
	VPAND     Y14, x, Y4     \
	VPCMPGTD  Y13, Y4, Y4    \
	VPMOVMSKB Y4, AX         \
	ORL       AX, R8

// func fp8OverAVX2(codes, src *byte, n int, by float32) (outside uint32)
TEXT ·fp8OverAVX2(SB), NOSPLIT, $0-36
	MOVQ         codes+0(FP), DI
	MOVQ         src+8(FP), SI
	MOVQ         n+16(FP), CX
	VBROADCASTSS by+24(FP), Y12
	FP8CONSTANTS
	XORL R8, R8

vector:
	FLOATS(0)
	VDIVPS Y12, Y0, Y0
	VDIVPS Y12, Y1, Y1
	VDIVPS Y12, Y2, Y2
	VDIVPS Y12, Y3, Y3
	OUTSIDE(Y0)
	OUTSIDE(Y1)
	OUTSIDE(Y2)
	OUTSIDE(Y3)
	FP8STORE
	JNZ    vector
	VZEROUPPER
	MOVL   R8, outside+32(FP)
	RET
