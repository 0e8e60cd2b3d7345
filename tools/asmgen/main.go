// Command asmgen writes the assembly of internal/backend/cpu: matrix kernels for every weight format in AVX2 and AVX-512, and the
// element-wise kernels in AVX2. It is a module of its own because avo is needed only here.
//
//	cd tools/asmgen && go run . -dir ../../internal/backend/cpu
//
// Beside simd_amd64.s and its stubs it writes simd_amd64.sum: SHA-256 sums of its own sources and of what it wrote. A test of the
// cpu package recomputes them, so that neither a changed generator nor an edited output goes unnoticed where avo is absent.
package main

import (
	"bytes"
	"crypto/sha256"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	. "github.com/mmcloughlin/avo/build"
)

const (
	asmFile  = "simd_amd64.s"
	stubFile = "simd_amd64.go"
	sumFile  = "simd_amd64.sum"
)

func main() {
	dir := flag.String("dir", "../../internal/backend/cpu", "where to write")
	flag.Parse()
	if err := run(*dir); err != nil {
		fmt.Fprintln(os.Stderr, "asmgen:", err)
		os.Exit(1)
	}
}

func run(dir string) error {
	tables()
	matrix()
	elementwise()
	delta()
	attention()
	cache()

	for name, value := range map[string]string{"out": asmFile, "stubs": stubFile} {
		if err := flag.Set(name, filepath.Join(dir, value)); err != nil {
			return err
		}
	}
	if err := flag.Set("pkg", "cpu"); err != nil {
		return err
	}
	Generate() // exits on failure
	return writeSums(dir)
}

// writeSums writes one line per file: sum, two blanks, path relative to the repository with forward slashes.
func writeSums(dir string) error {
	sources, err := filepath.Glob("*")
	if err != nil {
		return err
	}
	slices.Sort(sources)
	var b bytes.Buffer
	add := func(path, name string) error {
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		text = bytes.ReplaceAll(text, []byte("\r\n"), []byte("\n"))
		fmt.Fprintf(&b, "%x  %s\n", sha256.Sum256(text), name)
		return nil
	}
	for _, s := range sources {
		if strings.HasSuffix(s, ".go") || s == "go.mod" || s == "go.sum" {
			if err := add(s, "tools/asmgen/"+s); err != nil {
				return err
			}
		}
	}
	for _, s := range []string{asmFile, stubFile} {
		if err := add(filepath.Join(dir, s), "internal/backend/cpu/"+s); err != nil {
			return err
		}
	}
	return os.WriteFile(filepath.Join(dir, sumFile), b.Bytes(), 0o666)
}
