package artifact

import (
	"bytes"
	"encoding/binary"
	"encoding/json/jsontext"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"

	"ninfer/internal/num"
)

// Framing of container version 2 (docs/format.md 1.7): one file, 16 bytes of
// header, the directory, zeros up to a multiple of 4096, the payload.
const v2HeaderSize = 16

// v2Class is the class of everything that is wrong with a version 2 file; its
// rejections have no row in the table of version 3, so FormatError.Rule is 0.
const v2Class = "version 2 container"

// v3Class is the class of a file that is not one, but of the version that is wanted.
const v3Class = "container version 3"

// V2 is an open version 2 file. Such files can be inspected, verified and
// upgraded, not run: they say nothing about the model beyond two names. All
// methods may be called concurrently, Close only after everything else.
type V2 struct {
	// Objects are in payload order, with formats, layouts and encodings in
	// the spelling of version 3. They must not be changed.
	Objects   []Object
	ModelID   string
	WeightsID string

	file *File // the payload as one part; has no components and no id
	size int64
}

// v2Spelling maps the names that version 2 gave formats, layouts and the
// resource encoding to those of version 3. What the bytes mean is the same.
var v2Spelling = map[string]string{
	"BF16": "bf16", "FP32": "fp32", "I32": "int32", "I64": "int64",
	"Q4G64_F16S": "q4_g64_fp16", "Q5G64_F16S": "q5_g64_fp16", "Q6G64_F16S": "q6_g64_fp16", "W8G32_F16S": "q8_g32_fp16",
	"NVFP4": "nvfp4", "FP8_E4M3FN_ROW_BF16S": "fp8_e4m3fn_row_bf16", "FP8_E4M3FN_ROW_F32S": "fp8_e4m3fn_row_fp32",
	"U4Z8G16_F16S": "u4z8_g16_fp16", "FP8_E4M3FN": "fp8_e4m3fn",
}

var v2LayoutSpelling = map[string]string{
	"contiguous-le-v1": "contiguous_le_v1", "row-split-k128-v1": "row_split_k128_v1",
	"blockscale-k16-m128x4-v1": "block_scale_k16_m128x4_v1", "expert-blockscale-k16-m128x4-v1": "expert_block_scale_k16_m128x4_v1",
	"row-scale-v1": "row_scale_v1", "row-scale-f32-v1": "row_scale_fp32_v1", "packed-u4-g16-v1": "packed_u4_g16_v1",
}

const v2Encoding = "raw-bytes-v1"

// OpenV2 opens a version 2 file and checks everything about it but the
// payload's words: framing, directory, every format, layout, size, alignment
// and range. A file that fails gives a *FormatError of rule 0.
func OpenV2(path string) (*V2, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("artifact: %w", err)
	}
	a, err := openV2(path, f)
	if err != nil {
		f.Close()
		var fe *FormatError
		if errors.As(err, &fe) && fe.Path == path && fe.Class != v3Class {
			return nil, &FormatError{Path: path, Class: v2Class, Detail: fe.Detail, Err: fe.Err}
		}
		return nil, err
	}
	return a, nil
}

func openV2(path string, f *os.File) (*V2, error) {
	info, err := f.Stat()
	if err != nil {
		return nil, fmt.Errorf("artifact: %w", err)
	}
	if !info.Mode().IsRegular() {
		return nil, fmt.Errorf("artifact: %s is not a regular file", path)
	}
	size := info.Size()
	if size < v2HeaderSize {
		return nil, reject(path, 0, "%d bytes, the header alone has %d", size, v2HeaderSize)
	}
	var head [v2HeaderSize]byte
	if _, err := f.ReadAt(head[:], 0); err != nil {
		return nil, fmt.Errorf("artifact: reading the header of %s: %w", path, err)
	}
	switch magic := string(head[:8]); magic {
	case v2Magic:
	case entryMagic:
		return nil, &FormatError{Path: path, Class: v3Class, Detail: "it needs no upgrade"}
	case "\x00\x00\x00\x00\x00\x00\x00\x00":
		return nil, reject(path, 0, "the file begins with zeros: an upgrade that released its input has consumed it; download it again")
	default:
		return nil, reject(path, 0, "the file begins with % x", magic)
	}
	n := binary.LittleEndian.Uint64(head[8:])
	if n == 0 || n > uint64(size-v2HeaderSize) || n > maxDirectory {
		return nil, reject(path, 0, "json_bytes is %d, the file has %d bytes after the header", n, size-v2HeaderSize)
	}
	start := up(v2HeaderSize+int64(n), pageSize)
	if start >= size {
		return nil, reject(path, 0, "the payload would start at %d, the file has %d bytes", start, size)
	}
	text := make([]byte, n)
	if _, err := f.ReadAt(text, v2HeaderSize); err != nil {
		return nil, fmt.Errorf("artifact: reading the directory of %s: %w", path, err)
	}
	a := &V2{size: size}
	end, err := checkSyntax(text, path)
	if err != nil {
		return nil, err
	}
	p := &parser{path: path, dec: jsontext.NewDecoder(bytes.NewReader(text))}
	if err := p.v2Root(a); err != nil {
		return nil, err
	}
	if err := a.check(path, size-start); err != nil {
		return nil, err
	}
	// As a version 3 file of one part, for everything that only reads objects.
	a.file = &File{
		path: path, text: text, start: start, total: size - start, index: map[string]int{},
		dir:   &parsed{Directory: Directory{Objects: a.Objects, Files: []FileRecord{{PayloadBytes: size - start}}}, textEnd: end, contentEnd: -1},
		parts: []*part{{path: path, start: start, bytes: size - start, file: f}},
	}
	for i := range a.Objects {
		a.file.index[a.Objects[i].ID] = i
	}
	return a, nil
}

