package loader

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/cilium/ebpf"

	"github.com/ebpfnet/ebpfnet/bpf"
)

// Owner is the token of an attachment; package maps computes it.
type Owner uint64

// String returns the 16 hex digits by which everything names an owner.
func (o Owner) String() string { return fmt.Sprintf("%016x", uint64(o)) }

// direction of a packet, as seen by the host's network stack.
type direction int

const (
	ingress direction = iota
	egress
)

// target is a place for one program: a device and a direction.
type target struct {
	pin       string // name of the link's pin
	hook      string // name of the place, and of a filter there
	program   string
	ifindex   int
	direction direction
}

// samePlace reports whether the targets have the same device and hook, with any program.
func (t target) samePlace(other target) bool {
	return t.ifindex == other.ifindex && t.direction == other.direction
}

// endpointTargets returns the targets of our own containers' devices. They have no pins: see [Datapath.attacherOf].
func endpointTargets(ifindex int) []target {
	return []target{
		{"", fromContainer, fromContainer, ifindex, ingress},
		{"", toContainer, toContainer, ifindex, egress},
	}
}

// liveTargets returns the targets of a container's device that another plugin has created.
func liveTargets(ifindex int) []target {
	targets := endpointTargets(ifindex)
	for i := range targets {
		targets[i].pin = fmt.Sprintf("endpoint-%d-%s", ifindex, targets[i].hook)
	}
	return targets
}

// uplinkTargets returns an uplink's targets. Any header serves to look for programs
// or to detach them.
func uplinkTargets(ifindex int, header Header) []target {
	pin := func(hook string) string { return fmt.Sprintf("uplink-%d-%s", ifindex, hook) }
	return []target{
		{pin(fromUplink), fromUplink, fromUplink + string(header), ifindex, ingress},
		{pin(toUplink), toUplink, toUplink + string(header), ifindex, egress},
	}
}

// Header is the link-layer header of a device's packets: the suffix in the names of
// the programs that parse it.
type Header string

// The headers that the datapath can parse.
const (
	Ethernet Header = ""
	NoHeader Header = "_l3"
)

// loopbackTargets returns the targets on lo, for packets that the host sends to itself.
func loopbackTargets() []target {
	return []target{{"loopback-" + toLoopback, toLoopback, toLoopback, loopback, egress}}
}

// targetsOnDevice returns all targets that this version has on the device of t.
func targetsOnDevice(t target) []target {
	switch t.hook {
	case fromContainer, toContainer:
		if t.pin != "" {
			return liveTargets(t.ifindex)
		}
		return endpointTargets(t.ifindex)
	case fromUplink, toUplink:
		header := Ethernet
		if strings.HasSuffix(t.program, string(NoHeader)) {
			header = NoHeader
		}
		return uplinkTargets(t.ifindex, header)
	case toLoopback:
		return loopbackTargets()
	default: // another version's hook
		return nil
	}
}

const loopback = 1 // ifindex of lo in every network namespace

// attacher attaches programs to devices by one mechanism of the kernel.
type attacher interface {
	// attach attaches the program, and replaces an older one of ours.
	attach(t target, program *ebpf.Program) error
	// attached reports whether a program of ours is on the target.
	attached(t target) (bool, error)
	// detach detaches our program. A missing program or device is no error.
	detach(t target) error
	// attachedTargets returns the targets that have a program of ours, of any version. nameOf names a program.
	attachedTargets(nameOf programNamer) ([]target, error)
}

// attachers returns the mechanisms that this datapath uses.
func (d *Datapath) attachers() []attacher {
	if bpf.Attach(d.Config.Attach) == bpf.AttachClsact {
		return []attacher{clsact{d.dir}}
	}
	return []attacher{clsact{d.dir}, tcx{d.dir}}
}

// attacherOf returns clsact for the devices that ADD creates, and tcx for the others if
// the kernel has it. The former are ours alone. For them a tcx link is expensive: the
// kernel waits for every CPU when a link is attached and again when its device is
// deleted, which would more than double the time of an ADD. The others are shared with
// other tools, from which a link protects our programs, and carry traffic: when a
// qdisc is added to a device that is up, the kernel drops the packets in its queue.
func (d *Datapath) attacherOf(t target) attacher {
	attachers := d.attachers()
	if t.pin == "" {
		return attachers[0]
	}
	return attachers[len(attachers)-1]
}

