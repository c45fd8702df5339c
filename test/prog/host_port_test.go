package prog

import (
	"testing"
	"time"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

func TestHostPortFromUplink(t *testing.T) {
	runRows(t, bpf.ProgFromUplink, hostPortFromUplink())
}

func hostPortFromUplink() []row {
	toAny := []hostPort{{host: "any:8080", to: "pod:80"}}
	const from5000 = "remote:5000 > node:8080"
	return []row{
		{
			name: "on an exact address", on: withPorts,
			ports: []hostPort{{host: "node:8080", to: "pod:80"}},
			in:    from5000, out: "remote:5000 > pod:80",
			after: []flow{dnat("remote:5000", "pod:80", "node:8080")},
		},
		{
			name: "on any address", on: withPorts, ports: toAny,
			in: from5000, out: "remote:5000 > pod:80",
			after: []flow{dnat("remote:5000", "pod:80", "node:8080")},
		},
		{
			name: "on any address, another one", on: withPorts, ports: toAny,
			in: "remote:5000 > node2:8080", out: "remote:5000 > pod:80",
			after: []flow{dnat("remote:5000", "pod:80", "node2:8080")},
		},
		{
			name: "on any address, one without a subnet", on: withPorts, ports: toAny,
			in: "remote:5000 > vip:8080", out: "remote:5000 > pod:80",
			after: []flow{dnat("remote:5000", "pod:80", "vip:8080")},
		},
		{
			name: "on any address, one in the pods' subnet", on: withPorts, ports: toAny,
			in: "remote:5000 > podgw2:8080", out: "remote:5000 > pod:80",
			after: []flow{dnat("remote:5000", "pod:80", "podgw2:8080")},
		},
		{
			name: "on any address, one beside others of the host", on: withPorts, ports: toAny,
			in: "remote:5000 > crowded:8080", out: "remote:5000 > pod:80",
			after: []flow{dnat("remote:5000", "pod:80", "crowded:8080")},
		},
		{
			name: "an exact address takes precedence over any", on: withPorts,
			ports: []hostPort{{host: "any:8080", to: "pod:80"}, {host: "node:8080", to: "pod2:80"}},
			in:    from5000, out: "remote:5000 > pod2:80",
			after: []flow{dnat("remote:5000", "pod2:80", "node:8080")},
		},
		{
			name: "any address, with another exact one", on: withPorts,
			ports: []hostPort{{host: "any:8080", to: "pod:80"}, {host: "node2:8080", to: "pod2:80"}},
			in:    from5000, out: "remote:5000 > pod:80",
			after: []flow{dnat("remote:5000", "pod:80", "node:8080")},
		},
		{
			name: "TCP, with UDP on the same port", on: []proto{tcp},
			ports: []hostPort{{host: "any:8080", to: "pod:80", proto: tcp}, {host: "any:8080", to: "pod2:53", proto: udp}},
			in:    from5000, out: "remote:5000 > pod:80",
			after: []flow{dnat("remote:5000", "pod:80", "node:8080")},
		},
		{
			name: "UDP, with TCP on the same port", on: []proto{udp},
			ports: []hostPort{{host: "any:8080", to: "pod:80", proto: tcp}, {host: "any:8080", to: "pod2:53", proto: udp}},
			in:    from5000, out: "remote:5000 > pod2:53",
			after: []flow{dnat("remote:5000", "pod2:53", "node:8080")},
		},
		{
			name: "the same port number in the pod", on: withPorts, ports: []hostPort{{host: "any:80", to: "pod:80"}},
			in: "remote:5000 > node:80", out: "remote:5000 > pod:80",
			after: []flow{dnat("remote:5000", "pod:80", "node:80")},
		},
		{
			name: "a pod without ipMasq", on: withPorts, ports: []hostPort{{host: "any:8080", to: "plain:80"}},
			in: from5000, out: "remote:5000 > plain:80",
			after: []flow{dnat("remote:5000", "plain:80", "node:8080")},
		},
		{
			name: "a known connection", on: withPorts, ports: toAny,
			flows: []flow{dnat("remote:5000", "pod:80", "node:8080").established().idleFor(20 * time.Second)},
			in:    from5000, out: "remote:5000 > pod:80",
			edit:  func(p *testenv.Packet) { p.TCPFlags &= testenv.ACK },
			after: []flow{dnat("remote:5000", "pod:80", "node:8080").established().streaming()},
		},
		{
			name: "a connection follows the port to its new target", on: withPorts,
			ports: []hostPort{{host: "any:8080", to: "pod2:80"}},
			flows: []flow{dnat("remote:5000", "pod:80", "node:8080").established().idleFor(20 * time.Second)},
			in:    from5000, out: "remote:5000 > pod2:80",
			after: []flow{
				dnat("remote:5000", "pod:80", "node:8080").established().idleFor(20 * time.Second),
				dnat("remote:5000", "pod2:80", "node:8080"),
			},
		},
		{
			name: "a flow of the address's former owner", on: withPorts, ports: toAny,
			flows: []flow{dnat("remote:5000", "pod:80", "node:8080").ownedBy(formerOwner).established()},
			in:    from5000, out: "remote:5000 > pod:80",
			after: []flow{dnat("remote:5000", "pod:80", "node:8080")},
		},
		{
			name: "a flow by another address of the host", on: withPorts, ports: toAny,
			flows: []flow{dnat("remote:5000", "pod:80", "node2:8080").established()},
			in:    from5000, out: "remote:* > pod:80",
			after: []flow{dnat("remote:5000", "pod:80", "node2:8080").established(), dnat("remote:*", "pod:80", "node:8080").by(5000)},
		},
		{
			name: "a flow by another port of the host", on: withPorts, ports: toAny,
			flows: []flow{dnat("remote:5000", "pod:80", "node:8081").established()},
			in:    from5000, out: "remote:* > pod:80",
			after: []flow{dnat("remote:5000", "pod:80", "node:8081").established(), dnat("remote:*", "pod:80", "node:8080").by(5000)},
		},
		{
			name: "a flow to the pod's own address", on: withPorts, ports: toAny,
			flows: []flow{dnat("remote:5000", "pod:80", "pod:80").established()},
			in:    from5000, out: "remote:* > pod:80",
			after: []flow{dnat("remote:5000", "pod:80", "pod:80").established(), dnat("remote:*", "pod:80", "node:8080").by(5000)},
		},
		{
			name: "an expired flow by another address of the host", on: withPorts, ports: toAny,
			flows: []flow{dnat("remote:5000", "pod:80", "node2:8080").established().idleFor(6 * day)},
			in:    from5000, out: "remote:5000 > pod:80",
			after: []flow{dnat("remote:5000", "pod:80", "node:8080")},
		},
		{
			name: "a flow by another address of the host that has ended", on: []proto{tcp}, ports: toAny,
			flows: []flow{dnat("remote:5000", "pod:80", "node2:8080").with(replied).in(bpf.FlowTimeWait)},
			in:    from5000, out: "remote:5000 > pod:80",
			after: []flow{dnat("remote:5000", "pod:80", "node:8080")},
		},
		{
			name: "a segment, with a flow by another address of the host that has ended", on: []proto{tcp}, ports: toAny,
			flows: []flow{dnat("remote:5000", "pod:80", "node2:8080").with(replied).in(bpf.FlowTimeWait)},
			in:    from5000, edit: isSegment, out: "remote:* > pod:80",
			after: []flow{
				dnat("remote:5000", "pod:80", "node2:8080").with(replied).in(bpf.FlowTimeWait),
				dnat("remote:*", "pod:80", "node:8080").by(5000).provisional(),
			},
		},
		{
			name: "a flow that has another client port", on: withPorts, ports: toAny,
			flows: []flow{dnat("remote:7777", "pod:80", "node:8080").by(6666)},
			in:    from5000, out: "remote:5000 > pod:80",
			after: []flow{dnat("remote:7777", "pod:80", "node:8080").by(6666), dnat("remote:5000", "pod:80", "node:8080")},
		},
		{name: "SYN+ACK opens nothing", on: []proto{tcp}, ports: toAny, in: from5000, reply: true},
		{
			name: "a segment of an unknown connection", on: []proto{tcp}, ports: toAny, in: from5000, edit: isSegment,
			out: "remote:5000 > pod:80", after: []flow{dnat("remote:5000", "pod:80", "node:8080").provisional()},
		},
		{
			name: "IP options", on: withPorts, only: "v4", ports: toAny,
			edit: func(p *testenv.Packet) { p.Options = "\x94\x04\x00\x00\x01\x01\x01\x01" },
			in:   from5000, out: "remote:5000 > pod:80",
			after: []flow{dnat("remote:5000", "pod:80", "node:8080")},
		},
		{
			name: "no UDP checksum", on: []proto{udp}, only: "v4", ports: toAny,
			edit: func(p *testenv.Packet) { p.NoChecksum = true },
			in:   from5000, out: "remote:5000 > pod:80",
			after: []flow{dnat("remote:5000", "pod:80", "node:8080")},
		},
		{name: "not if the route is a blackhole", on: withPorts, ports: toAny, in: "remote:5000 > blackhole:8080"},
		{name: "not if the route is unreachable", on: withPorts, ports: toAny, in: "remote:5000 > refused:8080"},
		{name: "not in an IPv6 packet with mapped addresses", on: withPorts, only: "v6", ports: []hostPort{{host: "8.0.2.1:8080", to: "pod:80"}}, in: "remote:5000 > ::ffff:8.0.2.1:8080"},
	}
}
