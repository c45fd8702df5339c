package plugin

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/ipam"
	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/loader/flock"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/link"
	"github.com/ebpfnet/ebpfnet/plugin/record"
)

// Add connects a container (SPEC, section 2, ADD). It prints the result, or
// returns an error and leaves nothing behind.
func (p *Plugin) Add(ctx context.Context, args *skel.CmdArgs) error {
	config, err := parseConfig(args)
	if err != nil {
		return err
	}
	if err := checkChained(config); err != nil {
		return err
	}
	if err := checkRights(); err != nil {
		return cniError(err)
	}
	lock, err := config.keepApart(ctx, flock.Shared)
	if err != nil {
		return cniError(err)
	}
	defer lock.Release()

	a := &addition{
		Plugin: p,
		config: config,
		owner:  config.Attachment.Owner(),
		netns:  args.Netns,
	}
	defer a.close()

	if err := a.run(ctx); err != nil {
		// Its own time, since that of ADD may be over; what it has not undone, DEL will.
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
		defer cancel()
		return withDetails(cniError(err), a.undo.rollback(ctx))
	}
	return nil
}

const undoTimeout = 2 * time.Second

// addition is one ADD under way. Each step finds here what the steps before it
// made, and pushes how to unmake what it makes itself.
type addition struct {
	*Plugin
	config *Config
	owner  loader.Owner
	netns  string
	undo   undo

	host      *netlink.Handle
	container *container
	datapath  *loader.Datapath

	reserved  *ipam.Result
	addresses []link.Address
	pair      link.Pair
	routeTo   map[netip.Addr]int // after another plugin: the devices by which the host reaches addresses
	endpoints []maps.Endpoint
	written   bool // something may stand in maps or pins
}

// run takes the steps in the order that keeps a container safe while it is half
// made: it can send nothing before its entries exist, since its device is down,
// and nothing reaches it from outside before it works, since host ports come last.
func (a *addition) run(ctx context.Context) error {
	type step struct {
		name string
		do   func(context.Context) error
	}
	steps := []step{
		{"open the container's namespace", a.openNamespaces},
		{"reserve addresses", a.reserve},
		{"open the datapath", a.openDatapath},
		{"create the veth pair", a.createPair},
		{"keep a record", a.keepRecord},
		{"write the endpoints and attach", a.attach},
		{"set up the host's end", a.setUpHost},
		{"set up the container's end", a.setUpContainer},
		{"tune the interface", a.tune},
		{"limit the bandwidth", a.limit},
		{"attach to the uplinks", a.attachUplinks},
		{"open the host ports", a.openPorts},
		{"print the result", a.print},
	}
	clear := step{"clear what is left", a.clearLeft}
	switch {
	case a.config.Delegate.asksOnLink(): // the link before the addresses
		const first = 4 // steps that are taken in another order
		steps = append([]step{
			{"open the container's namespace", a.openNamespaces},
			clear,
			{"open the datapath", a.openDatapath},
			{"create the veth pair", a.createPair},
			{"bring the host's end up", a.raiseHost},
			{"reserve addresses", a.reserve},
		}, steps[first:]...)
	case a.config.Delegate != nil:
		steps = slices.Insert(steps, 1, clear)
	case a.config.PrevResult != nil: // see chain.go
		steps = []step{
			{"open the container's namespace", a.openNamespaces},
			{"find the interface", a.findInterface},
			{"open the datapath", a.openDatapath},
			{"keep a record", a.keepRecord},
			{"write the endpoints and attach", a.attach},
			{"turn forwarding on", a.enableForwarding},
			{"tune the interface", a.tune},
			{"limit the bandwidth", a.limit},
			{"attach to the uplinks", a.attachUplinks},
			{"open the host ports", a.openPorts},
			{"print the result", a.print},
		}
	}
	for _, step := range steps {
		if a.BeforeStep != nil {
			if err := a.BeforeStep(step.name); err != nil {
				return err
			}
		}
		a.Log.Debug(step.name)
		if err := step.do(ctx); err != nil {
			return err
		}
	}
	return nil
}

func (a *addition) close() {
	if a.datapath != nil {
		a.datapath.Close()
	}
	if a.container != nil {
		a.container.close()
	}
	if a.host != nil {
		a.host.Close()
	}
}

func (a *addition) openNamespaces(context.Context) (err error) {
	if a.container, err = openContainer(a.netns); err != nil {
		return err
	}
	a.host, err = openHandle()
	return err
}

