package testenv

import (
	"context"
	"net"
	"net/netip"

	"github.com/containernetworking/cni/libcni"
	types100 "github.com/containernetworking/cni/pkg/types/100"
)

// PodIfName is the interface name for [Runtime.NewPod].
const PodIfName = "eth0"

// Pod is a container as far as the network is concerned: a namespace and an attachment.
type Pod struct {
	*Namespace
	// Conf is passed to the plugins. Change it before Add.
	Conf *libcni.RuntimeConf
	// Result is nil while the pod is not attached.
	Result *types100.Result

	runtime *Runtime
	// mayBeAttached is true from the start of an Add to a successful Del.
	mayBeAttached bool
}

// NewPod makes a pod without attaching it.
func (r *Runtime) NewPod(tb TB, id string) *Pod {
	tb.Helper()
	ns := New(tb, "pod-"+id)
	return &Pod{
		Namespace: ns,
		Conf:      &libcni.RuntimeConf{ContainerID: id, NetNS: ns.Path, IfName: PodIfName},
		runtime:   r,
	}
}

// AddPod makes a pod and attaches it. capabilityArgs may be nil. The end of the test detaches the
// pod. A node without a datapath may get a recycled one: see [Preload].
func (r *Runtime) AddPod(tb TB, id string, capabilityArgs map[string]any, cniArgs ...[2]string) *Pod {
	tb.Helper()
	pod := r.NewPod(tb, id)
	pod.Conf.CapabilityArgs, pod.Conf.Args = capabilityArgs, cniArgs
	tb.Cleanup(func() {
		if !pod.mayBeAttached {
			return
		}
		ctx, cancel := timeoutContext(Timeout)
		defer cancel()
		if err := pod.Del(ctx); err != nil {
			tb.Logf("clean up: detach pod %s: %v", id, err)
		}
	})
	if options, loads := r.loadOptions(tb); loads {
		Preload(tb, r.Node, options)
	}
	if err := pod.Add(Context(tb)); err != nil {
		tb.Fatalf("attach pod %s: %v", id, err)
	}
	return pod
}

// Add attaches the pod.
func (p *Pod) Add(ctx context.Context) error {
	p.mayBeAttached = true
	result, err := p.runtime.Add(ctx, p.Conf)
	if err != nil {
		return err
	}
	p.Result = result
	return nil
}

// Del detaches the pod, even if it is not attached, and keeps the namespace.
func (p *Pod) Del(ctx context.Context) error {
	if err := p.runtime.Del(ctx, p.Conf); err != nil {
		return err
	}
	p.Result, p.mayBeAttached = nil, false
	return nil
}

// Check runs CHECK for the pod.
func (p *Pod) Check(ctx context.Context) error { return p.runtime.Check(ctx, p.Conf) }

// Addr4 returns the first IPv4 address of the result, or the zero Addr.
func (p *Pod) Addr4() netip.Addr { return p.addr(netip.Addr.Is4) }

// Addr6 returns the first IPv6 address of the result, or the zero Addr.
func (p *Pod) Addr6() netip.Addr { return p.addr(netip.Addr.Is6) }

func (p *Pod) addr(matches func(netip.Addr) bool) netip.Addr {
	if p.Result == nil {
		return netip.Addr{}
	}
	for _, ip := range p.Result.IPs {
		addr, ok := netip.AddrFromSlice(ip.Address.IP)
		if addr = addr.Unmap(); ok && matches(addr) {
			return addr
		}
	}
	return netip.Addr{}
}

// HostMAC returns the address of the host's end of the pod's veth, from the result.
func (p *Pod) HostMAC(tb TB) MAC {
	tb.Helper()
	for _, device := range p.Result.Interfaces {
		if device.Sandbox == "" {
			mac, err := net.ParseMAC(device.Mac)
			Must(tb, err)
			return MAC(mac)
		}
	}
	tb.Fatalf("interfaces in the result: got %v, want one on the host", p.Result.Interfaces)
	return MAC{}
}

// Sender returns the addresses that the pod's frames have, and those that another pod is known by.
func (p *Pod) Sender(tb TB, other *Pod) Sender {
	tb.Helper()
	return Sender{
		MAC: p.MACOf(tb, PodIfName), HostMAC: p.HostMAC(tb),
		Addr4: p.Addr4(), Addr6: p.Addr6(), Other4: other.Addr4(), Other6: other.Addr6(),
		Gateway4: IPv4.Gateway, Gateway6: IPv6.Gateway,
		Remote4: OutsideAddr4, Remote6: OutsideAddr6,
	}
}
