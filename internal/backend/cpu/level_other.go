//go:build !amd64

package cpu

func best() Level { return Plain }
