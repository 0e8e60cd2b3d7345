package synth

import (
	"encoding/binary"
	"fmt"
	"hash/fnv"
	"math"
	"math/bits"
	"strings"

	"ninfer/internal/arch"
	"ninfer/internal/num"
)

// blockBytes is the unit of the random streams: the words of a plane come in blocks that do not depend on each other.
const blockBytes = 4096

// Object makes the bytes of one tensor.
type Object struct {
	id     string
	geom   num.Geometry
	key    uint64
	planes []plane
	whole  []byte // the bytes themselves, of small objects and of those with padded rows
	zero   bool   // all zero
}

// plane is a run of bytes of the object that fill makes; bytes in no plane are zero.
type plane struct {
	off, n int64
	zero   bool
	words  Words
	fill   func(dst []byte, r *random)
}

// Words say what the words of a plane are.
type Words struct {
	// Bytes of 2 and 4 are BF16 and FP32 words of a normal distribution with Mean and Deviation; 8 are random bits under Mask and the Fixed ones.
	Bytes           int
	Mean, Deviation float64
	Mask, Fixed     uint64
}

// filler makes the words on the host.
func (w Words) filler() func([]byte, *random) {
	switch {
	case w.Bytes == 2:
		return normalWords(w.Mean, w.Deviation).fill
	case w.Bytes == 4:
		return normalWords(w.Mean, w.Deviation).fill32
	case w.Mask == 0:
		return constant(w.Fixed)
	}
	return masked(w.Mask, w.Fixed)
}

// Plane is a run of random words of an object.
type Plane struct {
	Offset, Bytes int64
	Words         Words
}

// Planes are the runs that Fill makes; all other bytes are zero. ok is false where the bytes have no such description: Fill makes them. Who
// makes the words elsewhere, on a GPU, need not make the same ones.
func (x *Object) Planes() (list []Plane, ok bool) {
	for _, p := range x.planes {
		if !p.zero {
			list = append(list, Plane{p.off, p.n, p.words})
		}
	}
	return list, x.whole == nil
}

// Options say what weights to make.
type Options struct {
	Seed uint64
	// SparseTable makes the n-gram table of zero words as far as its format allows, so that a file need not hold them.
	SparseTable bool
	IDs         int // token ids that the proposal head may name, at least its rows
}

// NewObject prepares an object of a config. Resources have no words to make and are an error.
func NewObject(c *arch.Config, s *arch.Spec, o Options) (*Object, error) {
	if s.Resource {
		return nil, fmt.Errorf("synth: %s is a resource", s.ID)
	}
	g, err := num.NewGeometry(s.Format, s.Layout, s.Shape)
	if err != nil {
		return nil, fmt.Errorf("synth: %s: %w", s.ID, err)
	}
	h := fnv.New64a()
	h.Write([]byte(s.ID))
	x := &Object{id: s.ID, geom: g, key: mix(h.Sum64() ^ mix(o.Seed))}
	if x.whole, err = fixed(c, s, o); err != nil {
		return nil, fmt.Errorf("synth: %s: %w", s.ID, err)
	}
	if x.whole != nil {
		return x, nil
	}
	mean, std := distribution(s)
	table := s.Source.Count > 0 && (s.Source.Op == arch.OpCopy || s.Source.Op == arch.OpEncodeTable) || s.Format == num.U4Z8G16
	if table && o.SparseTable && s.Format != num.U4Z8G16 {
		x.zero = true
		return x, nil
	}
	if g.PaddedCols != g.Cols {
		x.whole, err = x.encoded(mean, std)
		return x, err
	}
	if err := x.plan(s, mean, std, table && o.SparseTable); err != nil {
		return nil, fmt.Errorf("synth: %s: %w", s.ID, err)
	}
	return x, nil
}

// parameter is the canonical name of what an object holds.
func parameter(s *arch.Spec) string {
	if len(s.Holds) > 0 {
		return s.Holds[0].Parameter
	}
	return s.ID
}

