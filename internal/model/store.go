package model

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"os"
	"slices"
	"sync"
	"sync/atomic"

	"ninfer/internal/arch"
	"ninfer/internal/artifact"
	"ninfer/internal/backend"
	"ninfer/internal/num"
)

// Artifact is the Store of an opened artifact, of either dialect: canonical names in, typed views out. Make one with NewArtifact.
type Artifact struct {
	File *artifact.File

	config *arch.Config
	uses   map[string]artifact.Use // of banks, by parameter
	mixed  bool                    // dialect E
	places map[string]place        // dialect E: where canonical parameters are
}

// place is a run of rows in what bindings name, one after another.
type place struct {
	bindings    []string
	first, rows int
}

// NewArtifact reads the configuration that the file records, and from it which dialect it is. A directory of dialect E must hold exactly the
// bindings and uses of its configuration, with their formats (docs/format.md 4.4); of dialect L what is needed is looked up when
// it is. The file must stay open as long as the Artifact is used.
func NewArtifact(f *artifact.File) (*Artifact, error) {
	a := &Artifact{File: f, uses: map[string]artifact.Use{}}
	if err := a.open(); err != nil {
		return nil, fmt.Errorf("%s: %w", f.Path(), err)
	}
	return a, nil
}

func (a *Artifact) open() error {
	d := a.File.Directory()
	text, ok := d.Component("text")
	if !ok {
		return errors.New("no text component")
	}
	vision, ok := d.Component("vision")
	if !ok {
		return errors.New("no vision component")
	}
	for _, id := range []string{"mtp", "vision"} {
		if c, ok := d.Component(id); ok && c.Target != "text" {
			return fmt.Errorf("component %q has target %q, need \"text\"", id, c.Target)
		}
	}
	var err error
	if a.config, a.mixed, err = arch.FromComponents(text.Config, vision.Config); err != nil {
		return err
	}
	for _, u := range d.Uses {
		if b, ok := d.Bindings.Lookup(u.Parameter); ok && b.Object != "" {
			if o, ok := a.File.Object(b.Object); ok && o.Layout == num.ExpertBlockScale.String() {
				a.uses[u.Parameter] = u
			}
		}
	}
	if a.mixed {
		return a.closed()
	}
	return nil
}

// closed compares the directory with the inventory of dialect E and notes where canonical parameters are.
func (a *Artifact) closed() error {
	v := arch.Variant{Profile: arch.Mixed}
	specs, err := arch.Inventory(a.config, v, 0)
	if err != nil {
		return err
	}
	desc, err := arch.Describe(a.config, v, specs)
	if err != nil {
		return err
	}
	byObject := map[string][]arch.Binding{}
	for _, b := range desc.Bindings {
		byObject[b.Object] = append(byObject[b.Object], b)
	}
	d := a.File.Directory()
	bindings := 0
	a.places = map[string]place{}
	for _, s := range specs {
		if s.Resource {
			continue
		}
		g, err := num.NewGeometry(s.Format, s.Layout, s.Shape)
		if err != nil {
			return err
		}
		var names []string
		for _, b := range byObject[s.ID] {
			names = append(names, b.Name)
		}
		bindings += len(names)
		o, begin, end, err := a.resolve(names)
		switch {
		case err != nil:
			return err
		case o.Format != s.Format.String() || o.Layout != s.Layout.String():
			return fmt.Errorf("parameter %q is stored as %s %s, need %s %s", names[0], o.Format, o.Layout, s.Format, s.Layout)
		case end-begin != int64(g.Rows)*int64(g.Cols) || begin%int64(g.Cols) != 0 || len(o.Shape) == 0 || o.Shape[len(o.Shape)-1] != g.Cols:
			return fmt.Errorf("parameter %q has elements %d to %d of shape %v, need %v", names[0], begin, end, o.Shape, s.Shape)
		}
		runs := s.Holds
		if runs == nil {
			runs = []arch.Run{{Parameter: s.ID, Rows: g.Rows}}
		}
		first := 0
		for _, r := range runs {
			a.places[r.Parameter] = place{names, first, r.Rows}
			first += r.Rows
		}
	}
	if d.Bindings.Len() != bindings {
		for name := range d.Bindings.All() {
			if !slices.ContainsFunc(desc.Bindings, func(b arch.Binding) bool { return b.Name == name }) {
				return fmt.Errorf("parameter %q is bound, but the model has none of that name", name)
			}
		}
	}
	return a.closedUses(desc.Uses)
}

