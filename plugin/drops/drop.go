package drops

import (
	"cmp"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/loader/rtnl"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/admin"
	"github.com/ebpfnet/ebpfnet/plugin/containers"
	"github.com/ebpfnet/ebpfnet/plugin/link"
	"github.com/ebpfnet/ebpfnet/plugin/policy"
)

// Drop is a dropped packet, as schema/drops.json describes it.
type Drop struct {
	Time     time.Time `json:"time"`
	By       string    `json:"by"`                 // datapath or stack
	Reason   string    `json:"reason"`             // a name of ours in lower case, or the kernel's in upper case; "": the kernel gives none
	Meaning  string    `json:"meaning,omitempty"`  // of a reason of ours, or what is known of the destination
	RuleSet  string    `json:"ruleSet,omitempty"`  // of the container, which does not admit the packet: ingress or egress
	Policies []string  `json:"policies,omitempty"` // NetworkPolicies that isolate it in that direction
	Why      string    `json:"why,omitempty"`      // which of its rules nearly does
	Function string    `json:"function,omitempty"` // of the kernel, which has dropped it
	admin.Named
	Protocol    string `json:"protocol"`
	Source      string `json:"source"`
	Destination string `json:"destination"`
	Peer        string `json:"peer,omitempty"` // the side that is not the container's
	Device      string `json:"device"`
	Hook        string `json:"hook,omitempty"`
	Length      uint32 `json:"length"`
	Bytes       string `json:"bytes,omitempty"` // the first ones, in hexadecimal digits

	Raw []byte `json:"-"`
}

// Describer describes drops. It keeps the list of containers, and reads it again for an unknown one.
type Describer struct {
	Stack    *Stack // nil: the kernel reports nothing
	DataDir  string
	CacheDir string // libcni's
	State    string // of the node agent
	Bytes    int    // of each packet

	datapath *loader.Datapath
	host     *netlink.Handle
	rules    *admin.Explainer
	byOwner  map[string]*admin.Attachment
	byAddr   map[netip.Addr]*admin.Attachment
	devices  map[uint32]device
	read     time.Time
}

type device struct {
	name        string
	isContainer bool
}

// Open prepares to describe. The caller must Close it.
func (d *Describer) Open(datapath *loader.Datapath) (err error) {
	d.datapath = datapath
	if d.host, err = rtnl.Open(); err != nil {
		return err
	}
	d.rules = admin.NewExplainer(datapath, d.host, d.State)
	return d.readContainers()
}

// Close closes what Open has opened.
func (d *Describer) Close() {
	if d.host != nil {
		d.host.Close()
	}
}

// readContainers reads the list of containers, at most once a second.
func (d *Describer) readContainers() error {
	if time.Since(d.read) < time.Second {
		return nil
	}
	attachments, err := containers.Attachments(d.DataDir, d.CacheDir)
	if attachments == nil {
		return err
	}
	d.read = time.Now()
	d.byOwner, d.byAddr, d.devices = admin.ByOwner(attachments), admin.ByAddress(attachments), map[uint32]device{}
	return nil
}

// Describe describes an event.
func (d *Describer) Describe(e *bpf.DropEvent) (Drop, error) {
	protocol := binary.BigEndian.Uint16(binary.NativeEndian.AppendUint16(nil, e.Protocol)) // it is in network byte order
	p := parse(protocol, e.Bytes[min(e.L3, e.Captured):e.Captured])
	drop := Drop{
		Time:     time.Now().Add(-time.Duration(sinceBoot() - e.Time)).UTC(),
		Protocol: p.protocol, Source: p.side(p.src), Destination: p.side(p.dst),
		Length: e.Len,
		Raw:    slices.Clone(e.Bytes[:min(int(e.Captured), d.Bytes)]),
	}
	drop.Bytes = hex.EncodeToString(drop.Raw)
	on, err := d.device(e.Ifindex)
	drop.Device = on.name
	if e.ByStack != 0 {
		drop.By, drop.Reason, drop.Function = "stack", d.Stack.reasonName(e.Reason), d.Stack.function(e.Location)
		if unassigned, _ := rtnl.IsUnassigned(d.host, p.dst.Addr()); unassigned {
			drop.Meaning = "no container has the destination address"
		}
	} else {
		reason := maps.Reason(e.Reason)
		drop.By, drop.Reason, drop.Meaning, drop.Hook = "datapath", reason.Name(), reason.String(), hookOf(e, on)
	}
	return drop, errors.Join(err, d.addContainer(&drop, e, p))
}

