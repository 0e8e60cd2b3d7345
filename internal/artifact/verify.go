package artifact

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json/jsontext"
	"errors"
	"fmt"
	"hash"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"ninfer/internal/num"
)

// Options say what Verify compares an artifact with. The zero value uses what
// lies beside the artifact.
type Options struct {
	// Report is a conversion or upgrade report. Empty: PATH.conversion.json
	// or PATH.upgrade.json if there.
	Report string
	// FileDigests also computes the SHA-256 of every file, and compares it
	// with SHA256SUMS and with the digests of known releases.
	FileDigests bool
	// SHA256SUMS is a checksum list that must name every file; it implies
	// FileDigests. Empty: with FileDigests, SHA256SUMS or SHA256SUMS.v3
	// beside the artifact if it lists the entry.
	SHA256SUMS string
	// Against is the entry of another artifact that must say and hold the
	// same; its split and id may differ.
	Against string
	// Progress, if set, is called now and then, by one goroutine at a time,
	// with the bytes read so far and in all.
	Progress func(done, total int64)
}

// FileDigest is the SHA-256 of one file of an artifact.
type FileDigest struct {
	File   string `json:"file"`
	SHA256 string `json:"sha256"`
}

// Result is what Verify found. Its JSON form is part of the command line.
type Result struct {
	Artifact     string       `json:"artifact"`
	Objects      int          `json:"objects"`
	Bindings     int          `json:"bindings"`
	Uses         int          `json:"uses"`
	Files        int          `json:"files"`
	PayloadBytes int64        `json:"payload_bytes"`
	FileBytes    int64        `json:"file_bytes"`
	ArtifactID   string       `json:"artifact_id"`
	IDKind       string       `json:"artifact_id_kind"` // content, upgrade or unknown
	FileSHA256   []FileDigest `json:"file_sha256,omitzero"`
	Report       string       `json:"report,omitzero"`         // path of the report used
	Sums         string       `json:"checksum_list,omitzero"`  // path of the checksum list used
	Against      string       `json:"against,omitzero"`        // path of the other artifact
	ReportEqual  int          `json:"objects_equal_to_report"` // objects whose digest the report confirms
	Seconds      float64      `json:"seconds"`
	Notes        []string     `json:"notes,omitzero"` // worth saying, not wrong
	// Unchecked says what could not be checked with what was at hand.
	Unchecked []string `json:"unchecked"`
	Failures  []string `json:"failures"` // one line each
	Passed    bool     `json:"passed"`   // no failures

	// ObjectSHA256 holds the digest of every object that could be read,
	// lower-case hex, in order.
	ObjectSHA256 Map[string] `json:"-"`
}

// verifier is one run of Verify.
type verifier struct {
	Result
	o      Options
	report *report
	file   *File

	regions []verifyRegion
	broken  []bool // by part: it could not be opened

	total    int64
	done     atomic.Int64
	progress sync.Mutex
}

// verifyRegion is an object, a gap or a hole, in payload order.
type verifyRegion struct {
	object   *Object // nil for gaps and holes
	next     *Object // of a gap: the object after it
	hole     bool
	off, len int64

	digest   [sha256.Size]byte
	hashed   bool
	failures []string
	skipped  bool // lies in a file that could not be opened
}

func (r *verifyRegion) name() string {
	if r.hole {
		return fmt.Sprintf("unreferenced bytes at %d", r.off)
	}
	return r.object.kind() + " " + quote(r.object.ID)
}

// Verify reads a whole artifact and checks its structure (rows R1 to R23 for
// all objects and files, zero padding, the planned directory length), that
// every word is valid in its format, and its content: against the id where the
// id was derived from the content, and against whatever Options names. What is
// wrong with the artifact is in the result's failures; the error is for what
// kept Verify from looking, such as an entry or report that cannot be read.
func Verify(path string, o Options) (Result, error) {
	start := time.Now()
	v := &verifier{o: o}
	v.Artifact, v.Against = path, o.Against
	v.Unchecked, v.Failures = []string{}, []string{}
	err := v.run(path)
	if v.file != nil {
		v.file.Close()
	}
	if err != nil {
		return v.Result, err
	}
	for _, list := range [][]string{v.Failures, v.Notes, v.Unchecked} {
		for i := range list { // they name parts
			list[i] = plain(list[i])
		}
	}
	v.Passed = len(v.Failures) == 0
	v.Seconds = time.Since(start).Seconds()
	return v.Result, nil
}

