package artifact

import (
	"bufio"
	"encoding/hex"
	"encoding/json/v2"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// ReportPath is where convert puts the report of an artifact, and where Verify
// looks for it.
func ReportPath(path string) string { return path + ".conversion.json" }

// UpgradeReportPath is where the upgrade of a version 2 file puts its report.
func UpgradeReportPath(path string) string { return path + ".upgrade.json" }

// report is what Verify reads of a conversion or upgrade report; both have
// further members.
type report struct {
	path string

	ObjectSHA256    map[string]string `json:"object_sha256"`    // of every object, hex
	DirectorySHA256 string            `json:"directory_sha256"` // of the json_bytes bytes of the directory, hex
	ArtifactID      string            `json:"artifact_id"`

	// Of upgrade reports: digests of the version 2 objects, and of the
	// objects that were encoded anew.
	V2SHA256  string            `json:"v2_sha256"`
	V2Objects map[string]string `json:"v2_objects"`
	Banks     map[string]struct {
		SHA256 string `json:"sha256"`
	} `json:"mtp_banks"`
}

// readReport reads the report at path, or beside the artifact if path is
// empty; without one there it is nil.
func readReport(artifact, path string) (*report, error) {
	candidates := []string{path}
	if path == "" {
		candidates = []string{ReportPath(artifact), UpgradeReportPath(artifact)}
	}
	for _, p := range candidates {
		b, err := os.ReadFile(p)
		if errors.Is(err, fs.ErrNotExist) && path == "" {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("artifact: report: %w", err)
		}
		r := &report{path: p}
		if err := json.Unmarshal(b, r); err != nil {
			return nil, fmt.Errorf("artifact: report %s: %w", p, oneLine(err))
		}
		if r.ObjectSHA256 == nil && r.V2Objects != nil {
			r.ObjectSHA256 = r.V2Objects
			for id, bank := range r.Banks {
				r.ObjectSHA256[id] = bank.SHA256
			}
		}
		if r.ObjectSHA256 == nil && r.DirectorySHA256 == "" {
			return nil, fmt.Errorf("artifact: report %s holds no digests", p)
		}
		return r, nil
	}
	return nil, nil
}

// sumsNames are the checksum lists that are looked for beside an artifact.
var sumsNames = []string{"SHA256SUMS", "SHA256SUMS.v3"}

// readSums reads a checksum list: lines of 64 hex digits, two characters and a
// file name. The result maps names to lower-case hex.
func readSums(path string) (map[string]string, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("artifact: checksum list: %w", err)
	}
	defer f.Close()
	sums := map[string]string{}
	s := bufio.NewScanner(f)
	for n := 1; s.Scan(); n++ {
		line := strings.TrimRight(s.Text(), "\r")
		if line == "" {
			continue
		}
		digest, name, ok := strings.Cut(line, " ")
		digest = strings.ToLower(digest)
		if b, err := hex.DecodeString(digest); !ok || err != nil || len(b) != 32 || name == "" || name[0] != ' ' && name[0] != '*' || strings.TrimPrefix(name[1:], "./") == "" {
			return nil, fmt.Errorf("artifact: checksum list %s: line %d is not a digest, two characters and a name", path, n)
		}
		name = strings.TrimPrefix(name[1:], "./")
		if old, ok := sums[name]; ok && old != digest {
			return nil, fmt.Errorf("artifact: checksum list %s: line %d contradicts an earlier one about %q", path, n, name)
		}
		sums[name] = digest
	}
	if err := s.Err(); err != nil {
		return nil, fmt.Errorf("artifact: checksum list %s: %w", path, err)
	}
	return sums, nil
}

// findSums looks for a checksum list beside the artifact that lists its entry.
func findSums(artifact string) (string, map[string]string, error) {
	for _, name := range sumsNames {
		p := filepath.Join(filepath.Dir(artifact), name)
		sums, err := readSums(p)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return p, nil, err
		}
		if _, ok := sums[filepath.Base(artifact)]; ok {
			return p, sums, nil
		}
	}
	return "", nil, nil
}

// release is a published artifact whose file digests are known.
type release struct {
	entries map[string]string // recorded entry name to digest; they differ because the name is in the directory
	pinned  string            // the entry digest that the upstream tree pins
	parts   []string          // digests of parts 1, 2, ...
}

// releases are the published artifacts by id (docs/format.md 1.8.3).
var releases = map[string]release{
	"1e7e026e9f634926ae26b80f0fc8591e": {
		entries: map[string]string{
			"qwen3_8_flash_next_mixed.ninfer":    "0de7b5f6c3ac9719e1c6e5811a765fda15fb4618444343502fc798dff2282714",
			"qwen3_8_flash_next_mixed.v3.ninfer": "4a3faef781244fa431af35523d5df00d4c255f0271061c8cfe6718b17f9c66dd",
		},
		pinned: "0de7b5f6c3ac9719e1c6e5811a765fda15fb4618444343502fc798dff2282714",
		parts: []string{
			"e5d74e6a4874ef270f000799db5e171786dd685fb4c0d14c0baa075cae13cda8",
			"67a30b1e718f2205d45ed22235ea93d1c0f9f0bf7cba963155002b5bccbf7baa",
			"8bc02c7328ff27ce22858ce447afeb5a60d4d01f1f3a12955f9e2a5220780565",
		},
	},
}
