package plugin

import (
	"fmt"
	"io"
	"net"

	cnitypes "github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	cniversion "github.com/containernetworking/cni/pkg/version"

	"github.com/ebpfnet/ebpfnet/plugin/link"
)

// result is what ADD reports (SPEC, section 5).
type result types100.Result

// Order of the interfaces in a result; addresses name the container's by its index.
const (
	hostInterface = iota
	containerInterface
)

func (a *addition) result() *result {
	r := &result{
		CNIVersion: types100.ImplementedSpecVersion,
		Interfaces: []*types100.Interface{
			hostInterface: {Name: a.pair.HostName, Mac: a.pair.HostMAC.String(), Mtu: a.pair.MTU},
			containerInterface: {
				Name:    a.pair.ContainerName,
				Mac:     a.pair.ContainerMAC.String(),
				Mtu:     a.pair.MTU,
				Sandbox: a.netns,
			},
		},
		Routes: a.reserved.Routes,
		DNS:    a.reserved.DNS,
	}
	if !a.config.DNS.IsEmpty() {
		r.DNS = a.config.DNS
	}
	for _, address := range a.addresses {
		r.IPs = append(r.IPs, ipConfig(address))
	}
	return r
}

func ipConfig(address link.Address) *types100.IPConfig {
	prefix := address.Prefix
	return &types100.IPConfig{
		Interface: types100.Int(containerInterface),
		Address: net.IPNet{
			IP:   prefix.Addr().AsSlice(),
			Mask: net.CIDRMask(prefix.Bits(), prefix.Addr().BitLen()),
		},
		Gateway: address.Gateway.AsSlice(),
	}
}

// print writes the result in the version that was asked for. The library knows
// no difference between 1.0.0 and 1.1.0, which is where mtu came.
func (r *result) print(to io.Writer, version string) error {
	if knowsMTU, err := cniversion.GreaterThanOrEqualTo(version, "1.1.0"); err == nil && !knowsMTU {
		for _, device := range r.Interfaces {
			device.Mtu = 0
		}
	}
	converted, err := (*types100.Result)(r).GetAsVersion(version)
	if err != nil {
		return cnitypes.NewError(cnitypes.ErrIncompatibleCNIVersion, fmt.Sprintf("cniVersion %q: %v", version, err), "")
	}
	if err := converted.PrintTo(to); err != nil {
		return fmt.Errorf("print the result: %w", err)
	}
	return nil
}
