//go:build !amd64

package num

// vectors: there are none here, and the functions below are never called.
var vectors = false

const noVectors = "num: no vector instructions"

func groupMaxAVX2(dst *uint16, src *byte, groups, vectors int) { panic(noVectors) }

func q4GroupsAVX2(codes, high, src *byte, inv *float32, groups int) { panic(noVectors) }

func q5GroupsAVX2(codes, high, src *byte, inv *float32, groups int) { panic(noVectors) }

func q6GroupsAVX2(codes, high, src *byte, inv *float32, groups int) { panic(noVectors) }

func q8GroupsAVX2(codes, high, src *byte, inv *float32, groups int) { panic(noVectors) }

func nvfp4GroupsAVX2(codes, src, words *byte, table *[8]int16, quads int) { panic(noVectors) }

func fp8TimesAVX2(codes, src *byte, n int, by float32) { panic(noVectors) }

func fp8OverAVX2(codes, src *byte, n int, by float32) (outside uint32) { panic(noVectors) }
