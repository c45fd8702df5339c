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
	"github.com/ebpfnet/ebpfnet/plugin/admin"
	"github.com/ebpfnet/ebpfnet/plugin/link"
	"github.com/ebpfnet/ebpfnet/plugin/nodestate"
)

type walker struct {
	ctx       context.Context
	copy      *loader.Copy
	host      *netlink.Handle
	links     map[int]netlink.Link
	endpoints map[netip.Addr]maps.Endpoint
	devices   map[int]maps.Device
	uplinks   map[int]bool
	routes    map[maps.PrefixSet][]maps.Route
	owners    map[string]*admin.Attachment
	nodes     []maps.Node
	tunnel    maps.Tunnel
	rules     *firewall.Rules // once they are needed
	explainer *admin.Explainer
	flows     map[maps.Flow]bool // those that the copy had before the hook, without their states

	path     *Path
	hook, on string // of the next steps
	sender   int    // the device of the container that sends it, or 0
	from     netip.Addr
	last     packet // as its receiver gets it
	receiver End
	outside  int // the device by which the receiver is reached
}

func newWalker(ctx context.Context, attachments []*admin.Attachment) (w *walker, err error) {
	w = &walker{
		ctx: ctx, links: map[int]netlink.Link{}, endpoints: map[netip.Addr]maps.Endpoint{}, devices: map[int]maps.Device{},
		uplinks: map[int]bool{}, owners: admin.ByOwner(attachments), flows: map[maps.Flow]bool{},
	}
	if w.copy, err = loader.OpenCopy(); err != nil {
		return nil, err
	}
	if w.host, err = rtnl.Open(); err == nil {
		w.explainer = admin.NewExplainer(&w.copy.Datapath, w.host, nodestate.Default)
		err = w.read()
	}
	if err != nil {
		w.close()
		return nil, err
	}
	return w, nil
}

// read reads the host's devices, and the maps that say what is behind them.
func (w *walker) read() error {
	datapath := &w.copy.Datapath
	links, errLinks := link.List(w.host)
	endpoints, errEndpoints := maps.Endpoints(datapath)
	devices, errDevices := maps.Devices(datapath)
	uplinks, errUplinks := maps.Uplinks(datapath)
	var errRoutes, errNodes, errTunnel error
	w.routes, errRoutes = maps.GatewayRoutes(datapath)
	w.nodes, errNodes = maps.Nodes(datapath)
	w.tunnel, errTunnel = maps.GetTunnel(datapath)
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
		w.uplinks[u.IfIndex] = !u.ContainerBridge
	}
	return errors.Join(errLinks, errEndpoints, errDevices, errUplinks, errRoutes, errNodes, errTunnel)
}

func (w *walker) close() {
	w.copy.Close()
	if w.host != nil {
		w.host.Close()
	}
}

// addFlow adds a flow to those that are known, and reports whether it is new.
func (w *walker) addFlow(f maps.Flow) (isNew bool) {
	f.State = 0
	isNew = !w.flows[f]
	w.flows[f] = true
	return isNew
}

// at begins the steps of a hook, or of the stack.
func (w *walker) at(hook string, device int) { w.hook, w.on = hook, w.linkName(device) }

func (w *walker) step(step, format string, args ...any) {
	w.path.Steps = append(w.path.Steps, Step{Hook: w.hook, On: w.on, Step: step, What: fmt.Sprintf(format, args...)})
}

func (w *walker) drop(format string, args ...any) error {
	w.path.Verdict, w.path.Detail = Dropped, fmt.Sprintf(format, args...)
	return nil
}

// arrive ends the path of a packet at its receiver, or where it leaves the host.
func (w *walker) arrive(p packet, receiver End, verdict Verdict, where string) error {
	w.last, w.receiver = p, receiver
	w.path.FinalSource, w.path.FinalDestination = maps.AddrPortText(p.src), maps.AddrPortText(p.dst)
	w.path.Verdict, w.path.Detail = verdict, fmt.Sprintf("%s, as %s", where, p)
	return w.reportRules(p)
}

