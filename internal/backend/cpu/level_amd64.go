package cpu

import sys "golang.org/x/sys/cpu"

func best() Level {
	x := &sys.X86
	switch {
	case !x.HasAVX2 || !x.HasFMA || !x.HasF16C:
		return Plain
	case x.HasAVX512F && x.HasAVX512BW && x.HasAVX512DQ && x.HasAVX512VL:
		return AVX512
	}
	return AVX2
}