func (p *parser) v2Root(a *V2) error {
	have := seen{}
	err := p.object(0, func(name string) (err error) {
		have[name] = true
		switch name {
		case "identity":
			id := seen{}
			err = p.object(0, func(name string) (err error) {
				id[name] = true
				switch name {
				case "model_id":
					a.ModelID, err = p.str(0)
				case "weights_id":
					a.WeightsID, err = p.str(0)
				default:
					err = p.unknown(0, name)
				}
				return err
			})
			if err == nil {
				err = p.missing(0, id, "the identity", "model_id", "weights_id")
			}
		case "objects":
			err = p.array(0, func(int) error {
				o, err := p.v2Object()
				a.Objects = append(a.Objects, o)
				return err
			})
		default:
			err = p.unknown(0, name)
		}
		return err
	})
	if err != nil {
		return err
	}
	return p.missing(0, have, "the directory", "identity", "objects")
}

// v2Object reads one record and turns its names into those of version 3.
func (p *parser) v2Object() (Object, error) {
	var o Object
	var kind string
	have := seen{}
	err := p.object(0, func(name string) (err error) {
		have[name] = true
		switch name {
		case "name":
			o.ID, err = p.id(0)
		case "kind":
			kind, err = p.str(0)
		case "shape":
			o.Shape = []int{}
			err = p.array(0, func(int) error {
				n, err := p.integer(0, 1)
				o.Shape = append(o.Shape, int(n))
				return err
			})
		case "format":
			o.Format, err = p.v2Name("format", v2Spelling)
		case "layout":
			o.Layout, err = p.v2Name("layout", v2LayoutSpelling)
		case "encoding":
			o.Encoding, err = p.v2Name("encoding", map[string]string{v2Encoding: resourceEncoding})
		case "offset":
			o.Offset, err = p.integer(0, 0)
		case "bytes":
			o.Bytes, err = p.integer(0, 1)
		default:
			err = p.unknown(0, name)
		}
		return err
	})
	if err != nil {
		return o, err
	}
	members := []string{"name", "kind", "offset", "bytes"}
	switch kind {
	case "tensor":
		members = append(members, "shape", "format", "layout")
	case "resource":
		o.Resource = true
		members = append(members, "encoding")
	default:
		if have["kind"] {
			return o, p.fail(0, "object %s has unknown kind %s", quote(o.ID), quote(kind))
		}
	}
	if err := p.missing(0, have, "the object", members...); err != nil {
		return o, err
	}
	for _, name := range slices.Sorted(maps.Keys(have)) {
		if !slices.Contains(members, name) {
			return o, p.fail(0, "a %s has no member %q", kind, name)
		}
	}
	return o, nil
}

// v2Name reads a name that version 2 knows.
func (p *parser) v2Name(what string, spelling map[string]string) (string, error) {
	s, err := p.str(0)
	if err != nil {
		return "", err
	}
	name, ok := spelling[s]
	if !ok {
		return "", p.fail(0, "unknown %s %s", what, quote(s))
	}
	return name, nil
}

// check validates the objects against each other and the payload's length;
// everything is checked when the file is opened.
func (a *V2) check(path string, payload int64) error {
	if len(a.Objects) == 0 {
		return reject(path, 0, "objects is empty")
	}
	names := map[string]bool{}
	end := int64(0)
	for i := range a.Objects {
		o := &a.Objects[i]
		if names[o.ID] {
			return reject(path, 0, "object %s is listed twice", quote(o.ID))
		}
		names[o.ID] = true
		if !o.Resource {
			if len(o.Shape) > num.MaxRank {
				return reject(path, 0, "tensor %s has %d dimensions, at most %d are allowed", quote(o.ID), len(o.Shape), num.MaxRank)
			}
			if _, _, err := checkTensor(path, o); err != nil {
				return err
			}
		}
		if o.Offset < end {
			return reject(path, 0, "%s %s begins at %d, before the previous object ends at %d", o.kind(), quote(o.ID), o.Offset, end)
		}
		if o.Bytes > payload || o.Offset > payload-o.Bytes {
			return reject(path, 0, "%s %s at %d with %d bytes ends after the payload of %d bytes", o.kind(), quote(o.ID), o.Offset, o.Bytes, payload)
		}
		end = o.end()
	}
	return nil
}

// Close closes the file. Views given out before are dead.
func (a *V2) Close() error { return a.file.Close() }

// Path is the path as given to OpenV2.
func (a *V2) Path() string { return a.file.path }

// Size is the length of the file.
func (a *V2) Size() int64 { return a.size }

// PayloadStart is the offset of the first payload byte in the file.
func (a *V2) PayloadStart() int64 { return a.file.start }

// PayloadBytes is the length of the payload, which ends with the file.
func (a *V2) PayloadBytes() int64 { return a.file.total }

// Object finds an object by its name.
func (a *V2) Object(id string) (Object, bool) { return a.file.Object(id) }

// Resource gives a copy of a resource's bytes.
func (a *V2) Resource(id string) ([]byte, error) { return a.file.Resource(id) }

// ReadFileAt reads from the file itself, framing included, as io.ReaderAt
// does.
func (a *V2) ReadFileAt(p []byte, off int64) (int, error) {
	f, err := a.file.opened(0)
	if err != nil {
		return 0, err
	}
	return f.ReadAt(p, off)
}
