package prog

import (
	"testing"

	"github.com/ebpfnet/ebpfnet/bpf"
)

// Prefixes: the network of the remotes, one of them alone, and everything.
var (
	remotes     = map[string]string{"v4": "8.0.113.0/24", "v6": "2001:db8:86dd:9::/64"}
	remoteAlone = map[string]string{"v4": "8.0.113.9/32", "v6": "2001:db8:86dd:9::9/128"}
	upToRemote  = map[string]string{"v4": "8.0.113.8/31", "v6": "2001:db8:86dd:9::8/127"}
	everything  = map[string]string{"v4": "0.0.0.0/0", "v6": "::/0"}
)

func TestExempts(t *testing.T) {
	for _, program := range []string{bpf.ProgToUplink, bpf.ProgToUplinkL3} {
		t.Run(program, func(t *testing.T) { runRows(t, program, exemptRows()) })
	}
}

func exemptRows() []row {
	of := func(pod string, prefixes ...map[string]string) []exempt {
		var exempts []exempt
		for _, prefix := range prefixes {
			exempts = append(exempts, exempt{of: pod, prefix: prefix})
		}
		return exempts
	}
	masqueraded := row{in: outgoing, out: "node:* > remote:80", after: []flow{out("remote:80", "node:*", "pod:4000")}}
	but := func(name string, exempts []exempt) row {
		r := masqueraded
		r.name, r.exempts = name, exempts
		return r
	}
	return []row{
		{name: "a network", exempts: of("pod", remotes), in: outgoing},
		{name: "an address", exempts: of("pod", remoteAlone), in: outgoing},
		{name: "a prefix of odd length", exempts: of("pod", upToRemote), in: outgoing},
		{name: "everything", exempts: of("pod", everything), in: outgoing},
		{name: "several", exempts: of("pod", everything, remotes, remoteAlone, upToRemote), in: outgoing},
		{name: "protocols without ports", on: portless, exempts: of("pod", remotes), in: "pod:0 > remote:0"},
		{name: "multicast, in any case", on: ported, in: "pod:4000 > multicast:80"},
		{name: "link-local destinations, in any case", in: "pod:4000 > linklocal:80"},
		{name: "a later fragment", on: ported, exempts: of("pod", remotes), in: outgoing, raw: fragment(1)},
		{name: "a routing header", only: "v6", exempts: of("pod", remotes), in: outgoing, raw: routed},
		{name: "a header that is not all there", exempts: of("pod", remotes), in: outgoing, raw: cut(4)},
		{name: "an unknown echo reply", on: []proto{echo}, exempts: of("pod", remotes), in: outgoing, reply: true},
		{
			name: "answers from a host port do not care", on: ported, exempts: of("pod", everything),
			flows: []flow{in("remote:5000", "pod:80", "node2:8080")}, in: "pod:80 > remote:5000", reply: true,
			out: "node2:8080 > remote:5000", after: []flow{in("remote:5000", "pod:80", "node2:8080").state(replied)},
		},
		{
			name: "beside the prefix", exempts: of("pod", remoteAlone, upToRemote),
			in: "pod:4000 > remote2:80", out: "node:* > remote2:80", after: []flow{out("remote2:80", "node:*", "pod:4000")},
		},
		{
			name: "outside of the prefix", exempts: of("pod", remotes),
			in: "pod:4000 > onlink:80", out: "node:* > onlink:80", after: []flow{out("onlink:80", "node:*", "pod:4000")},
		},
		but("another pod's", of("pod2", everything)),
		but("another pod's, and a set of its own", append(of("pod2", everything), of("pod", map[string]string{"v4": "8.0.9.0/24", "v6": "2001:db8:1::/48"})...)),
		but("entries of the set 0, which pods without exemptions have", of("", everything)),
		{name: "a plain pod", exempts: of("pod", remotes), in: "plain:4000 > remote:80"},
	}
}
