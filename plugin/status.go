package plugin

import (
	"context"
	"net/netip"

	"github.com/containernetworking/cni/pkg/skel"
	cnitypes "github.com/containernetworking/cni/pkg/types"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/link"
)

// Status says whether an ADD could succeed now (SPEC, section 2, STATUS). It
// tries instead of guessing: the datapath is loaded if it is not.
func (p *Plugin) Status(ctx context.Context, args *skel.CmdArgs) error {
	config, err := parseConfig(args)
	if err != nil {
		return err
	}
	if err := checkRights(); err != nil {
		return notAvailable(err)
	}
	if config.IPAM != nil && config.IPAM.HasIPv6() {
		if err := link.CheckIPv6(); err != nil {
			return notAvailable(err)
		}
	}
	datapath, err := loader.Open(ctx, loader.Options{MaxFlows: config.MaxFlows})
	if err != nil {
		return notAvailable(err)
	}
	defer datapath.Close()

	if err := mend(ctx, datapath, config.Uplinks); err != nil {
		return cnitypes.NewError(cnitypes.ErrLimitedConnectivity, err.Error(), "containers that are connected may lack masquerading or host ports")
	}
	if config.Delegate != nil {
		return config.Delegate.status(ctx)
	}
	if config.IPAM == nil {
		return nil
	}
	if err := p.pool(config).Available(ctx); err != nil {
		return notAvailable(err)
	}
	return nil
}

// mend does what an ADD would do for the containers that are there: it follows
// changes of the uplinks, puts programs back that another tool has taken off, and has
// the host forward.
// Runtimes ask for the status all the time, and so nothing has to stay and watch.
// On a host without containers it does nothing.
func mend(ctx context.Context, datapath *loader.Datapath, names uplinkNames) error {
	endpoints, err := maps.Endpoints(datapath)
	if err != nil {
		return err
	}
	uplinks, err := maps.Uplinks(datapath)
	if err != nil || len(uplinks)+len(endpoints) == 0 {
		return err
	}
	var addresses []link.Address
	for _, endpoint := range endpoints {
		addresses = append(addresses, link.Address{Prefix: netip.PrefixFrom(endpoint.Addr, endpoint.Addr.BitLen())})
	}
	if err := link.EnableForwarding(families(addresses)); err != nil {
		return err
	}
	host, err := openHandle()
	if err != nil {
		return err
	}
	defer host.Close()

	if err := refreshUplinks(ctx, host, datapath, names); err != nil {
		return err
	}
	attached, err := datapath.LoopbackAttached()
	if err != nil || attached {
		return err
	}
	ports, err := maps.HostPorts(datapath)
	if err != nil || len(ports) == 0 {
		return err
	}
	return maps.With(ctx, datapath, func(*maps.Store) error { return datapath.AttachLoopback() })
}

func notAvailable(err error) error {
	return cnitypes.NewError(cnitypes.ErrPluginNotAvailable, err.Error(), "")
}
