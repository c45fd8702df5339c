package plugin

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/containernetworking/cni/pkg/skel"
	cnitypes "github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/vishvananda/netlink"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/loader/flock"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/link"
	"github.com/ebpfnet/ebpfnet/plugin/record"
)

// Check finds out whether everything is as ADD left it (SPEC, section 2,
// CHECK). The error lists all that differs.
func (p *Plugin) Check(ctx context.Context, args *skel.CmdArgs) error {
	config, err := parseConfig(args)
	if err != nil {
		return err
	}
	if config.PrevResult == nil {
		return invalid("prevResult", "", "the result of the last ADD")
	}
	check := &inspection{config: config, owner: config.Attachment.Owner()}
	if err := check.open(args.Netns); err != nil {
		return err
	}
	defer check.close()

	check.expect()
	check.inspectContainer()
	check.inspectHost()
	check.inspectForwarding()
	check.inspectMaps()
	check.inspectReservation(ctx, p)
	return check.report()
}

// inspection is one CHECK under way.
type inspection struct {
	config *Config
	owner  loader.Owner

	host      *netlink.Handle
	container *container
	datapath  *loader.Datapath
	chained   *record.Chained // nil: the interface is ours

	netInterface *types100.Interface // the container's in prevResult, or nil
	addresses    []link.Address      // its addresses in prevResult
	hostIndex    int                 // of the device found, or 0

	differences []error
}

func (i *inspection) open(path string) (err error) {
	if i.container, err = openContainer(path); err != nil {
		return err
	}
	if i.host, err = openHandle(); err != nil {
		i.close()
		return err
	}
	if i.datapath, err = loader.OpenLoaded(); err != nil {
		i.close()
		return err
	}
	return i.readRecord()
}

func (i *inspection) readRecord() error {
	records, err := record.Open(i.config.DataDir)
	if err != nil {
		return err
	}
	kept, err := records.Read(i.owner)
	if i.failed(err) {
		return nil
	}
	if kept != nil {
		i.chained = kept.Chained
		if err := i.config.change(kept.Settings); err != nil {
			return err
		}
	}
	if expected := recordOf(i.config); !expected.IsEmpty() && (kept == nil || !expected.SaysAs(kept)) {
		i.differs("the record in %s does not say what the configuration does of aliases, cgroupPath, labels and uplinks", i.config.DataDir)
	}
	return nil
}

func (i *inspection) close() {
	i.container.close()
	if i.host != nil {
		i.host.Close()
	}
	if i.datapath != nil {
		i.datapath.Close()
	}
}

func (i *inspection) differs(format string, args ...any) {
	i.differences = append(i.differences, fmt.Errorf(format, args...))
}

// failed notes an error of looking; what was to be seen is then not judged.
func (i *inspection) failed(err error) bool {
	if err != nil {
		i.differences = append(i.differences, err)
	}
	return err != nil
}

// repairs says of a difference that it can be mended while the container goes on.
const repairs = " (ebpfnetctl repair mends it)"

func (i *inspection) report() error {
	err := errors.Join(i.differences...)
	if errors.Is(err, flock.ErrBusy) {
		return err // something could not be looked at, which is no difference
	}
	if err != nil {
		return cnitypes.NewError(CodeDiffers, "not as ADD left it: "+err.Error(), "DEL and ADD the container to mend what nothing else is named for")
	}
	return nil
}

// expect reads from prevResult what the container's interface should have.
func (i *inspection) expect() {
	index := interfaceOf(i.config.PrevResult, i.config.Attachment.IfName)
	if index < 0 {
		i.differs("prevResult has no interface %s with a sandbox", i.config.Attachment.IfName)
		return
	}
	i.netInterface = i.config.PrevResult.Interfaces[index]
	for _, ip := range i.config.PrevResult.IPs {
		if ip.Interface != nil && *ip.Interface == index {
			gateway, _ := netip.AddrFromSlice(ip.Gateway)
			i.addresses = append(i.addresses, link.Address{Prefix: prefixOf(ip.Address), Gateway: gateway.Unmap()})
		}
	}
}

// inspectHostEnd is for what ADD gave its own device.
func (i *inspection) inspectHostEnd(device netlink.Link) {
	attrs := device.Attrs()
	if want := aliasOf(i.config.Attachment); attrs.Alias != want {
		i.differs("alias of %s: %q, expected %q, by which GC knows it", attrs.Name, attrs.Alias, want)
	}
	for _, want := range i.config.PrevResult.Interfaces {
		if want.Sandbox == "" && want.Name == attrs.Name {
			i.compare(device, "", want)
		}
	}
	present, err := link.Addresses(i.host, device)
	if i.failed(err) {
		return
	}
	for _, want := range i.addresses {
		isGateway := func(p netip.Prefix) bool { return p.Addr() == want.Gateway }
		if want.Gateway.IsValid() && !slices.ContainsFunc(present, isGateway) {
			i.differs("%s lacks the gateway's address %s", attrs.Name, want.Gateway)
		}
	}
}

