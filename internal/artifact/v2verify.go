package artifact

import (
	"fmt"
	"os"
	"path/filepath"
	"time"
)

// v2Release is a published version 2 file.
type v2Release struct {
	modelID, weightsID string
	size               int64
	sha256             string
}

var v2Releases = []v2Release{{
	"qwen3.8-flash-next", "mixed-nvfp4-fp8-ple-int4", 113_298_397_952,
	"3d383e51963aafd4318dfd04c8dc63ee7df11768de19d9ab58dbba44460d1d02",
}}

// Published gives the SHA-256 of the published file (docs/format.md 1.8.1) that
// has this file's identity and length, lower-case hex, if there is one.
func (a *V2) Published() (sha256 string, ok bool) {
	for _, r := range v2Releases {
		if a.ModelID == r.modelID && a.WeightsID == r.weightsID && a.size == r.size {
			return r.sha256, true
		}
	}
	return "", false
}

// V2Result is what VerifyV2 found. Its JSON form is part of the command line.
type V2Result struct {
	Artifact     string       `json:"artifact"`
	Container    int          `json:"container_version"` // 2
	ModelID      string       `json:"model_id"`
	WeightsID    string       `json:"weights_id"`
	Objects      int          `json:"objects"`
	PayloadBytes int64        `json:"payload_bytes"`
	FileBytes    int64        `json:"file_bytes"`
	FileSHA256   []FileDigest `json:"file_sha256,omitzero"`
	Sums         string       `json:"checksum_list,omitzero"`
	Seconds      float64      `json:"seconds"`
	Notes        []string     `json:"notes,omitzero"`
	Unchecked    []string     `json:"unchecked"` // what could not be checked with what was at hand
	Failures     []string     `json:"failures"`  // one line each
	Passed       bool         `json:"passed"`

	ObjectSHA256 Map[string] `json:"-"` // lower-case hex, in order
}

// VerifyV2 reads a whole version 2 file: its structure, the validity of every
// word, zero padding, and with FileDigests or SHA256SUMS its digest against a
// checksum list and the known release. Report and Against of the options are
// not for version 2 and are refused.
func VerifyV2(path string, o Options) (V2Result, error) {
	start := time.Now()
	r := V2Result{Artifact: path, Container: 2, Unchecked: []string{}, Failures: []string{}}
	if o.Report != "" || o.Against != "" {
		return r, fmt.Errorf("artifact %s: a version 2 file cannot be compared with a report or another artifact", path)
	}
	a, err := OpenV2(path)
	if err != nil {
		return r, err
	}
	defer a.Close()
	r.ModelID, r.WeightsID, r.Objects = a.ModelID, a.WeightsID, len(a.Objects)
	r.PayloadBytes, r.FileBytes = a.PayloadBytes(), a.size

	o.FileDigests = o.FileDigests || o.SHA256SUMS != ""
	v := &verifier{o: o, file: a.file, broken: make([]bool, 1)}
	v.planRegions()
	if o.FileDigests {
		v.total += a.size
	}
	v.checkV2Padding()
	parallel(len(v.regions), func(i int, buf []byte) { v.checkRegion(&v.regions[i], buf) })
	v.collectRegions()
	for _, h := range holes(a.Objects, a.file.total) {
		v.Notes = append(v.Notes, fmt.Sprintf("%d bytes at payload offset %d belong to no object", h.Bytes, h.Offset))
	}
	covered, err := v.checkV2Digest(a, &r)
	if err != nil {
		return r, err
	}
	if !covered {
		v.Unchecked = append(v.Unchecked, "the bytes of objects beyond the validity of their words: version 2 files hold no digest, and none was compared")
	}
	r.Failures = append(r.Failures, v.Failures...)
	r.Unchecked = append(r.Unchecked, v.Unchecked...)
	r.Notes, r.ObjectSHA256 = append(r.Notes, v.Notes...), v.ObjectSHA256
	r.Passed = len(r.Failures) == 0
	r.Seconds = time.Since(start).Seconds()
	return r, nil
}

// checkV2Padding checks the zeros between directory and payload.
func (v *verifier) checkV2Padding() {
	f, err := v.file.opened(0)
	if err != nil {
		v.failf("%v", err)
		return
	}
	v.checkZero(f, filepath.Base(v.file.path), "padding", v2HeaderSize+int64(len(v.file.text)), v.file.start)
}

// checkV2Digest computes the file's digest and compares it; it tells whether
// something vouched for it.
func (v *verifier) checkV2Digest(a *V2, r *V2Result) (bool, error) {
	if !v.o.FileDigests {
		return false, nil
	}
	got, err := v.fileDigest(a.file.path, make([]byte, 1<<20))
	if err != nil {
		return false, fmt.Errorf("artifact %s: %w", a.file.path, err)
	}
	name := filepath.Base(a.file.path)
	r.FileSHA256 = []FileDigest{{name, got}}
	sums := map[string]string(nil)
	if v.o.SHA256SUMS != "" {
		r.Sums = v.o.SHA256SUMS
		sums, err = readSums(r.Sums)
	} else {
		r.Sums, sums, err = findSums(a.file.path)
	}
	if err != nil {
		return false, err
	}
	covered := false
	if want, ok := a.Published(); ok {
		covered = true
		if got != want {
			v.failf("%s: its sha256 is %s, the published file has %s", name, got, want)
		}
	}
	if sums == nil {
		return covered, nil
	}
	switch want, ok := sums[name]; {
	case !ok:
		v.failf("%s: not listed in %s", name, r.Sums)
	case want != got:
		v.failf("%s: its sha256 is %s, %s says %s", name, got, r.Sums, want)
	default:
		covered = true
	}
	return covered, nil
}

// IsV2 tells whether a file begins as a version 2 container does.
func IsV2(path string) bool {
	f, err := os.Open(path)
	if err != nil {
		return false
	}
	defer f.Close()
	var magic [len(v2Magic)]byte
	_, err = f.ReadAt(magic[:], 0)
	return err == nil && string(magic[:]) == v2Magic
}
