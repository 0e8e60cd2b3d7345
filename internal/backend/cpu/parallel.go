package cpu

import (
	"runtime"
	"sync"
)

// parallel calls f for contiguous runs covering [0, n), one run a core. f must not depend on how n is cut.
func parallel(n int, f func(first, end int)) {
	workers := min(n, runtime.GOMAXPROCS(0))
	if workers <= 1 {
		f(0, n)
		return
	}
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() { f(n*w/workers, n*(w+1)/workers) })
	}
	wg.Wait()
}
