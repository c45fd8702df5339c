package prog

import (
	"testing"

	"github.com/ebpfnet/ebpfnet/bpf"
)

// Prefixes by family: the remotes' network, one remote, two addresses, everything.
var (
	remotes     = map[string]string{"v4": "8.0.113.0/24", "v6": "2001:db8:86dd:9::/64"}
	remoteAlone = map[string]string{"v4": "8.0.113.9/32", "v6": "2001:db8:86dd:9::9/128"}
	upToRemote  = map[string]string{"v4": "8.0.113.8/31", "v6": "2001:db8:86dd:9::8/127"}
	everything  = map[string]string{"v4": "0.0.0.0/0", "v6": "::/0"}
)

func TestNonMasqueradeCIDRs(t *testing.T) {
	for _, program := range []string{bpf.ProgToUplink, bpf.ProgToUplinkL3} {
		t.Run(program, func(t *testing.T) { runRows(t, program, nonMasqRows()) })
	}
}

func nonMasqRows() []row {
	cidrs := func(pod string, prefixes ...map[string]string) []nonMasq {
		var entries []nonMasq
		for _, prefix := range prefixes {
			entries = append(entries, nonMasq{pod: pod, prefix: prefix})
		}
		return entries
	}
	masqueraded := row{in: outgoing, out: "node:* > remote:80", after: []flow{snat("remote:80", "node:*", "pod:4000")}}
	still := func(name string, entries []nonMasq) row {
		r := masqueraded
		r.name, r.nonMasq = name, entries
		return r
	}
	return []row{
		{name: "a network", nonMasq: cidrs("pod", remotes), in: outgoing},
		{name: "an address", nonMasq: cidrs("pod", remoteAlone), in: outgoing},
		{name: "a prefix of odd length", nonMasq: cidrs("pod", upToRemote), in: outgoing},
		{name: "everything", nonMasq: cidrs("pod", everything), in: outgoing},
		{name: "several", nonMasq: cidrs("pod", everything, remotes, remoteAlone, upToRemote), in: outgoing},
		{name: "protocols without ports", on: withoutPorts, nonMasq: cidrs("pod", remotes), in: "pod:0 > remote:0"},
		{name: "multicast, without any CIDR", on: withPorts, in: "pod:4000 > multicast:80"},
		{name: "link-local destinations, without any CIDR", in: "pod:4000 > linklocal:80"},
		{name: "a later fragment", on: withPorts, nonMasq: cidrs("pod", remotes), in: outgoing, raw: fragment(1)},
		{name: "a routing header", only: "v6", nonMasq: cidrs("pod", remotes), in: outgoing, raw: routed},
		{name: "a truncated header", nonMasq: cidrs("pod", remotes), in: outgoing, raw: cut(4)},
		{name: "an unknown echo reply", on: []proto{echo}, nonMasq: cidrs("pod", remotes), in: outgoing, reply: true},
		{
			name: "replies from a host port are translated all the same", on: withPorts, nonMasq: cidrs("pod", everything),
			flows: []flow{dnat("remote:5000", "pod:80", "node2:8080")}, in: "pod:80 > remote:5000", reply: true,
			out: "node2:8080 > remote:5000", after: []flow{dnat("remote:5000", "pod:80", "node2:8080").accepted()},
		},
		{
			name: "a destination beside the CIDR", nonMasq: cidrs("pod", remoteAlone, upToRemote),
			in: "pod:4000 > remote2:80", out: "node:* > remote2:80", after: []flow{snat("remote2:80", "node:*", "pod:4000")},
		},
		{
			name: "a destination outside of the CIDR", nonMasq: cidrs("pod", remotes),
			in: "pod:4000 > onlink:80", out: "node:* > onlink:80", after: []flow{snat("onlink:80", "node:*", "pod:4000")},
		},
		still("another pod's CIDRs", cidrs("pod2", everything)),
		still("another pod's CIDRs, and others of its own", append(cidrs("pod2", everything), cidrs("pod", map[string]string{"v4": "8.0.9.0/24", "v6": "2001:db8:1::/48"})...)),
		still("CIDRs of set 0, which means no set", cidrs("", everything)),
		{name: "a pod without ipMasq", nonMasq: cidrs("pod", remotes), in: "plain:4000 > remote:80"},
	}
}
