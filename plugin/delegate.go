package plugin

import (
	"context"
	"errors"
	"net/netip"

	"github.com/containernetworking/cni/pkg/invoke"
	cnitypes "github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"

	"github.com/ebpfnet/ebpfnet/ipam"
	"github.com/ebpfnet/ebpfnet/plugin/cni"
	"github.com/ebpfnet/ebpfnet/plugin/cnierr"
	"github.com/ebpfnet/ebpfnet/plugin/config"
	"github.com/ebpfnet/ebpfnet/plugin/link"
	"github.com/ebpfnet/ebpfnet/plugin/show"
)

// delegate is another IPAM plugin that allocates the addresses (SPEC, section 4). It is executed
// with our environment and our configuration.
type delegate struct {
	kind  string // ipam.type
	stdin []byte
}

// newDelegate returns nil if ebpfnet allocates the addresses, or there are none.
func newDelegate(c *config.Config, call *cni.Call) *delegate {
	if c.Delegate == "" {
		return nil
	}
	return &delegate{kind: c.Delegate, stdin: call.StdinData}
}

// needsLink reports whether the plugin sends its requests from the container's interface, which must
// be up before it allocates addresses and still exist when it releases them. A DHCP server or relay
// on the host replies on all of the host's devices.
func (d *delegate) needsLink() bool { return d != nil && d.kind == "dhcp" }

// reserve lets the plugin allocate addresses. The caller releases them, even after an error.
func (d *delegate) reserve(ctx context.Context) (*ipam.Result, error) {
	given, err := invoke.DelegateAdd(ctx, d.kind, d.stdin, nil)
	if err != nil {
		return nil, d.wrap(ctx, err)
	}
	result, err := types100.NewResultFromResult(given)
	if err == nil && len(result.IPs) == 0 {
		err = errors.New("returned no address")
	}
	if err != nil {
		return nil, d.wrap(ctx, err)
	}
	reserved := &ipam.Result{Routes: result.Routes, DNS: result.DNS}
	for _, ip := range result.IPs {
		address := ipam.Address{Prefix: link.PrefixOf(ip.Address)}
		gateway, _ := netip.AddrFromSlice(ip.Gateway)
		if address.Gateway = gateway.Unmap(); !address.Gateway.IsValid() {
			address.Gateway = link.DefaultGateway(address.Prefix.Addr())
		}
		reserved.Addresses = append(reserved.Addresses, address)
	}
	return reserved, nil
}

func (d *delegate) release(ctx context.Context) error {
	return d.wrap(ctx, invoke.DelegateDel(ctx, d.kind, d.stdin, nil))
}

func (d *delegate) check(ctx context.Context) error {
	return d.wrap(ctx, invoke.DelegateCheck(ctx, d.kind, d.stdin, nil))
}

func (d *delegate) status(ctx context.Context) error {
	return d.wrap(ctx, invoke.DelegateStatus(ctx, d.kind, d.stdin, nil))
}

func (d *delegate) gc(ctx context.Context) error {
	return d.wrap(ctx, invoke.DelegateGC(ctx, d.kind, d.stdin, nil))
}

// wrap names the plugin in its error, which keeps its code.
func (d *delegate) wrap(ctx context.Context, err error) error {
	if err == nil {
		return nil
	}
	switch ctx.Err() { // the plugin was killed, and its output is incomplete
	case context.DeadlineExceeded:
		err = cnitypes.NewError(cnitypes.ErrTryAgainLater, "did not finish in time", err.Error())
	case context.Canceled:
		err = cnitypes.NewError(cnitypes.ErrTryAgainLater, "a signal has ended it", err.Error())
	}
	return cnierr.WithPrefix(cnierr.WithCode(err), "ipam.type "+show.Value(d.kind)+": ")
}
