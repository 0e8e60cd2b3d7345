package digest

import "testing"

func TestSource(t *testing.T) {
	const base = "int a = 1; // one\nint b = '\"'; /* two */ asm(\"x // y\\\"\" \"z\");\n"
	for _, same := range []string{
		"int a = 1;\nint b = '\"';\n\n asm(\"x // y\\\"\" \"z\");", "// first\nint a = 1; int b = '\"'; /* \n other */ asm(\"x // y\\\"\" \"z\"); // last",
	} {
		if Source(same) != Source(base) {
			t.Errorf("%q and %q differ", strip(same), strip(base))
		}
	}
	for _, other := range []string{
		"int a = 2; int b = '\"'; asm(\"x // y\\\"\" \"z\");", "int a = 1; int b = '\"'; asm(\"x // z\\\"\" \"z\");", "int a = 1; int b = '\"'; asm(\"x  // y\\\"\" \"z\");",
		"inta = 1; int b = '\"'; asm(\"x // y\\\"\" \"z\");", "int a = 1; int b = '\"'; asm(\"x",
	} {
		if Source(other) == Source(base) {
			t.Errorf("%q has the same sum", other)
		}
	}
	// the sum itself cannot change without compiling again: SHA-256 of "int a;"
	if s := Source(" int /* x */ a; // y\n"); s != "68ee7ca0e099b2c45f613f363e4911edbf3f696a3569f0ca666d433db8503c90" {
		t.Errorf("sum %s", s)
	}
}
