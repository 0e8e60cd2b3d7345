package digest

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json/v2"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"ninfer/internal/backend/cuda/code"
)

// Stale compares the CUDA sources and machine code in the folder dir with its manifest.json and its resource report, which tools/kernelgen
// writes, and with the generated table. It returns a line for each thing that has parted and for each kernel that spills registers but those that
// known has as "KERNEL on TARGET spills BYTES bytes"; none if all is well.
func Stale[K ~int](dir string, t *code.Table[K], known ...string) []string {
	var lines []string
	say := func(format string, args ...any) { lines = append(lines, fmt.Sprintf(format, args...)) }
	var m struct {
		Archs   []string
		Headers map[string]string
		Kernels map[string]struct{ Source, Fatbin string }
	}
	text, err := os.ReadFile(filepath.Join(dir, "manifest.json"))
	if err == nil {
		err = json.Unmarshal(text, &m, json.MatchCaseInsensitiveNames(true))
	}
	if err != nil {
		return []string{err.Error()}
	}
	check := func(name, want string) {
		b, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			say("%v", err)
			return
		}
		sum := Source(string(b))
		if filepath.Ext(name) == ".fatbin" {
			s := sha256.Sum256(b)
			sum = hex.EncodeToString(s[:])
		}
		if sum != want {
			say("%s is not what the machine code was made from: run tools/kernelgen -dir with its folder", name)
		}
	}
	if have, want := "sm_"+strings.Join(m.Archs, " sm_"), strings.Join(t.Archs, " "); have != want {
		say("machine code for %s, want %s", have, want)
	}
	files, _ := filepath.Glob(filepath.Join(dir, "*"))
	found := 0
	for _, f := range files {
		switch name := filepath.Base(f); filepath.Ext(name) {
		case ".cu":
			found++
			kernel := m.Kernels[strings.TrimSuffix(name, ".cu")]
			check(name, kernel.Source)
			check(filepath.Join("fatbin", strings.TrimSuffix(name, ".cu")+".fatbin"), kernel.Fatbin)
		case ".cuh", ".h":
			check(name, m.Headers[name])
			delete(m.Headers, name)
		}
	}
	for name := range m.Headers {
		say("%s is in the manifest only", name)
	}
	if found != len(m.Kernels) || found != len(t.Sources) {
		say("%d sources, %d in the manifest, %d in the table", found, len(m.Kernels), len(t.Sources))
	}
	for _, s := range t.Sources {
		if _, ok := m.Kernels[s]; !ok {
			say("%s.cu is in the table and not in the manifest", s)
		}
	}
	return append(lines, spills(dir, t, known)...)
}

// spills is Stale's part about the resource report.
func spills[K ~int](dir string, t *code.Table[K], known []string) (lines []string) {
	text, err := os.ReadFile(filepath.Join(dir, "resources.txt"))
	if err != nil {
		return []string{err.Error()}
	}
	seen := map[string]bool{}
	for line := range strings.Lines(string(text)) {
		f := strings.Fields(line)
		if len(f) != 7 || !strings.HasPrefix(f[2], "sm_") {
			continue
		}
		seen[f[1]+" "+f[2]] = true
		if said := fmt.Sprintf("%s on %s spills %s bytes", f[1], f[2], f[6]); f[6] != "0" && !slices.Contains(known, said) {
			lines = append(lines, said)
		}
	}
	for _, k := range t.Kernels {
		for _, a := range t.Archs {
			if !seen[k.Name+" "+a] {
				lines = append(lines, fmt.Sprintf("%s on %s is not in the resource report", k.Name, a))
			}
		}
	}
	return lines
}
