//go:build !linux

package cli

import (
	"context"
	"net"
	"time"
)

// listen opens the server's socket with probes, so that a dead peer is noticed within about 20 s.
func listen(address string) (net.Listener, error) {
	config := net.ListenConfig{KeepAliveConfig: net.KeepAliveConfig{Enable: true, Idle: 5 * time.Second, Interval: 5 * time.Second, Count: 3}}
	return config.Listen(context.Background(), "tcp", address)
}
