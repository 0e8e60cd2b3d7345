// Command kernelgen compiles the CUDA kernels and writes everything derived from their sources.
//
//	go run ./tools/kernelgen [-dir internal/backend/cuda/kernels] [-nvcc nvcc] [-go-only]
//
// It reads params.h (the parameter structs) and every *.cu (the kernels, found by NINFER_KERNEL), and writes
//
//	sizes_gen.cuh    sizes and offsets as the compiler sees them, read back at start and compared with Go's
//	kernels_gen.go   Go mirrors of the structs, the table of kernels, the architectures
//	fatbin/*.fatbin  machine code for every architecture, one file a source
//	manifest.json    SHA-256 of sources and headers (without comments) and of machine code, with the compiler and its flags
//	resources.txt    registers, shared memory and spills of every kernel on every architecture
//
// With -go-only nothing is compiled and only the first two are written: on a machine without nvcc. The package's tests then fail
// until the machine code is made again.
package main

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json/jsontext"
	"encoding/json/v2"
	"errors"
	"flag"
	"fmt"
	"go/format"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"

	"ninfer/internal/backend/cuda/kernels/digest"
)

// archs are the targets: H100/H200, and RTX Blackwell. Both need their own "a" code, which no other GPU can run.
var archs = []string{"90a", "120a"}

// targets is archs, or what -archs says.
var targets = archs

var flags = []string{"-std=c++17", "-O3", "-Xfatbin=-compress-all", "-Xptxas=-v"}

func main() {
	dir := flag.String("dir", "internal/backend/cuda/kernels", "folder of the kernels")
	nvcc := flag.String("nvcc", "nvcc", "compiler")
	goOnly := flag.Bool("go-only", false, "write the generated sources, compile nothing")
	only := flag.String("archs", "", "compile for these targets only (comma separated): for trials, not for committing")
	flag.Parse()
	if *only != "" {
		targets = strings.Split(*only, ",")
	}
	if err := run(*dir, *nvcc, *goOnly); err != nil {
		fmt.Fprintln(os.Stderr, "kernelgen:", err)
		os.Exit(1)
	}
}

func run(dir, nvcc string, goOnly bool) error {
	text, err := os.ReadFile(filepath.Join(dir, "params.h"))
	if err != nil {
		return err
	}
	structs, err := parseStructs(string(text))
	if err != nil {
		return fmt.Errorf("params.h: %w", err)
	}
	sources, err := filepath.Glob(filepath.Join(dir, "*.cu"))
	if err != nil {
		return err
	}
	var list []kernel
	for _, s := range sources {
		text, err := os.ReadFile(s)
		if err != nil {
			return err
		}
		ks, err := parseKernels(strings.TrimSuffix(filepath.Base(s), ".cu"), string(text))
		if err != nil {
			return err
		}
		list = append(list, ks...)
	}
	if err := os.WriteFile(filepath.Join(dir, "sizes_gen.cuh"), sizesHeader(structs), 0o644); err != nil {
		return err
	}
	code, err := goSource(structs, list, sources)
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(dir, "kernels_gen.go"), code, 0o644); err != nil {
		return err
	}
	if goOnly {
		return nil
	}
	return compile(dir, nvcc, sources)
}

type manifest struct {
	Compiler string              `json:"compiler"`
	Flags    []string            `json:"flags"`
	Archs    []string            `json:"archs"`
	Headers  map[string]string   `json:"headers"`
	Kernels  map[string]fileSums `json:"kernels"`
}

type fileSums struct {
	Source string `json:"source"`
	Fatbin string `json:"fatbin"`
}

// sum is the SHA-256 of a file, of a source without comments and spacing.
func sum(path string) (string, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return "", err
	}
	if filepath.Ext(path) != ".fatbin" {
		return digest.Source(string(b)), nil
	}
	s := sha256.Sum256(b)
	return hex.EncodeToString(s[:]), nil
}