func (v *verifier) failf(format string, args ...any) {
	v.Failures = append(v.Failures, fmt.Sprintf(format, args...))
}

func (v *verifier) run(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return fmt.Errorf("artifact: %w", err)
	}
	defer f.Close()
	if v.report, err = readReport(path, v.o.Report); err != nil {
		if v.o.Report != "" {
			return err
		}
		v.failf("%v", err)
	}
	if v.report != nil {
		v.Report = v.report.path
	}
	// Before the directory is parsed: damage in it shows best as a wrong
	// digest, whatever it does to the syntax.
	directoryDamaged := v.checkDirectoryDigest(path, f)

	a, err := Open(path)
	if err != nil {
		var fe *FormatError
		if !errors.As(err, &fe) {
			return err
		}
		v.failf("%v", err)
		return nil
	}
	v.file = a
	d := a.Directory()
	v.Objects, v.Bindings, v.Uses, v.Files = len(d.Objects), d.Bindings.Len(), len(d.Uses), len(d.Files)
	v.PayloadBytes, v.FileBytes, v.ArtifactID = a.total, a.FileBytes(), FormatID(a.id)

	v.checkEntryFraming(f)
	v.checkParts()
	v.planRegions()
	var against *File
	if v.o.Against != "" {
		if against, err = Open(v.o.Against); err != nil {
			return err
		}
		defer against.Close()
		v.total += a.total
	}
	if v.o.SHA256SUMS != "" {
		v.o.FileDigests = true
	}
	if v.o.FileDigests {
		v.total += v.FileBytes
	}
	parallel(len(v.regions), func(i int, buf []byte) { v.checkRegion(&v.regions[i], buf) })
	v.collectRegions()
	reportCovers := v.compareReport()
	idCovers := v.checkID(directoryDamaged)
	sumsCover, err := v.checkFileDigests()
	if err != nil {
		return err
	}
	if against != nil {
		v.compareWith(against)
	}
	if !reportCovers && !idCovers && !sumsCover && against == nil {
		v.Unchecked = append(v.Unchecked, "the bytes of objects beyond the validity of their words: the artifact id was not derived from the content, and no report, checksum list or other copy was given")
	}
	return nil
}

// checkDirectoryDigest compares the directory with the report, if the header
// is intact enough to find it. It reports whether they differ.
func (v *verifier) checkDirectoryDigest(path string, f *os.File) bool {
	if v.report == nil || v.report.DirectorySHA256 == "" {
		return false
	}
	info, err := f.Stat()
	if err != nil {
		return false
	}
	_, text, err := entryFraming(path, f, info.Size())
	if err != nil {
		return false // Open says why
	}
	sum := sha256.Sum256(text)
	if got := hex.EncodeToString(sum[:]); got != strings.ToLower(v.report.DirectorySHA256) {
		v.failf("directory: its sha256 is %s, the report says %s (or json_bytes in the header is damaged)", got, v.report.DirectorySHA256)
		return true
	}
	return false
}

// checkEntryFraming checks what writers must do and readers may ignore.
func (v *verifier) checkEntryFraming(f *os.File) {
	a := v.file
	n, end := int64(len(a.text)), a.dir.textEnd
	planned := up(headerSize+int64(end), pageSize) - headerSize
	switch {
	case (headerSize+n)%pageSize != 0:
		v.failf("header: json_bytes is %d, but 32 + json_bytes must be a multiple of %d", n, pageSize)
	case n != planned && n != planned+pageSize:
		// One page more is possible: the reserve never shrinks again when a
		// shorter list of files follows from it.
		v.failf("header: json_bytes is %d, a directory of %d bytes is written with %d", n, end, planned)
	}
	if i := bytes.IndexFunc(a.text[end:], func(r rune) bool { return r != ' ' }); i >= 0 {
		v.failf("directory: byte %d is 0x%02x, only spaces may follow the JSON text", headerSize+end+i, a.text[end+i])
	}
	if a.text[0] != '{' {
		v.failf("directory: byte %d is 0x%02x, the JSON text must begin at once", headerSize, a.text[0])
	}
	v.checkZero(f, filepath.Base(a.path), "entry padding", headerSize+n, a.start)
}

