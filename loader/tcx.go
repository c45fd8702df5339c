package loader

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
)

// tcx attaches by BPF links (kernel 6.6), which live as long as their pins. A
// process that is killed between attaching and pinning takes its link along.
type tcx struct {
	dir stateDir
}

func (a tcx) attach(t target, program *ebpf.Program) error {
	pin := a.dir.linkPin(t)
	ifindex, err := linkDevice(pin)
	switch {
	case err == nil && ifindex == t.ifindex:
		return updateLink(pin, program)
	case err == nil: // outlived its device
		err = removePin(pin)
	case errors.Is(err, fs.ErrNotExist):
		err = nil
	}
	if err != nil {
		return err
	}
	l, err := attachTCX(t, program)
	if err != nil {
		return err
	}
	defer l.Close()

	return l.Pin(pin)
}

// attachTCX waits a moment for a link of the same program to go: the kernel
// frees one in the background when its pin is removed, and refuses a second.
func attachTCX(t target, program *ebpf.Program) (link.Link, error) {
	options := link.TCXOptions{Interface: t.ifindex, Program: program, Attach: ebpf.AttachTCXIngress}
	if t.direction == egress {
		options.Attach = ebpf.AttachTCXEgress
	}
	deadline := time.After(time.Second)
	again := time.NewTicker(time.Millisecond)
	defer again.Stop()
	for {
		l, err := link.AttachTCX(options)
		if !errors.Is(err, fs.ErrExist) {
			return l, err
		}
		select {
		case <-deadline:
			return nil, err
		case <-again.C:
		}
	}
}

func updateLink(pin string, program *ebpf.Program) error {
	l, err := link.LoadPinnedLink(pin, nil)
	if err != nil {
		return fmt.Errorf("open %s: %w", pin, err)
	}
	defer l.Close()

	return l.Update(program)
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

func (a tcx) placed() ([]target, error) {
	pins, err := os.ReadDir(a.dir.links())
	if err != nil {
		return nil, err
	}
	var placed []target
	for _, pin := range pins {
		info, err := linkInfo(filepath.Join(a.dir.links(), pin.Name()))
		if errors.Is(err, fs.ErrNotExist) {
			continue // an ADD that undoes what it did
		}
		if err != nil {
			return nil, err
		}
		place := info.TCX()
		if place == nil || place.Ifindex == 0 {
			continue
		}
		program, err := ProgramName(info.Program)
		if err != nil {
			return nil, err
		}
		t := target{pin: pin.Name(), hook: hookOf(pin.Name()), program: program, ifindex: int(place.Ifindex)}
		if ebpf.AttachType(place.AttachType) == ebpf.AttachTCXEgress {
			t.direction = egress
		}
		placed = append(placed, t)
	}
	return placed, nil
}

// hookOf returns what stands last in the name of a link's pin.
func hookOf(pin string) string { return pin[strings.LastIndex(pin, "-")+1:] }

// linkDevice returns the index of the device that a pinned link is on, or 0
// where the device is gone.
func linkDevice(pin string) (int, error) {
	info, err := linkInfo(pin)
	if err != nil {
		return 0, err
	}
	place := info.TCX()
	if place == nil {
		return 0, nil
	}
	return int(place.Ifindex), nil
}

func linkInfo(pin string) (*link.Info, error) {
	l, err := link.LoadPinnedLink(pin, nil)
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", pin, err)
	}
	defer l.Close()

	info, err := l.Info()
	if err != nil {
		return nil, fmt.Errorf("ask %s for its device: %w", pin, err)
	}
	return info, nil
}

func removePin(pin string) error {
	err := os.Remove(pin)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}