func (i *inspection) inspectRoutesTo(device netlink.Link) {
	for _, want := range i.addresses {
		route, err := link.RouteTo(i.host, want.Prefix.Addr())
		if err != nil || route.Device != i.hostIndex {
			i.differs("the host has no route to %s by %s", want.Prefix.Addr(), device.Attrs().Name)
		}
	}
}

// inspectForwarding looks at what all containers of the host need.
func (i *inspection) inspectForwarding() {
	off, err := link.ForwardingIsOff(families(i.addresses))
	if i.failed(err) {
		return
	}
	for _, name := range off {
		i.differs("the host forwards nothing: %s is 0, expected 1"+repairs, name)
	}
}

func (i *inspection) inspectHost() {
	device, name, err := i.hostDevice()
	if i.failed(err) {
		return
	}
	if device == nil {
		i.differs("the host has no device %s", name)
		return
	}
	i.hostIndex = device.Attrs().Index
	if i.chained == nil {
		i.inspectHostEnd(device)
		i.inspectRoutesTo(device)
	}
	if device.Attrs().Flags&net.FlagUp == 0 {
		i.differs("%s is down", name)
	}
	attached, err := i.datapath.EndpointAttached(i.hostIndex)
	if !i.failed(err) && !attached {
		i.differs("%s has lost its BPF programs"+repairs, name)
	}
	i.inspectLimits(device)
	i.inspectUplinks()
}

// hostDevice returns the host's end of the veth, and what to call it where it is gone.
func (i *inspection) hostDevice() (device netlink.Link, name string, err error) {
	if i.chained != nil {
		device, err = link.Device(i.host, i.chained.HostIndex)
		return device, fmt.Sprintf("number %d, which was the host's end of the veth", i.chained.HostIndex), err
	}
	device, err = link.Find(i.host, hostName(i.owner))
	return device, hostName(i.owner), err
}

func (i *inspection) inspectUplinks() {
	uplinks, err := maps.Uplinks(i.datapath)
	if i.failed(err) {
		return
	}
	i.inspectNewUplinks(uplinks)
	for _, uplink := range uplinks {
		if uplink.ContainerBridge {
			continue
		}
		device, err := link.Device(i.host, uplink.IfIndex)
		if i.failed(err) || device == nil {
			continue
		}
		attached, err := i.datapath.UplinkAttached(uplink.IfIndex)
		if !i.failed(err) && !attached {
			i.differs("uplink %s has lost its BPF programs"+repairs, device.Attrs().Name)
		}
	}
}

// inspectNewUplinks finds devices that are named as uplinks and came after the last call that
// looked. (Of those that routes tell, a new one is no fault.)
func (i *inspection) inspectNewUplinks(known []maps.Uplink) {
	if i.config.Uplinks == nil {
		return
	}
	found, err := link.Uplinks(i.host, i.config.Uplinks.chooser())
	if i.failed(err) {
		return
	}
	for _, uplink := range found {
		device, err := link.Device(i.host, uplink.Index)
		if i.failed(err) || device == nil {
			continue
		}
		if _, readable := link.HeaderOf(device); !readable {
			continue
		}
		if !slices.ContainsFunc(known, func(u maps.Uplink) bool { return u.IfIndex == uplink.Index }) {
			i.differs("uplink %s is new, and has no BPF programs yet"+repairs, device.Attrs().Name)
		}
	}
}

