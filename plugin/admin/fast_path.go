package admin

import (
	"errors"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/maps"
)

// AutoPath says as which other value fastPath auto acts for a family.
type AutoPath struct {
	Family  string        `json:"family"`
	ActsAs  maps.FastPath `json:"actsAs"`
	Because []string      `json:"because"` // why not as always
}

// hooksOfHost and hooksOfDevice are reasons for fastPath auto to act as established.
var (
	hooksOfHost = map[bpf.StackHook]string{
		bpf.HookNetfilter: "netfilter hooks",
		bpf.HookIPsec:     "IPsec policies",
		bpf.HookUnknown:   "this kernel or these programs do not show the stack's hooks",
	}
	hooksOfDevice = map[bpf.StackHook]string{
		bpf.HookBridge: "netfilter hooks for bridges",
		bpf.HookNetdev: "a netdev chain",
		bpf.HookTC:     "tc programs of others",
	}
)

// AutoPaths returns what fastPath auto acts as towards the host's uplinks, for IPv4 and IPv6.
func (o *Host) AutoPaths() ([]AutoPath, error) {
	rules, err := maps.ReadRouteRules(o.datapath)
	if err != nil {
		return nil, err
	}
	paths := []AutoPath{{Family: "IPv4"}, {Family: "IPv6"}}
	for i, hasRules := range []bool{rules.IPv4, rules.IPv6} {
		if paths[i].Because, err = o.stackHooks(i == 1); err != nil {
			return nil, err
		}
		if hasRules {
			paths[i].Because = append(paths[i].Because, "policy rules")
		}
		paths[i].ActsAs = maps.FastPathAlways
		if len(paths[i].Because) > 0 {
			paths[i].ActsAs = maps.FastPathEstablished
		}
	}
	return paths, nil
}

// ServicesPath says which path established connections take that the host's rules translate, such as kube-proxy's. isFast:
// the fast path.
func (o *Host) ServicesPath() (text string, isFast bool) {
	if o.datapath.SeesConntrack() {
		return "established connections are on the fast path", true
	}
	return "on the slow path, because programs cannot read conntrack (Linux 6.6 with BTF)", false
}

const loopback = 1 // ifindex

func (o *Host) stackHooks(ipv6 bool) (found []string, err error) {
	found = []string{}
	hooks, err := o.datapath.StackHooks(loopback, ipv6)
	if err != nil {
		return nil, err
	}
	for _, hook := range []bpf.StackHook{bpf.HookNetfilter, bpf.HookIPsec, bpf.HookUnknown} {
		if hooks&hook != 0 {
			found = append(found, hooksOfHost[hook])
		}
	}
	uplinks, err := o.Uplinks()
	for _, uplink := range uplinks {
		hooks, errHooks := o.datapath.StackHooks(uplink.Attrs().Index, ipv6)
		err = errors.Join(err, errHooks)
		for _, hook := range []bpf.StackHook{bpf.HookBridge, bpf.HookNetdev, bpf.HookTC} {
			if hooks&hook != 0 {
				found = append(found, hooksOfDevice[hook]+" at "+uplink.Attrs().Name)
			}
		}
	}
	return found, err
}
