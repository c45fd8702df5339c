package loader

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/cilium/ebpf"

	"github.com/ebpfnet/ebpfnet/bpf"
)

// Owner is an attachment's token (package maps makes it); here it names pins.
type Owner uint64

// direction is that of a packet as the host's network stack sees it.
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

func endpointTargets(owner Owner, ifindex int) []target {
	pin := func(hook string) string { return fmt.Sprintf("%s%016x-%s", endpointPrefix, uint64(owner), hook) }
	return []target{
		{pin(fromContainer), fromContainer, fromContainer, ifindex, ingress},
		{pin(toContainer), toContainer, toContainer, ifindex, egress},
	}
}

// uplinkTargets needs no header to look for programs or to take them off.
func uplinkTargets(ifindex int, header Header) []target {
	pin := func(hook string) string { return fmt.Sprintf("%s%d-%s", uplinkPrefix, ifindex, hook) }
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

// hostTargets are on the loopback device: what the host sends to itself.
func hostTargets() []target {
	return []target{{"host-" + fromHost, fromHost, fromHost, loopback, egress}}
}

const loopback = 1 // always the first device

const (
	endpointPrefix = "endpoint-"
	uplinkPrefix   = "uplink-"
)

// attacher is a way to attach a program to a device.
type attacher interface {
	// attach puts the program on the target, in the place of an older one of ours.
	attach(t target, program *ebpf.Program) error
	// attached says whether a program of ours is on the target.
	attached(t target) (bool, error)
	// detach takes our program off. It is no error that there is none, or no device.
	detach(t target) error
}

func (d *Datapath) attacher() attacher {
	if bpf.DatapathAttach(d.Config.Attach) == bpf.DatapathAttachATTACH_CLSACT {
		return clsact{}
	}
	return tcx{d.dir}
}

// AttachEndpoint puts the programs on the host's end of an attachment's veth.
// It needs no lock, since nobody else has pins of this owner; the caller calls
// DetachEndpoint in the end.
func (d *Datapath) AttachEndpoint(owner Owner, ifindex int) error {
	return d.attachAll(endpointTargets(owner, ifindex))
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

// AttachHost puts the program on the loopback device, if it is not there yet.
// It costs the host's traffic to itself two lookups per packet, so it is there
// only while there are host ports. The caller holds the lock.
func (d *Datapath) AttachHost() error {
	attached, err := d.HostAttached()
	if err != nil || attached {
		return err
	}
	return d.attachAll(hostTargets())
}

// HostAttached says whether the program is on the loopback device.
func (d *Datapath) HostAttached() (bool, error) {
	return d.allAttached(hostTargets())
}

// DetachHost takes the program off the loopback device. The caller holds the lock.
func (d *Datapath) DetachHost() error {
	return d.detachAll(hostTargets())
}

// EndpointAttached says whether all programs of an attachment are in place.
func (d *Datapath) EndpointAttached(owner Owner, ifindex int) (bool, error) {
	return d.allAttached(endpointTargets(owner, ifindex))
}

// UplinkAttached says whether all programs of an uplink are in place.
func (d *Datapath) UplinkAttached(ifindex int) (bool, error) {
	return d.allAttached(uplinkTargets(ifindex, Ethernet))
}

// DetachEndpoint takes the programs off an attachment's veth, which may be gone
// already: ifindex 0 then. The caller holds the lock.
func (d *Datapath) DetachEndpoint(owner Owner, ifindex int) error {
	return d.detachAll(endpointTargets(owner, ifindex))
}

// DetachUplink takes the programs off an uplink, which may be gone already.
// The caller holds the lock.
func (d *Datapath) DetachUplink(ifindex int) error {
	return d.detachAll(uplinkTargets(ifindex, Ethernet))
}

func (d *Datapath) attachAll(targets []target) error {
	for _, t := range targets {
		if err := d.attach(t); err != nil {
			return errors.Join(err, d.detachAll(targets))
		}
	}
	return nil
}

func (d *Datapath) attach(t target) error {
	program, err := ebpf.LoadPinnedProgram(d.dir.progPin(t.program), nil)
	if err != nil {
		return fmt.Errorf("open %s: %w", d.dir.progPin(t.program), err)
	}
	defer program.Close()

	if err := d.attacher().attach(t, program); err != nil {
		return fmt.Errorf("attach %s to device %d: %w", t.hook, t.ifindex, err)
	}
	return nil
}

func (d *Datapath) allAttached(targets []target) (bool, error) {
	for _, t := range targets {
		attached, err := d.attacher().attached(t)
		if err != nil || !attached {
			return false, err
		}
	}
	return true, nil
}

func (d *Datapath) detachAll(targets []target) error {
	var errs []error
	for _, t := range targets {
		if err := d.attacher().detach(t); err != nil {
			errs = append(errs, fmt.Errorf("detach %s from device %d: %w", t.hook, t.ifindex, err))
		}
	}
	return errors.Join(errs...)
}

// DetachDead takes the programs of the given owners off, and removes pins whose
// device is gone, whosever they are. It goes on after errors. The caller holds
// the lock.
func (d *Datapath) DetachDead(owners map[Owner]bool) error {
	entries, err := os.ReadDir(d.dir.links())
	if err != nil {
		return fmt.Errorf("list the pinned links: %w", err)
	}
	var errs []error
	for _, entry := range entries {
		name, isEndpoint := strings.CutPrefix(entry.Name(), endpointPrefix)
		if !isEndpoint {
			continue
		}
		hex, _, _ := strings.Cut(name, "-")
		owner, err := strconv.ParseUint(hex, 16, 64)
		pin := filepath.Join(d.dir.links(), entry.Name())
		if err == nil && (owners[Owner(owner)] || isDefunct(pin)) {
			errs = append(errs, removePin(pin))
		}
	}
	return errors.Join(errs...)
}
