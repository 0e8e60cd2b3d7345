package cli

import (
	"context"
	"net"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// listen opens the server's socket so that a dead peer is noticed: probes after 5 s of silence, and no more than 15 s with data that is
// not acknowledged (docs/serving.md, Load). Accepted connections inherit the latter.
func listen(address string) (net.Listener, error) {
	var failed error
	config := net.ListenConfig{
		KeepAliveConfig: net.KeepAliveConfig{Enable: true, Idle: 5 * time.Second, Interval: 5 * time.Second, Count: 3},
		Control: func(_, _ string, c syscall.RawConn) error {
			err := c.Control(func(fd uintptr) {
				failed = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, 15_000)
			})
			if err == nil {
				err = failed
			}
			return err
		},
	}
	return config.Listen(context.Background(), "tcp", address)
}
