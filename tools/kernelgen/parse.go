package main

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"
)

// cstruct is a parameter struct of params.h.
type cstruct struct {
	name   string
	fields []field
}

type field struct {
	name   string
	gotype string
	count  int // elements of an array, 0 for a single value
}

func (f field) full() string {
	if f.count > 0 {
		return fmt.Sprintf("[%d]%s", f.count, f.gotype)
	}
	return f.gotype
}

// kernel is one use of NINFER_KERNEL.
type kernel struct{ name, source, params, threads string }

var (
	reComment = regexp.MustCompile(`(?s)//[^\n]*|/\*.*?\*/`)
	reStruct  = regexp.MustCompile(`(?s)struct (\w+) \{(.*?)\};`)
	reKernel  = regexp.MustCompile(`(?m)^NINFER_KERNEL\((\w+), (\w+), (\w+), \w+\)`)
	reConst   = regexp.MustCompile(`static constexpr int (\w+) = ([^;]+);`)
	reField   = regexp.MustCompile(`^(\w+)(?:\[(\d+)\])?$`)
)

// parseStructs reads the restricted C of params.h.
func parseStructs(text string) ([]cstruct, error) {
	text = reComment.ReplaceAllString(text, "")
	known := map[string]bool{}
	var list []cstruct
	for _, m := range reStruct.FindAllStringSubmatch(text, -1) {
		s := cstruct{name: m[1]}
		for _, decl := range strings.Split(m[2], ";") {
			decl = strings.TrimSpace(decl)
			if decl == "" {
				continue
			}
			gotype, rest := "", ""
			if i := strings.LastIndex(decl, "*"); i >= 0 {
				gotype, rest = "driver.Ptr", decl[i+1:]
			} else {
				ctype, names, ok := strings.Cut(decl, " ")
				if !ok {
					return nil, fmt.Errorf("struct %s: cannot read %q", s.name, decl)
				}
				rest = names
				switch {
				case ctype == "uint32_t":
					gotype = "uint32"
				case ctype == "uint64_t":
					gotype = "uint64"
				case ctype == "float":
					gotype = "float32"
				case known[ctype]:
					gotype = ctype
				default:
					return nil, fmt.Errorf("struct %s: unknown type %q", s.name, ctype)
				}
			}
			for _, n := range strings.Split(rest, ",") {
				m := reField.FindStringSubmatch(strings.TrimSpace(n))
				if m == nil {
					return nil, fmt.Errorf("struct %s: cannot read %q", s.name, decl)
				}
				f := field{name: m[1], gotype: gotype}
				if m[2] != "" {
					f.count, _ = strconv.Atoi(m[2])
				}
				s.fields = append(s.fields, f)
			}
		}
		known[s.name] = true
		list = append(list, s)
	}
	if len(list) == 0 {
		return nil, fmt.Errorf("no structs")
	}
	return list, nil
}

// parseKernels finds the kernels of a source and resolves thread counts given as constants of that source.
func parseKernels(source, text string) ([]kernel, error) {
	text = reComment.ReplaceAllString(text, "")
	consts := map[string]string{}
	for _, m := range reConst.FindAllStringSubmatch(text, -1) {
		v := m[2]
		for name, value := range consts {
			v = regexp.MustCompile(`\b`+name+`\b`).ReplaceAllString(v, value)
		}
		consts[m[1]] = "(" + v + ")"
	}
	var list []kernel
	for _, m := range reKernel.FindAllStringSubmatch(text, -1) {
		threads := m[3]
		if v, ok := consts[threads]; ok {
			threads = v
		} else if _, err := strconv.Atoi(threads); err != nil {
			return nil, fmt.Errorf("%s.cu: kernel %s: unknown thread count %s", source, m[1], threads)
		}
		list = append(list, kernel{name: m[1], source: source, params: m[2], threads: threads})
	}
	return list, nil
}