func compile(dir, nvcc string, sources []string) error {
	version, err := exec.Command(nvcc, "--version").Output()
	if err != nil {
		return fmt.Errorf("%s: %w", nvcc, err)
	}
	lines := strings.Split(strings.TrimSpace(string(version)), "\n")
	m := manifest{Compiler: lines[len(lines)-1], Flags: flags, Archs: targets, Headers: map[string]string{}, Kernels: map[string]fileSums{}}
	if err := os.MkdirAll(filepath.Join(dir, "fatbin"), 0o755); err != nil {
		return err
	}
	reports := make([]string, len(sources))
	errs := make([]error, len(sources))
	var wg sync.WaitGroup
	for i, src := range sources {
		wg.Go(func() { reports[i], errs[i] = compileOne(dir, nvcc, src) })
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		return err
	}
	for _, src := range sources {
		name := strings.TrimSuffix(filepath.Base(src), ".cu")
		var s fileSums
		if s.Source, err = sum(src); err != nil {
			return err
		}
		if s.Fatbin, err = sum(filepath.Join(dir, "fatbin", name+".fatbin")); err != nil {
			return err
		}
		m.Kernels[name] = s
	}
	for _, pattern := range []string{"*.cuh", "*.h"} {
		files, err := filepath.Glob(filepath.Join(dir, pattern))
		if err != nil {
			return err
		}
		for _, f := range files {
			if m.Headers[filepath.Base(f)], err = sum(f); err != nil {
				return err
			}
		}
	}
	b, err := json.Marshal(m, json.Deterministic(true), jsontext.WithIndent("  "))
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(dir, "manifest.json"), append(b, '\n'), 0o644); err != nil {
		return err
	}
	report := "Compiler: " + m.Compiler + "\nRegisters a thread, static shared memory and spilled bytes of each kernel. Written by tools/kernelgen.\n\n"
	report += fmt.Sprintf("%-8s %-24s %-8s %9s %7s %6s %6s\n", "source", "kernel", "target", "registers", "shared", "stack", "spills")
	report += strings.Join(reports, "")
	return os.WriteFile(filepath.Join(dir, "resources.txt"), []byte(report), 0o644)
}

func compileOne(dir, nvcc, src string) (string, error) {
	name := strings.TrimSuffix(filepath.Base(src), ".cu")
	args := slices.Concat([]string{"-fatbin", "-o", filepath.Join(dir, "fatbin", name+".fatbin")}, flags)
	for _, a := range targets {
		args = append(args, "-gencode=arch=compute_"+a+",code=sm_"+a)
	}
	var out bytes.Buffer
	cmd := exec.Command(nvcc, append(args, src)...)
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("%s: %w\n%s", src, err, out.String())
	}
	return resources(name, out.String()), nil
}

var (
	reEntry  = regexp.MustCompile(`Compiling entry function '(\w+)' for '(\w+)'`)
	reStack  = regexp.MustCompile(`(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads`)
	reUsed   = regexp.MustCompile(`Used (\d+) registers`)
	reShared = regexp.MustCompile(`(\d+) bytes smem`)
)

// resources turns ptxas -v output into one line a kernel and target, sorted.
func resources(source, out string) string {
	var lines []string
	var name, arch, stack, spill string
	for line := range strings.Lines(out) {
		if m := reEntry.FindStringSubmatch(line); m != nil {
			name, arch, stack, spill = m[1], m[2], "0", "0"
		} else if m := reStack.FindStringSubmatch(line); m != nil {
			stack, spill = m[1], m[2]
			if m[3] != "0" {
				spill = m[2] + "+" + m[3]
			}
		} else if m := reUsed.FindStringSubmatch(line); m != nil {
			shared := "0"
			if s := reShared.FindStringSubmatch(line); s != nil {
				shared = s[1]
			}
			lines = append(lines, fmt.Sprintf("%-8s %-24s %-8s %9s %7s %6s %6s\n", source, name, arch, m[1], shared, stack, spill))
		}
	}
	slices.Sort(lines)
	return strings.Join(lines, "")
}

