package cpu

import (
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"
)

// counter counts how often each unit ran.
type counter struct {
	units []atomic.Int32
	slow  time.Duration // of unit 1
}

func (c *counter) do(_, unit int) {
	if unit == 1 && c.slow > 0 {
		time.Sleep(c.slow)
	}
	c.units[unit].Add(1)
}

// Every unit of every task runs once, whether helpers are awake, asleep, late or at rest; idle helpers sleep; close leaves nothing.
func TestPool(t *testing.T) {
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	for _, workers := range []int{1, 2, 3, 8} {
		p := newPool(workers)
		for round := range 300 {
			c := &counter{units: make([]atomic.Int32, round%17)}
			switch round % 60 {
			case 20:
				time.Sleep(2 * time.Millisecond)
			case 40:
				c.slow = time.Millisecond
			}
			p.run(c, len(c.units))
			for u := range c.units {
				if n := c.units[u].Load(); n != 1 {
					t.Fatalf("%d workers, round %d: unit %d ran %d times", workers, round, u, n)
				}
			}
		}
		deadline := time.Now().Add(5 * time.Second)
		for w := 1; w < workers; w++ {
			for !p.helpers[w].asleep.Load() {
				if time.Now().After(deadline) {
					t.Fatalf("%d workers: helper %d does not sleep", workers, w)
				}
				time.Sleep(time.Millisecond)
			}
		}
		p.close()
		p.close()
	}
}
