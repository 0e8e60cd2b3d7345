package num

import sys "golang.org/x/sys/cpu"

// vectors tells whether the functions below may be called. Tests turn it off.
var vectors = sys.X86.HasAVX2

// groupMaxAVX2 writes the largest magnitude word of each of some groups of 16*vectors BF16 words. Neither count is zero.
//
//go:noescape
func groupMaxAVX2(dst *uint16, src *byte, groups, vectors int)

// q4GroupsAVX2 rounds and packs whole groups: roundGroup for each of them with its own reciprocal. There is at least one.
//
//go:noescape
func q4GroupsAVX2(codes, high, src *byte, inv *float32, groups int)

//go:noescape
func q5GroupsAVX2(codes, high, src *byte, inv *float32, groups int)

//go:noescape
func q6GroupsAVX2(codes, high, src *byte, inv *float32, groups int)

//go:noescape
func q8GroupsAVX2(codes, high, src *byte, inv *float32, groups int)

// nvfp4GroupsAVX2 writes the codes of quads of four groups of 16 values. The table has a row for each scale word: a magnitude above
// boundary i has a code of at least i+1, and one above the last boundary a sign. There is at least one quad.
//
//go:noescape
func nvfp4GroupsAVX2(codes, src, words *byte, table *[8]int16, quads int)

// fp8TimesAVX2 writes ToE4M3(x*by) of n BF16 values, none of which is a NaN; n is a positive multiple of 32.
//
//go:noescape
func fp8TimesAVX2(codes, src *byte, n int, by float32)

// fp8OverAVX2 writes ToE4M3(x/by) of n BF16 values and tells, by a result that is not zero, of quotients that are NaN or beyond 448, whose
// codes are undefined; n is a positive multiple of 32.
//
//go:noescape
func fp8OverAVX2(codes, src *byte, n int, by float32) (outside uint32)