// checkZero checks that the bytes [from,to) of a file are zero.
func (v *verifier) checkZero(f io.ReaderAt, name, what string, from, to int64) {
	b := make([]byte, to-from)
	if _, err := f.ReadAt(b, from); err != nil && len(b) > 0 {
		v.failf("%s: reading %s: %v", what, name, cause(err))
		return
	}
	if i := nonZero(b); i >= 0 {
		v.failf("%s: byte %d of %s is 0x%02x, it must be zero", what, from+int64(i), name, b[i])
	}
}

// nonZero is the index of the first byte that is not zero, or -1.
func nonZero(b []byte) int {
	return bytes.IndexFunc(b, func(r rune) bool { return r != 0 })
}

func (v *verifier) checkParts() {
	v.broken = make([]bool, len(v.file.parts))
	for i, p := range v.file.parts {
		if i == 0 {
			continue
		}
		f, err := v.file.opened(i)
		if err != nil {
			v.failf("part header: %v", err)
			v.broken[i] = true
			continue
		}
		v.checkZero(f, filepath.Base(p.path), "part header", headerSize, partStart)
	}
}

// planRegions cuts the payload into objects, gaps and holes.
func (v *verifier) planRegions() {
	d := v.file.Directory()
	isHole := map[int64]bool{}
	for _, h := range holes(d.Objects, v.file.total) {
		isHole[h.Offset] = true
	}
	end := int64(0)
	for i := range d.Objects {
		o := &d.Objects[i]
		if o.Offset > end {
			v.regions = append(v.regions, verifyRegion{next: o, hole: isHole[end], off: end, len: o.Offset - end})
		}
		v.regions = append(v.regions, verifyRegion{object: o, off: o.Offset, len: o.Bytes})
		end = o.end()
	}
	if end < v.file.total {
		v.regions = append(v.regions, verifyRegion{hole: true, off: end, len: v.file.total - end})
	}
	v.total += v.file.total
}

// parallel calls f for 0..n-1 from as many goroutines as there are
// processors, each with a buffer of its own.
func parallel(n int, f func(i int, buf []byte)) {
	var next atomic.Int64
	var wg sync.WaitGroup
	for range min(n, runtime.GOMAXPROCS(0)) {
		wg.Go(func() {
			buf := make([]byte, 1<<20)
			for {
				i := int(next.Add(1)) - 1
				if i >= n {
					return
				}
				f(i, buf)
			}
		})
	}
	wg.Wait()
}

// advance counts bytes for the progress.
func (v *verifier) advance(n int) {
	done := v.done.Add(int64(n))
	if v.o.Progress != nil {
		v.progress.Lock()
		v.o.Progress(done, v.total)
		v.progress.Unlock()
	}
}

// readRegion feeds the bytes of a region to f piece by piece.
func (v *verifier) readRegion(a *File, off, n int64, buf []byte, f func(at int64, b []byte) bool) error {
	for at := int64(0); at < n; {
		b := buf[:min(int64(len(buf)), n-at)]
		if _, err := a.ReadAt(b, off+at); err != nil {
			return err
		}
		v.advance(len(b))
		if !f(at, b) {
			return nil
		}
		at += int64(len(b))
	}
	return nil
}

