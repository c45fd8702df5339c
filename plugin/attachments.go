package plugin

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/link"
	"github.com/ebpfnet/ebpfnet/plugin/record"
)

// AttachmentInfo is what is known on a host of one attachment, from its device, its entries in the
// maps and its record.
type AttachmentInfo struct {
	maps.Attachment                // empty where nothing is left that names it
	Owner           string         `json:"owner"`            // the token in map entries and the name of the device
	Dead            bool           `json:"dead"`             // its device is gone: DEL or GC sweeps up after it
	Device          string         `json:"device,omitempty"` // the host's end
	MAC             string         `json:"mac,omitempty"`    // the container's
	Chained         bool           `json:"chained"`          // the device is another plugin's
	Addresses       []AddressInfo  `json:"addresses"`
	HostPorts       []PortInfo     `json:"hostPorts"`
	AntiSpoof       bool           `json:"antiSpoof"`
	IngressPolicy   string         `json:"ingressPolicy,omitempty"`
	IngressRate     uint64         `json:"ingressRate,omitempty"` // bits per second; 0: no limit
	EgressRate      uint64         `json:"egressRate,omitempty"`
	Aliases         []string       `json:"aliases,omitempty"`
	CgroupPath      string         `json:"cgroupPath,omitempty"`
	Labels          []record.Label `json:"labels,omitempty"`
	// ProgramsBefore are those of others that see its packets first.
	ProgramsBefore []string `json:"programsBefore,omitempty"`

	index int // of the device
}

// AddressInfo is an address of a container.
type AddressInfo struct {
	Address     netip.Addr `json:"address"`
	Gateway     netip.Addr `json:"gateway"`
	Masqueraded bool       `json:"masqueraded"`
}

// PortInfo is a host port. HostAddress 0.0.0.0 or :: is any.
type PortInfo struct {
	Protocol    string     `json:"protocol"`
	HostAddress netip.Addr `json:"hostAddress"`
	HostPort    uint16     `json:"hostPort"`
	Address     netip.Addr `json:"address"`
	Port        uint16     `json:"port"`
}

// attachmentList is being put together.
type attachmentList map[loader.Owner]*AttachmentInfo

func (l attachmentList) of(owner loader.Owner) *AttachmentInfo {
	if l[owner] == nil {
		l[owner] = &AttachmentInfo{Owner: fmt.Sprintf("%016x", uint64(owner)), Dead: true, Addresses: []AddressInfo{}, HostPorts: []PortInfo{}}
	}
	return l[owner]
}

// Attachments lists all attachments in the calling thread's network namespace, in the order of
// their names. Records are looked for in directory, "" for the usual one. A part that cannot be
// read is left out, and in the error.
func Attachments(directory string) ([]*AttachmentInfo, error) {
	datapath, err := loader.OpenLoaded()
	if err != nil {
		return nil, err
	}
	defer datapath.Close()
	host, err := openHandle()
	if err != nil {
		return nil, err
	}
	defer host.Close()

	list := attachmentList{}
	err = errors.Join(list.addDevices(host), list.addRecords(host, dataDir(directory)), list.addEntries(datapath), list.addPrograms(host))
	all := []*AttachmentInfo{}
	for _, info := range list {
		slices.SortFunc(info.Addresses, func(a, b AddressInfo) int { return a.Address.Compare(b.Address) })
		slices.SortFunc(info.HostPorts, comparePorts)
		all = append(all, info)
	}
	slices.SortFunc(all, func(a, b *AttachmentInfo) int {
		return cmp.Or(cmp.Compare(a.Network, b.Network), cmp.Compare(a.ContainerID, b.ContainerID),
			cmp.Compare(a.IfName, b.IfName), cmp.Compare(a.Owner, b.Owner))
	})
	return all, err
}

func comparePorts(a, b PortInfo) int {
	return cmp.Or(cmp.Compare(a.HostPort, b.HostPort), cmp.Compare(a.Protocol, b.Protocol), a.HostAddress.Compare(b.HostAddress))
}

func (i *AttachmentInfo) setDevice(device netlink.Link) {
	i.Dead, i.Device, i.index = false, device.Attrs().Name, device.Attrs().Index
}

func (l attachmentList) addDevices(host *netlink.Handle) error {
	devices, err := link.List(host)
	for _, device := range devices {
		at, ours := attachmentOf(device)
		if !ours {
			continue
		}
		info := l.of(at.Owner())
		info.Attachment = at
		info.setDevice(device)
	}
	return err
}

func (l attachmentList) addRecords(host *netlink.Handle, directory string) error {
	records, err := record.Open(directory)
	if err != nil {
		return err
	}
	kept, err := records.List()
	errs := []error{err}
	for _, r := range kept {
		info := l.of(r.Attachment.Owner())
		info.Attachment, info.Aliases, info.CgroupPath, info.Labels = r.Attachment, r.Aliases, r.CgroupPath, r.Labels
		limits := r.Bandwidth.With(r.Settings.Limits)
		info.IngressRate, info.EgressRate = limits.Ingress.Rate, limits.Egress.Rate
		if r.Chained == nil {
			continue
		}
		info.Chained = true
		device, err := link.Device(host, r.Chained.HostIndex)
		errs = append(errs, err)
		if device != nil {
			info.setDevice(device)
		}
	}
	return errors.Join(errs...)
}

func (l attachmentList) addEntries(datapath *loader.Datapath) error {
	endpoints, endpointsErr := maps.Endpoints(datapath)
	for _, e := range endpoints {
		info := l.of(e.Owner)
		info.MAC = e.MAC.String()
		info.Addresses = append(info.Addresses, AddressInfo{e.Addr, e.Gateway, e.Masq})
	}
	devices, devicesErr := maps.Devices(datapath)
	for _, d := range devices {
		info := l.of(d.Owner)
		info.MAC, info.AntiSpoof, info.IngressPolicy = d.MAC.String(), d.AntiSpoof, d.IngressPolicy.String()
	}
	ports, portsErr := maps.HostPorts(datapath)
	for _, p := range ports {
		info := l.of(p.Owner)
		info.HostPorts = append(info.HostPorts, PortInfo{p.Protocol.String(), p.HostAddr, p.HostPort, p.ContainerAddr, p.ContainerPort})
	}
	return errors.Join(endpointsErr, devicesErr, portsErr)
}

func (l attachmentList) addPrograms(host *netlink.Handle) error {
	var errs []error
	for _, info := range l {
		if info.Dead {
			continue
		}
		before, err := programsBefore(host, info.index)
		info.ProgramsBefore = before
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}
