package plugin

import (
	"context"
	"errors"
	"net/netip"
	"time"

	cnitypes "github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"

	"github.com/ebpfnet/ebpfnet/ipam"
	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/loader/flock"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/cni"
	"github.com/ebpfnet/ebpfnet/plugin/cnierr"
	"github.com/ebpfnet/ebpfnet/plugin/link"
	"github.com/ebpfnet/ebpfnet/plugin/nodestate"
)

// undoTimeout is for the undo of a failed ADD. DEL undoes what remains.
const undoTimeout = 2 * time.Second

// Add connects a container (SPEC, section 2, ADD). It prints the result, or returns an error and
// leaves nothing behind.
func (p *Plugin) Add(ctx context.Context, call *cni.Call) error {
	v, err := parse(call)
	if err != nil {
		return err
	}
	if err := v.config.CheckPosition(); err != nil {
		return err
	}
	if err := CheckCapabilities(); err != nil {
		return err
	}
	a := &adder{Plugin: p, verb: v, owner: v.config.Attachment.Owner(), netns: call.Netns}
	defer a.close()
	if err := a.openNamespaces(call.Netns, v.ownNetns); err != nil { // without a lock, whatever the path leads to
		return err
	}
	lock, err := v.lockAgainstGC(ctx, flock.Shared)
	if err != nil {
		return err
	}
	defer lock.Release()

	if err := a.run(ctx); err != nil {
		// The undo has its own time, because that of ADD may be over.
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
		defer cancel()
		return cnierr.WithDetails(cnierr.WithCode(err), a.undo.rollback(ctx))
	}
	return nil
}

// adder is an ADD in progress. Each step finds here what earlier ones made, and pushes the undo of its
// own changes.
type adder struct {
	*Plugin
	*verb
	owner loader.Owner
	netns string
	undo  undo
	opened

	reserved      *ipam.Result
	overlaps      []string // subnets of other devices that ADD has warned of
	addresses     []link.Address
	pair          link.Pair
	routeTo       map[netip.Addr]int // after another plugin: the host's devices that lead to addresses
	endpoints     []maps.Endpoint
	routes        []*cnitypes.Route // of the container
	gatewayRoutes []maps.Route      // those of them that the datapath needs
	uplinks       []int             // devices of all networks
	written       bool              // maps or pins may have entries of this ADD
}

// step is a step of ADD. when, if not nil, says whether this ADD takes it.
type step struct {
	name string
	do   func(context.Context) error
	when func() bool
}

// steps returns all steps of ADD in their order, which keeps an unfinished container safe. The container sends nothing
// before its entries exist, because its device is down until then, and receives nothing from outside before it works,
// because its host ports are opened last.
func (a *adder) steps() []step {
	return []step{
		{"ask for the node agent", a.checkCluster, nil},
		{"find the interface", a.findInterface, a.isChained},
		{"remove what a dead container left", a.removeDead, a.isDelegated},
		{"reserve addresses", a.reserve, a.reservesFirst},
		{"open the datapath", a.openDatapath, nil},
		{"create the veth pair", a.createPair, a.ownsInterface},
		{"set the link up", a.raiseLink, a.delegate.needsLink},
		{"reserve addresses over the link", a.reserve, a.delegate.needsLink},
		{"find the routes' gateways", a.findGateways, a.ownsInterface},
		{"write the record", a.writeRecord, nil},
		{"wait for the pod's policies", a.awaitPodPolicy, a.isPod},
		{"write the endpoints and attach", a.attach, nil},
		{"set up the host's end", a.setUpHost, a.ownsInterface},
		{"attach to the uplinks", a.attachUplinks, nil},
		{"refuse packets to unassigned addresses", a.refuseUnassigned, a.refusesUnassigned},
		{"size the packets", a.sizePackets, a.ownsInterface},
		{"set up the container's end", a.setUpContainer, a.ownsInterface},
		{"enable forwarding", a.enableForwarding, a.isChained},
		{"tune the interface", a.tune, nil},
		{"limit the bandwidth", a.limit, nil},
		{"open the host ports", a.openHostPorts, nil},
		{"print the result", a.print, nil},
	}
}

