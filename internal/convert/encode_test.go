package convert

import (
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"ninfer/internal/arch"
	"ninfer/internal/convert/converttest"
)

// TestEncodeRefusals is S7 to S9 for profile swift, S14 and S15 for every encoder of the options: each case changes one thing.
func TestEncodeRefusals(t *testing.T) {
	const (
		shards = "model.language_model.layers.1.ple.ple_embedding.ngram_embedding."
		query  = "model.language_model.layers.3.self_attn.q_proj.weight"
		bank   = "mtp.layers.0.mlp.experts.down_proj"
		nan    = "\xc0\x7f"
		inf    = "\x80\xff"
	)
	type edit = func(map[string]converttest.Raw)
	patch := func(name string, f func(*converttest.Raw)) edit {
		return func(m map[string]converttest.Raw) {
			x, ok := m[name]
			if !ok {
				t.Fatalf("no tensor %s", name)
			}
			x.Data, x.Shape = slices.Clone(x.Data), slices.Clone(x.Shape)
			f(&x)
			m[name] = x
		}
	}
	word := func(name string, at int, bf16 string) edit {
		return patch(name, func(x *converttest.Raw) { copy(x.Data[2*at:], bf16) })
	}
	zero := func(name string, from, to int) edit {
		return patch(name, func(x *converttest.Raw) {
			if to < 0 {
				to = len(x.Data)
			}
			clear(x.Data[from:to])
		})
	}
	table := Options{Profile: "swift", PLEFormat: "fp8_e4m3fn"}
	rows := Options{Profile: "swift", ProjectionFormat: "fp8_e4m3fn_row_bf16"}
	draft := Options{Profile: "swift", MTPExpertFormat: "nvfp4"}
	mixed := Options{Profile: "mixed"}
	folders, golden := map[arch.Profile][2]string{}, map[arch.Profile]map[string]converttest.Raw{}
	for _, p := range []arch.Profile{arch.Swift, arch.Mixed} {
		model, ple := sources(t, p)
		folders[p], golden[p] = [2]string{model, ple}, converttest.Tensors(t, model)
	}
	for _, tt := range []struct {
		name  string
		o     Options
		edit  edit
		class Class
		parts []string
	}{
		{"nan in the table", table, word(shards+"shard_2.weight", 1000, nan), Encode, []string{shards + "shard_2.weight", "NaN", "value 1000"}},
		{"infinity in the table", table, word(shards+"shard_0.weight", 0, inf), Encode, []string{shards + "shard_0.weight", "Inf"}},
		{"zero table", table, func(m map[string]converttest.Raw) {
			for _, i := range []string{"0", "1", "2", "3"} {
				zero(shards+"shard_"+i+".weight", 0, -1)(m)
			}
		}, Encode, []string{"ngram_embedding.weight", "not finite and positive"}},
		{"nan in a projection", rows, word(query, 128*7+3, nan), Encode, []string{query, "row 7 column 3"}},
		{"infinity in the head", rows, word("lm_head.weight", 128*5, inf), Encode, []string{"lm_head.weight", "row 5 column 0"}},
		{"row too small", rows, patch(query, func(x *converttest.Raw) {
			clear(x.Data[256*4 : 256*5])
			x.Data[256*4] = 1 // 2^-133
		}), Encode, []string{query, "row 4"}},
		{"nan in an expert", draft, word(bank, 128*128*2+128, nan), Encode, []string{bank, "expert 2", "row 1 column 0"}},
		{"zero expert", draft, zero(bank, 128*128*2*5, 128*128*2*6), Encode, []string{bank, "expert 5", "zero"}},
		{"nan in an expert, mixed", mixed, word(bank, 128*128*2+128, nan), Encode, []string{bank, "expert 2", "row 1 column 0"}},
		{"fp8 table for swift", Options{Profile: "swift"}, patch(shards+"shard_1.weight", func(x *converttest.Raw) {
			x.DType, x.Data = "F8_E4M3", x.Data[:len(x.Data)/2]
		}), Source, []string{"shard_1", "F8_E4M3", "BF16"}},
		{"multiplier for swift", Options{Profile: "swift"}, func(m map[string]converttest.Raw) {
			m[shards+"weight_scale"] = converttest.Raw{DType: "BF16", Shape: []int{1}, Data: []byte{0x51, 0x39}}
		}, Source, []string{shards + `weight_scale" is not expected`}},
		{
			"missing shard of the table",
			Options{Profile: "swift"},
			func(m map[string]converttest.Raw) { delete(m, shards+"shard_3.weight") }, Source,
			[]string{`shard_3.weight" is missing`},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			o, v := tt.o, variant(t, tt.o)
			o.Model, o.PLE = converttest.Clone(t, folders[v.Profile][0]), folders[v.Profile][1]
			m := maps.Clone(golden[v.Profile])
			tt.edit(m)
			converttest.Save(t, o.Model, m)
			o.Out = filepath.Join(t.TempDir(), v.OutputName())
			refuse(t, o, tt.class, tt.parts...)
		})
	}

	// What is only copied may hold anything; an expert of zeros has an encoding in profile A.
	dir, ple := folders[arch.Mixed][0], folders[arch.Mixed][1]
	dir = converttest.Clone(t, dir)
	m := maps.Clone(golden[arch.Mixed])
	word("lm_head.weight", 3, nan)(m)
	zero(bank, 128*128*2*5, 128*128*2*6)(m)
	converttest.Save(t, dir, m)
	_, f := convert(t, Options{Profile: "mixed", Model: dir, PLE: ple, Out: filepath.Join(t.TempDir(), mixedOutput)})
	if x, err := f.Tensor("text/output_head"); err != nil || string(x.Data[6:8]) != nan {
		t.Errorf("NaN word was not kept: %v", err)
	}
	x, err := f.Tensor("mtp/layer/mlp/experts/down")
	if err != nil || x.Divisor(5) != 1 || strings.Trim(string(x.Data[5*128*64:6*128*64]), "\x00") != "" {
		t.Errorf("expert of zeros has divisor %v: %v", x.Divisor(5), err)
	}
}
