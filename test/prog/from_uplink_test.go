package prog

import (
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

func TestFromUplinkReplies(t *testing.T) { runRows(t, bpf.ProgFromUplink, fromUplinkReplies()) }

func fromUplinkReplies() []row {
	flows := []flow{snat("remote:80", "node:20000", "pod:4000").idleFor(20 * time.Second)}
	return []row{
		{
			name: "to a masqueraded flow", flows: flows,
			in: "remote:80 > node:20000", reply: true,
			out:   "remote:80 > pod:4000",
			after: []flow{snat("remote:80", "node:20000", "pod:4000").accepted().streaming()},
		},
		{
			name: "to a masqueraded flow that was replied to, with a host port of the same number", on: withPorts,
			flows: []flow{snat("remote:80", "node:20000", "pod:4000").idleFor(20 * time.Second).established()},
			ports: []hostPort{{host: "node:20000", to: "pod2:80"}},
			in:    "remote:80 > node:20000", reply: true, edit: isSegment,
			out:   "remote:80 > pod:4000",
			after: []flow{snat("remote:80", "node:20000", "pod:4000").established().streaming()},
		},
		{
			name: "SYN+ACK to a masqueraded flow, with a host port of the same number", on: []proto{tcp}, flows: flows,
			ports: []hostPort{{host: "node:20000", to: "pod2:80"}},
			in:    "remote:80 > node:20000", reply: true,
			out:   "remote:80 > pod:4000",
			after: []flow{snat("remote:80", "node:20000", "pod:4000").accepted().streaming()},
		},
		{
			name: "to a masqueraded flow without reply, with a host port of the same number", on: []proto{udp}, flows: flows,
			ports: []hostPort{{host: "node:20000", to: "pod2:80"}},
			in:    "remote:80 > node:20000", reply: true,
			out:   "remote:80 > pod2:80",
			after: []flow{flows[0], dnat("remote:80", "pod2:80", "node:20000")},
		},
		{
			name: "a SYN, with a host port of the same number: the tuple is taken", on: []proto{tcp},
			flows: []flow{snat("remote:80", "node:20000", "pod:4000").established()},
			ports: []hostPort{{host: "node:20000", to: "pod2:80"}}, in: "remote:80 > node:20000",
		},
		{
			name: "a SYN, with a host port of the same number and a flow without reply", on: []proto{tcp}, flows: flows,
			ports: []hostPort{{host: "node:20000", to: "pod2:80"}},
			in:    "remote:80 > node:20000", out: "remote:80 > pod2:80",
			after: []flow{flows[0], dnat("remote:80", "pod2:80", "node:20000")},
		},
		{
			name: "a SYN, with a host port of the same number and a flow that has ended", on: []proto{tcp},
			flows: []flow{snat("remote:80", "node:20000", "pod:4000").with(replied).in(bpf.FlowTimeWait)},
			ports: []hostPort{{host: "node:20000", to: "pod2:80"}},
			in:    "remote:80 > node:20000", out: "remote:80 > pod2:80",
			after: []flow{snat("remote:80", "node:20000", "pod:4000").with(replied).in(bpf.FlowTimeWait), dnat("remote:80", "pod2:80", "node:20000")},
		},
		{name: "a SYN is no reply", on: []proto{tcp}, flows: flows, in: "remote:80 > node:20000"},
		{
			name: "a SYN is no reply, in an established connection", on: []proto{tcp},
			flows: []flow{snat("remote:80", "node:20000", "pod:4000").established()}, in: "remote:80 > node:20000",
		},
		{
			name: "with IP options", only: "v4", flows: flows,
			in: "remote:80 > node:20000", reply: true,
			edit:  func(p *testenv.Packet) { p.Options = "\x07\x07\x04\x00\x00\x00\x00\x00" },
			out:   "remote:80 > pod:4000",
			after: []flow{snat("remote:80", "node:20000", "pod:4000").accepted().streaming()},
		},
		{
			name: "without UDP checksum", only: "v4", on: []proto{udp}, flows: flows,
			in: "remote:80 > node:20000", reply: true,
			edit:  func(p *testenv.Packet) { p.NoChecksum = true },
			out:   "remote:80 > pod:4000",
			after: []flow{snat("remote:80", "node:20000", "pod:4000").accepted().streaming()},
		},
		{
			name: "to a flow without ports", on: withoutPorts, flows: []flow{snat("remote:0", "node:0", "pod:0").idleFor(20 * time.Second)},
			in: "remote:0 > node:0", out: "remote:0 > pod:0",
			after: []flow{snat("remote:0", "node:0", "pod:0").established()},
		},
		{name: "from another remote, without ports", on: withoutPorts, flows: []flow{snat("remote:0", "node:0", "pod:0")}, in: "remote2:0 > node:0"},
		{name: "to another address, without ports", on: withoutPorts, flows: []flow{snat("remote:0", "node:0", "pod:0")}, in: "remote:0 > node2:0"},
		{name: "to an unknown flow without ports", on: withoutPorts, in: "remote:0 > node:0"},
		{name: "to an unknown flow", in: "remote:80 > node:20000", reply: true},
		{
			name: "to the flow of the address's former owner", flows: each(flows, isFormerOwners), in: "remote:80 > node:20000", reply: true, anyFlows: true,
		},
		{
			name: "to the flow of an address that is no pod's any more", flows: []flow{snat("remote:80", "node:20000", "onlink:4000").ownedBy(formerOwner)},
			in: "remote:80 > node:20000", reply: true, anyFlows: true,
		},
		{name: "from another remote", flows: flows, in: "remote2:80 > node:20000", reply: true},
		{name: "from another port", on: withPorts, flows: flows, in: "remote:81 > node:20000", reply: true},
		{name: "to another port", flows: flows, in: "remote:80 > node:20001", reply: true},
		{name: "to another address of the node", flows: flows, in: "remote:80 > node2:20000", reply: true},
		{name: "to a port outside of the masquerading range", on: withPorts, flows: []flow{snat("remote:80", "node:999", "pod:4000")}, in: "remote:80 > node:999", reply: true},
		{name: "to a DNAT flow with the same key", on: withPorts, flows: []flow{dnat("remote:80", "node:20000", "pod:4000")}, in: "remote:80 > node:20000", reply: true},
		{
			name: "mapped addresses in IPv6 to an IPv4 flow", only: "v6", on: withPorts,
			flows: []flow{snat("8.0.113.9:80", "8.0.2.1:20000", "pod:4000")},
			in:    "::ffff:8.0.113.9:80 > ::ffff:8.0.2.1:20000", reply: true,
		},
		{name: "of another protocol", on: withPorts, flows: flows, in: "remote:80 > node:20000", reply: true, edit: swapProtocol},
	}
}

func TestFromUplinkToEndpoints(t *testing.T) {
	runRows(t, bpf.ProgFromUplink, fromUplinkToEndpoints())
}

func fromUplinkToEndpoints() []row {
	besideHostPort := func(name, pod string) row {
		former := dnat("remote:5000", pod, "node:8080").established()
		return row{
			name: name, on: withPorts, flows: []flow{former}, in: "remote:5000 > " + pod, out: "remote:* > " + pod,
			after: []flow{former, dnat("remote:*", pod, pod).by(5000)},
		}
	}
	return []row{
		{name: "a pod will reply from its own address, if the stack delivers", in: "remote:5000 > pod:80"},
		{
			name:  "a known connection",
			flows: []flow{dnat("remote:5000", "pod:80", "pod:80").idleFor(20 * time.Second).established()},
			in:    "remote:5000 > pod:80",
			edit:  func(p *testenv.Packet) { p.TCPFlags &= testenv.ACK },
			after: []flow{dnat("remote:5000", "pod:80", "pod:80").established().streaming()},
		},
		besideHostPort("the remote used a host port before", "pod:80"),
		besideHostPort("the remote used a host port before, of a pod without ipMasq", "plain:80"),
		{name: "a protocol without ports", on: withoutPorts, in: "remote:0 > pod:0"},
		{name: "a pod without ipMasq needs no flow", in: "remote:5000 > plain:80"},
		{name: "a host port of the same number", on: withPorts, ports: []hostPort{{host: "any:80", to: "pod2:80"}}, in: "remote:5000 > plain:80"},
		{
			name: "a pod without ipMasq that has a host port will reply from its own address", on: withPorts, ports: []hostPort{{host: "any:8080", to: "plain:80"}},
			in: "remote:5000 > plain:80",
		},
	}
}

func TestFromUplinkForged(t *testing.T) { runRows(t, bpf.ProgFromUplink, fromUplinkForged()) }

// Nobody outside has the address of a container of this host. No header hides the sender.
func fromUplinkForged() []row {
	const forged = "pod2:5000 > pod:80"
	drop := func(name string, r row) row {
		if r.in == "" {
			r.in = forged
		}
		r.name, r.drop = name, "own source"
		return r
	}
	broadcast := testenv.MAC{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}
	return []row{
		drop("to a container", row{}),
		drop("to the host", row{in: "pod2:5000 > node:80"}),
		drop("to a host port", row{in: "pod2:5000 > node:8080", ports: []hostPort{{host: "any:8080", to: "pod:80"}}}),
		drop("to a hairpin client", row{in: "pod2:80 > podgw:20000", on: withPorts, flows: hairpin("pod:5000", "node:8080", "podgw:20000", "pod2:80"), reply: true}),
		drop("to another host", row{in: "pod2:5000 > onlink:80"}),
		drop("a protocol without ports", row{on: withoutPorts}),
		drop("a first fragment", row{on: withPorts, raw: fragment(0)}),
		drop("a later fragment", row{on: withPorts, raw: fragment(1)}),
		drop("no echo", row{on: []proto{echo}, raw: timestamp}),
		drop("a routing header", row{only: "v6", raw: routed}),
		drop("three options", row{only: "v6", raw: withHeaders(3, unix.IPPROTO_DSTOPTS)}),
		drop("a header that is cut", row{on: withPorts, raw: cut(4)}),
		drop("in a broadcast frame", row{ether: true, in: "pod2:5000 > node:80", edit: to(broadcast)}),
		drop("received again", row{tag: func(scene, testenv.Packet) uint32 { return tagAdmitted }}),
		{name: "in a frame for another host", ether: true, in: forged, edit: to(testenv.MAC{2, 0xee, 0, 0, 0, 1})},
		{name: "behind a second tag of VLAN 0", ether: true, in: forged, raw: priority(unix.ETH_P_8021Q), drop: "headers"},
		{name: "behind 802.1ad in VLAN 0", ether: true, in: forged, raw: priority(unix.ETH_P_8021AD), drop: "headers"},
	}
}

func TestFromUplinkIgnores(t *testing.T) { runRows(t, bpf.ProgFromUplink, fromUplinkIgnores()) }

func fromUplinkIgnores() []row {
	ports := []hostPort{{host: "any:8080", to: "pod:80"}, {host: "node:8080", to: "pod:80"}}
	broadcast := testenv.MAC{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}
	const to8080 = "remote:5000 > node:8080"
	return []row{
		{name: "ping to the host", on: []proto{echo}, ports: ports, in: to8080},
		{name: "another port of the host", ports: ports, in: "remote:5000 > node:8081"},
		{name: "forwarded to another host", ports: ports, in: "remote:5000 > onlink:8080"},
		{name: "forwarded back out", ports: ports, in: "remote:5000 > remote2:8080"},
		{name: "loopback destinations", ports: append(ports, hostPort{host: "loopback:8080", to: "pod:80"}), in: "remote:5000 > loopback:8080"},
		{name: "multicast", ports: ports, in: "remote:5000 > multicast:8080"},
		{name: "broadcast", only: "v4", ports: ports, in: "remote:5000 > 255.255.255.255:8080"},
		{name: "link-local destinations", ports: ports, in: "remote:5000 > linklocal:8080"},
		{name: "the unspecified address", ports: ports, in: "remote:5000 > any:8080"},
		{name: "a frame for another host", ether: true, ports: ports, in: to8080, edit: to(testenv.MAC{2, 0xee, 0, 0, 0, 1})},
		{name: "a broadcast frame", ether: true, ports: ports, in: to8080, edit: to(broadcast)},
		{name: "a multicast frame", ether: true, ports: ports, in: to8080, edit: to(testenv.MAC{0x33, 0x33, 0, 0, 0, 1})},
		{
			name: "a reply in a frame for another host", ether: true, in: "remote:80 > node:20000", reply: true,
			flows: []flow{snat("remote:80", "node:20000", "pod:4000")}, edit: to(testenv.MAC{2, 0xee, 0, 0, 0, 1}),
		},
		{name: "a fragment that ends within the TCP header", on: []proto{tcp}, ports: ports, in: to8080, raw: fragment(0)},
		{name: "SCTP", ports: ports, in: to8080, edit: protocol(132)},
		{name: "VLAN frames", ether: true, ports: ports, in: to8080, raw: tagged},
		{name: "an unknown EtherType", ether: true, ports: ports, in: to8080, raw: typed(0x88cc)},
		{name: "a routing header", only: "v6", ports: ports, in: to8080, raw: routed},
		{
			name: "an IP header of 16 bytes, so the destination ends where a port is expected", only: "v4", on: withPorts,
			ports: []hostPort{{host: "any:513", to: "pod:80"}}, in: to8080, // 8.0.2.1
			ether: true, // without Ethernet, the device's address would begin with 0x44
			raw:   func(_ scene, f []byte) []byte { f[14] = 0x44; return f },
		},
		{name: "a truncated header", ports: ports, in: to8080, raw: cut(7)},
	}
}

// isSegment makes a TCP packet one in the middle of a connection.
func isSegment(p *testenv.Packet) {
	if p.TCPFlags != 0 {
		p.TCPFlags = testenv.ACK
	}
}

// swapProtocol turns TCP into UDP and UDP into TCP.
func swapProtocol(p *testenv.Packet) {
	s := scene{addressing: v4, proto: udp}
	if p.Proto == s.number() {
		s.proto = tcp
	}
	p.Proto = s.number()
	p.Seq, p.Ack, p.TCPFlags, p.Window = 0, 0, 0, 0
}
