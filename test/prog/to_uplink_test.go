package prog

import (
	"testing"
	"time"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

func TestToUplinkMasquerades(t *testing.T) {
	runRows(t, bpf.ProgToUplink, toUplinkMasquerades())
}

func toUplinkMasquerades() []row {
	return []row{
		{
			name:  "a new flow",
			in:    "pod:4000 > remote:80",
			out:   "node:* > remote:80",
			after: []flow{out("remote:80", "node:*", "pod:4000")},
		},
		{
			name:  "the destination is another host of the uplink's network",
			in:    "pod:4000 > onlink:80",
			out:   "node:* > onlink:80",
			after: []flow{out("onlink:80", "node:*", "pod:4000")},
		},
		{
			name:  "IP options",
			only:  "v4",
			in:    "pod:4000 > remote:80",
			edit:  func(p *testenv.Packet) { p.Options = "\x94\x04\x00\x00" },
			out:   "node:* > remote:80",
			after: []flow{out("remote:80", "node:*", "pod:4000")},
		},
		{
			name:  "no UDP checksum",
			on:    []proto{udp},
			only:  "v4",
			in:    "pod:4000 > remote:80",
			edit:  func(p *testenv.Packet) { p.NoChecksum = true },
			out:   "node:* > remote:80",
			after: []flow{out("remote:80", "node:*", "pod:4000")},
		},
		{
			name: "all else in the packet stays",
			in:   "pod:4000 > remote:80",
			edit: func(p *testenv.Packet) {
				p.TTL, p.TOS, p.Payload = 3, 0x2e, "of an odd length."
				if p.Src.Is6() {
					p.FlowLabel = 0xabcde
				} else {
					p.DontFragment, p.IPID = true, 77
				}
			},
			out:   "node:* > remote:80",
			after: []flow{out("remote:80", "node:*", "pod:4000")},
		},
		{
			name:  "the other pod's flow to the same remote stays",
			flows: []flow{out("remote:80", "node:5", "pod2:4000").unused(10 * time.Second)},
			in:    "pod:4000 > remote:80",
			out:   "node:* > remote:80",
			after: []flow{
				out("remote:80", "node:5", "pod2:4000").unused(10 * time.Second),
				out("remote:80", "node:*", "pod:4000"),
			},
		},
	}
}

func TestToUplinkByAddress(t *testing.T) { runRows(t, bpf.ProgToUplink, toUplinkByAddress()) }

func toUplinkByAddress() []row {
	ours := out("remote:0", "node:0", "pod:0").unused(10 * time.Second)
	others := out("remote:0", "node:0", "pod2:0").unused(20 * time.Second)
	return []row{
		{
			name: "a new flow", on: portless, in: "pod:0 > remote:0", out: "node:0 > remote:0",
			after: []flow{out("remote:0", "node:0", "pod:0")},
		},
		{
			name: "a known one", on: portless, flows: []flow{ours.state(replied)},
			in: "pod:0 > remote:0", out: "node:0 > remote:0",
			after: []flow{out("remote:0", "node:0", "pod:0").state(replied)},
		},
		{
			name: "beside another pod's with another remote", on: portless, flows: []flow{out("remote2:0", "node:0", "pod2:0")},
			in: "pod:0 > remote:0", out: "node:0 > remote:0",
			after: []flow{out("remote2:0", "node:0", "pod2:0"), out("remote:0", "node:0", "pod:0")},
		},
		{
			name: "what another pod has not used for long", on: portless, flows: []flow{others.unused(50 * time.Second)},
			in: "pod:0 > remote:0", out: "node:0 > remote:0",
			after: []flow{out("remote:0", "node:0", "pod:0")},
		},
		{
			name: "the answer to what came to the pod itself", on: portless, flows: []flow{in("remote:0", "pod:0", "pod:0")},
			in: "pod:0 > remote:0", after: []flow{in("remote:0", "pod:0", "pod:0").state(replied)},
		},
		{name: "another pod has it", on: portless, flows: []flow{others}, in: "pod:0 > remote:0", drop: "no port"},
		{
			name: "a former pod of this address had it", on: portless, flows: []flow{ours.of(stranger)}, in: "pod:0 > remote:0",
			out: "node:0 > remote:0", after: []flow{out("remote:0", "node:0", "pod:0")},
		},
		{name: "a plain pod's", on: portless, in: "plain:0 > remote:0"},
		{name: "to a group", on: portless, in: "pod:0 > multicast:0"},
		{name: "the host's", on: portless, in: "node:0 > remote:0"},
	}
}

func TestToUplinkAnswers(t *testing.T) { runRows(t, bpf.ProgToUplink, toUplinkAnswers()) }

func toUplinkAnswers() []row {
	return []row{
		{
			name:  "from a host port",
			on:    ported,
			flows: []flow{in("remote:5000", "pod:80", "node2:8080").unused(10 * time.Second)},
			in:    "pod:80 > remote:5000", reply: true,
			out:   "node2:8080 > remote:5000",
			after: []flow{in("remote:5000", "pod:80", "node2:8080").state(replied)},
		},
		{
			name:  "from a host port of a pod that is not masqueraded",
			on:    ported,
			flows: []flow{in("remote:5000", "plain:80", "node:8080")},
			in:    "plain:80 > remote:5000", reply: true,
			out:   "node:8080 > remote:5000",
			after: []flow{in("remote:5000", "plain:80", "node:8080").state(replied)},
		},
		{
			name:  "from the pod's own address",
			flows: []flow{in("remote:5000", "pod:80", "pod:80")},
			in:    "pod:80 > remote:5000", reply: true,
			after: []flow{in("remote:5000", "pod:80", "pod:80").state(replied)},
		},
		{
			name:  "a reset closes",
			on:    []proto{tcp},
			flows: []flow{in("remote:5000", "pod:80", "node:8080").state(replied)},
			in:    "pod:80 > remote:5000", reply: true,
			edit:  func(p *testenv.Packet) { p.TCPFlags = testenv.RST },
			out:   "node:8080 > remote:5000",
			after: []flow{in("remote:5000", "pod:80", "node:8080").state(replied | reset)},
		},
		{
			name:  "not to another port of the remote",
			on:    ported,
			flows: []flow{in("remote:5001", "pod:80", "node:8080").unused(10 * time.Second)},
			in:    "pod:80 > remote:5000",
			out:   "node:* > remote:5000",
			after: []flow{
				in("remote:5001", "pod:80", "node:8080").unused(10 * time.Second),
				out("remote:5000", "node:*", "pod:80"),
			},
		},
		{
			name:  "not with the entry of the address's former owner",
			on:    ported,
			flows: []flow{in("remote:5000", "pod:80", "node:8080").of(0xdead).state(replied)},
			in:    "pod:80 > remote:5000",
			out:   "node:* > remote:5000",
			after: []flow{
				in("remote:5000", "pod:80", "node:8080").of(0xdead).state(replied),
				out("remote:5000", "node:*", "pod:80"),
			},
		},
	}
}

func TestToUplinkLeaves(t *testing.T) { runRows(t, bpf.ProgToUplink, toUplinkLeaves()) }

func toUplinkLeaves() []row {
	return []row{
		{name: "what is not an endpoint's", in: "node:4000 > remote:80"},
		{name: "what is routed through", in: "onlink:4000 > remote:80"},
		{name: "an endpoint without ipMasq", in: "plain:4000 > remote:80"},
		{name: "link-local destinations", in: "pod:4000 > linklocal:80"},
		{name: "multicast destinations", in: "pod:4000 > multicast:5353"},
		{name: "broadcasts", only: "v4", in: "pod:4000 > 255.255.255.255:67"},
		{name: "a VLAN's frames", ether: true, in: "pod:4000 > remote:80", raw: tagged},
		{name: "ARP", ether: true, only: "v4", on: []proto{udp}, in: "pod:4000 > remote:80", raw: typed(0x0806)},
		{name: "an unknown EtherType", ether: true, on: []proto{udp}, in: "pod:4000 > remote:80", raw: typed(0x88cc)},
		{name: "a plain endpoint's fragments", on: ported, in: "plain:4000 > remote:80", raw: fragment(1)},
		{name: "a plain endpoint's SCTP", in: "plain:4000 > remote:80", edit: protocol(132)},
	}
}

func TestToUplinkDrops(t *testing.T) { runRows(t, bpf.ProgToUplink, toUplinkDrops()) }

func toUplinkDrops() []row {
	return []row{
		{name: "a fragment that ends within the TCP header", on: []proto{tcp}, in: "pod:4000 > remote:80", raw: fragment(0), drop: "truncated"},
		{name: "the answer to an unknown echo request", on: []proto{echo}, in: "pod:80 > remote:5000", reply: true, drop: "no flow"},
		{name: "ICMP that is neither echo nor error", on: []proto{echo}, in: "pod:4000 > remote:80", edit: func(p *testenv.Packet) { p.Type, p.Rest = 137, 0 }, drop: "protocol"},
		{name: "a routing header", only: "v6", in: "pod:4000 > remote:80", raw: routed, drop: "protocol"},
		{name: "IPv4 in IPv6", only: "v6", in: "pod:4000 > ::ffff:8.0.113.9:80", drop: "protocol"},
		{name: "a header that is not all there", in: "pod:4000 > remote:80", raw: cut(4), drop: "truncated"},
		{name: "an IP header alone", in: "pod:4000 > remote:80", raw: cut(0), drop: "truncated"},
	}
}