func (v *verifier) checkRegion(r *verifyRegion, buf []byte) {
	fail := func(format string, args ...any) { r.failures = append(r.failures, fmt.Sprintf(format, args...)) }
	_ = v.file.pieces(r.off, r.len, func(i int, _, _ int64) error {
		r.skipped = r.skipped || v.broken[i]
		return nil
	})
	var format num.Format
	if o := r.object; o != nil {
		var err error
		if o.Resource {
			err = checkResource(v.file.path, o)
		} else {
			format, _, err = checkTensor(v.file.path, o)
		}
		var fe *FormatError
		if errors.As(err, &fe) {
			fail("%s: %s", r.name(), fe.reason())
		}
	}
	if r.skipped {
		return
	}
	if r.object == nil && !r.hole {
		err := v.readRegion(v.file, r.off, r.len, buf, func(at int64, b []byte) bool {
			i := nonZero(b)
			if i >= 0 {
				file, pos := v.file.position(r.off + at + int64(i))
				fail("gap before %s %s: payload byte %d (byte %d of %s) is 0x%02x, it must be zero",
					r.next.kind(), quote(r.next.ID), r.off+at+int64(i), pos, file, b[i])
			}
			return i < 0
		})
		if err != nil {
			fail("gap before %s: %v", quote(r.next.ID), err)
		}
		return
	}
	h := sha256.New()
	nan := int64(-1)
	err := v.readRegion(v.file, r.off, r.len, buf, func(at int64, b []byte) bool {
		h.Write(b)
		if format == num.FP8 && nan < 0 {
			if i := num.E4M3NaN(b); i >= 0 {
				nan = at + int64(i)
			}
		}
		return true
	})
	if err != nil {
		fail("%s: %v", r.name(), err)
		return
	}
	h.Sum(r.digest[:0])
	r.hashed = true
	if nan >= 0 {
		fail("%s: fp8 code at offset %d is NaN", r.name(), nan)
	}
	// Words of the direct formats are valid whatever they are, so objects of
	// many gigabytes need no view.
	if o := r.object; o != nil && !o.Resource && len(r.failures) == 0 && o.Layout != num.Contiguous.String() {
		t, err := v.file.Tensor(o.ID)
		if err == nil {
			err = t.Validate()
		}
		if err != nil {
			fail("%s: %v", r.name(), err)
		}
	}
}

// position is the file and the offset in it of a payload byte.
func (a *File) position(off int64) (name string, at int64) {
	p := a.parts[a.locate(off)]
	return filepath.Base(p.path), p.start + off - p.base
}

// collectRegions gathers failures and digests in payload order.
func (v *verifier) collectRegions() {
	skipped := 0
	for i := range v.regions {
		r := &v.regions[i]
		v.Failures = append(v.Failures, r.failures...)
		if r.skipped {
			skipped++
		}
		if r.object != nil && r.hashed {
			v.ObjectSHA256.Set(r.object.ID, hex.EncodeToString(r.digest[:]))
		}
	}
	if skipped > 0 {
		v.Unchecked = append(v.Unchecked, fmt.Sprintf("%d objects and gaps that lie in files that could not be opened", skipped))
	}
}

// compareReport compares object digests with the report; it tells whether the
// report has one for every object.
func (v *verifier) compareReport() bool {
	if v.report == nil || v.report.ObjectSHA256 == nil {
		return false
	}
	covered := true
	for i := range v.regions {
		r := &v.regions[i]
		if r.object == nil {
			covered = covered && !r.hole
			continue
		}
		want, ok := v.report.ObjectSHA256[r.object.ID]
		if !ok {
			covered = false
			v.failf("%s: the report %s has no digest for it", r.name(), v.report.path)
			continue
		}
		if !r.hashed {
			continue
		}
		if got := hex.EncodeToString(r.digest[:]); got != strings.ToLower(want) {
			v.failf("%s: its sha256 is %s, the report says %s", r.name(), got, want)
		} else {
			v.ReportEqual++
		}
	}
	for id := range v.report.ObjectSHA256 {
		if _, ok := v.file.Object(id); !ok {
			v.failf("the report %s has a digest for %s, which the artifact lacks", v.report.path, quote(id))
		}
	}
	return covered
}

// near tells whether an id looks like another one that was damaged.
func near(a, b [16]byte) bool {
	equal := 0
	for i := range a {
		if a[i] == b[i] {
			equal++
		}
	}
	return equal >= 8
}

