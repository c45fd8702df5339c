package admin

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/loader/rtnl"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/config"
	"github.com/ebpfnet/ebpfnet/plugin/link"
	"github.com/ebpfnet/ebpfnet/plugin/names"
	"github.com/ebpfnet/ebpfnet/plugin/record"
)

// Named is an attachment with its container's name.
type Named struct {
	maps.Attachment        // empty where nothing names it any more
	Name            string `json:"name,omitempty"` // from the runtime, such as web or shop/web-0; Attachments leaves it empty
	Owner           string `json:"owner"`          // the token in map entries and in the device's name; "": of no container
}

// Title returns what a table shows: the container's name, or else its ID or its owner.
func (n Named) Title() string { return cmp.Or(n.Name, n.ContainerID, n.Owner) }

// Attachment is what the host knows of one attachment, from its device, its map entries and its
// record.
type Attachment struct {
	Named
	Dead          bool           `json:"dead"`             // its device is gone: DEL or GC removes the rest
	Device        string         `json:"device,omitempty"` // the host's end
	MAC           string         `json:"mac,omitempty"`    // the container's
	Chained       bool           `json:"chained"`          // the device belongs to another plugin
	Addresses     []Address      `json:"addresses"`
	Routes        []Route        `json:"routes,omitempty"` // with a gateway of their own
	HostPorts     []HostPort     `json:"hostPorts"`
	AntiSpoof     bool           `json:"antiSpoof"`
	IngressPolicy string         `json:"ingressPolicy,omitempty"` // "rules" of a policy
	PolicyMode    string         `json:"policyMode,omitempty"`    // "audit", or none
	IngressRate   uint64         `json:"ingressRate,omitempty"`   // bits per second; 0: no limit
	EgressRate    uint64         `json:"egressRate,omitempty"`
	Aliases       []string       `json:"aliases,omitempty"`
	CgroupPath    string         `json:"cgroupPath,omitempty"`
	Labels        []record.Label `json:"labels,omitempty"`
	// ProgramsBefore are programs of other tools that receive its packets first.
	ProgramsBefore []string `json:"programsBefore,omitempty"`

	index int // of the device
}

// ByOwner returns attachments by their owners.
func ByOwner(attachments []*Attachment) map[string]*Attachment {
	byOwner := map[string]*Attachment{}
	for _, a := range attachments {
		byOwner[a.Owner] = a
	}
	return byOwner
}

// HasAddress reports whether an address is one of the attachment's.
func (a *Attachment) HasAddress(address netip.Addr) bool {
	return slices.ContainsFunc(a.Addresses, func(own Address) bool { return own.Address == address })
}

// PortBehind returns the container's port for packets to a destination, which may be a host port.
func (a *Attachment) PortBehind(protocol string, to netip.AddrPort) uint16 {
	for _, p := range a.HostPorts {
		isIts := p.HostAddress == to.Addr() || p.HostAddress.IsUnspecified() && !a.HasAddress(to.Addr())
		if isIts && p.Protocol == protocol && p.HostPort == to.Port() {
			return p.ContainerPort
		}
	}
	return to.Port()
}

// ByAddress returns attachments by their addresses.
func ByAddress(attachments []*Attachment) map[netip.Addr]*Attachment {
	byAddress := map[netip.Addr]*Attachment{}
	for _, a := range attachments {
		for _, address := range a.Addresses {
			byAddress[address.Address] = a
		}
	}
	return byAddress
}

// Address is an address of a container.
type Address struct {
	Address     netip.Addr `json:"address"`
	Gateway     netip.Addr `json:"gateway"`
	Masqueraded bool       `json:"masqueraded"`
}

// Route is a route of a container by another gateway than those of its addresses.
type Route struct {
	To      netip.Prefix `json:"dst"`
	Gateway netip.Addr   `json:"gw"`
}

// HostPort is a host port of a container. HostAddress 0.0.0.0 or :: means any.
type HostPort struct {
	Protocol         string     `json:"protocol"`
	HostAddress      netip.Addr `json:"hostAddress"`
	HostPort         uint16     `json:"hostPort"`
	ContainerAddress netip.Addr `json:"containerAddress"`
	ContainerPort    uint16     `json:"containerPort"`
}

// attachmentList is the list under construction.
type attachmentList map[loader.Owner]*Attachment

// get returns an owner's attachment, which is dead until its device is found.
func (l attachmentList) get(owner loader.Owner) *Attachment {
	if l[owner] == nil {
		l[owner] = &Attachment{Named: Named{Owner: owner.String()}, Dead: true, Addresses: []Address{}, HostPorts: []HostPort{}}
	}
	return l[owner]
}

// Attachments lists all attachments in the calling thread's network namespace, sorted by name.
// dataDir is the directory of the records, "" for the default. What cannot be read is missing from
// the list and reported in the error.
func Attachments(dataDir string) ([]*Attachment, error) {
	o, err := openHost(loader.OpenLoaded)
	if err != nil {
		return nil, err
	}
	defer o.Close()

	list := attachmentList{}
	// ADD makes the device first, then the record, then the entries: read the other way round, an attachment that is
	// being added has what it needs to be alive.
	err = errors.Join(list.addEntries(o.datapath), list.addRecords(o.host, config.DataDir(dataDir)), list.addDevices(o.host), list.addPrograms(o.host))
	return list.sorted(), err
}