// openDatapath also pushes the removal of all that later steps write into maps:
// it runs after the device is gone, and before the addresses are free.
func (a *addition) openDatapath(ctx context.Context) (err error) {
	if a.datapath, err = loader.Open(ctx, loader.Options{MaxFlows: a.config.MaxFlows}); err != nil {
		return err
	}
	a.undo.push(func(ctx context.Context) error {
		if !a.written {
			return nil
		}
		return releaseEntries(ctx, a.datapath, a.owner, a.pair.HostIndex, (*maps.Store).Release)
	})
	return nil
}

func (a *addition) createPair(context.Context) error {
	if _, ipv6 := a.families(); ipv6 {
		if err := link.CheckIPv6(); err != nil {
			return err
		}
	}
	outside, err := link.FindOutside(a.host)
	if err != nil {
		return err
	}
	a.pair = link.Pair{
		Kind:          a.config.Device,
		HostName:      hostName(a.owner),
		ContainerName: a.config.Attachment.IfName,
		HostMAC:       hostMAC(a.owner),
		ContainerMAC:  a.config.MAC,
		MTU:           a.config.MTU,
	}
	if a.pair.MTU == 0 {
		a.pair.MTU = outside.MTU
	}
	if a.config.BigTCP {
		a.pair.BigTCP = outside.BigTCP.For(a.pair.MTU)
	}
	if a.pair.ContainerMAC == nil {
		a.pair.ContainerMAC = containerMAC(a.owner)
	}
	err = a.pair.Create(a.host, a.container.ns, aliasOf(a.config.Attachment))
	if errors.Is(err, unix.EEXIST) {
		return a.nameInUse(err)
	}
	if err != nil {
		return err
	}
	a.undo.push(func(context.Context) error { return link.Delete(a.host, a.pair.HostName) })
	return nil
}

// nameInUse tells which of the two names it was.
func (a *addition) nameInUse(err error) error {
	if device, findErr := link.Find(a.host, a.pair.HostName); findErr != nil || device == nil {
		return invalidEnv("CNI_IFNAME", a.pair.ContainerName, fmt.Sprintf("a name that no interface of the container has (%v)", err))
	}
	return a.exists()
}