func (a *Artifact) closedUses(need []arch.Use) error {
	type pair struct{ parameter, input string }
	left := map[pair]string{}
	for _, u := range need {
		left[pair{u.Parameter, u.Input}] = u.Policy
	}
	for _, u := range a.File.Directory().Uses {
		p := pair{u.Parameter, u.Input}
		policy, ok := left[p]
		switch {
		case !ok:
			return fmt.Errorf("parameter %q has a use at %q, which the model does not have", u.Parameter, u.Input)
		case u.Policy != policy:
			return fmt.Errorf("parameter %q at %q has activation policy %q, need %q", u.Parameter, u.Input, u.Policy, policy)
		case u.Auxiliaries.Len() > 0:
			return fmt.Errorf("parameter %q at %q has an auxiliary %q, need none", u.Parameter, u.Input, u.Auxiliaries.Names()[0])
		}
		delete(left, p)
	}
	for _, u := range need { // in order, so that the message does not depend on a map
		if _, ok := left[pair{u.Parameter, u.Input}]; ok {
			return fmt.Errorf("parameter %q lacks its use at %q", u.Parameter, u.Input)
		}
	}
	return nil
}

// Config returns the configuration that the artifact records.
func (a *Artifact) Config() *arch.Config { return a.config }

// Resource returns the bytes of a text or vision resource, such as "tokenizer.json".
func (a *Artifact) Resource(component, role string) ([]byte, error) {
	c, _ := a.File.Directory().Component(component)
	id, ok := c.Resources.Lookup(role)
	if !ok {
		return nil, fmt.Errorf("%s: component %q has no resource %q", a.File.Path(), component, role)
	}
	return a.File.Resource(id)
}

// locate says where a canonical parameter is; rows of -1 are all of it.
func (a *Artifact) locate(name string) (place, bool) {
	if a.mixed {
		p, ok := a.places[name]
		return p, ok
	}
	_, ok := a.File.Directory().Bindings.Lookup(name)
	return place{bindings: []string{name}, rows: -1}, ok
}

// Has reports whether the artifact has the parameter.
func (a *Artifact) Has(name string) bool {
	_, ok := a.locate(name)
	return ok
}

// resolve finds the run of elements of one object that bindings name together.
func (a *Artifact) resolve(names []string) (o artifact.Object, begin, end int64, err error) {
	d := a.File.Directory()
	have := false
	for _, name := range names {
		b, ok := d.Bindings.Lookup(name)
		if !ok {
			return o, 0, 0, fmt.Errorf("no parameter %q", name)
		}
		parts := b.Parts
		if b.Object != "" {
			whole, _ := a.File.Object(b.Object)
			n := int64(1)
			for _, k := range whole.Shape {
				n *= int64(k)
			}
			parts = []artifact.Part{{Object: b.Object, End: n}}
		}
		for _, p := range parts {
			switch {
			case !have:
				o, _ = a.File.Object(p.Object)
				begin, end, have = p.Begin, p.End, true
			case p.Object != o.ID || p.Begin != end:
				return o, 0, 0, fmt.Errorf("parameter %q is not one run of elements: that cannot be read", name)
			default:
				end = p.End
			}
		}
	}
	return o, begin, end, nil
}

// Weight returns a parameter, a view of the mapped file where its object lies in one.
func (a *Artifact) Weight(name string) (backend.Weight, error) {
	p, ok := a.locate(name)
	if !ok {
		return backend.Weight{}, fmt.Errorf("%s: no parameter %q", a.File.Path(), name)
	}
	o, begin, end, err := a.resolve(p.bindings)
	if err != nil {
		return backend.Weight{}, fmt.Errorf("%s: %w", a.File.Path(), err)
	}
	t, err := a.File.Tensor(o.ID)
	if err != nil {
		return backend.Weight{}, err
	}
	cols := int64(t.Cols())
	if begin%cols != 0 || end%cols != 0 {
		return backend.Weight{}, fmt.Errorf("%s: parameter %q begins or ends inside a row of %q", a.File.Path(), name, o.ID)
	}
	if err := a.checkBank(p.bindings[0], t); err != nil {
		return backend.Weight{}, fmt.Errorf("%s: %w", a.File.Path(), err)
	}
	w := backend.Whole(t).Rows(int(begin/cols), int((end-begin)/cols))
	if p.rows >= 0 {
		w = w.Rows(p.first, p.rows)
	}
	return w, nil
}

