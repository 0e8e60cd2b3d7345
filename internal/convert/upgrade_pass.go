package convert

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"sync/atomic"
	"time"

	"ninfer/internal/artifact"
)

// segment is a run of bytes of the input that goes to one place.
type segment struct {
	end  int64                           // offset in the file after the last byte
	take func(off int64, p []byte) error // off counts from the segment's start; nil: only hashed
	done func() error                    // after the last byte; may be nil
}

// makeSegments says where every byte of the input goes.
func (u *upgrade) makeSegments() {
	base := u.in.PayloadStart()
	add := func(n int64, take func(int64, []byte) error, done func() error) {
		end := n
		if k := len(u.segments); k > 0 {
			end += u.segments[k-1].end
		}
		u.segments = append(u.segments, segment{end: end, take: take, done: done})
	}
	add(base, nil, nil)
	if u.mixed {
		end := int64(0)
		for i := range u.in.Objects {
			o := &u.in.Objects[i]
			if o.Offset > end {
				add(o.Offset-end, nil, nil)
			}
			u.addObject(o, add)
			end = o.Offset + o.Bytes
		}
		add(u.in.PayloadBytes()-end, nil, nil)
		return
	}
	// Dialect L: everything stays where it is; what is no object there is a hole, or a gap that must be zero.
	total := u.in.PayloadBytes()
	end := int64(0)
	holes := u.plan.Holes
	hole := 0
	between := func(to int64) {
		if hole < len(holes) && holes[hole].Offset == end && end < to {
			i := hole
			hole++
			add(to-end, func(off int64, p []byte) error { return classify(IO, u.writer.WriteHoleAt(i, off, p)) }, nil)
		} else if end < to {
			at := end
			add(to-end, func(off int64, p []byte) error { return u.checkGap(at+off, p) }, nil)
		}
		end = to
	}
	for i := range u.plan.Directory.Objects {
		o := &u.plan.Directory.Objects[i]
		if o.ID == chatTemplate {
			break // the last one: after the old payload
		}
		between(o.Offset)
		u.addObject(o, add)
		end = o.Offset + o.Bytes
	}
	between(total)
}

func (u *upgrade) addObject(o *artifact.Object, add func(int64, func(int64, []byte) error, func() error)) {
	id := o.ID
	if u.mixed && (id == mixedGateUp || id == mixedDown) {
		b := newBank(u, id)
		u.banks = append(u.banks, b)
		add(o.Bytes, b.take, b.done)
		return
	}
	if u.mixed && id == chatTemplate {
		h := sha256.New()
		add(o.Bytes, func(off int64, p []byte) error {
			h.Write(p)
			return classify(IO, u.writer.WriteAt(id, off, p))
		}, func() error {
			if got := hex.EncodeToString(h.Sum(nil)); u.pins != nil && got != u.pins.template {
				return fail(Source, "%s: the sha256 of %q is %s, the published one is %s", u.In, id, got, u.pins.template)
			}
			return nil
		})
		return
	}
	add(o.Bytes, func(off int64, p []byte) error { return classify(IO, u.writer.WriteAt(id, off, p)) }, nil)
}

// checkGap refuses padding that is not zero: the artifact's padding must be, and nothing else would tell that bytes are lost.
func (u *upgrade) checkGap(at int64, p []byte) error {
	for i, b := range p {
		if b != 0 {
			return fail(Source, "%s: padding at payload byte %d is 0x%02x, want zero", u.In, at+int64(i), b)
		}
	}
	return nil
}

// block is a run of the input that is being hashed and written.
type block struct {
	off  int64
	data []byte
	refs atomic.Int32
}

// upgradeBlock is how much of the input is read at once. The number of blocks bounds memory.
const (
	upgradeBlock  = 4 << 20
	upgradeBlocks = 6
)

