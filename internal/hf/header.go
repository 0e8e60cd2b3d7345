package hf

import (
	"fmt"
	"math/bits"
)

// entry is one tensor of a header; begin and end are relative to the byte after the header.
type entry struct {
	dtype      string
	shape      []int
	begin, end int64
}

// wordSizes are the dtypes that docs/format.md 5.1 names, and I32 for recorded results, with their sizes in bytes. A tensor of another dtype may be listed, but
// not used.
var wordSizes = map[string]int64{"BF16": 2, "F16": 2, "F32": 4, "I32": 4, "I64": 8, "U8": 1, "F8_E4M3": 1}

// dtypeName returns the spelling without allocating for the known ones.
func dtypeName(b []byte) string {
	switch string(b) {
	case "BF16":
		return "BF16"
	case "F16":
		return "F16"
	case "F32":
		return "F32"
	case "I32":
		return "I32"
	case "I64":
		return "I64"
	case "U8":
		return "U8"
	case "F8_E4M3":
		return "F8_E4M3"
	}
	return string(b)
}

// parseHeader reads a header's JSON text. data is the number of bytes after the header. found gets each tensor; it must not keep
// the name. Names are not compared with each other: found does that.
func parseHeader(text []byte, data int64, found func(name []byte, e entry) error) error {
	s := scanner{b: text}
	var dims []int // shapes are cut from this; a full one is left behind
	metadata := false
	err := s.members(func(name []byte) error {
		if string(name) == "__metadata__" {
			if metadata {
				return fmt.Errorf("offset %d: duplicate member __metadata__", s.i)
			}
			metadata = true
			if s.space() != '{' {
				return fmt.Errorf("offset %d: __metadata__ is not an object", s.i)
			}
			return s.value()
		}
		e, err := parseEntry(&s, &dims)
		if err != nil {
			return fmt.Errorf("tensor %q: %w", name, err)
		}
		if e.begin > e.end || e.end > data {
			return fmt.Errorf("tensor %q: bytes [%d, %d) are not inside the %d bytes of data", name, e.begin, e.end, data)
		}
		if word, ok := wordSizes[e.dtype]; ok {
			if size, ok := byteSize(e.shape, word); !ok || size != e.end-e.begin {
				return fmt.Errorf("tensor %q: %s %v does not have the %d bytes of its data_offsets", name, e.dtype, e.shape, e.end-e.begin)
			}
		}
		return found(name, e)
	})
	if err != nil {
		return err
	}
	return s.end()
}

// byteSize is the product of the dimensions and the word size; false if it does not fit.
func byteSize(shape []int, word int64) (int64, bool) {
	n := uint64(word)
	for _, d := range shape {
		if d == 0 {
			return 0, true
		}
	}
	for _, d := range shape {
		hi, lo := bits.Mul64(n, uint64(d))
		if hi != 0 || lo > 1<<62 {
			return 0, false
		}
		n = lo
	}
	return int64(n), true
}

func parseEntry(s *scanner, dims *[]int) (entry, error) {
	var e entry
	var have struct{ dtype, shape, offsets bool }
	once := func(seen *bool, name []byte) error {
		if *seen {
			return fmt.Errorf("duplicate member %s", name)
		}
		*seen = true
		return nil
	}
	err := s.members(func(name []byte) error {
		switch string(name) {
		case "dtype":
			if err := once(&have.dtype, name); err != nil {
				return err
			}
			d, err := s.str()
			e.dtype = dtypeName(d)
			return err
		case "shape":
			if err := once(&have.shape, name); err != nil {
				return err
			}
			list := *dims
			start := len(list)
			err := s.elements(func(int) error {
				n, err := s.integer()
				if err != nil {
					return err
				}
				if len(list) == cap(list) {
					grown := make([]int, len(list)-start, max(4096, 2*(len(list)-start)))
					copy(grown, list[start:])
					list, start = grown, 0
				}
				list = append(list, int(n))
				return nil
			})
			e.shape = list[start:len(list):len(list)]
			*dims = list
			return err
		case "data_offsets":
			if err := once(&have.offsets, name); err != nil {
				return err
			}
			count := 0
			err := s.elements(func(i int) error {
				n, err := s.integer()
				switch count++; i {
				case 0:
					e.begin = n
				case 1:
					e.end = n
				}
				return err
			})
			if err == nil && count != 2 {
				err = fmt.Errorf("data_offsets has %d numbers, need 2", count)
			}
			return err
		}
		return fmt.Errorf("unknown member %q", name)
	})
	switch {
	case err != nil:
		return e, err
	case !have.dtype:
		return e, fmt.Errorf("no dtype")
	case !have.shape:
		return e, fmt.Errorf("no shape")
	case !have.offsets:
		return e, fmt.Errorf("no data_offsets")
	}
	return e, nil
}
