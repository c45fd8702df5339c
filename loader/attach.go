package loader

import (
	"errors"
	"fmt"
	"strings"

	"github.com/cilium/ebpf"

	"github.com/ebpfnet/ebpfnet/bpf"
)

// Owner is an attachment's token, which package maps makes.
type Owner uint64

// direction is that of a packet as the host's network stack sees it.
type direction int

const (
	ingress direction = iota
	egress
)

// target is a place for one program: a device and a direction.
type target struct {
	pin       string // name of a link's pin
	hook      string // name of the place, and of a filter there
	program   string
	ifindex   int
	direction direction
}

// endpointTargets have no pins: see [Datapath.attacherOf].
func endpointTargets(ifindex int) []target {
	return []target{
		{"", fromContainer, fromContainer, ifindex, ingress},
		{"", toContainer, toContainer, ifindex, egress},
	}
}

// uplinkTargets needs no header to look for programs or to take them off.
func uplinkTargets(ifindex int, header Header) []target {
	pin := func(hook string) string { return fmt.Sprintf("uplink-%d-%s", ifindex, hook) }
	return []target{
		{pin(fromUplink), fromUplink, fromUplink + string(header), ifindex, ingress},
		{pin(toUplink), toUplink, toUplink + string(header), ifindex, egress},
	}
}

// Header is what a device's packets have before the IP header. It is the suffix
// of the programs that read them.
type Header string

// The headers that the datapath can read.
const (
	Ethernet Header = ""
	NoHeader Header = "_l3"
)

// loopbackTargets are on the loopback device: what the host sends to itself.
func loopbackTargets() []target {
	return []target{{"loopback-" + toLoopback, toLoopback, toLoopback, loopback, egress}}
}

// siblings returns all targets of the device that a target is on, as this version
// has them.
func siblings(t target) []target {
	switch t.hook {
	case fromContainer, toContainer:
		return endpointTargets(t.ifindex)
	case fromUplink, toUplink:
		header := Ethernet
		if strings.HasSuffix(t.program, string(NoHeader)) {
			header = NoHeader
		}
		return uplinkTargets(t.ifindex, header)
	case toLoopback:
		return loopbackTargets()
	default: // another version's
		return nil
	}
}

const loopback = 1 // always the first device

// attacher is a way to attach a program to a device.
type attacher interface {
	// attach puts the program on the target, in the place of an older one of ours.
	attach(t target, program *ebpf.Program) error
	// attached says whether a program of ours is on the target.
	attached(t target) (bool, error)
	// detach takes our program off. It is no error that there is none, or no device.
	detach(t target) error
	// placed returns where programs of ours are, of whatever version, on devices
	// that are there.
	placed() ([]target, error)
}

// attachers returns the ways in which programs of this datapath are attached.
func (d *Datapath) attachers() []attacher {
	if bpf.Attach(d.Config.Attach) == bpf.AttachClsact {
		return []attacher{clsact{}}
	}
	return []attacher{clsact{}, tcx{d.dir}}
}

// attacherOf has filters on the devices of containers, and on all others the best
// that the kernel has. The kernel waits for every CPU when a tcx link comes, and
// again when its device goes, which more than doubles the cost of an ADD and is a
// third of that of a DEL. Links are for the devices that are shared with other tools.
func (d *Datapath) attacherOf(t target) attacher {
	attachers := d.attachers()
	if t.hook == fromContainer || t.hook == toContainer {
		return attachers[0]
	}
	return attachers[len(attachers)-1]
}

// placed returns where programs of ours are.
func (d *Datapath) placed() ([]target, error) {
	var all []target
	for _, attacher := range d.attachers() {
		placed, err := attacher.placed()
		if err != nil {
			return nil, fmt.Errorf("look for our programs on devices: %w", err)
		}
		all = append(all, placed...)
	}
	return all, nil
}

// AttachEndpoint puts the programs on the host's end of an attachment's veth. It
// needs no lock: whoever else attaches to this device attaches the same. The
// programs go with the device; whoever does not delete that calls DetachEndpoint
// in the end.
func (d *Datapath) AttachEndpoint(ifindex int) error {
	return d.attachAll(endpointTargets(ifindex))
}