// checkID compares the id with those that follow from the content; it tells
// whether the id vouches for the bytes of all objects.
func (v *verifier) checkID(directoryDamaged bool) bool {
	a := v.file
	v.IDKind = "unknown"
	damaged := false
	if v.report != nil && v.report.ArtifactID != "" && strings.ToLower(v.report.ArtifactID) != v.ArtifactID {
		v.failf("header: the artifact id is %s, the report says %s", v.ArtifactID, v.report.ArtifactID)
		damaged = true
	}
	if v2 := v.upgradedFrom(); v2 != "" {
		id, err := upgradeID(&a.dir.Directory, a.text, v2)
		if err == nil && id == a.id {
			v.IDKind = "upgrade"
			return false
		}
		if !isContentID(a.id) && !damaged {
			v.failf("header or directory: the artifact id is %s, but the directory of this upgraded artifact gives %s", v.ArtifactID, FormatID(id))
			return false
		}
	}
	var digests [][sha256.Size]byte
	for i := range v.regions {
		r := &v.regions[i]
		if r.object == nil && !r.hole {
			continue
		}
		if !r.hashed {
			v.Unchecked = append(v.Unchecked, "the artifact id, as not all objects could be read")
			return false
		}
		digests = append(digests, r.digest)
	}
	if a.dir.contentEnd < 0 {
		if isContentID(a.id) {
			v.failf("directory: it is not written as the derivation of the artifact id demands")
		}
		return false
	}
	id := contentID(a.text[:a.dir.contentEnd], digests)
	switch {
	case id == a.id:
		v.IDKind = "content"
		return true
	case damaged:
	case near(id, a.id):
		v.failf("header: the artifact id is %s, the content gives %s", v.ArtifactID, FormatID(id))
	case isContentID(a.id):
		v.IDKind = "content"
		v.failf("content does not match the id: the id is %s, directory and objects give %s", v.ArtifactID, FormatID(id))
		if v.report == nil && !directoryDamaged {
			v.Unchecked = append(v.Unchecked, "which object is damaged: that needs the conversion report, a checksum list or another copy")
		}
	}
	return false
}

// upgradedFrom is the digest of the version 2 file that the report or the
// provenance names, or empty.
func (v *verifier) upgradedFrom() string {
	if v.report != nil && v.report.V2SHA256 != "" {
		return strings.ToLower(v.report.V2SHA256)
	}
	from, ok, err := member(v.file.Directory().Provenance, "upgraded_from")
	if err != nil || !ok || from.Kind() != '{' {
		return ""
	}
	sum, ok, err := member(from, "sha256")
	if err != nil || !ok || sum.Kind() != '"' {
		return ""
	}
	b, err := jsontext.AppendUnquote(nil, sum)
	if err != nil {
		return ""
	}
	return string(b)
}

// checkFileDigests computes the digest of every file and compares it with a
// checksum list and known releases; it tells whether they vouch for all files.
func (v *verifier) checkFileDigests() (bool, error) {
	if !v.o.FileDigests {
		return false, nil
	}
	a := v.file
	names := make([]string, len(a.parts))
	got := make([]string, len(a.parts))
	errs := make([]error, len(a.parts))
	parallel(len(a.parts), func(i int, buf []byte) {
		names[i] = filepath.Base(a.parts[i].path)
		if !v.broken[i] {
			got[i], errs[i] = v.fileDigest(a.parts[i].path, buf)
		}
	})
	for i := range names {
		if errs[i] != nil {
			v.failf("%s: %v", names[i], errs[i])
		} else if !v.broken[i] {
			v.FileSHA256 = append(v.FileSHA256, FileDigest{names[i], got[i]})
		}
	}

	var sums map[string]string
	var err error
	if v.o.SHA256SUMS != "" {
		v.Sums = v.o.SHA256SUMS
		sums, err = readSums(v.Sums)
	} else {
		v.Sums, sums, err = findSums(a.path)
	}
	if err != nil {
		return false, err
	}
	covered := v.checkRelease(names, got)
	if sums == nil {
		return covered, nil
	}
	listed := true
	for i, name := range names {
		want, ok := sums[name]
		switch {
		case !ok:
			listed = false
			v.failf("%s: not listed in %s", name, v.Sums)
		case got[i] != "" && got[i] != want:
			v.failf("%s: its sha256 is %s, %s says %s", name, got[i], v.Sums, want)
		}
	}
	return covered || listed, nil
}