// hookOf returns the program, by the device and the direction: a packet on its way in was received by the device
// itself.
func hookOf(e *bpf.DropEvent, on device) string {
	isIngress := e.IngressIfindex == e.Ifindex
	switch {
	case on.isContainer && isIngress:
		return bpf.ProgFromContainer
	case on.isContainer:
		return bpf.ProgToContainer
	case on.name == "lo":
		return bpf.ProgToLoopback
	case isIngress:
		return bpf.ProgFromUplink
	default:
		return bpf.ProgToUplink
	}
}

func (d *Describer) device(index uint32) (device, error) {
	if known, ok := d.devices[index]; ok {
		return known, nil
	}
	found := device{name: fmt.Sprintf("device %d (gone)", index)}
	present, err := link.Device(d.host, int(index))
	if present != nil {
		found.name = present.Attrs().Name
	}
	_, isContainer, errDevice := maps.GetDevice(d.datapath, int(index))
	found.isContainer = isContainer
	d.devices[index] = found
	return found, errors.Join(err, errDevice)
}

// addContainer adds the owner of the packet, or else the container with one of its addresses.
func (d *Describer) addContainer(drop *Drop, e *bpf.DropEvent, p packet) error {
	owner := ""
	if e.Owner != 0 {
		owner = loader.Owner(e.Owner).String()
	}
	var err error
	if owner != "" && d.byOwner[owner] == nil {
		err = d.readContainers()
	}
	of := d.byOwner[owner]
	for _, side := range []netip.AddrPort{p.src, p.dst} {
		if of == nil && owner == "" {
			of = d.byAddr[side.Addr()]
		}
	}
	drop.Owner = owner
	if of == nil {
		return err
	}
	drop.Named, drop.Peer = of.Named, drop.Source
	if drop.Hook == bpf.ProgFromContainer || of.HasAddress(p.src.Addr()) {
		drop.Peer = drop.Destination
	}
	return errors.Join(err, d.addRules(drop, e, p, of))
}

// addRules adds which rule set of a container does not admit the packet, and the rule that nearly does. It judges
// the packet by the rules as they are now.
func (d *Describer) addRules(drop *Drop, e *bpf.DropEvent, p packet, of *admin.Attachment) error {
	isEgress := of.HasAddress(p.src.Addr()) || drop.Hook == bpf.ProgFromContainer && drop.Device == of.Device
	switch reason := bpf.Reason(e.Reason); {
	case e.ByStack != 0:
		return nil
	case reason == bpf.ReasonPolicyEgress:
		isEgress = true
	case reason == bpf.ReasonPolicyIngress:
		isEgress = false
	case reason != bpf.ReasonPolicyAudit:
		return nil
	}
	drop.RuleSet = admin.DirectionOf(isEgress)
	hasPorts := p.number == maps.TCP || p.number == maps.UDP || p.number == maps.SCTP
	switch {
	case p.isError:
		drop.Why = "an ICMP error about no connection that the rules admit"
		return nil
	case hasPorts && !p.hasPorts:
		drop.Why = "a fragment without ports"
		return nil
	}
	entry, err := d.rules.PolicyOf(of)
	if err != nil {
		return err
	}
	c := policy.Connection{Protocol: p.number, Port: p.dst.Port()}
	if isEgress {
		c.Peer, err = d.rules.PeerOf(p.dst.Addr())
	} else {
		c.Port = of.PortBehind(p.protocol, p.dst)
		c.Peer, err = d.senderOf(e, p)
	}
	if err != nil {
		return err
	}
	judged, err := d.rules.Judge(entry, isEgress, c)
	drop.Policies, drop.Name = judged.Policies, cmp.Or(drop.Name, judged.Pod)
	if drop.Why = judged.Why; judged.Admits {
		drop.Why = "by now: " + judged.Why
	}
	return err
}

// senderOf returns the sender as the programs know it: by the device that the packet has come from.
func (d *Describer) senderOf(e *bpf.DropEvent, p packet) (peer maps.Peer, err error) {
	if peer, err = d.rules.PeerOf(p.src.Addr()); err != nil {
		return peer, err
	}
	device, isContainer, err := maps.GetDevice(d.datapath, int(e.IngressIfindex))
	if peer.Host = e.IngressIfindex == 0; isContainer {
		peer.Network = device.Network
	}
	return peer, err
}