// checkBank: quantized experts may be used with 4-bit activations, and dialect L then gives a divisor for those of each expert. The
// closed comparison has seen that dialect E gives none.
func (a *Artifact) checkBank(parameter string, t num.Tensor) error {
	if t.Layout != num.ExpertBlockScale {
		return nil
	}
	u := a.uses[parameter]
	if u.Policy != "AllowA4" {
		return fmt.Errorf("bank %q has activation policy %q, need AllowA4", parameter, u.Policy)
	}
	if a.mixed {
		return nil
	}
	b, ok := u.Auxiliaries.Lookup(arch.DivisorRole)
	if !ok || b.Object == "" {
		return fmt.Errorf("bank %q has no auxiliary %s", parameter, arch.DivisorRole)
	}
	d, err := a.File.Tensor(b.Object)
	switch {
	case err != nil:
		return err
	case d.Format != num.FP32 || !slices.Equal(d.Shape, t.Shape[:1]):
		return fmt.Errorf("activation divisors %q are %s %v, need fp32 [%d]", b.Object, d.Format, d.Shape, t.Shape[0])
	}
	row := make([]float32, d.Cols())
	d.DecodeRow32(row, 0)
	for e, x := range row {
		if !(x > 0 && x <= math.MaxFloat32) {
			return fmt.Errorf("activation divisors %q: %v of expert %d is not finite and positive", b.Object, x, e)
		}
	}
	return nil
}

// Table returns the n-gram table's format and a reader of its rows; the table itself may be far larger than memory.
func (a *Artifact) Table(name string) (num.Format, backend.RowSource, error) {
	if a.mixed {
		s, err := a.shards()
		if err != nil {
			return 0, nil, fmt.Errorf("%s: %w", a.File.Path(), err)
		}
		return num.U4Z8G16, s, nil
	}
	b, ok := a.File.Directory().Bindings.Lookup(name)
	if !ok || b.Object == "" {
		return 0, nil, fmt.Errorf("%s: no parameter %q that is one object", a.File.Path(), name)
	}
	id := b.Object
	if err := a.File.Check(id); err != nil {
		return 0, nil, err
	}
	o, _ := a.File.Object(id)
	f, _ := num.ParseFormat(o.Format)
	spans, err := a.File.Spans(id)
	if err != nil {
		return 0, nil, err
	}
	if err := a.File.Random(id); err != nil {
		return 0, nil, err
	}
	if len(o.Shape) != 2 {
		return 0, nil, fmt.Errorf("%s: table %q has shape %v, need two dimensions", a.File.Path(), id, o.Shape)
	}
	return f, tableSpans{file: a.File, name: id, rows: int64(o.Shape[0]), rowBytes: o.Bytes / int64(o.Shape[0]), spans: spans}, nil
}

// TableBytes is the size of the n-gram tables, which a reader of rows maps but need not hold in memory.
func (a *Artifact) TableBytes() int64 {
	t := &a.config.Text
	var names []string
	for _, id := range t.PLELayerIDs {
		if a.mixed {
			for i := range t.NgramParts {
				names = append(names, arch.MixedShard(id-1, i))
			}
		} else {
			names = append(names, arch.PLEPrefix(arch.LayerPrefix(id-1))+arch.PLETable)
		}
	}
	var n int64
	for _, name := range names {
		if p, ok := a.locate(name); ok {
			if o, _, _, err := a.resolve(p.bindings); err == nil {
				n += o.Bytes
			}
		}
	}
	return n
}

// Warms says whether WarmTable would do anything.
func (a *Artifact) Warms() bool { return a.mixed }

// WarmTable reads every page of an INT4 n-gram table once, so that the page cache holds it, and returns its bytes; other tables are larger
// and have none warmed. It ends early with ctx.
func (a *Artifact) WarmTable(ctx context.Context) (int64, error) {
	if !a.mixed {
		return 0, nil
	}
	s, err := a.shards()
	if err != nil {
		return 0, fmt.Errorf("%s: %w", a.File.Path(), err)
	}
	const piece = 64 << 20 // neighbouring pages are read together
	var pieces [][]byte
	for _, shard := range s.shards {
		for _, span := range shard {
			pieces = slices.AppendSeq(pieces, slices.Chunk(span, piece))
		}
	}
	var next, read atomic.Int64
	var all sync.WaitGroup
	var sink atomic.Uint32
	for range 8 {
		all.Go(func() {
			sum := uint32(0)
			for i := next.Add(1) - 1; i < int64(len(pieces)) && ctx.Err() == nil; i = next.Add(1) - 1 {
				for at := 0; at < len(pieces[i]); at += os.Getpagesize() {
					sum += uint32(pieces[i][at])
				}
				read.Add(int64(len(pieces[i])))
			}
			sink.Add(sum)
		})
	}
	all.Wait()
	if err := ctx.Err(); err != nil {
		return read.Load(), err
	}
	// Pages that memory could not hold come back one by one.
	for i := range s.shards {
		if err := a.File.Random(s.ids[i]); err != nil {
			return read.Load(), err
		}
	}
	return read.Load(), nil
}