func (v *verifier) fileDigest(path string, buf []byte) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", cause(err)
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.CopyBuffer(counter{h, v}, struct{ io.Reader }{f}, buf); err != nil {
		return "", cause(err)
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

// counter hashes and counts.
type counter struct {
	h hash.Hash
	v *verifier
}

func (c counter) Write(p []byte) (int, error) {
	c.v.advance(len(p))
	return c.h.Write(p)
}

// checkRelease compares with the digests of a known release.
func (v *verifier) checkRelease(names, got []string) bool {
	rel, ok := releases[v.ArtifactID]
	if !ok {
		return false
	}
	recorded := names[0]
	if len(v.file.dir.Files) > 1 {
		recorded = strings.TrimSuffix(v.file.dir.Files[1].Path, ".part-0001")
	}
	want, ok := rel.entries[recorded]
	if !ok || len(got) != len(rel.parts)+1 {
		v.Unchecked = append(v.Unchecked, "the digests of the published files: this copy has other file names or another split")
		return false
	}
	for i, digest := range got {
		if i > 0 {
			want = rel.parts[i-1]
		}
		if digest != "" && digest != want {
			v.failf("%s: its sha256 is %s, the published file has %s", names[i], digest, want)
		}
	}
	if got[0] == rel.entries[recorded] && got[0] != rel.pinned {
		v.Notes = append(v.Notes, fmt.Sprintf("the entry's digest is the published one for its name; the pin %s in the upstream tree belongs to another name", rel.pinned))
	}
	return true
}

// compareWith compares directory and objects with another artifact.
func (v *verifier) compareWith(b *File) {
	a := v.file
	x, errX := appendContent(nil, a.Directory(), converterOrder)
	y, errY := appendContent(nil, b.Directory(), converterOrder)
	if errX != nil || errY != nil {
		v.failf("directory: cannot be compared with that of %s", b.path)
	} else if !bytes.Equal(x, y) {
		v.failf("directory: it differs from that of %s", b.path)
	}
	for i := range b.dir.Objects {
		if o := &b.dir.Objects[i]; !a.has(o.ID) {
			v.failf("%s %s: only %s has it", o.kind(), quote(o.ID), b.path)
		}
	}
	failures := make([]string, len(v.regions))
	parallel(len(v.regions), func(i int, buf []byte) {
		r := &v.regions[i]
		if r.object == nil || r.skipped {
			return
		}
		other, ok := b.Object(r.object.ID)
		switch {
		case !ok:
			failures[i] = fmt.Sprintf("%s: %s does not have it", r.name(), b.path)
			return
		case other.Bytes != r.len:
			failures[i] = fmt.Sprintf("%s: %d bytes, %s has %d", r.name(), r.len, b.path, other.Bytes)
			return
		}
		mine := make([]byte, len(buf))
		err := v.readRegion(a, r.off, r.len, mine, func(at int64, p []byte) bool {
			q := buf[:len(p)]
			if _, err := b.ReadAt(q, other.Offset+at); err != nil {
				failures[i] = fmt.Sprintf("%s: %v", r.name(), err)
				return false
			}
			if bytes.Equal(p, q) {
				return true
			}
			k := 0
			for p[k] == q[k] {
				k++
			}
			failures[i] = fmt.Sprintf("%s: byte %d is 0x%02x, %s has 0x%02x", r.name(), at+int64(k), p[k], b.path, q[k])
			return false
		})
		if err != nil {
			failures[i] = fmt.Sprintf("%s: %v", r.name(), err)
		}
	})
	for _, f := range failures {
		if f != "" {
			v.Failures = append(v.Failures, f)
		}
	}
	if a.id != b.id {
		v.Notes = append(v.Notes, fmt.Sprintf("the artifact id of %s is %s", b.path, FormatID(b.id)))
	}
}

func (a *File) has(id string) bool {
	_, ok := a.index[id]
	return ok
}
