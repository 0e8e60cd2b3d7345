//go:build !linux

package convert

import "time"

func processTime() time.Duration { return 0 }

func peakMemory() int64 { return 0 }

func syncAll() {}

func diskBytes() int64 { return 0 }