func (i *inspection) inspectMaps() {
	i.inspectDevice()
	var endpoints []maps.Endpoint
	for _, want := range i.addresses {
		endpoint, found, err := maps.GetEndpoint(i.datapath, want.Prefix.Addr())
		switch {
		case i.failed(err):
		case !found:
			i.differs("the datapath does not know %s", want.Prefix.Addr())
		case endpoint.Owner != i.owner:
			i.differs("the datapath knows %s as another container's", want.Prefix.Addr())
		case i.chained == nil && endpoint.IfIndex != i.hostIndex:
			i.differs("the datapath has %s behind device %d, expected %d", want.Prefix.Addr(), endpoint.IfIndex, i.hostIndex)
		case endpoint.Masq != i.config.Masq.Of(want.Prefix.Addr()):
			i.differs("masquerading of %s is %v, expected %v", want.Prefix.Addr(), endpoint.Masq, !endpoint.Masq)
		case endpoint.FastPath != i.config.fastPath(i.chained != nil):
			i.differs("fastPath of %s is %s, expected %s", want.Prefix.Addr(), endpoint.FastPath, i.config.fastPath(i.chained != nil))
		case endpoint.NonMasq != maps.PrefixSetOf(i.config.Masq.ExemptFor(want.Prefix.Addr())):
			i.differs("%s is exempt from masquerading towards other networks than nonMasqueradeCIDRs says", want.Prefix.Addr())
		default:
			endpoints = append(endpoints, endpoint)
			i.inspectExempts(want.Prefix.Addr())
		}
	}
	var ports []maps.HostPort
	for _, mapping := range i.config.Ports {
		ports = append(ports, mapping.entriesFor(endpoints)...)
	}
	for _, want := range ports {
		i.inspectPort(want)
	}
	for _, mapping := range i.config.Ports {
		missing, err := maps.MissingSrcRanges(i.datapath, mapping.Sources)
		if !i.failed(err) && len(missing) > 0 {
			i.differs("host port %d is closed to %v, for which it is meant", mapping.HostPort, missing)
		}
	}
	if len(ports) == 0 {
		return
	}
	attached, err := i.datapath.LoopbackAttached()
	if !i.failed(err) && !attached {
		i.differs("the loopback device has lost its BPF program, by which the host reaches host ports" + repairs)
	}
}

func (i *inspection) inspectDevice() {
	if i.hostIndex == 0 {
		return
	}
	device, found, err := maps.GetDevice(i.datapath, i.hostIndex)
	switch {
	case i.failed(err):
	case !found || device.Owner != i.owner:
		i.differs("the datapath does not know device %d as the container's", i.hostIndex)
	case device.AntiSpoof != i.config.AntiSpoof:
		i.differs("antiSpoof is %v, expected %v", device.AntiSpoof, i.config.AntiSpoof)
	case device.Shaped != (i.config.Bandwidth.Ingress.Rate != 0):
		i.differs("the datapath takes the container for held to a rate: %v, expected %v", device.Shaped, i.config.Bandwidth.Ingress.Rate != 0)
	case device.IngressPolicy != i.config.Ingress:
		i.differs("ingressPolicy is %s, expected %s", device.IngressPolicy, i.config.Ingress)
	case device.AntiSpoof && i.netInterface != nil && i.netInterface.Mac != "" && device.MAC.String() != i.netInterface.Mac:
		i.differs("antiSpoof stops all that the container sends: its MAC is %s, and was %s at ADD; set antiSpoof to false, or have ebpfnet set the MAC",
			i.netInterface.Mac, device.MAC)
	}
}

func (i *inspection) inspectExempts(addr netip.Addr) {
	missing, err := maps.MissingNonMasqCIDRs(i.datapath, i.config.Masq.ExemptFor(addr))
	if !i.failed(err) && len(missing) > 0 {
		i.differs("the datapath masquerades %s towards %v, which nonMasqueradeCIDRs exempts", addr, missing)
	}
}

func (i *inspection) inspectPort(want maps.HostPort) {
	port, found, err := maps.GetHostPort(i.datapath, want)
	switch {
	case i.failed(err):
	case !found:
		i.differs("missing host port: %v", want)
	case port != want:
		i.differs("host port: %v, expected %v", port, want)
	}
}

func (i *inspection) inspectReservation(ctx context.Context, p *Plugin) {
	if i.config.Delegate != nil {
		i.failed(i.config.Delegate.check(ctx))
		return
	}
	if i.config.IPAM == nil {
		return
	}
	reserved, err := p.pool(i.config).Reserved(ctx, ipamAttachment(i.config.Attachment))
	if i.failed(err) {
		return
	}
	given := map[netip.Addr]bool{}
	for _, want := range i.addresses {
		given[want.Prefix.Addr()] = true
		if !slices.Contains(reserved, want.Prefix.Addr()) {
			i.differs("%s is not reserved for the container in %s", want.Prefix.Addr(), i.config.IPAM.Dir())
		}
	}
	for _, addr := range reserved {
		if !given[addr] {
			i.differs("%s is reserved for the container in %s, and not in prevResult", addr, i.config.IPAM.Dir())
		}
	}
}

func prefixOf(n net.IPNet) netip.Prefix {
	addr, _ := netip.AddrFromSlice(n.IP)
	bits, _ := n.Mask.Size()
	return netip.PrefixFrom(addr.Unmap(), bits)
}