// copySpans copies len(dst) bytes from an offset into runs that follow each other.
func copySpans(dst []byte, spans [][]byte, at int64) {
	for _, s := range spans {
		if at >= int64(len(s)) {
			at -= int64(len(s))
			continue
		}
		n := copy(dst, s[at:])
		if dst, at = dst[n:], 0; len(dst) == 0 {
			return
		}
	}
}

// tableSpans reads rows of a contiguous table that may continue from file to file.
type tableSpans struct {
	file     *artifact.File
	name     string
	rows     int64
	rowBytes int64
	spans    [][]byte
}

func (t tableSpans) Rows(ids []int64, dst []byte) error {
	for _, id := range ids {
		if id < 0 || id >= t.rows {
			return fmt.Errorf("table %q: row %d of %d", t.name, id, t.rows)
		}
		copySpans(dst[:t.rowBytes], t.spans, id*t.rowBytes)
		dst = dst[t.rowBytes:]
	}
	return nil
}

// Enter is of backend.Enterer. Its only errors are those of systems that cannot.
func (t tableSpans) Enter(stop func() bool) { _ = t.file.Enter(t.name, stop) }

// shardedTable reads rows of a table whose shards each hold the codes of their rows and then the scales. A row comes out as its codes,
// then its scales.
type shardedTable struct {
	file   *artifact.File
	rows   int64 // of one shard
	geom   num.Geometry
	ids    []string // the shards' objects
	shards [][][]byte
}

// shards opens the table of dialect E, after comparing the stored hash constants with those that the configuration gives.
func (a *Artifact) shards() (*shardedTable, error) {
	t := &a.config.Text
	l, n := t.PLELayerIDs[0]-1, t.Ngram(0)
	for what, want := range [][]int64{n.Multipliers, n.Offsets, n.Sizes} {
		w, err := a.Weight(arch.MixedIndex(l, what))
		if err != nil {
			return nil, err
		}
		words := w.T.Planes().Codes
		for i, x := range want {
			if got := int64(binary.LittleEndian.Uint64(words[8*i:])); got != x {
				return nil, fmt.Errorf("parameter %q has %d at %d, but the configuration gives %d", arch.MixedIndex(l, what), got, i, x)
			}
		}
	}
	s := &shardedTable{file: a.File, rows: n.Rows / int64(t.NgramParts)}
	for i := range t.NgramParts {
		o, _, _, err := a.resolve(a.places[arch.MixedShard(l, i)].bindings)
		if err != nil {
			return nil, err
		}
		if err := a.File.Check(o.ID); err != nil {
			return nil, err
		}
		if !slices.Equal(o.Shape, []int{int(s.rows), n.HeadWidth}) {
			return nil, fmt.Errorf("shard %q has shape %v, need [%d %d]", o.ID, o.Shape, s.rows, n.HeadWidth)
		}
		if s.geom, err = num.NewGeometry(num.U4Z8G16, num.PackedU4, o.Shape); err != nil {
			return nil, err
		}
		spans, err := a.File.Spans(o.ID)
		if err != nil {
			return nil, err
		}
		s.ids, s.shards = append(s.ids, o.ID), append(s.shards, spans)
	}
	return s, nil
}

func (t *shardedTable) Rows(ids []int64, dst []byte) error {
	codes, scales := t.geom.Codes.Stride, t.geom.Scales.Stride
	for _, id := range ids {
		if id < 0 || id >= t.rows*int64(len(t.shards)) {
			return fmt.Errorf("n-gram table: row %d of %d", id, t.rows*int64(len(t.shards)))
		}
		spans, r := t.shards[id/t.rows], id%t.rows
		copySpans(dst[:codes], spans, r*codes)
		copySpans(dst[codes:codes+scales], spans, t.geom.Scales.Off+r*scales)
		dst = dst[codes+scales:]
	}
	return nil
}

// Enter is of backend.Enterer.
func (t *shardedTable) Enter(stop func() bool) {
	for _, id := range t.ids {
		_ = t.file.Enter(id, stop)
	}
}