// AttachUplink puts the programs on an uplink, if they are not there yet.
// The caller holds the lock.
func (d *Datapath) AttachUplink(ifindex int, header Header) error {
	attached, err := d.UplinkAttached(ifindex)
	if err != nil || attached {
		return err
	}
	return d.attachAll(uplinkTargets(ifindex, header))
}

// AttachLoopback puts the program on the loopback device, if it is not there yet.
// It costs the host's traffic to itself two lookups per packet, so it is there
// only while there are host ports. The caller holds the lock.
func (d *Datapath) AttachLoopback() error {
	attached, err := d.LoopbackAttached()
	if err != nil || attached {
		return err
	}
	return d.attachAll(loopbackTargets())
}

// LoopbackAttached says whether the program is on the loopback device.
func (d *Datapath) LoopbackAttached() (bool, error) {
	return d.allAttached(loopbackTargets())
}

// DetachLoopback takes the program off the loopback device. The caller holds the lock.
func (d *Datapath) DetachLoopback() error {
	return d.detachAll(loopbackTargets())
}

// EndpointAttached says whether all programs of an attachment are in place.
func (d *Datapath) EndpointAttached(ifindex int) (bool, error) {
	return d.allAttached(endpointTargets(ifindex))
}

// UplinkAttached says whether all programs of an uplink are in place.
func (d *Datapath) UplinkAttached(ifindex int) (bool, error) {
	return d.allAttached(uplinkTargets(ifindex, Ethernet))
}

// DetachEndpoint takes the programs off an attachment's device, which may be gone
// already.
func (d *Datapath) DetachEndpoint(ifindex int) error {
	return d.detachAll(endpointTargets(ifindex))
}

// DetachUplink takes the programs off an uplink, which may be gone already.
// The caller holds the lock.
func (d *Datapath) DetachUplink(ifindex int) error {
	return d.detachAll(uplinkTargets(ifindex, Ethernet))
}

// attachAll looks behind itself: an upgrade goes through what is attached after it
// has named other programs, so whoever comes later than that has to take those.
func (d *Datapath) attachAll(targets []target) error {
	for {
		build := d.Config.Build
		err := d.attachEach(targets)
		readErr := d.readConfig()
		if readErr == nil && d.Config.Build != build {
			continue
		}
		if err = errors.Join(err, readErr); err != nil {
			return errors.Join(err, d.detachAll(targets))
		}
		return nil
	}
}

func (d *Datapath) attachEach(targets []target) error {
	for _, t := range targets {
		if err := d.attach(t); err != nil {
			return err
		}
	}
	return nil
}

// attach attaches the program of the build that is known to be in use.
func (d *Datapath) attach(t target) error {
	program, err := openProgram(d.dir.progPin(d.Config.Build, t.program))
	if err != nil {
		return err
	}
	defer program.Close()

	if err := d.attacherOf(t).attach(t, program); err != nil {
		return fmt.Errorf("attach %s to device %d: %w", t.hook, t.ifindex, err)
	}
	return nil
}

func (d *Datapath) allAttached(targets []target) (bool, error) {
	for _, t := range targets {
		attached, err := d.attacherOf(t).attached(t)
		if err != nil || !attached {
			return false, err
		}
	}
	return true, nil
}

func (d *Datapath) detachAll(targets []target) error {
	var errs []error
	for _, t := range targets {
		if err := d.attacherOf(t).detach(t); err != nil {
			errs = append(errs, fmt.Errorf("detach %s from device %d: %w", t.hook, t.ifindex, err))
		}
	}
	return errors.Join(errs...)
}

// ProgramName returns the name that a program has in the kernel. The error wraps fs.ErrNotExist
// where the program is gone.
func ProgramName(id ebpf.ProgramID) (string, error) {
	program, err := ebpf.NewProgramFromID(id)
	if err != nil {
		return "", fmt.Errorf("open program %d: %w", id, err)
	}
	defer program.Close()

	info, err := program.Info()
	if err != nil {
		return "", fmt.Errorf("ask for the name of program %d: %w", id, err)
	}
	return info.Name, nil
}