// distribution gives mean and standard deviation of an object's values. A matrix keeps the size of what it is applied to.
func distribution(s *arch.Spec) (mean, std float64) {
	name := parameter(s)
	const small = 0.02
	switch {
	case strings.HasPrefix(name, "vision/"):
		norm := strings.HasSuffix(name, arch.VisionNorm1) || strings.HasSuffix(name, arch.VisionNorm2) || name == arch.MergerNorm
		switch {
		case norm:
			return 1, small
		case len(s.Shape) == 1 || name == arch.VisionPositions:
			return 0, small
		}
	case strings.HasSuffix(name, "linear_attn."+arch.GDNNorm):
		return 1, small
	case strings.HasSuffix(name, "linear_attn."+arch.GDNALog):
		return 1.4, 0.7 // logarithms of decay rates between 1 and 16
	case strings.HasSuffix(name, "linear_attn."+arch.GDNDTBias):
		return -4.6, 1.1 // time steps between 0.001 and 0.1 after the softplus
	case strings.HasSuffix(name, arch.GDNConv):
		return 0, 0.3
	case len(s.Shape) == 1, name == arch.EmbedTokens: // all other norms of the text model are 1 + w
		return 0, small
	case s.Source.Count > 0 && s.Format != num.NVFP4, s.Format == num.U4Z8G16: // the n-gram table
		return 0, small
	}
	return 0, 1 / math.Sqrt(float64(s.Shape[len(s.Shape)-1]))
}

// fixed makes objects whose content is not free: token ids, hash constants, divisors and multipliers. It is nil for all others.
func fixed(c *arch.Config, s *arch.Spec, o Options) ([]byte, error) {
	le := binary.LittleEndian
	var b []byte
	floats := func(x float32) {
		for range s.Shape[0] {
			b = le.AppendUint32(b, math.Float32bits(x))
		}
	}
	switch {
	case s.Source.Op == arch.OpProposalIDs:
		rows := s.Shape[0]
		if o.IDs < rows {
			return nil, fmt.Errorf("%d token ids for %d rows", o.IDs, rows)
		}
		for r := range rows {
			b = le.AppendUint32(b, uint32(int64(r)*int64(o.IDs)/int64(rows)))
		}
	case s.Source.Op == arch.OpConstant:
		floats(s.Source.Constant)
	case s.Source.Op == arch.OpDivisors:
		floats(num.GateUpActivationDivisor)
	case strings.HasSuffix(parameter(s), arch.PLETableScale):
		return le.AppendUint16(nil, num.ToBF16(float32(0.02/fp8RMS))), nil
	case s.Format == num.Int64:
		for k := range c.Text.PLELayerIDs {
			g := c.Text.Ngram(k)
			for i, list := range [][]int64{g.Multipliers, g.Offsets, g.Sizes} {
				if s.ID != arch.MixedIndex(c.Text.PLELayerIDs[k]-1, i) {
					continue
				}
				for _, n := range list {
					b = le.AppendUint64(b, uint64(n))
				}
			}
		}
		if len(b) != 8*s.Shape[0] {
			return nil, fmt.Errorf("unknown int64 tensor")
		}
	case s.Format == num.Int32:
		return nil, fmt.Errorf("unknown int32 tensor")
	}
	return b, nil
}

// encoded makes an object with padded rows by encoding BF16 rows.
func (x *Object) encoded(mean, std float64) ([]byte, error) {
	b := make([]byte, x.geom.Bytes)
	words := normalWords(mean, std)
	row := make([]byte, 2*x.geom.Cols)
	stream := make([]byte, (len(row)+7)/8*8)
	for i := range x.geom.Rows {
		r := newRandom(x.key, 9, int64(i))
		words.fill(stream, r)
		copy(row, stream)
		dst, err := x.geom.RowBytes(b, i, i+1)
		if err == nil {
			err = x.geom.EncodeRows(dst, row)
		}
		if err != nil {
			return nil, fmt.Errorf("synth: %s: %w", x.id, err)
		}
	}
	return b, nil
}

// rms is the root of the mean square of values that are equally likely.
func rms(n int, value func(i int) float64) float64 {
	sum := 0.0
	for i := range n {
		sum += value(i) * value(i)
	}
	return math.Sqrt(sum / float64(n))
}

