package plugin

import (
	"context"

	types100 "github.com/containernetworking/cni/pkg/types/100"

	"github.com/ebpfnet/ebpfnet/plugin/cni"
)

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