func (l attachmentList) sorted() []*Attachment {
	all := []*Attachment{}
	for _, a := range l {
		slices.SortFunc(a.Addresses, func(a, b Address) int { return a.Address.Compare(b.Address) })
		slices.SortFunc(a.Routes, func(a, b Route) int { return a.To.Compare(b.To) })
		slices.SortFunc(a.HostPorts, ComparePorts)
		all = append(all, a)
	}
	slices.SortFunc(all, func(a, b *Attachment) int {
		return cmp.Or(cmp.Compare(a.Network, b.Network), cmp.Compare(a.ContainerID, b.ContainerID),
			cmp.Compare(a.IfName, b.IfName), cmp.Compare(a.Owner, b.Owner))
	})
	return all
}

// ComparePorts compares by port, protocol and address.
func ComparePorts(a, b HostPort) int {
	return cmp.Or(cmp.Compare(a.HostPort, b.HostPort), cmp.Compare(a.Protocol, b.Protocol), a.HostAddress.Compare(b.HostAddress))
}

func (a *Attachment) setDevice(device netlink.Link) {
	a.Dead, a.Device, a.index = false, device.Attrs().Name, device.Attrs().Index
}

func (l attachmentList) addDevices(host *netlink.Handle) error {
	devices, err := link.List(host)
	for _, device := range devices {
		label, ok := names.ParseAlias(device.Attrs().Alias)
		if !ok {
			continue
		}
		a := l.get(label.Owner)
		if label.IsNamed() { // else the record has the names
			a.Attachment = label.Attachment
		}
		a.setDevice(device)
	}
	return err
}

func (l attachmentList) addRecords(host *netlink.Handle, dataDir string) error {
	records, err := record.Open(dataDir)
	if err != nil {
		return err
	}
	recs, err := records.List()
	errs := []error{err}
	for _, rec := range recs {
		a := l.get(rec.Attachment.Owner())
		a.Attachment, a.Aliases, a.CgroupPath, a.Labels = rec.Attachment, rec.Aliases, rec.CgroupPath, rec.Labels
		limits := rec.Settings.Limits.Apply(rec.Bandwidth)
		a.IngressRate, a.EgressRate = limits.Ingress.Rate, limits.Egress.Rate
		if rec.Chained == nil {
			continue
		}
		a.Chained = true
		device, err := link.Device(host, rec.Chained.HostIndex)
		errs = append(errs, err)
		if device != nil {
			a.setDevice(device)
		}
	}
	return errors.Join(errs...)
}

func (l attachmentList) addEntries(datapath *loader.Datapath) error {
	endpoints, errEndpoints := maps.Endpoints(datapath)
	for _, e := range endpoints {
		a := l.get(e.Owner)
		a.MAC = e.MAC.String()
		a.Addresses = append(a.Addresses, Address{e.Addr, e.Gateway, e.Masq})
	}
	routes, errRoutes := maps.GatewayRoutes(datapath)
	devices, errDevices := maps.Devices(datapath)
	for _, d := range devices {
		a := l.get(d.Owner)
		for _, r := range routes[d.Routes] {
			a.Routes = append(a.Routes, Route(r))
		}
		a.MAC, a.AntiSpoof = d.MAC.String(), d.AntiSpoof
		if err := a.setPolicy(datapath, d); err != nil {
			return err
		}
	}
	ports, errPorts := maps.HostPorts(datapath)
	for _, p := range ports {
		a := l.get(p.Owner)
		a.HostPorts = append(a.HostPorts, HostPort{p.Protocol.String(), p.HostAddr, p.HostPort, p.ContainerAddr, p.ContainerPort})
	}
	return errors.Join(errEndpoints, errRoutes, errDevices, errPorts)
}

func (l attachmentList) addPrograms(host *netlink.Handle) error {
	var errs []error
	for _, a := range l {
		if a.Dead {
			continue
		}
		before, err := programsBefore(host, a.index, a.Chained, bpf.ProgFromContainer)
		a.ProgramsBefore = before
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// NamespaceOf opens the network namespace of a living attachment's container. The caller must close it.
func NamespaceOf(a *Attachment) (netns.NsHandle, error) {
	host, err := rtnl.Open()
	if err != nil {
		return netns.None(), err
	}
	defer host.Close()
	_, ns, err := pairOf(host, a.index)
	return ns, err
}

// pairOf returns the host's end of a container's devices, and the container's network namespace. The caller must close it.
func pairOf(host *netlink.Handle, index int) (outside netlink.Link, ns netns.NsHandle, err error) {
	if outside, err = host.LinkByIndex(index); err != nil {
		return nil, netns.None(), fmt.Errorf("find device %d: %w", index, err)
	}
	ns, err = link.NamespaceOfPeer(host, outside)
	return outside, ns, err
}
