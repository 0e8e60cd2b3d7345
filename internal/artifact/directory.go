package artifact

import (
	"encoding/json/jsontext"
	"iter"
	"slices"
)

// Map is a map from names to V that keeps the order in which names were first
// set: the order of members in the directory. The zero value is empty.
type Map[V any] struct {
	names  []string
	values map[string]V
}

// Len is the number of names.
func (m *Map[V]) Len() int { return len(m.names) }

// Lookup gives the value of a name, and whether it is there.
func (m *Map[V]) Lookup(name string) (V, bool) {
	v, ok := m.values[name]
	return v, ok
}

// Set gives a name its value; a new name goes to the end.
func (m *Map[V]) Set(name string, v V) {
	if _, ok := m.values[name]; !ok {
		m.names = append(m.names, name)
		if m.values == nil {
			m.values = make(map[string]V)
		}
	}
	m.values[name] = v
}

// Names is a copy of the names in order.
func (m *Map[V]) Names() []string { return slices.Clone(m.names) }

// All iterates over names and values in order.
func (m *Map[V]) All() iter.Seq2[string, V] {
	return func(yield func(string, V) bool) {
		for _, n := range m.names {
			if !yield(n, m.values[n]) {
				return
			}
		}
	}
}

// Directory is the JSON directory of an artifact. One given by a File must
// not be changed.
type Directory struct {
	Components []Component
	Objects    []Object // ascending offsets
	Bindings   Map[Binding]
	Uses       []Use
	Metadata   jsontext.Value // a JSON object; "{}" where the file has none
	Provenance jsontext.Value // likewise
	Files      []FileRecord   // at least one; the first is the entry
}

// Component finds a component by its id.
func (d *Directory) Component(id string) (Component, bool) {
	for _, c := range d.Components {
		if c.ID == id {
			return c, true
		}
	}
	return Component{}, false
}

// A Component is one part of the model: "text" always, others optional.
type Component struct {
	ID        string
	Config    jsontext.Value // a JSON object, as spelled in the file
	Target    string         // id of another component, or empty
	Resources Map[string]    // role to the id of a resource object
	Proposal  *Proposal      // only on "text"
}

// Proposal describes the proposal head's vocabulary.
type Proposal struct {
	Domain string // "full" or "indexed"
	Rows   int64  // rows of an indexed head, 0 for a full one
}

// Object is one run of payload bytes: a tensor, or a resource kept verbatim.
type Object struct {
	ID       string
	Resource bool
	Encoding string // of a resource; raw_bytes_v1 is the only readable one
	Shape    []int  // of a tensor, C-order, 0 to 16 positive dimensions
	Format   string // of a tensor, as spelled in the file
	Layout   string // of a tensor, as spelled in the file
	Offset   int64  // in the logical payload, independent of files
	Bytes    int64  // complete encoded size, positive
}

// end is the first payload byte after the object.
func (o *Object) end() int64 { return o.Offset + o.Bytes }

// kind is the word used for the object in messages and in the file.
func (o *Object) kind() string {
	if o.Resource {
		return "resource"
	}
	return "tensor"
}

// Part is a range of logical elements of a tensor in C-order.
type Part struct {
	Object     string
	Begin, End int64
}

// Binding says which elements a logical parameter consists of. Exactly one
// form is set: Object, the whole tensor; or Parts, whose concatenation it is.
type Binding struct {
	Object string
	Parts  []Part
}

// Use is one place where the model applies a parameter to an input.
type Use struct {
	Parameter   string       // a name in Bindings
	Input       string       // the pair (Parameter, Input) is unique
	Policy      string       // activation policy: "", A16Only, AllowA8 or AllowA4
	Auxiliaries Map[Binding] // role to further parameters, such as divisors
}

// FileRecord is one file of the set.
type FileRecord struct {
	Path         string // file name beside the entry; empty for the entry itself
	PayloadBytes int64
}

// resourceEncoding is the only encoding of resources that can be read.
const resourceEncoding = "raw_bytes_v1"

// activationPolicies are the legal values of Use.Policy besides none.
var activationPolicies = []string{"A16Only", "AllowA8", "AllowA4"}
