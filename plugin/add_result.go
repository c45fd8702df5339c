package plugin

import (
	"context"

	types100 "github.com/containernetworking/cni/pkg/types/100"

	"github.com/ebpfnet/ebpfnet/plugin/cni"
)

// The order of the interfaces in a result. Addresses refer to the container's by its index.
const (
	hostInterface = iota
	containerInterface
)

func (a *adder) print(context.Context) error {
	return cni.PrintResult(a.Stdout, a.result(), a.config.CNIVersion)
}

// result returns what ADD reports (SPEC, section 5): after another plugin that plugin's result.
func (a *adder) result() *types100.Result {
	result := &types100.Result{}
	if a.isChained() {
		*result = *a.config.PrevResult
	} else {
		*result = a.ownResult()
	}
	if !a.config.DNS.IsEmpty() {
		result.DNS = a.config.DNS
	}
	return result
}

func (a *adder) ownResult() types100.Result {
	result := types100.Result{
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
	for _, address := range a.addresses {
		ip := cni.IPConfig(address.Prefix, address.Gateway)
		ip.Interface = types100.Int(containerInterface)
		result.IPs = append(result.IPs, ip)
	}
	return result
}
