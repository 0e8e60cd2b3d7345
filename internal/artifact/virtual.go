package artifact

import (
	"bytes"
	"encoding/binary"
	"fmt"

	"ninfer/internal/mmap"
)

// Virtual is an artifact that no file holds: the framing of a plan around bytes that are zero until they are made. It costs address space
// only, so that a model of any size can be opened for a device that makes its own weights. write makes what must have content: it is
// called once for each object, in order, and leaves alone what may stay zero. The plan must be of one file; the id is all zero.
func Virtual(p *Plan, write func(o *Object, data []byte) error) (*File, error) {
	if len(p.Directory.Files) > 1 {
		return nil, fmt.Errorf("artifact: %s is planned with %d files: one that is not written must be whole", p.Entry, len(p.Directory.Files))
	}
	mem, err := mmap.Reserve(p.Entry, p.PayloadStart+p.PayloadBytes)
	if err != nil {
		return nil, fmt.Errorf("artifact: %w", err)
	}
	data := mem.Bytes()
	copy(data, entryMagic)
	binary.LittleEndian.PutUint64(data[8:], uint64(len(p.Text)))
	copy(data[headerSize:], p.Text)
	a, err := open(p.Entry, bytes.NewReader(data), int64(len(data)))
	for i := range p.Directory.Objects {
		if err != nil {
			break
		}
		o := &p.Directory.Objects[i]
		err = write(o, data[p.PayloadStart+o.Offset:][:o.Bytes:o.Bytes])
	}
	if err != nil {
		mem.Close()
		return nil, fmt.Errorf("artifact: %s: %w", p.Entry, err)
	}
	a.parts[0].mem = mem
	return a, nil
}
