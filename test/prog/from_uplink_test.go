package prog

import (
	"testing"
	"time"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

func TestFromUplinkReplies(t *testing.T) { runRows(t, bpf.ProgFromUplink, fromUplinkReplies()) }

func fromUplinkReplies() []row {
	flows := []flow{out("remote:80", "node:20000", "pod:4000").unused(20 * time.Second)}
	return []row{
		{
			name: "to a masqueraded flow", flows: flows,
			in: "remote:80 > node:20000", reply: true,
			out:   "remote:80 > pod:4000",
			after: []flow{out("remote:80", "node:20000", "pod:4000").state(replied)},
		},
		{
			name: "to a masqueraded flow before the host port of the same number", on: ported, flows: flows,
			ports: []port{{host: "node:20000", to: "pod2:80"}},
			in:    "remote:80 > node:20000", reply: true,
			out:   "remote:80 > pod:4000",
			after: []flow{out("remote:80", "node:20000", "pod:4000").state(replied)},
		},
		{
			name: "with IP options", only: "v4", flows: flows,
			in: "remote:80 > node:20000", reply: true,
			edit:  func(p *testenv.Packet) { p.Options = "\x07\x07\x04\x00\x00\x00\x00\x00" },
			out:   "remote:80 > pod:4000",
			after: []flow{out("remote:80", "node:20000", "pod:4000").state(replied)},
		},
		{
			name: "without UDP checksum", only: "v4", on: []proto{udp}, flows: flows,
			in: "remote:80 > node:20000", reply: true,
			edit:  func(p *testenv.Packet) { p.NoChecksum = true },
			out:   "remote:80 > pod:4000",
			after: []flow{out("remote:80", "node:20000", "pod:4000").state(replied)},
		},
		{
			name: "to a flow without ports", on: portless, flows: []flow{out("remote:0", "node:0", "pod:0").unused(20 * time.Second)},
			in: "remote:0 > node:0", out: "remote:0 > pod:0",
			after: []flow{out("remote:0", "node:0", "pod:0").state(replied)},
		},
		{name: "of another remote, without ports", on: portless, flows: []flow{out("remote:0", "node:0", "pod:0")}, in: "remote2:0 > node:0"},
		{name: "to another address, without ports", on: portless, flows: []flow{out("remote:0", "node:0", "pod:0")}, in: "remote:0 > node2:0"},
		{name: "to a pod that is gone, without ports", on: portless, in: "remote:0 > node:0"},
		{name: "to a pod that is gone", in: "remote:80 > node:20000", reply: true},
		{
			name: "to a former pod of this address", flows: each(flows, isStrangers), in: "remote:80 > node:20000", reply: true,
			after: []flow{out("remote:80", "node:20000", "pod:4000").of(stranger).state(replied)},
		},
		{
			name: "to a pod that is gone, with its flow still there", flows: []flow{out("remote:80", "node:20000", "onlink:4000").of(stranger)},
			in: "remote:80 > node:20000", reply: true,
			after: []flow{out("remote:80", "node:20000", "onlink:4000").of(stranger).state(replied)},
		},
		{name: "of another remote", flows: flows, in: "remote2:80 > node:20000", reply: true},
		{name: "from another port", on: ported, flows: flows, in: "remote:81 > node:20000", reply: true},
		{name: "to another port", flows: flows, in: "remote:80 > node:20001", reply: true},
		{name: "to another address of ours", flows: flows, in: "remote:80 > node2:20000", reply: true},
		{name: "to a port that masquerading never chooses", on: ported, flows: []flow{out("remote:80", "node:999", "pod:4000")}, in: "remote:80 > node:999", reply: true},
		{name: "to a flow in of the same numbers", on: ported, flows: []flow{in("remote:80", "node:20000", "pod:4000")}, in: "remote:80 > node:20000", reply: true},
		{
			name: "in IPv6 to an IPv4 flow", only: "v6", on: ported,
			flows: []flow{out("8.0.113.9:80", "8.0.2.1:20000", "pod:4000")},
			in:    "::ffff:8.0.113.9:80 > ::ffff:8.0.2.1:20000", reply: true,
		},
		{name: "of another protocol", on: ported, flows: flows, in: "remote:80 > node:20000", reply: true, edit: otherPorted},
	}
}

func TestFromUplinkToEndpoints(t *testing.T) {
	runRows(t, bpf.ProgFromUplink, fromUplinkToEndpoints())
}

func fromUplinkToEndpoints() []row {
	return []row{
		{
			name:  "a masqueraded one will answer as itself",
			in:    "remote:5000 > pod:80",
			after: []flow{in("remote:5000", "pod:80", "pod:80")},
		},
		{
			name:  "its connection goes on",
			flows: []flow{in("remote:5000", "pod:80", "pod:80").unused(20 * time.Second).state(replied)},
			in:    "remote:5000 > pod:80",
			edit:  func(p *testenv.Packet) { p.TCPFlags &= testenv.ACK },
			after: []flow{in("remote:5000", "pod:80", "pod:80").state(replied)},
		},
		{
			name:  "the remote used a host port before",
			flows: []flow{in("remote:5000", "pod:80", "node:8080").state(replied)},
			on:    ported,
			in:    "remote:5000 > pod:80",
			after: []flow{in("remote:5000", "pod:80", "pod:80")},
		},
		{
			name:  "the remote used a host port of a plain one before",
			flows: []flow{in("remote:5000", "plain:80", "node:8080").state(replied | fin)},
			on:    ported,
			in:    "remote:5000 > plain:80",
			after: []flow{in("remote:5000", "plain:80", "plain:80")},
		},
		{
			name: "by a protocol without ports", on: portless, in: "remote:0 > pod:0",
			after: []flow{in("remote:0", "pod:0", "pod:0")},
		},
		{name: "a plain one answers as itself anyway", in: "remote:5000 > plain:80"},
		{name: "its port is not a host port", on: ported, ports: []port{{host: "any:80", to: "pod2:80"}}, in: "remote:5000 > plain:80"},
		{
			name: "a plain one with a host port will answer as itself", on: ported, ports: []port{{host: "any:8080", to: "plain:80"}},
			in: "remote:5000 > plain:80", after: []flow{in("remote:5000", "plain:80", "plain:80")},
		},
	}
}

func TestFromUplinkLeaves(t *testing.T) { runRows(t, bpf.ProgFromUplink, fromUplinkLeaves()) }

func fromUplinkLeaves() []row {
	ports := []port{{host: "any:8080", to: "pod:80"}, {host: "node:8080", to: "pod:80"}}
	broadcast := testenv.MAC{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}
	const to8080 = "remote:5000 > node:8080"
	return []row{
		{name: "ping to the host", on: []proto{echo}, ports: ports, in: to8080},
		{name: "another port of the host", ports: ports, in: "remote:5000 > node:8081"},
		{name: "what is routed through", ports: ports, in: "remote:5000 > onlink:8080"},
		{name: "what is routed back out", ports: ports, in: "remote:5000 > remote2:8080"},
		{name: "loopback destinations", ports: append(ports, port{host: "loopback:8080", to: "pod:80"}), in: "remote:5000 > loopback:8080"},
		{name: "multicast", ports: ports, in: "remote:5000 > multicast:8080"},
		{name: "broadcast", only: "v4", ports: ports, in: "remote:5000 > 255.255.255.255:8080"},
		{name: "link-local destinations", ports: ports, in: "remote:5000 > linklocal:8080"},
		{name: "the unspecified address", ports: ports, in: "remote:5000 > any:8080"},
		{name: "a frame to another host", ether: true, ports: ports, in: to8080, edit: to(testenv.MAC{2, 0xee, 0, 0, 0, 1})},
		{name: "a frame to all hosts", ether: true, ports: ports, in: to8080, edit: to(broadcast)},
		{name: "a frame to a group", ether: true, ports: ports, in: to8080, edit: to(testenv.MAC{0x33, 0x33, 0, 0, 0, 1})},
		{
			name: "a masqueraded flow's frame to another host", ether: true, in: "remote:80 > node:20000", reply: true,
			flows: []flow{out("remote:80", "node:20000", "pod:4000")}, edit: to(testenv.MAC{2, 0xee, 0, 0, 0, 1}),
		},
		{name: "a fragment that ends within the TCP header", on: []proto{tcp}, ports: ports, in: to8080, raw: fragment(0)},
		{name: "SCTP", ports: ports, in: to8080, edit: protocol(132)},
		{name: "a VLAN's frames", ether: true, ports: ports, in: to8080, raw: tagged},
		{name: "an unknown EtherType", ether: true, ports: ports, in: to8080, raw: typed(0x88cc)},
		{name: "a routing header", only: "v6", ports: ports, in: to8080, raw: routed},
		{
			name: "an IP header of 16 bytes, which makes the end of the address a port", only: "v4", on: ported,
			ports: []port{{host: "any:513", to: "pod:80"}}, in: to8080, // 8.0.2.1
			ether: true, // a test run without takes 0x44 for the begin of an address
			raw:   func(_ scene, f []byte) []byte { f[14] = 0x44; return f },
		},
		{name: "a header that is not all there", ports: ports, in: to8080, raw: cut(7)},
	}
}

// otherPorted makes TCP of UDP and UDP of TCP.
func otherPorted(p *testenv.Packet) {
	s := scene{family: v4, proto: udp}
	if p.Proto == s.number() {
		s.proto = tcp
	}
	p.Proto = s.number()
	p.Seq, p.Ack, p.TCPFlags, p.Window = 0, 0, 0, 0
}
