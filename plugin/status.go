package plugin

import (
	"context"
	"errors"
	"io/fs"
	"time"

	cnitypes "github.com/containernetworking/cni/pkg/types"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/loader/flock"
	"github.com/ebpfnet/ebpfnet/plugin/cni"
	"github.com/ebpfnet/ebpfnet/plugin/cnierr"
	"github.com/ebpfnet/ebpfnet/plugin/link"
	"github.com/ebpfnet/ebpfnet/plugin/nodestate"
	"github.com/ebpfnet/ebpfnet/plugin/refresh"
)

// Status returns an error if an ADD would fail now (SPEC, section 2, STATUS). It loads the datapath if
// necessary, and reconciles it with the host.
func (p *Plugin) Status(ctx context.Context, call *cni.Call) error {
	v, err := parse(call)
	if err != nil {
		return err
	}
	if err := v.checkCluster(ctx); err != nil {
		return cnierr.NotAvailable(err)
	}
	if v.config.Cluster != "" {
		if err := nodestate.CheckPolicies(v.config.Cluster, time.Now()); err != nil {
			return cnierr.NotAvailable(err)
		}
	}
	if err := CheckCapabilities(); err != nil {
		return cnierr.NotAvailable(err)
	}
	if v.config.IPAM != nil && v.config.IPAM.HasIPv6() {
		if err := link.CheckIPv6(); err != nil {
			return cnierr.NotAvailable(err)
		}
	}
	if err := checkPrivate(v.config.DataDir); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return cnierr.NotAvailable(err)
	}
	datapath, err := loader.Open(ctx, loader.Options{MaxFlows: v.config.MaxFlows})
	if err != nil {
		return cnierr.NotAvailable(err)
	}
	defer datapath.Close()

	switch err := refresh.Host(ctx, datapath, v.config.Uplinks); {
	case errors.Is(err, flock.ErrBusy): // as for the other locks: nothing is known to be wrong
		return cnierr.NotAvailable(err)
	case err != nil:
		return cnitypes.NewError(cnitypes.ErrLimitedConnectivity, err.Error(), "connected containers may lack masquerading or host ports")
	}
	if v.delegate != nil {
		return v.delegate.status(ctx)
	}
	if v.config.IPAM == nil {
		return nil
	}
	if err := v.pool().Available(ctx); err != nil {
		return cnierr.NotAvailable(err)
	}
	v.warnOfOverlaps()
	return nil
}