func (a *addition) attach(ctx context.Context) error {
	network := maps.NetworkToken(a.config.Attachment.Network)
	for _, address := range a.addresses {
		a.endpoints = append(a.endpoints, maps.Endpoint{
			Addr:      address.Prefix.Addr(),
			Owner:     a.owner,
			Network:   network,
			Container: maps.ContainerToken(a.config.Attachment.ContainerID),
			IfIndex:   a.deviceTo(address.Prefix.Addr()),
			MAC:       a.pair.ContainerMAC,
			HostMAC:   a.pair.HostMAC,
			Gateway:   address.Gateway,
			Masq:      a.config.Masq.Of(address.Prefix.Addr()),
			FastPath:  a.config.fastPath(a.config.PrevResult != nil),
			MTU:       a.pair.MTU,
			NonMasq:   maps.PrefixSetOf(a.config.Masq.ExemptFor(address.Prefix.Addr())),
		})
	}
	err := maps.With(ctx, a.datapath, func(store *maps.Store) error {
		a.written = true
		if err := store.PutDevice(a.device(network)); err != nil {
			return err
		}
		for _, endpoint := range a.endpoints {
			if err := a.create(store, func() error { return store.AddEndpoint(endpoint) }); err != nil {
				return err
			}
			if err := store.AddNonMasqCIDRs(a.config.Masq.ExemptFor(endpoint.Addr)); err != nil {
				return err
			}
			if endpoint.IfIndex == a.pair.HostIndex {
				continue
			}
			if err := keepFromUplinks(a.datapath, store, endpoint.IfIndex); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	return a.datapath.AttachEndpoint(a.pair.HostIndex)
}

// device is what the datapath is told of the container besides its addresses.
func (a *addition) device(network maps.Network) maps.Device {
	device := maps.Device{
		IfIndex:       a.pair.HostIndex,
		Owner:         a.owner,
		Network:       network,
		Container:     maps.ContainerToken(a.config.Attachment.ContainerID),
		MAC:           a.pair.ContainerMAC,
		AntiSpoof:     a.config.AntiSpoof,
		Shaped:        a.config.Bandwidth.Ingress.Rate != 0,
		IngressPolicy: a.config.Ingress,
		Bridged:       a.pair.Bridge != 0,
		AnyAddress:    len(a.addresses) == 0,
	}
	for _, address := range a.addresses {
		addr, gateway := &device.Addr4, &device.Gateway4
		if address.IsIPv6() {
			addr, gateway = &device.Addr6, &device.Gateway6
		}
		if !addr.IsValid() {
			*addr, *gateway = address.Prefix.Addr(), address.Gateway
		}
	}
	return device
}

// deviceTo returns the device by which the host reaches an address: its end of the
// veth, or a bridge that another plugin has put that into.
func (a *addition) deviceTo(addr netip.Addr) int {
	if device, found := a.routeTo[addr]; found {
		return device
	}
	return a.pair.HostIndex
}

// raiseHost lets the link carry packets. The container's end has no address, and no
// way but this link; the host's end has one by which DHCP servers know where they
// were asked: that of a gateway that nobody names.
func (a *addition) raiseHost(context.Context) error {
	return link.RaiseWith(a.host, a.pair, usualGateway(netip.IPv4Unspecified()))
}

func (a *addition) setUpHost(context.Context) error {
	if err := link.EnableForwarding(a.families()); err != nil {
		return err
	}
	return link.SetUpHost(a.host, a.pair, a.addresses)
}

func (a *addition) families() (ipv4, ipv6 bool) { return families(a.addresses) }

func families(addresses []link.Address) (ipv4, ipv6 bool) {
	for _, address := range addresses {
		if address.IsIPv6() {
			ipv6 = true
		} else {
			ipv4 = true
		}
	}
	return ipv4, ipv6
}

func (a *addition) setUpContainer(context.Context) error {
	return link.SetUpContainer(a.container.ns, a.container.handle, a.pair, a.addresses, a.reserved.Routes)
}

func (a *addition) attachUplinks(ctx context.Context) error {
	if err := refreshUplinks(ctx, a.host, a.datapath, a.config.Uplinks); err != nil || a.config.Uplinks == nil {
		return err
	}
	known, err := maps.Uplinks(a.datapath)
	facesOut := func(u maps.Uplink) bool { return !u.ContainerBridge }
	if err == nil && !slices.ContainsFunc(known, facesOut) {
		a.Log.Warn("no device of the host has a name that uplinks means: nothing is masqueraded", "uplinks", a.config.Uplinks)
	}
	return err
}

func (a *addition) openPorts(ctx context.Context) error {
	var ports []maps.HostPort
	for _, mapping := range a.config.Ports {
		ports = append(ports, mapping.entriesFor(a.endpoints)...)
	}
	if len(ports) == 0 {
		return nil
	}
	for _, port := range ports {
		if err := refuseListener(port); err != nil {
			return err
		}
	}
	return maps.With(ctx, a.datapath, func(store *maps.Store) error {
		for _, port := range ports {
			if err := a.create(store, func() error { return store.AddHostPort(port) }); err != nil {
				return err
			}
		}
		for _, mapping := range a.config.Ports {
			if err := store.AddSrcRanges(mapping.Sources); err != nil {
				return err
			}
		}
		return a.datapath.AttachLoopback()
	})
}

// create adds an entry. Where another attachment has it, that one is asked for
// by its device: if it is gone, so are its claims; else the error names it. With those go
// programs and prefixes that nobody needs then, so what an entry of ours needs comes after it.
func (a *addition) create(store *maps.Store, add func() error) error {
	err := add()
	holder, found := maps.HolderOf(err)
	if !found {
		return err
	}
	living, findErr := a.nameOf(holder)
	if findErr != nil {
		return errors.Join(err, findErr)
	}
	if living != "" {
		return fmt.Errorf("%w (%s)", err, living)
	}
	a.Log.Warn("remove the entries of a container that is gone", "owner", fmt.Sprintf("%016x", uint64(holder)))
	if err := store.Release(holder); err != nil {
		return err
	}
	return add()
}

// nameOf returns the name of an attachment that lives, which one of ours does as
// long as its device is there; else "".
func (a *addition) nameOf(owner loader.Owner) (string, error) {
	device, err := link.Find(a.host, hostName(owner))
	if err != nil {
		return "", err
	}
	if device != nil {
		return device.Attrs().Alias, nil
	}
	records, err := record.Open(a.config.DataDir)
	if err != nil {
		return "", err
	}
	r, err := records.Read(owner)
	if err != nil || r == nil || r.Chained == nil {
		return "", err
	}
	device, err = link.Device(a.host, r.Chained.HostIndex)
	if err != nil || device == nil {
		return "", err
	}
	return aliasOf(r.Attachment), nil
}

func (a *addition) print(context.Context) error {
	if a.config.PrevResult != nil {
		passed := *a.config.PrevResult
		if !a.config.DNS.IsEmpty() {
			passed.DNS = a.config.DNS
		}
		return (*result)(&passed).print(a.Stdout, a.config.CNIVersion)
	}
	return a.result().print(a.Stdout, a.config.CNIVersion)
}
