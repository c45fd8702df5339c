package plugin

import (
	"context"

	"github.com/containernetworking/cni/pkg/skel"
	cnitypes "github.com/containernetworking/cni/pkg/types"

	"github.com/ebpfnet/ebpfnet/ipam"
	"github.com/ebpfnet/ebpfnet/loader"
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
	datapath.Close()

	if config.Delegate != nil {
		return config.Delegate.status(ctx)
	}
	if config.IPAM == nil {
		return nil
	}
	if err := ipam.Open(config.IPAM, p.Log).Available(ctx); err != nil {
		return notAvailable(err)
	}
	return nil
}

func notAvailable(err error) error {
	return cnitypes.NewError(cnitypes.ErrPluginNotAvailable, err.Error(), "")
}