// pass reads the input once, front to back: one goroutine reads ahead, one hashes the whole file, and this one sends every byte
// where it belongs.
func (u *upgrade) pass(ctx context.Context, release *artifact.Releaser) error {
	user := ctx
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	start := time.Now()
	free := make(chan *block, upgradeBlocks)
	for range upgradeBlocks {
		free <- &block{data: make([]byte, upgradeBlock)}
	}
	drop := func(b *block) {
		if b.refs.Add(-1) == 0 {
			free <- b
		}
	}
	toWrite, toHash := make(chan *block, upgradeBlocks), make(chan *block, upgradeBlocks)
	var readErr error
	go func() {
		defer close(toWrite)
		defer close(toHash)
		for off := int64(0); off < u.in.Size(); {
			var b *block
			select {
			case b = <-free:
			case <-ctx.Done():
				readErr = ctx.Err()
				return
			}
			b.off, b.data = off, b.data[:min(upgradeBlock, u.in.Size()-off)]
			if _, err := u.in.ReadFileAt(b.data, off); err != nil {
				readErr = fail(IO, "reading %s at %d: %w", u.In, off, err)
				return
			}
			off += int64(len(b.data))
			b.refs.Store(2)
			toHash <- b
			toWrite <- b
		}
	}()
	whole := sha256.New()
	hashed := make(chan struct{})
	go func() {
		defer close(hashed)
		for b := range toHash {
			whole.Write(b.data)
			drop(b)
		}
	}()

	var failed error
	at := 0
	waiting := time.Now()
	for b := range toWrite {
		u.r.Timings.ReadWait += time.Since(waiting).Seconds()
		if failed == nil {
			t := time.Now()
			if failed = user.Err(); failed == nil {
				failed = u.distribute(b, &at)
			}
			if end := b.off + int64(len(b.data)); failed == nil && u.fault != nil {
				failed = classify(IO, u.fault(end))
			}
			if failed == nil && release != nil {
				failed = classify(IO, release.Release(b.off+int64(len(b.data))))
			}
			u.r.Timings.Write += time.Since(t).Seconds()
			if failed != nil {
				cancel()
			} else if u.Progress != nil {
				u.Progress(UpgradeStep{b.off + int64(len(b.data)), u.in.Size(), time.Since(start)})
			}
		}
		drop(b)
		waiting = time.Now()
	}
	<-hashed
	u.r.Timings.HashWait = time.Since(waiting).Seconds()
	switch {
	case failed != nil:
		return failed
	case readErr != nil:
		return readErr
	case user.Err() != nil:
		return user.Err()
	}
	u.r.V2SHA256 = hex.EncodeToString(whole.Sum(nil))
	return nil
}

// distribute gives a block's bytes to the segments they belong to; at is the segment that was reached.
func (u *upgrade) distribute(b *block, at *int) error {
	off, p := b.off, b.data
	for len(p) > 0 {
		s := &u.segments[*at]
		begin := int64(0)
		if *at > 0 {
			begin = u.segments[*at-1].end
		}
		n := min(int64(len(p)), s.end-off)
		if n > 0 && s.take != nil {
			if err := s.take(off-begin, p[:n]); err != nil {
				return err
			}
		}
		off, p = off+n, p[n:]
		if off == s.end {
			if s.done != nil {
				if err := s.done(); err != nil {
					return err
				}
			}
			*at++
		}
	}
	return nil
}

// finish checks what only the whole input shows, and writes what follows it.
func (u *upgrade) finish() error {
	if u.pins != nil && u.r.V2SHA256 != u.pins.file {
		return fail(Source, "%s: its sha256 is %s, the published file has %s", u.In, u.r.V2SHA256, u.pins.file)
	}
	if u.mixed {
		if u.pins == nil {
			return nil // the id follows from the content
		}
		id, err := u.plan.UpgradeID(u.r.V2SHA256)
		if err != nil {
			return err
		}
		u.writer.SetID(id)
		return nil
	}
	// The last hole may reach beyond the input, up to the template's alignment.
	if n := len(u.plan.Holes); n > 0 {
		h := u.plan.Holes[n-1]
		if from := u.in.PayloadBytes(); h.Offset+h.Bytes > from {
			from = max(from, h.Offset)
			if err := u.writer.WriteHoleAt(n-1, from-h.Offset, make([]byte, h.Offset+h.Bytes-from)); err != nil {
				return classify(IO, err)
			}
		}
	}
	return classify(IO, u.writer.WriteAt(chatTemplate, 0, u.template))
}

// complete fills the report.
func (u *upgrade) complete(receipt *artifact.Receipt, elapsed time.Duration) {
	r := &u.r
	own := map[string]string{}
	for _, b := range u.banks {
		own[b.id] = b.v2
		r.Banks.Set(b.id, b.report)
	}
	for i := range u.in.Objects {
		id := u.in.Objects[i].ID
		sum, _ := receipt.ObjectSHA256.Lookup(id)
		if s, ok := own[id]; ok {
			sum = s
		}
		r.V2Objects.Set(id, sum)
	}
	r.Input, r.Output, r.ArtifactID = u.In, u.Out, artifact.FormatID(receipt.ID)
	r.Files, r.PayloadBytes, r.Seconds = receipt.Files, receipt.PayloadBytes, elapsed.Seconds()
	r.Directory, r.Published = receipt.DirectorySHA256, u.pins != nil
	r.Objects, r.FileBytes = len(u.plan.Directory.Objects), receipt.FileBytes
}
