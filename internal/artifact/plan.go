package artifact

import (
	"bytes"
	"fmt"
	"math"
	"path/filepath"
	"slices"
	"strings"

	"ninfer/internal/num"
)

// DefaultLimit is the largest length of one file, framing included, unless a
// plan asks for another.
const DefaultLimit = 32_000_000_000

// PlanOptions change how a plan is made. The zero value is the converter's
// rule.
type PlanOptions struct {
	Limit int64 // largest file in bytes; 0 is DefaultLimit
	// Upgrade plans as the upgrade of a version 2 dialect L artifact does
	// (docs/format.md 1.9): objects keep their offsets, so that unreferenced
	// holes may be between them, and members have that upgrade's order.
	Upgrade bool
}

// Region is a run of bytes of the logical payload.
type Region struct{ Offset, Bytes int64 }

// Plan fixes everything about an artifact but its payload and its id. Its
// fields must not be changed.
type Plan struct {
	Entry        string    // file name of the entry
	Directory    Directory // with offsets, sizes and files
	PayloadBytes int64
	Content      []byte   // directory text up to but excluding `,"files":`
	Text         []byte   // directory text padded with spaces to json_bytes
	PayloadStart int64    // first payload byte in the entry file
	Holes        []Region // unreferenced bytes that are not alignment gaps
}

// NewPlan places objects and fixes directory text and split. entry is the
// entry's file name, which the text contains. In d, every tensor needs ID,
// Shape, Format and Layout, every resource ID and Bytes; sizes of tensors and
// all offsets are computed, and Files is ignored. The plan fails where a
// reader would refuse the directory or a file cannot hold its framing.
func NewPlan(entry string, d *Directory, o PlanOptions) (*Plan, error) {
	if entry != filepath.Base(entry) || strings.ContainsAny(entry, `/\`) || !isID(entry) || entry == "." || entry == ".." {
		return nil, fmt.Errorf("artifact: %q is not a plain file name", entry)
	}
	limit := o.Limit
	if limit == 0 {
		limit = DefaultLimit
	}
	p := &Plan{Entry: entry, Directory: *d}
	p.Directory.Objects = slices.Clone(d.Objects)
	if err := place(entry, p.Directory.Objects, o.Upgrade); err != nil {
		return nil, err
	}
	p.PayloadBytes = p.Directory.Objects[len(p.Directory.Objects)-1].end()
	p.Holes = holes(p.Directory.Objects, p.PayloadBytes)

	ord := converterOrder
	if o.Upgrade {
		ord = upgradeOrder
	}
	content, err := appendContent(nil, &p.Directory, ord)
	if err != nil {
		return nil, fmt.Errorf("artifact: directory of %s: %w", entry, err)
	}
	p.Content = content

	// The reserve depends on the length of the text, which names the files,
	// whose number depends on the reserve. It only grows, so this ends.
	single := []FileRecord{{PayloadBytes: p.PayloadBytes}}
	reserve := up(headerSize+int64(len(appendFiles(slices.Clone(content), single))), pageSize) - headerSize
	if o.Upgrade {
		reserve = pageSize - headerSize
	}
	for {
		p.PayloadStart = headerSize + reserve
		files, err := split(entry, p.PayloadStart, p.PayloadBytes, limit)
		if err != nil {
			return nil, err
		}
		text := appendFiles(slices.Clone(content), files)
		if int64(len(text)) <= reserve {
			p.Directory.Files = files
			p.Text = append(text, bytes.Repeat([]byte{' '}, int(reserve)-len(text))...)
			break
		}
		reserve = up(headerSize+int64(len(text)), pageSize) - headerSize
	}

	// What a reader would refuse must not be written.
	read, err := parseDirectory(p.Text, entry, entry)
	if err != nil {
		return nil, fmt.Errorf("artifact: planned directory: %w", err)
	}
	p.Directory = read.Directory
	return p, nil
}

// place sets sizes and offsets, or checks the offsets that are there.
func place(entry string, objects []Object, keep bool) error {
	if len(objects) == 0 {
		return fmt.Errorf("artifact: %s has no objects", entry)
	}
	end := int64(0)
	for i := range objects {
		o := &objects[i]
		if o.Resource {
			if o.Encoding == "" {
				o.Encoding = resourceEncoding
			}
			if err := checkResource(entry, o); err != nil {
				return err
			}
			if o.Bytes <= 0 {
				return fmt.Errorf("artifact: resource %q of %s is empty", o.ID, entry)
			}
		} else {
			_, _, size, err := encodedSize(entry, o)
			if err != nil {
				return err
			}
			if o.Bytes != 0 && o.Bytes != size {
				return reject(entry, 18, "tensor %s is planned with %d bytes, %s %v needs %d", quote(o.ID), o.Bytes, o.Format, o.Shape, size)
			}
			o.Bytes = size
		}
		natural := naturalOffset(o, end)
		if !keep {
			o.Offset = natural
		}
		if o.Offset < natural || !o.Resource && o.Offset%num.Alignment != 0 {
			return reject(entry, 9, "%s %s is planned at %d, after an object that ends at %d", o.kind(), quote(o.ID), o.Offset, end)
		}
		if o.Offset > math.MaxInt64/2-o.Bytes {
			return fmt.Errorf("artifact: the payload of %s is too large", entry)
		}
		end = o.end()
	}
	return nil
}

// naturalOffset is where an object goes after one that ends at end.
func naturalOffset(o *Object, end int64) int64 {
	if o.Resource {
		return end
	}
	return up(end, num.Alignment)
}

// holes are the unreferenced regions that alignment does not explain, in
// order: all bytes between two objects of which the second does not begin at
// its natural offset, and all bytes after the last object.
func holes(objects []Object, total int64) []Region {
	var out []Region
	end := int64(0)
	for i := range objects {
		o := &objects[i]
		if o.Offset != naturalOffset(o, end) {
			out = append(out, Region{end, o.Offset - end})
		}
		end = o.end()
	}
	if end < total {
		out = append(out, Region{end, total - end})
	}
	return out
}

// split cuts the payload into files (docs/format.md 1.5).
func split(entry string, start, payload, limit int64) ([]FileRecord, error) {
	if start >= limit {
		return nil, fmt.Errorf("artifact: a file limit of %d bytes does not hold the directory of %s, which needs %d", limit, entry, start)
	}
	if payload <= limit-start {
		return []FileRecord{{PayloadBytes: payload}}, nil
	}
	first := (limit - start) / pageSize * pageSize
	rest := (limit - partStart) / pageSize * pageSize
	if first <= 0 || rest <= 0 {
		return nil, fmt.Errorf("artifact: a file limit of %d bytes leaves no room for payload after the %d bytes of framing of %s", limit, start, entry)
	}
	files := []FileRecord{{PayloadBytes: first}}
	for left := payload - first; left > 0; left -= rest {
		files = append(files, FileRecord{
			Path:         partName(entry, len(files)),
			PayloadBytes: min(left, rest),
		})
	}
	return files, nil
}