// checkCluster refuses containers until the node agent, if the configuration names one, has synced.
func (v *verb) checkCluster(context.Context) error {
	if v.config.Cluster == "" {
		return nil
	}
	return nodestate.Check(v.config.Cluster)
}

// isChained reports whether this ADD works on the interface that another plugin made.
func (v *verb) isChained() bool { return v.config.IsChained() }

func (v *verb) ownsInterface() bool { return !v.isChained() }

// isDelegated reports whether another IPAM plugin allocates the addresses.
func (v *verb) isDelegated() bool { return v.delegate != nil }

// reservesFirst reports whether addresses are reserved before the datapath is opened.
func (v *verb) reservesFirst() bool { return v.ownsInterface() && !v.delegate.needsLink() }

func (a *adder) run(ctx context.Context) error {
	for _, step := range a.steps() {
		if step.when != nil && !step.when() {
			continue
		}
		if a.BeforeStep != nil {
			if err := a.BeforeStep(step.name); err != nil {
				return err
			}
		}
		a.log.Debug(step.name)
		if err := step.do(ctx); err != nil {
			return err
		}
	}
	return nil
}

// openDatapath also pushes the removal of all that later steps write into maps. As an undo it runs
// after the device is removed and before the addresses are released.
func (a *adder) openDatapath(ctx context.Context) (err error) {
	if a.datapath, err = loader.Open(ctx, loader.Options{MaxFlows: a.config.MaxFlows}); err != nil {
		return err
	}
	a.undo.push(func(ctx context.Context) error {
		if !a.written {
			return nil
		}
		return removeEntries(ctx, a.datapath, a.owner, a.pair.HostIndex, (*maps.Store).Release)
	})
	return nil
}

// undo is how a failed ADD is undone: each step that changes something pushes its reversal.
type undo struct {
	steps []func(context.Context) error
}

func (u *undo) push(step func(context.Context) error) {
	u.steps = append(u.steps, step)
}

// rollback runs all steps, last pushed first, and continues after errors.
func (u *undo) rollback(ctx context.Context) error {
	var errs []error
	for len(u.steps) > 0 {
		last := len(u.steps) - 1
		errs = append(errs, u.steps[last](ctx))
		u.steps = u.steps[:last]
	}
	return errors.Join(errs...)
}

func (a *adder) print(context.Context) error {
	return cni.PrintResult(a.Stdout, a.result(), a.config.CNIVersion)
}

// result returns what ADD reports (SPEC, section 5): the result of the plugins before, to which an ADD
// that made the interface adds its own.
func (a *adder) result() *types100.Result {
	result := &types100.Result{CNIVersion: types100.ImplementedSpecVersion}
	if a.config.PrevResult != nil {
		*result = *a.config.PrevResult
	}
	if a.ownsInterface() {
		a.addOwn(result)
	}
	if !a.config.DNS.IsEmpty() {
		result.DNS = a.config.DNS
	}
	return result
}

// addOwn adds the pair, its addresses and routes. The addresses of other interfaces keep their index,
// and come last because results up to 0.2.0 have only the first address of each family.
func (a *adder) addOwn(result *types100.Result) {
	container := len(result.Interfaces) + 1
	result.Interfaces = append(result.Interfaces,
		&types100.Interface{Name: a.pair.HostName, Mac: a.pair.HostMAC.String(), Mtu: a.pair.MTU},
		&types100.Interface{Name: a.pair.ContainerName, Mac: a.pair.ContainerMAC.String(), Mtu: a.pair.MTU, Sandbox: a.netns},
	)
	var own []*types100.IPConfig
	for _, address := range a.addresses {
		ip := cni.IPConfig(address.Prefix, address.Gateway)
		ip.Interface = types100.Int(container)
		own = append(own, ip)
	}
	result.IPs = append(own, result.IPs...)
	result.Routes = append(result.Routes, a.reserved.Routes...)
	if !a.reserved.DNS.IsEmpty() {
		result.DNS = a.reserved.DNS
	}
}