func (w *walker) deliver(p packet, to maps.Endpoint) error {
	return w.arrive(p, End{Address: to.Addr}, Delivered, "to "+w.ownerName(to.Owner))
}

func (w *walker) deliverToHost(p packet) error {
	return w.arrive(p, End{Host: true}, Delivered, "to the host itself")
}

// send ends the path at a device by which the packet leaves the host.
func (w *walker) send(p packet, device int) error {
	w.outside = device
	return w.arrive(p, End{Address: p.dst.Addr()}, Sent, "by "+w.linkName(device))
}

func (w *walker) linkName(index int) string {
	if l := w.links[index]; l != nil {
		return l.Attrs().Name
	}
	return fmt.Sprintf("device %d", index)
}

// mac returns the address of a device, or zeros.
func (w *walker) mac(index int) net.HardwareAddr {
	if l := w.links[index]; l != nil && len(l.Attrs().HardwareAddr) == 6 {
		return l.Attrs().HardwareAddr
	}
	return make(net.HardwareAddr, 6)
}

// above returns the bridge of a device that is a port of one, else the device: the stack receives by it.
func (w *walker) above(index int) int {
	if l := w.links[index]; l != nil && link.IsPort(l) {
		return l.Attrs().MasterIndex
	}
	return index
}

func (w *walker) ownerName(owner loader.Owner) string {
	if a := w.owners[owner.String()]; a != nil {
		return a.Title()
	}
	return "owner " + owner.String()
}

// nodeOf returns the address of the node whose containers have an address, if any.
func (w *walker) nodeOf(addr netip.Addr) (remote netip.Addr) {
	longest := -1
	for _, n := range w.nodes {
		if n.Prefix.Contains(addr) && n.Prefix.Bits() > longest {
			longest, remote = n.Prefix.Bits(), n.Remote
		}
	}
	return remote
}

// gatewayOf returns the gateway of the most specific route to an address that a device's container has of its own.
func (w *walker) gatewayOf(d maps.Device, to netip.Addr) (gateway netip.Addr) {
	longest := -1
	for _, route := range w.routes[d.Routes] {
		if d.Routes != 0 && route.To.Contains(to) && route.To.Bits() > longest {
			longest, gateway = route.To.Bits(), route.Gateway
		}
	}
	return gateway
}

// walk walks with a packet from where it begins.
func (w *walker) walk(p packet, from End) (*Path, error) {
	w.path = &Path{Source: maps.AddrPortText(p.src), Destination: maps.AddrPortText(p.dst), Steps: []Step{}}
	endpoint, isEndpoint := w.endpoints[p.src.Addr()]
	w.sender, w.from = 0, p.src.Addr()
	switch {
	case from.Host:
		return w.path, w.fromHost(p)
	case isEndpoint:
		w.sender = endpoint.IfIndex
		p.build(endpoint.MAC, w.mac(w.above(endpoint.IfIndex)))
		return w.path, w.fromContainer(p, endpoint.IfIndex)
	case from.Container != nil:
		return nil, fmt.Errorf("no program would see the packet: %s is in no map, so the container is gone", p.src.Addr())
	}
	device := w.outside
	if device == 0 {
		route, err := w.routeTo(p.src.Addr())
		if w.isUnassigned(p.src.Addr()) {
			return w.path, w.drop("no container has %s: nobody sends from it", p.src.Addr())
		}
		if err != nil {
			return nil, err
		}
		if route.Type == unix.RTN_LOCAL {
			return w.path, w.fromHost(p)
		}
		device = route.LinkIndex
	}
	p.build(make(net.HardwareAddr, 6), w.mac(device))
	if !w.uplinks[device] { // another tool's bridge, for example
		return w.path, w.toStack(p, device, 0)
	}
	return w.path, w.fromUplink(p, device, 0)
}