// attachedTargets returns links before filters: if a device has both, the links are kept.
func (d *Datapath) attachedTargets() ([]target, error) {
	nameOf, err := d.dir.pinnedPrograms("*")
	if err != nil {
		return nil, err
	}
	var all []target
	for _, attacher := range slices.Backward(d.attachers()) {
		targets, err := attacher.attachedTargets(nameOf.name)
		if err != nil {
			return nil, fmt.Errorf("list the devices with our programs: %w", err)
		}
		all = append(all, targets...)
	}
	return all, nil
}

// AttachEndpoint attaches the programs to the host's end of an attachment's veth. It
// needs no lock, because every caller attaches the same to this device. The programs
// disappear with the device; a caller that does not delete the device must call
// DetachEndpoint.
func (d *Datapath) AttachEndpoint(ifindex int) error {
	return d.attachAll(endpointTargets(ifindex))
}

// AttachLiveEndpoint attaches the programs to a container's device of another plugin. No packet is
// lost if the kernel has tcx. DetachEndpoint removes the links even if their device is gone.
func (d *Datapath) AttachLiveEndpoint(ifindex int) error {
	return d.attachAll(liveTargets(ifindex))
}

// AttachUplink attaches the programs to an uplink, unless they are attached. The
// caller holds the lock.
func (d *Datapath) AttachUplink(ifindex int, header Header) error {
	return d.attachMissing(uplinkTargets(ifindex, header))
}

// AttachLoopback attaches the program to lo, unless it is attached. Each packet that
// the host sends to itself then costs two lookups, so the program is attached only
// while there are host ports. The caller holds the lock.
func (d *Datapath) AttachLoopback() error {
	return d.attachMissing(loopbackTargets())
}

// attachMissing is attachAll, unless all programs are attached.
func (d *Datapath) attachMissing(targets []target) error {
	attached, err := d.allAttached(targets)
	if err != nil || attached {
		return err
	}
	return d.attachAll(targets)
}

// LoopbackAttached reports whether the program is attached to lo.
func (d *Datapath) LoopbackAttached() (bool, error) {
	return d.allAttached(loopbackTargets())
}

// DetachLoopback detaches the program from lo. The caller holds the lock.
func (d *Datapath) DetachLoopback() error {
	return d.detachAll(loopbackTargets())
}

// EndpointAttached reports whether all programs are attached to an attachment's device.
func (d *Datapath) EndpointAttached(ifindex int) (bool, error) {
	attached, err := d.allAttached(endpointTargets(ifindex))
	if err != nil || attached {
		return attached, err
	}
	return d.allAttached(liveTargets(ifindex))
}

// UplinkAttached reports whether all programs are attached to an uplink.
func (d *Datapath) UplinkAttached(ifindex int) (bool, error) {
	return d.allAttached(uplinkTargets(ifindex, Ethernet))
}

// DetachEndpoint detaches the programs from an attachment's device, which may no
// longer exist.
func (d *Datapath) DetachEndpoint(ifindex int) error {
	return d.detachAll(append(endpointTargets(ifindex), liveTargets(ifindex)...))
}

// DetachUplink detaches the programs from an uplink, which may no longer exist. The
// caller holds the lock.
func (d *Datapath) DetachUplink(ifindex int) error {
	return d.detachAll(uplinkTargets(ifindex, Ethernet))
}

// attachAll attaches again if an upgrade has switched programs meanwhile. An upgrade
// reattaches only the targets that are attached when it switches, so a later attach must
// use the new programs itself.
func (d *Datapath) attachAll(targets []target) error {
	for {
		build := d.Config.Build
		err := d.attachEach(targets)
		errRead := d.readConfig()
		if errRead == nil && d.Config.Build != build {
			continue
		}
		if err = errors.Join(err, errRead); err != nil {
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

// attach attaches the program of the build in d.Config.
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

// ProgramName returns the name of a loaded program. The error wraps fs.ErrNotExist if
// the program no longer exists.
func ProgramName(id ebpf.ProgramID) (string, error) {
	program, err := ebpf.NewProgramFromID(id)
	if err != nil {
		return "", fmt.Errorf("open program %d: %w", id, err)
	}
	defer program.Close()

	info, err := program.Info()
	if err != nil {
		return "", fmt.Errorf("get the name of program %d: %w", id, err)
	}
	return info.Name, nil
}
