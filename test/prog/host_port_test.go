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
	bothProtocols := []hostPort{{host: "any:8080", to: "pod:80", proto: tcp}, {host: "any:8080", to: "pod2:53", proto: udp}}
	const from5000 = "remote:5000 > node:8080"

	served := func(name string, on []proto, host, pod string, ports ...hostPort) row {
		return row{
			name: name, on: on, ports: ports, in: "remote:5000 > " + host, out: "remote:5000 > " + pod,
			after: []flow{dnat("remote:5000", pod, host)},
		}
	}
	// The client's port is free: another flow does not count any more.
	replaces := func(name string, on []proto, f flow) row {
		r := served(name, on, "node:8080", "pod:80", toAny...)
		r.flows = []flow{f}
		return r
	}
	// Another flow has the client's port.
	beside := func(name string, f flow) row {
		return row{
			name: name, on: withPorts, ports: toAny, flows: []flow{f}, in: from5000, out: "remote:* > pod:80",
			after: []flow{f, dnat("remote:*", "pod:80", "node:8080").by(5000)},
		}
	}
	return []row{
		served("on an exact address", withPorts, "node:8080", "pod:80", hostPort{host: "node:8080", to: "pod:80"}),
		served("on any address", withPorts, "node:8080", "pod:80", toAny...),
		served("on any address, another one", withPorts, "node2:8080", "pod:80", toAny...),
		served("on any address, one without a subnet", withPorts, "vip:8080", "pod:80", toAny...),
		served("on any address, one in the pods' subnet", withPorts, "podgw2:8080", "pod:80", toAny...),
		served("on any address, one beside others of the host", withPorts, "crowded:8080", "pod:80", toAny...),
		served("an exact address takes precedence over any", withPorts, "node:8080", "pod2:80",
			hostPort{host: "any:8080", to: "pod:80"}, hostPort{host: "node:8080", to: "pod2:80"}),
		served("any address, with another exact one", withPorts, "node:8080", "pod:80",
			hostPort{host: "any:8080", to: "pod:80"}, hostPort{host: "node2:8080", to: "pod2:80"}),
		served("TCP, with UDP on the same port", []proto{tcp}, "node:8080", "pod:80", bothProtocols...),
		served("UDP, with TCP on the same port", []proto{udp}, "node:8080", "pod2:53", bothProtocols...),
		served("the same port number in the pod", withPorts, "node:80", "pod:80", hostPort{host: "any:80", to: "pod:80"}),
		served("a pod without ipMasq", withPorts, "node:8080", "plain:80", hostPort{host: "any:8080", to: "plain:80"}),
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
		beside("a flow by another address of the host", dnat("remote:5000", "pod:80", "node2:8080").established()),
		beside("a flow by another port of the host", dnat("remote:5000", "pod:80", "node:8081").established()),
		beside("a flow to the pod's own address", dnat("remote:5000", "pod:80", "pod:80").established()),
		replaces("a flow of the address's former owner", withPorts, dnat("remote:5000", "pod:80", "node:8080").ownedBy(formerOwner).established()),
		replaces("an expired flow by another address of the host", withPorts, dnat("remote:5000", "pod:80", "node2:8080").established().idleFor(6*day)),
		replaces("a flow by another address of the host that has ended", []proto{tcp},
			dnat("remote:5000", "pod:80", "node2:8080").with(replied).in(bpf.FlowTimeWait)),
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
