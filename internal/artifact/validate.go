package artifact

import (
	"bytes"
	"encoding/json/jsontext"
	"math"
	"math/bits"
	"slices"
	"strings"

	"ninfer/internal/num"
)

// validate checks what a directory says as a whole: rows R7 to R13.
func validate(d *Directory, path, entry string) error {
	total, err := validateFiles(d, path, entry)
	if err != nil {
		return err
	}
	objects, err := validateObjects(d, path, total)
	if err != nil {
		return err
	}
	if err := validateComponents(d, path, objects); err != nil {
		return err
	}
	for name, b := range d.Bindings.All() {
		if err := validateBinding(b, path, 11, "binding "+quote(name), d, objects); err != nil {
			return err
		}
	}
	if err := validateUses(d, path, objects); err != nil {
		return err
	}
	return validateMetadata(d, path)
}

// quote is for names in messages: always one line.
func quote(s string) string { return string(appendString(nil, s)) }

func validateFiles(d *Directory, path, entry string) (total int64, err error) {
	if len(d.Files) == 0 {
		return 0, reject(path, 7, "files is empty")
	}
	names := map[string]bool{}
	for i, f := range d.Files {
		if total > math.MaxInt64-f.PayloadBytes {
			return 0, reject(path, 7, "the payload sizes of files add up to more than %d bytes", int64(math.MaxInt64))
		}
		total += f.PayloadBytes
		if i == 0 {
			continue
		}
		switch {
		case f.Path == "." || f.Path == "..", strings.ContainsAny(f.Path, `/\`):
			return 0, reject(path, 7, "files[%d]: %s is not a plain file name", i, quote(f.Path))
		case names[f.Path]:
			return 0, reject(path, 7, "files[%d]: %s is listed twice", i, quote(f.Path))
		case f.Path == entry:
			return 0, reject(path, 7, "files[%d]: %s is the name of the entry itself; was the entry renamed to a part's name?", i, quote(f.Path))
		}
		names[f.Path] = true
	}
	return total, nil
}

// validateObjects checks R8 and R9 and gives the index of every object by id.
func validateObjects(d *Directory, path string, total int64) (map[string]int, error) {
	if len(d.Objects) == 0 {
		return nil, reject(path, 8, "objects is empty")
	}
	index := make(map[string]int, len(d.Objects))
	for i := range d.Objects {
		o := &d.Objects[i]
		if _, ok := index[o.ID]; ok {
			return nil, reject(path, 8, "object %s is listed twice", quote(o.ID))
		}
		index[o.ID] = i
		if len(o.Shape) > num.MaxRank {
			return nil, reject(path, 8, "tensor %s has %d dimensions, at most %d are allowed", quote(o.ID), len(o.Shape), num.MaxRank)
		}
		if _, ok := elements(o.Shape); !ok {
			return nil, reject(path, 8, "tensor %s: the element count of %v does not fit 64 bits", quote(o.ID), o.Shape)
		}
	}
	end := int64(0)
	for i := range d.Objects {
		o := &d.Objects[i]
		if o.Offset < end {
			return nil, reject(path, 9, "%s %s begins at %d, before the previous object ends at %d", o.kind(), quote(o.ID), o.Offset, end)
		}
		if o.Bytes > total || o.Offset > total-o.Bytes {
			return nil, reject(path, 9, "%s %s at %d with %d bytes ends after the payload of %d bytes", o.kind(), quote(o.ID), o.Offset, o.Bytes, total)
		}
		end = o.end()
	}
	return index, nil
}

// elements is the product of the dimensions and whether it fits 64 bits.
func elements(shape []int) (uint64, bool) {
	n := uint64(1)
	for _, d := range shape {
		hi, lo := bits.Mul64(n, uint64(d))
		if hi != 0 {
			return 0, false
		}
		n = lo
	}
	return n, true
}

func validateComponents(d *Directory, path string, objects map[string]int) error {
	ids := map[string]bool{}
	for _, c := range d.Components {
		ids[c.ID] = true
	}
	if !ids["text"] {
		return reject(path, 10, `components lacks "text"`)
	}
	for i := range d.Components {
		c := &d.Components[i]
		if c.Target != "" && !ids[c.Target] {
			return reject(path, 10, "component %s targets %s, which is not a component", quote(c.ID), quote(c.Target))
		}
		for role, id := range c.Resources.All() {
			o, ok := objects[id]
			if !ok {
				return reject(path, 10, "component %s: resource %s names object %s, which does not exist", quote(c.ID), quote(role), quote(id))
			}
			if !d.Objects[o].Resource {
				return reject(path, 10, "component %s: resource %s names %s, which is a tensor", quote(c.ID), quote(role), quote(id))
			}
		}
		if c.Proposal == nil {
			continue
		}
		if c.ID != "text" {
			return reject(path, 10, "component %s has a proposal; only \"text\" may", quote(c.ID))
		}
		switch {
		case c.Proposal.Domain == "full" && c.Proposal.Rows != 0:
			return reject(path, 10, `a proposal of domain "full" has no rows`)
		case c.Proposal.Domain == "indexed" && c.Proposal.Rows == 0:
			return reject(path, 10, `a proposal of domain "indexed" needs rows`)
		case c.Proposal.Domain != "full" && c.Proposal.Domain != "indexed":
			return reject(path, 10, "unknown proposal domain %s", quote(c.Proposal.Domain))
		}
	}
	return nil
}

func validateBinding(b Binding, path string, rule int, what string, d *Directory, objects map[string]int) error {
	tensor := func(id string) (*Object, error) {
		i, ok := objects[id]
		if !ok {
			return nil, reject(path, rule, "%s refers to object %s, which does not exist", what, quote(id))
		}
		if d.Objects[i].Resource {
			return nil, reject(path, rule, "%s refers to %s, which is a resource", what, quote(id))
		}
		return &d.Objects[i], nil
	}
	if len(b.Parts) == 0 {
		_, err := tensor(b.Object)
		return err
	}
	sum := uint64(0)
	for _, p := range b.Parts {
		o, err := tensor(p.Object)
		if err != nil {
			return err
		}
		n, _ := elements(o.Shape)
		if p.Begin < 0 || p.Begin >= p.End || uint64(p.End) > n {
			return reject(path, rule, "%s: range [%d,%d) is not inside the %d elements of %s", what, p.Begin, p.End, n, quote(p.Object))
		}
		var carry uint64
		if sum, carry = bits.Add64(sum, uint64(p.End-p.Begin), 0); carry != 0 {
			return reject(path, rule, "%s: the lengths of its parts do not fit 64 bits", what)
		}
	}
	return nil
}

func validateUses(d *Directory, path string, objects map[string]int) error {
	type pair struct{ parameter, input string }
	pairs := make(map[pair]bool, len(d.Uses))
	for i := range d.Uses {
		u := &d.Uses[i]
		if _, ok := d.Bindings.Lookup(u.Parameter); !ok {
			return reject(path, 12, "uses[%d]: parameter %s is not bound", i, quote(u.Parameter))
		}
		if k := (pair{u.Parameter, u.Input}); pairs[k] {
			return reject(path, 12, "uses[%d]: parameter %s has two uses with input %s", i, quote(u.Parameter), quote(u.Input))
		} else {
			pairs[k] = true
		}
		if u.Policy != "" && !slices.Contains(activationPolicies, u.Policy) {
			return reject(path, 12, "uses[%d]: unknown activation policy %s", i, quote(u.Policy))
		}
		for role, b := range u.Auxiliaries.All() {
			if err := validateBinding(b, path, 12, "auxiliary "+quote(role)+" of "+quote(u.Parameter), d, objects); err != nil {
				return err
			}
		}
	}
	return nil
}

// validateMetadata checks that a name in the metadata is an id.
func validateMetadata(d *Directory, path string) error {
	name, found, err := member(d.Metadata, "name")
	if err != nil {
		return reject(path, 13, "metadata: %v", err)
	}
	if !found {
		return nil
	}
	if name.Kind() != '"' {
		return reject(path, 13, "metadata.name is %s, not a string", kindName(name.Kind()))
	}
	s, err := jsontext.AppendUnquote(nil, name)
	if err != nil || !isID(string(s)) {
		return reject(path, 13, "metadata.name is not an id")
	}
	return nil
}

// member finds one member of a JSON object.
func member(object jsontext.Value, name string) (jsontext.Value, bool, error) {
	dec := jsontext.NewDecoder(bytes.NewReader(object))
	if _, err := dec.ReadToken(); err != nil {
		return nil, false, err
	}
	for dec.PeekKind() == '"' {
		t, err := dec.ReadToken()
		if err != nil {
			return nil, false, err
		}
		if t.String() == name {
			v, err := dec.ReadValue()
			return bytes.Clone(v), err == nil, err
		}
		if err := dec.SkipValue(); err != nil {
			return nil, false, err
		}
	}
	return nil, false, nil
}
