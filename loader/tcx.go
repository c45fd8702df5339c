package loader

import (
	"errors"
	"fmt"
	"io/fs"
	"os"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
)

// tcx attaches by BPF links (kernel 6.6), which live as long as their pins. A
// process that is killed between attaching and pinning takes its link along.
type tcx struct {
	dir stateDir
}

func (a tcx) attach(t target, program *ebpf.Program) error {
	if err := a.detach(t); err != nil { // a pin that outlived its device
		return err
	}
	attachment := ebpf.AttachTCXIngress
	if t.direction == egress {
		attachment = ebpf.AttachTCXEgress
	}
	l, err := link.AttachTCX(link.TCXOptions{Interface: t.ifindex, Program: program, Attach: attachment})
	if err != nil {
		return err
	}
	defer l.Close()

	return l.Pin(a.dir.linkPin(t))
}

// attached also looks behind the pin: it outlives its device, and a link can be
// detached by force.
func (a tcx) attached(t target) (bool, error) {
	ifindex, err := linkDevice(a.dir.linkPin(t))
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return err == nil && ifindex == t.ifindex, err
}

func (a tcx) detach(t target) error {
	return removePin(a.dir.linkPin(t))
}

// linkDevice returns the index of the device that a pinned link is on, or 0
// where the device is gone.
func linkDevice(pin string) (int, error) {
	l, err := link.LoadPinnedLink(pin, nil)
	if err != nil {
		return 0, fmt.Errorf("open %s: %w", pin, err)
	}
	defer l.Close()

	info, err := l.Info()
	if err != nil {
		return 0, fmt.Errorf("ask %s for its device: %w", pin, err)
	}
	place := info.TCX()
	if place == nil {
		return 0, nil
	}
	return int(place.Ifindex), nil
}

func isDefunct(pin string) bool {
	ifindex, err := linkDevice(pin)
	return err == nil && ifindex == 0
}

func removePin(pin string) error {
	err := os.Remove(pin)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}
