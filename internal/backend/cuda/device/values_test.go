package device_test

import (
	"math/rand/v2"

	"ninfer/internal/num"
)

func toBF16(v float64) uint16 { return num.ToBF16(float32(v)) }
func ofBF16(w uint16) float64 { return float64(num.FromBF16(w)) }

// randomE4M3 draws a code that stands for a number, and that number.
func randomE4M3(r *rand.Rand) (byte, float64) {
	c := byte(r.Uint32())
	if c&0x7f == 0x7f { // not a number
		c ^= 1
	}
	return c, float64(num.FromE4M3(c))
}