func goSource(structs []cstruct, list []kernel, sources []string) ([]byte, error) {
	var b bytes.Buffer
	b.WriteString("// Code generated by tools/kernelgen from params.h and *.cu. DO NOT EDIT.\n\npackage kernels\n\n")
	b.WriteString("import (\n\t\"unsafe\"\n\n\t\"ninfer/internal/backend/cuda/code\"\n\t\"ninfer/internal/backend/cuda/driver\"\n)\n")
	b.WriteString("\n// ID names a kernel.\ntype ID int\n\n// The kernels.\nconst (\n")
	for i, k := range list {
		if i == 0 {
			fmt.Fprintf(&b, "\t%s ID = iota // %s\n", goName(k.name), k.params)
		} else {
			fmt.Fprintf(&b, "\t%s // %s\n", goName(k.name), k.params)
		}
	}
	b.WriteString(")\n\n// Name is the kernel's name.\nfunc (k ID) Name() string { return table.Kernels[k].Name }\n\nvar table = code.Table[ID]{\n\tArchs: []string{")
	for _, a := range archs {
		fmt.Fprintf(&b, "\"sm_%s\", ", a)
	}
	b.WriteString("},\n\tSources: []string{")
	for _, s := range sources {
		fmt.Fprintf(&b, "%q, ", strings.TrimSuffix(filepath.Base(s), ".cu"))
	}
	b.WriteString("},\n\tKernels: []code.Kernel{\n")
	for _, k := range list {
		fmt.Fprintf(&b, "\t\t{Name: %q, Source: %q, Threads: %s},\n", k.name, k.source, k.threads)
	}
	b.WriteString("\t},\n\tLayout: layout,\n\tSizes: Sizes,\n\tFiles: fatbins,\n}\n\nvar _ = code.SizesParams(SizesParams{})\n")
	for _, s := range structs {
		fmt.Fprintf(&b, "\n// %s mirrors the struct of that name in params.h.\ntype %s struct {\n", s.name, s.name)
		for _, f := range s.fields {
			fmt.Fprintf(&b, "\t%s %s\n", goName(f.name), f.full())
		}
		b.WriteString("}\n")
	}
	b.WriteString("\n// layout is the size of every struct, followed by the offsets of its fields.\nvar layout = []uintptr{\n")
	for _, s := range structs {
		fmt.Fprintf(&b, "\tunsafe.Sizeof(%s{}),\n", s.name)
		for _, f := range s.fields {
			fmt.Fprintf(&b, "\tunsafe.Offsetof(%s{}.%s),\n", s.name, goName(f.name))
		}
	}
	b.WriteString("}\n")
	return format.Source(b.Bytes())
}

func goName(s string) string {
	var b strings.Builder
	for _, part := range strings.Split(s, "_") {
		b.WriteString(strings.ToUpper(part[:1]) + part[1:])
	}
	return b.String()
}

func sizesHeader(structs []cstruct) []byte {
	var b bytes.Buffer
	b.WriteString("// Code generated by tools/kernelgen from params.h. DO NOT EDIT.\n#pragma once\n#include <cstddef>\n#include \"params.h\"\n\n")
	b.WriteString("__device__ const uint32_t kSizes[] = {\n")
	n := 0
	for _, s := range structs {
		fmt.Fprintf(&b, "  sizeof(%s),", s.name)
		n++
		for _, f := range s.fields {
			fmt.Fprintf(&b, " offsetof(%s, %s),", s.name, f.name)
			n++
		}
		b.WriteString("\n")
	}
	fmt.Fprintf(&b, "};\nstatic constexpr uint32_t kSizeCount = %d;\n", n)
	return b.Bytes()
}
