package convert

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"hash"
	"math"
	"runtime"
	"slices"
	"sync"
	"time"

	"ninfer/internal/num"
)

// bank encodes one BF16 expert bank of a mixed version 2 file as NVFP4 while it is read (docs/format.md 2.8, profile A).
type bank struct {
	u    *upgrade
	id   string
	g    num.Geometry // of the output
	size int64        // source bytes of one expert

	batch  [][]byte // source of the experts that are collected
	filled int      // of them, the last one perhaps in part
	have   int64    // bytes of the last one
	first  int      // expert number of batch[0]

	codes    [][]byte // by expert of the batch
	scales   []byte   // plane of the whole bank
	divisors []float32
	oracle   oracle
	source   hash.Hash // of the input's bytes
	stored   hash.Hash // of the output's bytes
	off      int64     // output bytes so far
	encode   time.Duration

	v2     string
	report BankReport
}

func newBank(u *upgrade, id string) *bank {
	b := &bank{u: u, id: id, source: sha256.New(), stored: sha256.New()}
	for i := range u.plan.Directory.Objects {
		if o := &u.plan.Directory.Objects[i]; o.ID == id {
			var err error
			if b.g, err = num.NewGeometry(num.NVFP4, num.ExpertBlockScale, o.Shape); err != nil {
				panic("convert: planned bank: " + err.Error()) // NewPlan has placed it
			}
		}
	}
	b.size = 2 * int64(b.g.ExpertRows) * int64(b.g.Cols)
	b.scales = make([]byte, b.g.Scales.Len)
	b.divisors = make([]float32, b.g.Experts)
	n := min(runtime.GOMAXPROCS(0), 16, b.g.Experts)
	b.batch, b.codes = make([][]byte, n), make([][]byte, n)
	for i := range n {
		b.batch[i], b.codes[i] = make([]byte, b.size), make([]byte, b.size/4)
	}
	b.oracle.experts = slices.Compact([]int{0, b.g.Experts / 2, b.g.Experts - 1})
	b.oracle.exact = true
	return b
}

// take collects experts and encodes as many at once as there are cores.
func (b *bank) take(_ int64, p []byte) error {
	b.source.Write(p)
	for len(p) > 0 {
		n := copy(b.batch[b.filled][b.have:], p)
		p = p[n:]
		if b.have += int64(n); b.have < b.size {
			break
		}
		b.have = 0
		if b.filled++; b.filled == len(b.batch) {
			if err := b.flush(); err != nil {
				return err
			}
		}
	}
	return nil
}

// flush encodes the collected experts and writes their codes.
func (b *bank) flush() error {
	start := time.Now()
	errs := make([]error, b.filled)
	n, k := b.g.ExpertRows, b.g.Cols
	plane := len(b.scales) / b.g.Experts
	var wg sync.WaitGroup
	for i := range b.filled {
		wg.Go(func() {
			e := b.first + i
			b.divisors[e], errs[i] = num.EncodeNVFP4(num.ProfileA, n, k, b.batch[i], b.codes[i], b.scales[e*plane:][:plane])
		})
	}
	wg.Wait()
	b.encode += time.Since(start)
	for i, err := range errs {
		e := b.first + i
		if err != nil {
			return fail(Encode, "%s: tensor %q expert %d: %w", b.u.In, b.id, e, err)
		}
		if slices.Contains(b.oracle.experts, e) {
			b.oracle.check(n, k, b.batch[i], b.codes[i], b.scales[e*plane:][:plane], b.divisors[e])
		}
		if err := b.write(b.codes[i]); err != nil {
			return err
		}
	}
	b.first, b.filled = b.first+b.filled, 0
	return nil
}

func (b *bank) write(p []byte) error {
	b.stored.Write(p)
	err := b.u.writer.WriteAt(b.id, b.off, p)
	b.off += int64(len(p))
	return classify(IO, err)
}

