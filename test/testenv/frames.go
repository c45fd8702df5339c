package testenv

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"time"

	"golang.org/x/sys/unix"
)

// SendFrames sends whole frames on a device, bypassing the namespace's stack. They arrive in this order, because one CPU
// sends them all, and all of them arrive, because it waits while that CPU's queue is full (ENOBUFS).
func (ns *Namespace) SendFrames(device string, frames ...[]byte) error {
	link, err := ns.rtnl.LinkByName(device)
	if err != nil {
		return fmt.Errorf("find %s in %s: %w", device, ns.Name, err)
	}
	return ns.Do(func() error {
		if err := PinThread(rand.Int()); err != nil {
			return err
		}
		fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return fmt.Errorf("open packet socket in %s: %w", ns.Name, err)
		}
		defer unix.Close(fd)
		to := &unix.SockaddrLinklayer{Ifindex: link.Attrs().Index}
		for i, frame := range frames {
			err := unix.Sendto(fd, frame, 0, to)
			for deadline := time.Now().Add(Timeout); errors.Is(err, unix.ENOBUFS) && time.Now().Before(deadline); {
				runtime.Gosched()
				err = unix.Sendto(fd, frame, 0, to)
			}
			if err != nil {
				return fmt.Errorf("send frame %d of %d from %s of %s: %w", i, len(frames), device, ns.Name, err)
			}
		}
		return nil
	})
}

// MACOf returns the hardware address of a device.
func (ns *Namespace) MACOf(tb TB, device string) MAC {
	tb.Helper()
	link, err := ns.rtnl.LinkByName(device)
	if err != nil {
		tb.Fatalf("find %s in %s: %v", device, ns.Name, err)
	}
	return MAC(link.Attrs().HardwareAddr)
}
