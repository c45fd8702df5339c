package plugin

import (
	"context"
	"errors"
	"fmt"
	"net/netip"

	"github.com/containernetworking/cni/pkg/invoke"
	cnitypes "github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"

	"github.com/ebpfnet/ebpfnet/ipam"
)

// delegate is another plugin that gives addresses (SPEC, section 4). It is executed
// with our environment and our configuration, and finds in both what it wants.
type delegate struct {
	kind  string // ipam.type
	stdin []byte
}

// asksOnLink says that the plugin asks by the container's interface, which must be there
// and up when it gives addresses, and still be there when it gives them back. At the other
// end a DHCP server or relay of the host answers, on all of the host's devices.
func (d *delegate) asksOnLink() bool { return d != nil && d.kind == "dhcp" }

// reserve has the plugin give addresses. The caller releases them, whether that fails or not.
func (d *delegate) reserve(ctx context.Context) (*ipam.Result, error) {
	given, err := invoke.DelegateAdd(ctx, d.kind, d.stdin, nil)
	if err != nil {
		return nil, d.failed(ctx, err)
	}
	result, err := types100.NewResultFromResult(given)
	if err == nil && len(result.IPs) == 0 {
		err = errors.New("gave no address")
	}
	if err != nil {
		return nil, d.failed(ctx, err)
	}
	reserved := &ipam.Result{Routes: result.Routes, DNS: result.DNS}
	for _, ip := range result.IPs {
		address := ipam.Address{Prefix: prefixOf(ip.Address)}
		gateway, _ := netip.AddrFromSlice(ip.Gateway)
		if address.Gateway = gateway.Unmap(); !address.Gateway.IsValid() {
			address.Gateway = usualGateway(address.Prefix.Addr())
		}
		reserved.Addresses = append(reserved.Addresses, address)
	}
	return reserved, nil
}

// usualGateway is for addresses that come without: the host answers for it on the
// container's own link, where no other host can be asked.
func usualGateway(addr netip.Addr) netip.Addr {
	if addr.Is4() {
		return netip.AddrFrom4([4]byte{169, 254, 1, 1}) // RFC 3927
	}
	return netip.MustParseAddr("fe80::1")
}

func (d *delegate) release(ctx context.Context) error {
	return d.failed(ctx, invoke.DelegateDel(ctx, d.kind, d.stdin, nil))
}

func (d *delegate) check(ctx context.Context) error {
	return d.failed(ctx, invoke.DelegateCheck(ctx, d.kind, d.stdin, nil))
}

func (d *delegate) status(ctx context.Context) error {
	return d.failed(ctx, invoke.DelegateStatus(ctx, d.kind, d.stdin, nil))
}

func (d *delegate) gc(ctx context.Context) error {
	return d.failed(ctx, invoke.DelegateGC(ctx, d.kind, d.stdin, nil))
}

// failed says whose error it is; its code stays.
func (d *delegate) failed(ctx context.Context, err error) error {
	if err == nil {
		return nil
	}
	if ctx.Err() != nil { // the plugin was killed, and its own words are cut off
		err = cnitypes.NewError(cnitypes.ErrTryAgainLater, "gave no answer in time", err.Error())
	}
	return withPrefix(cniError(err), fmt.Sprintf("ipam.type %q: ", d.kind))
}
