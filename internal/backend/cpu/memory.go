package cpu

import (
	"bufio"
	"io/fs"
	"path"
	"strconv"
	"strings"
)

// availableIn reads how many bytes programs can still take on Linux, from the root of its file system: what the kernel estimates, what is
// mapped from files counting as free, and no more than the memory limit of the process's group leaves. Without an estimate ok is false.
func availableIn(root fs.FS) (bytes int64, ok bool) {
	text, err := fs.ReadFile(root, "proc/meminfo")
	if err != nil {
		return 0, false
	}
	fields := fieldsOf(string(text))
	kib, ok := fields["MemAvailable:"]
	if !ok {
		return 0, false
	}
	bytes = kib << 10
	for _, dir := range groups(root) {
		limit, ok1 := number(root, path.Join(dir, "memory.max")) // "max" is none
		used, ok2 := number(root, path.Join(dir, "memory.current"))
		if !ok1 || !ok2 {
			continue
		}
		stat, _ := fs.ReadFile(root, path.Join(dir, "memory.stat"))
		files := fieldsOf(string(stat))
		bytes = min(bytes, limit-used+files["active_file"]+files["inactive_file"])
	}
	return max(bytes, 0), true
}

// groups are the folders of the process's control group and of those above it, in the second version's single tree.
func groups(root fs.FS) []string {
	text, _ := fs.ReadFile(root, "proc/self/cgroup")
	dirs := []string{"sys/fs/cgroup"}
	for line := range strings.Lines(string(text)) {
		name, ok := strings.CutPrefix(strings.TrimSpace(line), "0::/")
		for ok && name != "" && name != "." {
			dirs = append(dirs, path.Join("sys/fs/cgroup", name))
			name = path.Dir(name)
		}
	}
	return dirs
}

func number(root fs.FS, name string) (int64, bool) {
	text, err := fs.ReadFile(root, name)
	if err != nil {
		return 0, false
	}
	n, err := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64)
	return n, err == nil
}

// fieldsOf reads lines of a name and a number.
func fieldsOf(text string) map[string]int64 {
	m := map[string]int64{}
	lines := bufio.NewScanner(strings.NewReader(text))
	for lines.Scan() {
		if f := strings.Fields(lines.Text()); len(f) >= 2 {
			if n, err := strconv.ParseInt(f[1], 10, 64); err == nil {
				m[f[0]] = n
			}
		}
	}
	return m
}
