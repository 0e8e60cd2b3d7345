package device

import (
	"bytes"
	"errors"
	"testing"
	"time"

	"ninfer/internal/backend"
)

// source has rows of four bytes that tell their number. It is slow at one of them and fails at another.
type source struct{ slow, bad int64 }

var errBad = errors.New("no such row")

func (s source) Rows(ids []int64, dst []byte) error {
	for i, id := range ids {
		switch id {
		case s.bad:
			return errBad
		case s.slow:
			time.Sleep(2 * slow)
		}
		copy(dst[4*i:], []byte{byte(id), byte(id >> 8), 7, byte(id)})
	}
	return nil
}

// Rows of a table come in order whoever copies them, of one token and of many, with some on a disk, and an error is told.
func TestTableRows(t *testing.T) {
	for _, n := range []int{1, 16, 17, 128, 3000} {
		for _, slowAt := range []int64{-1, 500, 503} {
			d := &Device{}
			ids := make([]int64, n)
			var want []byte
			for i := range ids {
				ids[i] = 500 + int64(7*i%n)
				want = append(want, byte(ids[i]), byte(ids[i]>>8), 7, byte(ids[i]))
			}
			got := make([]byte, 4*n)
			if err := d.rows(&backend.Table{RowBytes: 4, Source: source{slowAt, -1}}, ids, got); err != nil || !bytes.Equal(got, want) {
				t.Errorf("%d rows, slow %d: %v, or others than asked for", n, slowAt, err)
			}
			if rows, missed := d.Gathered(); rows != uint64(n) || slowAt == 500 && missed == 0 {
				t.Errorf("%d rows, slow %d: %d counted, %d slow", n, slowAt, rows, missed)
			}
			if err := d.rows(&backend.Table{RowBytes: 4, Source: source{slowAt, ids[n-1]}}, ids, got); !errors.Is(err, errBad) {
				t.Errorf("%d rows, a bad one: %v", n, err)
			}
		}
	}
}

// enterer counts how often it is entered, and goes on until it is stopped.
type enterer struct {
	source
	begun chan struct{}
}

func (e enterer) Enter(stop func() bool) {
	e.begun <- struct{}{}
	for !stop() {
		time.Sleep(time.Millisecond)
	}
}

// The table's pages are entered once, whatever the number of steps, and no longer than the device is open.
func TestTableEntered(t *testing.T) {
	d := &Device{}
	e := enterer{begun: make(chan struct{}, 2)}
	d.enter(source{})
	for range 2 {
		d.enter(e)
	}
	<-e.begun
	d.leave()
	if len(e.begun) > 0 {
		t.Error("entered twice")
	}
}
