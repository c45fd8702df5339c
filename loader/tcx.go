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

// tcx attaches programs by BPF links (kernel 6.6), which live as long as their pins.
// If a process is killed between attaching and pinning, its link disappears with it.
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

// attachTCX retries for a moment while the same program has another link on the
// device: the kernel frees a link some time after its pin is removed, and until then
// refuses a second one.
func attachTCX(t target, program *ebpf.Program) (link.Link, error) {
	options := link.TCXOptions{Interface: t.ifindex, Program: program, Attach: ebpf.AttachTCXIngress}
	if t.direction == egress {
		options.Attach = ebpf.AttachTCXEgress
	}
	deadline := time.After(time.Second)
	retry := time.NewTicker(time.Millisecond)
	defer retry.Stop()
	for {
		l, err := link.AttachTCX(options)
		if !errors.Is(err, fs.ErrExist) {
			return l, err
		}
		select {
		case <-deadline:
			return nil, err
		case <-retry.C:
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

// attached asks the link for its device, because a pin outlives the device, and a link
// can be detached by force.
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

func (a tcx) attachedTargets(nameOf programNamer) ([]target, error) {
	pins, err := os.ReadDir(a.dir.links())
	if err != nil {
		return nil, err
	}
	var attached []target
	for _, pin := range pins {
		info, err := linkInfo(filepath.Join(a.dir.links(), pin.Name()))
		if errors.Is(err, fs.ErrNotExist) {
			continue // an ADD has just rolled back
		}
		if err != nil {
			return nil, err
		}
		device := info.TCX()
		if device == nil {
			continue
		}
		program, err := nameOf(info.Program)
		if err != nil {
			return nil, err
		}
		t := target{pin: pin.Name(), hook: hookOf(pin.Name()), program: program, ifindex: int(device.Ifindex)}
		if ebpf.AttachType(device.AttachType) == ebpf.AttachTCXEgress {
			t.direction = egress
		}
		attached = append(attached, t)
	}
	return attached, nil
}

// hookOf returns the hook, which is the last part of a link's pin name.
func hookOf(pin string) string { return pin[strings.LastIndex(pin, "-")+1:] }

// linkDevice returns the ifindex of a pinned link's device, or 0 if the device is gone.
func linkDevice(pin string) (int, error) {
	info, err := linkInfo(pin)
	if err != nil {
		return 0, err
	}
	device := info.TCX()
	if device == nil {
		return 0, nil
	}
	return int(device.Ifindex), nil
}

func linkInfo(pin string) (*link.Info, error) {
	l, err := link.LoadPinnedLink(pin, nil)
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", pin, err)
	}
	defer l.Close()

	info, err := l.Info()
	if err != nil {
		return nil, fmt.Errorf("get the device of %s: %w", pin, err)
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