// The words that fill makes, and the root mean squares of their values.
var (
	// E4M3 magnitudes 0x20 to 0x3f: 1/8 to 15/8.
	fp8RMS = rms(32, func(i int) float64 { return float64(num.FromE4M3(byte(0x20 + i))) })
	// All E2M1 codes with block scales 0x38 to 0x3f: 1 to 15/8.
	nvfp4RMS = rms(16, func(i int) float64 { return float64(num.FromE2M1(byte(i))) }) *
		rms(8, func(i int) float64 { return float64(num.FromE4M3(byte(0x38 + i))) })
)

// plan says how the planes are filled.
func (x *Object) plan(s *arch.Spec, mean, std float64, sparse bool) error {
	g := &x.geom
	add := func(p num.PlaneSpec, w Words) {
		if p.Len > 0 {
			x.planes = append(x.planes, plane{off: p.Off, n: p.Len, words: w, fill: w.filler()})
		}
	}
	normal := func(bytes int) Words { return Words{Bytes: bytes, Mean: mean, Deviation: std} }
	bits := func(mask, fixed uint64) Words { return Words{Bytes: 8, Mask: mask, Fixed: fixed} }
	integer := func(low, high int) float64 {
		return rms(high-low+1, func(i int) float64 { return float64(low + i) })
	}
	half := func(word uint16) Words { return bits(0, uint64(word)*0x0001_0001_0001_0001) }
	single := func(x float64) Words {
		word := uint64(math.Float32bits(float32(x)))
		return bits(0, word|word<<32)
	}
	any := bits(math.MaxUint64, 0)
	e4m3 := bits(0x9f9f9f9f9f9f9f9f, 0x2020202020202020)
	// grouped formats: the scale makes codes as large as wanted.
	groupScale := func(codes float64) uint16 { return max(num.ToF16(float32(std/codes)), 1) }
	switch g.Format {
	case num.BF16:
		add(g.Codes, normal(2))
	case num.FP32:
		add(g.Codes, normal(4))
	case num.FP8:
		add(g.Codes, e4m3)
	case num.Q4G64:
		add(g.Codes, any)
		add(g.Scales, half(groupScale(integer(-8, 7))))
	case num.Q5G64:
		add(g.Codes, any)
		add(g.High, any)
		add(g.Scales, half(groupScale(integer(-16, 15))))
	case num.Q6G64:
		add(g.Codes, any)
		add(g.High, any)
		add(g.Scales, half(groupScale(integer(-32, 31))))
	case num.Q8G32:
		add(g.Codes, bits(math.MaxUint64, 0x0101010101010101)) // odd: -128 is not a code
		add(g.Scales, half(groupScale(rms(128, func(i int) float64 { return float64(2*i - 127) }))))
	case num.U4Z8G16:
		if sparse { // codes 0 mean -8 under any scale that is not zero: the smallest
			x.planes = append(x.planes, plane{off: g.Codes.Off, n: g.Codes.Len, zero: true})
			add(g.Scales, half(1))
			return nil
		}
		add(g.Codes, any)
		add(g.Scales, half(groupScale(integer(-8, 7))))
	case num.FP8RowBF16:
		add(g.Codes, e4m3)
		add(g.Scales, half(num.ToBF16(float32(std/fp8RMS))))
	case num.FP8RowFP32:
		add(g.Codes, e4m3)
		add(g.Scales, single(std/fp8RMS))
	case num.NVFP4:
		add(g.Codes, any)
		add(g.Scales, bits(0x0707070707070707, 0x3838383838383838))
		add(g.Divisors, single(nvfp4RMS/std))
	default:
		return fmt.Errorf("no words for format %s", g.Format)
	}
	return nil
}

// Bytes is the size of the object.
func (x *Object) Bytes() int64 { return x.geom.Bytes }

