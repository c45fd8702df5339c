package trace

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/cmd/ebpfnetctl/firewall"
	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/loader/rtnl"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/link"
	"github.com/ebpfnet/ebpfnet/plugin/operator"
)

// walker walks with a packet from hook to hook.
type walker struct {
	ctx       context.Context
	copy      *loader.Copy
	host      *netlink.Handle
	links     map[int]netlink.Link
	endpoints map[netip.Addr]maps.Endpoint
	devices   map[int]maps.Device
	uplinks   map[int]maps.Uplink
	ports     []maps.HostPort
	routes    map[maps.PrefixSet][]maps.Route
	owners    map[string]*operator.Attachment
	nodes     []maps.Node
	tunnel    maps.Tunnel
	rules     *firewall.Rules // once they are needed
	copied    map[string]bool // the tuples whose decisions and notes the copy has

	way      *Way
	hook, on string // of the steps that are told
	last     packet // as its receiver gets it
	receiver End
	outside  int // the uplink by which the receiver is reached
}

func newWalk(ctx context.Context, attachments []*operator.Attachment) (w *walker, err error) {
	w = &walker{
		ctx: ctx, links: map[int]netlink.Link{}, endpoints: map[netip.Addr]maps.Endpoint{}, devices: map[int]maps.Device{},
		uplinks: map[int]maps.Uplink{}, owners: map[string]*operator.Attachment{}, copied: map[string]bool{},
	}
	if w.copy, err = loader.OpenCopy(); err != nil {
		return nil, err
	}
	if w.host, err = rtnl.Open(); err == nil {
		err = w.read()
	}
	if err != nil {
		w.close()
		return nil, err
	}
	for _, a := range attachments {
		w.owners[a.Owner] = a
	}
	return w, nil
}

// read reads what explains the programs' decisions.
func (w *walker) read() error {
	links, errLinks := link.List(w.host)
	endpoints, errEndpoints := maps.Endpoints(&w.copy.Datapath)
	devices, errDevices := maps.Devices(&w.copy.Datapath)
	uplinks, errUplinks := maps.Uplinks(&w.copy.Datapath)
	var errPorts, errRoutes error
	w.ports, errPorts = maps.HostPorts(&w.copy.Datapath)
	w.routes, errRoutes = maps.GatewayRoutes(&w.copy.Datapath)
	var errNodes, errTunnel error
	w.nodes, errNodes = maps.Nodes(&w.copy.Datapath)
	w.tunnel, errTunnel = maps.GetTunnel(&w.copy.Datapath)
	clear(w.links)
	clear(w.endpoints)
	clear(w.devices)
	clear(w.uplinks)
	for _, l := range links {
		w.links[l.Attrs().Index] = l
	}
	for _, e := range endpoints {
		w.endpoints[e.Addr] = e
	}
	for _, d := range devices {
		w.devices[d.IfIndex] = d
	}
	for _, u := range uplinks {
		if !u.ContainerBridge {
			w.uplinks[u.IfIndex] = u
		}
	}
	return errors.Join(errLinks, errEndpoints, errDevices, errUplinks, errPorts, errRoutes, errNodes, errTunnel)
}

func (w *walker) close() {
	w.copy.Close()
	if w.host != nil {
		w.host.Close()
	}
}

// tell adds a step.
func (w *walker) tell(step, entry, format string, args ...any) {
	w.way.Steps = append(w.way.Steps, Step{Hook: w.hook, On: w.on, Step: step, What: fmt.Sprintf(format, args...), Entry: entry})
}

// end ends the way.
func (w *walker) end(fate Fate, format string, args ...any) error {
	w.way.Fate, w.way.Verdict = fate, fmt.Sprintf(format, args...)
	return nil
}

// arrives notes the packet as its receiver gets it.
func (w *walker) arrives(p packet, receiver End) {
	w.last, w.receiver = p, receiver
	w.way.FinalSource, w.way.FinalDestination = maps.AddrPortText(p.src), maps.AddrPortText(p.dst)
}

// at begins the steps of a hook, or of the stack.
func (w *walker) at(hook string, device int) { w.hook, w.on = hook, w.linkName(device) }

func (w *walker) linkName(index int) string {
	if l := w.links[index]; l != nil {
		return l.Attrs().Name
	}
	return fmt.Sprintf("device %d", index)
}

func (w *walker) mac(index int) net.HardwareAddr {
	if l := w.links[index]; l != nil && len(l.Attrs().HardwareAddr) == 6 {
		return l.Attrs().HardwareAddr
	}
	return make(net.HardwareAddr, 6)
}

// above returns the bridge of a device that is a port of one, else the device: what the stack receives by.
func (w *walker) above(index int) int {
	if l := w.links[index]; l != nil && link.IsPort(l) {
		return l.Attrs().MasterIndex
	}
	return index
}

// ownerName names the container of an entry.
func (w *walker) ownerName(owner loader.Owner) string {
	if a := w.owners[owner.String()]; a != nil && a.ContainerID != "" {
		return a.Network + "/" + a.ContainerID + "/" + a.IfName
	}
	return "owner " + owner.String()
}

// who names who has an address.
func (w *walker) who(addr netip.Addr) string {
	if e, ok := w.endpoints[addr]; ok {
		return w.ownerName(e.Owner)
	}
	return addr.String()
}

// start sends the packet from where it comes from.
func (w *walker) start(p packet, from End) error {
	endpoint, isEndpoint := w.endpoints[p.src.Addr()]
	switch {
	case from.Host:
		return w.hostSends(p)
	case isEndpoint:
		p.build(endpoint.MAC, w.mac(w.above(endpoint.IfIndex)))
		return w.fromContainer(p, endpoint.IfIndex)
	case from.Container != nil:
		return fmt.Errorf("no program would see the packet: %s is in no map, so the container is gone", p.src.Addr())
	}
	uplink := w.outside
	if uplink == 0 {
		route, err := w.routeTo(p.src.Addr())
		if err != nil {
			return err
		}
		if route.Type == unix.RTN_LOCAL {
			return w.hostSends(p)
		}
		uplink = route.LinkIndex
	}
	p.build(make(net.HardwareAddr, 6), w.mac(uplink))
	if _, isUplink := w.uplinks[uplink]; !isUplink { // a bridge of another tool, say
		return w.byStack(p, uplink, 0)
	}
	return w.fromUplink(p, uplink, 0)
}
