// Command ninfer converts, verifies and runs Qwen3.8-Flash-Next on one GPU or on the CPU.
package main

import (
	"os"

	"ninfer/internal/cli"
)

func main() { os.Exit(cli.Main(os.Args, os.Stdin, os.Stdout, os.Stderr)) }