// done writes what follows the codes and checks the bank (docs/format.md 1.8.2).
func (b *bank) done() error {
	if err := b.flush(); err != nil {
		return err
	}
	if err := b.write(make([]byte, b.g.Scales.Off-b.off)); err != nil {
		return err
	}
	if err := b.write(b.scales); err != nil {
		return err
	}
	if err := b.write(floats(b.divisors)); err != nil {
		return err
	}
	b.v2 = hex.EncodeToString(b.source.Sum(nil))
	b.report = BankReport{
		SHA256: hex.EncodeToString(b.stored.Sum(nil)), Bytes: b.off, EncodeSeconds: b.encode.Seconds(), Oracle: b.oracle.report(),
	}
	b.batch, b.codes, b.scales = nil, nil, nil
	if p := b.u.pins; p != nil && b.report.SHA256 != p.banks[b.id] {
		return fail(Encode, "%q: the encoded bank has sha256 %s, the published one %s", b.id, b.report.SHA256, p.banks[b.id])
	}
	if !b.report.Oracle.Passed {
		return fail(Encode, "%q: the encoded bank differs from the definition of its format: %+v", b.id, b.report.Oracle)
	}
	return nil
}

// oracle checks encoded experts against their source in binary64, from the definition of the format (docs/format.md 1.8.2) and without
// the encoder's arithmetic.
type oracle struct {
	experts []int
	exact   bool    // divisors and signs
	scale   float64 // largest error of a scale, in steps of E4M3 at its size
	excess  float64 // largest distance of a code beyond the best one's
}

func (o *oracle) report() OracleReport {
	return OracleReport{
		Experts: o.experts, Exact: o.exact, MaxScaleError: o.scale, MaxCodeExcess: o.excess,
		Passed: o.exact && o.scale <= 1 && o.excess <= 1e-5,
	}
}

var e2m1Magnitudes = [8]float64{0, 0.5, 1, 1.5, 2, 3, 4, 6}

// e4m3Value is the value of a scale word that is not a NaN, by its definition.
func e4m3Value(w byte) float64 {
	e, m := int(w>>3&15), float64(w&7)
	if e == 0 {
		return math.Ldexp(m, -9)
	}
	return math.Ldexp(1+m/8, e-7)
}

// check compares one expert of n rows and k columns: BF16 source, packed codes, swizzled scales, divisor.
func (o *oracle) check(n, k int, source, codes, scales []byte, divisor float32) {
	amax := 0.0
	w := make([]float64, n*k)
	for i := range w {
		w[i] = float64(math.Float32frombits(uint32(binary.LittleEndian.Uint16(source[2*i:])) << 16))
		amax = max(amax, math.Abs(w[i]))
	}
	want := float32(1)
	if amax > 0 {
		want = float32(2688 / amax)
	}
	o.exact = o.exact && divisor == want
	d := float64(divisor)
	for r := range n {
		for g := range k / 16 {
			group := w[r*k+16*g:][:16]
			t := 0.0
			for _, x := range group {
				t = max(t, math.Abs(x*d)/6)
			}
			// 512-byte tiles of 128 rows by 4 groups; lines of 16 bytes for the rows r, r+32, r+64, r+96.
			word := scales[(r/128*(k/64)+g/4)*512+r%32*16+r%128/32*4+g%4]
			o.exact = o.exact && word < 0x7f
			s := e4m3Value(word)
			step := math.Ldexp(1, int(math.Floor(math.Log2(max(t, 0x1p-6))))-3)
			o.scale = max(o.scale, math.Abs(s-t)/step)
			for j, x := range group {
				code := codes[(r*k+16*g+j)/2] >> (j % 2 * 4) & 15
				q := 0.0
				if s > 0 {
					q = x * d / s
				}
				target, best := min(math.Abs(q), 6), math.Inf(1)
				for _, m := range e2m1Magnitudes {
					best = min(best, math.Abs(m-target))
				}
				o.excess = max(o.excess, math.Abs(e2m1Magnitudes[code&7]-target)-best)
				if negative := code&8 != 0; negative != (q < 0) && !(code&7 == 0 && math.Abs(q) <= 0.25) {
					o.exact = false
				}
			}
		}
	}
}