// Zero tells whether the n bytes from off on are all zero by construction, as the table's are with SparseTable, or padding.
func (x *Object) Zero(off, n int64) bool {
	if x.zero {
		return true
	}
	if x.whole != nil {
		return false
	}
	for _, p := range x.planes {
		if !p.zero && off < p.off+p.n && p.off < off+n {
			return false
		}
	}
	return true
}

// Fill makes the bytes of the object from off on; it panics if they are not inside the object. It is fastest where off and len(dst) are
// multiples of 4096.
func (x *Object) Fill(dst []byte, off int64) {
	if off < 0 || off > x.geom.Bytes-int64(len(dst)) {
		panic(fmt.Sprintf("synth: bytes [%d,%d) of the %d of %s", off, off+int64(len(dst)), x.geom.Bytes, x.id))
	}
	if x.whole != nil {
		copy(dst, x.whole[off:])
		return
	}
	clear(dst)
	for i, p := range x.planes {
		from, to := max(off, p.off), min(off+int64(len(dst)), p.off+p.n)
		if from >= to || p.zero {
			continue
		}
		x.fillPlane(uint64(i), p, dst[from-off:to-off], from-p.off)
	}
}

// fillPlane makes bytes of a plane from at on.
func (x *Object) fillPlane(number uint64, p plane, dst []byte, at int64) {
	var block [blockBytes]byte
	for len(dst) > 0 {
		k, in := at/blockBytes, at%blockBytes
		r := newRandom(x.key, number, k)
		if in == 0 && len(dst) >= blockBytes {
			p.fill(dst[:blockBytes], r)
			dst, at = dst[blockBytes:], at+blockBytes
			continue
		}
		p.fill(block[:], r)
		n := copy(dst, block[in:])
		dst, at = dst[n:], at+int64(n)
	}
}

// random is a small generator (wyrand by Wang Yi): one multiplication for eight bytes.
type random struct{ state uint64 }

// mix is the output function of SplitMix64.
func mix(z uint64) uint64 {
	z = (z ^ z>>30) * 0xBF58476D1CE4E5B9
	z = (z ^ z>>27) * 0x94D049BB133111EB
	return z ^ z>>31
}

func newRandom(key, stream uint64, block int64) *random {
	return &random{mix(key+stream*0x9E3779B97F4A7C15) + mix(uint64(block)*0xD1B54A32D192ED03+1)}
}

func (r *random) next() uint64 {
	r.state += 0xA0761D6478BD642F
	hi, lo := bits.Mul64(r.state, r.state^0xE7037ED1A0B428DB)
	return hi ^ lo
}

// masked fills with random bits under a mask, and fixed bits.
func masked(mask, fixed uint64) func(dst []byte, r *random) {
	return func(dst []byte, r *random) {
		for ; len(dst) >= 8; dst = dst[8:] {
			binary.LittleEndian.PutUint64(dst, r.next()&mask|fixed)
		}
	}
}

// constant repeats eight bytes.
func constant(word uint64) func(dst []byte, r *random) {
	return func(dst []byte, _ *random) {
		for ; len(dst) >= 8; dst = dst[8:] {
			binary.LittleEndian.PutUint64(dst, word)
		}
	}
}

// words are 4096 equally likely BF16 words of a normal distribution.
type words [4096]uint16

func normalWords(mean, std float64) *words {
	w := new(words)
	for i := range w {
		p := (float64(i) + 0.5) / float64(len(w))
		w[i] = num.ToBF16(float32(mean + std*math.Sqrt2*math.Erfinv(2*p-1)))
	}
	return w
}

func (w *words) fill(dst []byte, r *random) {
	for ; len(dst) >= 8; dst = dst[8:] {
		x := r.next()
		binary.LittleEndian.PutUint64(dst, uint64(w[x&4095])|uint64(w[x>>12&4095])<<16|uint64(w[x>>24&4095])<<32|uint64(w[x>>36&4095])<<48)
	}
}

// fill32 widens them.
func (w *words) fill32(dst []byte, r *random) {
	for ; len(dst) >= 8; dst = dst[8:] {
		x := r.next()
		binary.LittleEndian.PutUint64(dst, uint64(w[x&4095])<<16|uint64(w[x>>12&4095])<<48)
	}
}
