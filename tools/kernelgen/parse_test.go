package main

import (
	"slices"
	"testing"
)

func TestParseStructs(t *testing.T) {
	list, err := parseStructs(`
// struct Not { uint32_t real; };
struct Part {
  const void* w;   // a pointer
  uint32_t rows, flags;
};
struct P {
  const __nv_bfloat16* x; /* two
  lines */ uint64_t* best;
  float f;
  uint32_t n;
  Part part[8];
};`)
	if err != nil {
		t.Fatal(err)
	}
	want := []cstruct{
		{"Part", []field{{"w", "driver.Ptr", 0}, {"rows", "uint32", 0}, {"flags", "uint32", 0}}},
		{"P", []field{{"x", "driver.Ptr", 0}, {"best", "driver.Ptr", 0}, {"f", "float32", 0}, {"n", "uint32", 0}, {"part", "Part", 8}}},
	}
	if !slices.EqualFunc(list, want, func(a, b cstruct) bool { return a.name == b.name && slices.Equal(a.fields, b.fields) }) {
		t.Errorf("got %+v", list)
	}
	for _, bad := range []string{"", "struct A { double x; };", "struct A { B b; };", "struct A { uint32_t x[n]; };"} {
		if _, err := parseStructs(bad); err == nil {
			t.Errorf("%q: no error", bad)
		}
	}
}

func TestParseKernels(t *testing.T) {
	list, err := parseKernels("a", `
static constexpr int kWarps = 8;
static constexpr int kThreads = 32 * kWarps;
// NINFER_KERNEL(not_me, P, 32, 1)
NINFER_KERNEL(one, P, kThreads, 2) { }
#define NINFER_KERNEL(name, Params, threads, blocks) not_me_either
NINFER_KERNEL(two, Q, 64, kBlocks) { }`)
	if err != nil {
		t.Fatal(err)
	}
	if want := []kernel{{"one", "a", "P", "(32 * (8))"}, {"two", "a", "Q", "64"}}; !slices.Equal(list, want) {
		t.Errorf("got %+v", list)
	}
	if _, err := parseKernels("a", "NINFER_KERNEL(one, P, kMany, 2)"); err == nil {
		t.Error("an unknown thread count was taken")
	}
}

func TestResources(t *testing.T) {
	got := resources("s", `ptxas info    : Compiling entry function 'k' for 'sm_90a'
ptxas info    : Function properties for k
    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 64 registers, used 1 barriers, 128 bytes smem
ptxas info    : Compiling entry function 'j' for 'sm_120a'
ptxas info    : Used 8 registers
`)
	want := "s        j                        sm_120a          8       0      0      0\ns        k                        sm_90a          64     128      8   4+12\n"
	if got != want {
		t.Errorf("got\n%s", got)
	}
}
