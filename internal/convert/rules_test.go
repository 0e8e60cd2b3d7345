package convert

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"strings"
	"testing"
)

// rules says where each row of the rejection tables is tested: R of readers (docs/format.md 1.3) in package artifact, S of sources (5.7)
// here. A line has the row, the test, and what its case is called or changes there. All were seen to fail with the check taken out.
const rules = `
R1	TestRejectFraming	R1/31 bytes
R2	TestRejectFraming	R2/command
R3	TestRejectFraming	R3/part
R4	TestRejectFraming	R4/beyond the file
R5	TestRejectDirectory	R5/duplicate by escape
R6	TestRejectDirectory	R6/fraction
R7	TestRejectDirectory	R7/entry's name
R8	TestRejectDirectory	R8/rank 17
R9	TestRejectDirectory	R9/overlap by one byte
R10	TestRejectDirectory	R10/full with rows
R11	TestRejectDirectory	R11/beyond the parent
R12	TestRejectDirectory	R12/duplicate pair
R13	TestRejectDirectory	R13/name is empty
R14	TestRejectFraming	R14/long
R15	TestRejectObject	R15
R16	TestRejectObject	R16/pair
R17	TestRejectObject	R17/divisibility
R18	TestRejectObject	R18/size
R19	TestRejectObject	R19/128
R20	TestRejectObject	R20
R21	TestRejectPart	R21/short header
R22	TestRejectPart	R22/id
R23	TestRejectPart	R23/short
S1	TestOptions	Options{Profile: "official"}
S2	TestOptions	Options{PLEFormat: "bf16"}
S3	TestOptions	out("model.ninfer")
S4	TestConfig	[]string{vision}
S5	TestConfig	"quant_algo"
S6	TestResources	os.Truncate
S6	TestResources	os.Remove
S7	TestTensors	two extra
S7	TestShards	missing index
S8	TestTensors	no multiplier
S9	TestTensors	scale of rank 1
S9	TestTensors	bf16 table
S10	TestShards	truncated by a byte
S11	TestTensors	gate and up input_scale
S12	TestTensors	tiny weight_scale_2
S13	TestTensors	nan block scale
S14	TestTensors	nan head
S14	TestEncodeRefusals	nan in the table
S15	TestTensors	overflow vision
S15	TestEncodeRefusals	zero table
S15	TestEncodeRefusals	row too small
S15	TestEncodeRefusals	zero expert
S16	TestRanking	512*8 + 8
S17	TestOutput	part-0007
S18	TestWriteError	ENOSPC
S18	TestFileSizeLimit	file too large
S19	TestUpgradeReject	version 3
S19	TestUpgradeReject	identity
S20	TestPins	a4e813ed3cfbbcc61e2929699eccb864a4dfa843
S20	TestPins	6144
S20	TestMixedRefusals	input scale
S20	TestMixedRefusals	zero multiplier
S20	TestMixedRefusals	META.json
S20	TestMixedRefusals	infinite scale
`

// TestRules: no row without a test, no line without its case.
func TestRules(t *testing.T) {
	tests := map[string]string{} // the text of each, by its name
	for _, dir := range []string{".", "../artifact"} {
		names, err := filepath.Glob(filepath.Join(dir, "*_test.go"))
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range names {
			text := string(read(t, name))
			set := token.NewFileSet()
			file, err := parser.ParseFile(set, name, text, 0)
			if err != nil {
				t.Fatal(err)
			}
			for _, d := range file.Decls {
				if f, ok := d.(*ast.FuncDecl); ok {
					tests[dir+f.Name.Name] = text[set.Position(f.Pos()).Offset:set.Position(f.End()).Offset]
				}
			}
		}
	}
	have := map[string]bool{}
	for line := range strings.Lines(strings.TrimSpace(rules)) {
		f := strings.Split(strings.TrimSpace(line), "\t")
		if len(f) != 3 {
			t.Fatalf("line %q", line)
		}
		dir := map[byte]string{'R': "../artifact", 'S': "."}[f[0][0]]
		if !strings.Contains(tests[dir+f[1]], f[2]) {
			t.Errorf("%s: %s has no case %s", f[0], f[1], f[2])
		}
		have[f[0]] = true
	}
	for kind, n := range map[string]int{"R": 23, "S": 20} {
		for i := range n {
			if row := fmt.Sprint(kind, i+1); !have[row] {
				t.Errorf("%s has no test", row)
			}
		}
	}
}
