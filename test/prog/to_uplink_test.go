package prog

import (
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

func TestToUplinkMasquerades(t *testing.T) {
	runRows(t, bpf.ProgToUplink, toUplinkMasquerades())
}

func toUplinkMasquerades() []row {
	others := snat("remote:80", "node:5", "pod2:4000").idleFor(10 * time.Second)
	anything := func(p *testenv.Packet) {
		p.TTL, p.TOS, p.Payload = 3, 0x2e, "of an odd length."
		if p.Src.Is6() {
			p.FlowLabel = 0xabcde
		} else {
			p.DontFragment, p.IPID = true, 77
		}
	}
	rows := []row{
		{name: "a new flow"},
		{name: "IP options", only: "v4", edit: func(p *testenv.Packet) { p.Options = "\x94\x04\x00\x00" }},
		{name: "no UDP checksum", on: []proto{udp}, only: "v4", edit: func(p *testenv.Packet) { p.NoChecksum = true }},
		{name: "the rest of the packet is unchanged", edit: anything},
		{name: "another pod's flow to the same remote is unchanged", flows: []flow{others}},
	}
	for i, r := range rows {
		rows[i].in, rows[i].out = outgoing, "node:* > remote:80"
		rows[i].after = append(slices.Clone(r.flows), snat("remote:80", "node:*", "pod:4000"))
	}
	return append(rows, row{
		name: "the destination is another host of the uplink's network", in: "pod:4000 > onlink:80", out: "node:* > onlink:80",
		after: []flow{snat("onlink:80", "node:*", "pod:4000")},
	})
}

func TestToUplinkMasqueradesByAddress(t *testing.T) {
	runRows(t, bpf.ProgToUplink, toUplinkByAddress())
}

func toUplinkByAddress() []row {
	ours := snat("remote:0", "node:0", "pod:0").idleFor(10 * time.Second)
	others := snat("remote:0", "node:0", "pod2:0").idleFor(20 * time.Second)
	return []row{
		{
			name: "a new flow", on: withoutPorts, in: "pod:0 > remote:0", out: "node:0 > remote:0",
			after: []flow{snat("remote:0", "node:0", "pod:0")},
		},
		{
			name: "a known flow", on: withoutPorts, flows: []flow{ours.established()},
			in: "pod:0 > remote:0", out: "node:0 > remote:0",
			after: []flow{snat("remote:0", "node:0", "pod:0").established()},
		},
		{
			name: "with another pod's flow to another remote", on: withoutPorts, flows: []flow{snat("remote2:0", "node:0", "pod2:0")},
			in: "pod:0 > remote:0", out: "node:0 > remote:0",
			after: []flow{snat("remote2:0", "node:0", "pod2:0"), snat("remote:0", "node:0", "pod:0")},
		},
		{
			name: "with another pod's expired flow", on: withoutPorts, flows: []flow{others.idleFor(700 * time.Second)},
			in: "pod:0 > remote:0", out: "node:0 > remote:0",
			after: []flow{snat("remote:0", "node:0", "pod:0")},
		},
		{
			name: "a reply from the pod's own address", on: withoutPorts, flows: []flow{dnat("remote:0", "pod:0", "pod:0")},
			in: "pod:0 > remote:0", after: []flow{dnat("remote:0", "pod:0", "pod:0").established()},
		},
		{name: "with another pod's flow to the remote", on: withoutPorts, flows: []flow{others}, in: "pod:0 > remote:0", drop: "no port"},
		{
			name: "with a flow of the address's former owner", on: withoutPorts, flows: []flow{ours.ownedBy(formerOwner)}, in: "pod:0 > remote:0",
			out: "node:0 > remote:0", after: []flow{snat("remote:0", "node:0", "pod:0")},
		},
		{name: "from a pod without ipMasq", on: withoutPorts, in: "plain:0 > remote:0"},
		{name: "to a multicast group", on: withoutPorts, in: "pod:0 > multicast:0"},
		{name: "from the host", on: withoutPorts, in: "node:0 > remote:0", after: []flow{claim("remote:0", "node:0")}},
		{
			name: "from the host, with a pod's flow to the remote", on: withoutPorts, flows: []flow{others.established()}, in: "node:0 > remote:0",
			after: []flow{claim("remote:0", "node:0")},
		},
		{
			name: "with a flow of the host to the remote", on: withoutPorts, flows: []flow{claim("remote:0", "node:0").idleFor(20 * time.Second)},
			in: "pod:0 > remote:0", drop: "no port",
		},
		{name: "a checksum over the addresses", on: []proto{dccp, lite}, in: "pod:0 > remote:0", drop: "protocol"},
		{name: "a tunnel", on: []proto{gre, esp}, in: "pod3:0 > remote:0", drop: "protocol"},
		{name: "a tunnel, with a flow from before", on: []proto{gre, esp}, flows: []flow{snat("remote:0", "node:0", "pod3:0")}, in: "pod3:0 > remote:0", drop: "protocol"},
		{name: "UDP behind two fragment headers", only: "v6", on: []proto{udp}, in: "pod3:4000 > remote:80", raw: withHeaders(2, unix.IPPROTO_FRAGMENT), drop: "protocol"},
		{
			name: "a tunnel's reply from the pod's own address", on: []proto{gre, esp}, flows: []flow{dnat("remote:0", "pod3:0", "pod3:0")},
			in: "pod3:0 > remote:0", after: []flow{dnat("remote:0", "pod3:0", "pod3:0").established()},
		},
	}
}

// TestToUplinkSCTP opens a flow with an INIT alone. Its ports stay the pod's, so two pods exclude each other only from the
// same port with the same remote.
func TestToUplinkSCTP(t *testing.T) { runRows(t, bpf.ProgToUplink, toUplinkSCTP()) }

func toUplinkSCTP() []row {
	const out, masqueraded = "pod:4000 > remote:80", "node:4000 > remote:80"
	ours, others := snat("remote:80", "node:4000", "pod:4000"), snat("remote:80", "node:4000", "pod2:4000").idleFor(20*time.Second)
	rows := []row{
		{name: "an INIT", in: out, out: masqueraded, after: []flow{ours}},
		{name: "of a pod that may not use tunnels", in: "pod3:4000 > remote:80", out: masqueraded, after: []flow{snat("remote:80", "node:4000", "pod3:4000")}},
		{name: "data", in: out, edit: isData, drop: "no flow"},
		{name: "data of a flow", flows: []flow{ours.established()}, in: out, edit: isData, out: masqueraded},
		{name: "another pod's flow has the port", flows: []flow{others}, in: out, drop: "no port"},
		{name: "another pod's flow has the port, and data", flows: []flow{others}, in: out, edit: isData, drop: "no flow"},
		{
			name: "another pod's flow has another port", flows: []flow{others}, in: "pod:4001 > remote:80", out: "node:4001 > remote:80",
			after: []flow{others, snat("remote:80", "node:4001", "pod:4001")},
		},
		{
			name: "another pod's flow to another port", flows: []flow{others}, in: "pod:4000 > remote:81", out: "node:4000 > remote:81",
			after: []flow{others, snat("remote:81", "node:4000", "pod:4000")},
		},
		{name: "the host's flow has the port", flows: []flow{claim("remote:80", "node:4000").idleFor(20 * time.Second)}, in: out, drop: "no port"},
		{name: "from the host", in: "node:4000 > remote:80", edit: isData, after: []flow{claim("remote:80", "node:4000")}},
		{
			name: "a reply from the pod's own address", flows: []flow{dnat("remote:80", "pod:4000", "pod:4000")}, in: out, edit: isData,
			after: []flow{dnat("remote:80", "pod:4000", "pod:4000").established()},
		},
	}
	for i := range rows {
		rows[i].on = []proto{sctp}
	}
	return rows
}

func TestToUplinkReplies(t *testing.T) { runRows(t, bpf.ProgToUplink, toUplinkReplies()) }

func toUplinkReplies() []row {
	return []row{
		{
			name:  "from a host port",
			on:    withPorts,
			flows: []flow{dnat("remote:5000", "pod:80", "node2:8080").idleFor(10 * time.Second)},
			in:    "pod:80 > remote:5000", reply: true,
			out:   "node2:8080 > remote:5000",
			after: []flow{dnat("remote:5000", "pod:80", "node2:8080").accepted().streaming()},
		},
		{
			name:  "from a host port of a pod that is not masqueraded",
			on:    withPorts,
			flows: []flow{dnat("remote:5000", "plain:80", "node:8080")},
			in:    "plain:80 > remote:5000", reply: true,
			out:   "node:8080 > remote:5000",
			after: []flow{dnat("remote:5000", "plain:80", "node:8080").accepted()},
		},
		{
			name:  "from the pod's own address",
			flows: []flow{dnat("remote:5000", "pod:80", "pod:80")},
			in:    "pod:80 > remote:5000", reply: true,
			after: []flow{dnat("remote:5000", "pod:80", "pod:80").accepted()},
		},
		{
			name:  "a reset closes",
			on:    []proto{tcp},
			flows: []flow{dnat("remote:5000", "pod:80", "node:8080").established()},
			in:    "pod:80 > remote:5000", reply: true,
			edit:  func(p *testenv.Packet) { p.TCPFlags = testenv.RST },
			out:   "node:8080 > remote:5000",
			after: []flow{dnat("remote:5000", "pod:80", "node:8080").with(replied | bpf.FlowFIN).in(bpf.FlowClose)},
		},
		{
			name:  "not to another port of the remote",
			on:    withPorts,
			flows: []flow{dnat("remote:5001", "pod:80", "node:8080").idleFor(10 * time.Second)},
			in:    "pod:80 > remote:5000",
			out:   "node:* > remote:5000",
			after: []flow{
				dnat("remote:5001", "pod:80", "node:8080").idleFor(10 * time.Second),
				snat("remote:5000", "node:*", "pod:80"),
			},
		},
		{
			name:  "not by a flow of the address's former owner",
			on:    withPorts,
			flows: []flow{dnat("remote:5000", "pod:80", "node:8080").ownedBy(0xdead).established()},
			in:    "pod:80 > remote:5000",
			out:   "node:* > remote:5000",
			after: []flow{
				dnat("remote:5000", "pod:80", "node:8080").ownedBy(0xdead).established(),
				snat("remote:5000", "node:*", "pod:80"),
			},
		},
	}
}

func TestToUplinkIgnores(t *testing.T) { runRows(t, bpf.ProgToUplink, toUplinkIgnores()) }

func toUplinkIgnores() []row {
	return []row{
		{name: "from the host, outside of the masquerading range", on: withPorts, in: "node:40000 > remote:80"},
		{name: "forwarded for another host", forwarded: true, in: "onlink:4000 > remote:80"},
		{name: "an endpoint without ipMasq", in: "plain:4000 > remote:80"},
		{name: "link-local destinations", in: "pod:4000 > linklocal:80"},
		{name: "multicast destinations", in: "pod:4000 > multicast:5353"},
		{name: "broadcasts", only: "v4", in: "pod:4000 > 255.255.255.255:67"},
		{name: "VLAN frames", ether: true, in: "pod:4000 > remote:80", raw: tagged},
		{name: "ARP", ether: true, only: "v4", on: []proto{udp}, in: "pod:4000 > remote:80", raw: typed(0x0806)},
		{name: "an unknown EtherType", ether: true, on: []proto{udp}, in: "pod:4000 > remote:80", raw: typed(0x88cc)},
		{name: "fragments of an endpoint without ipMasq", on: withPorts, in: "plain:4000 > remote:80", raw: fragment(1)},
		{name: "SCTP of an endpoint without ipMasq", in: "plain:4000 > remote:80", edit: protocol(132)},
	}
}

func TestToUplinkDrops(t *testing.T) { runRows(t, bpf.ProgToUplink, toUplinkDrops()) }

func toUplinkDrops() []row {
	return []row{
		{name: "a fragment that ends within the TCP header", on: []proto{tcp}, in: "pod:4000 > remote:80", raw: fragment(0), drop: "truncated"},
		{name: "an echo reply without flow", on: []proto{echo}, in: "pod:80 > remote:5000", reply: true, drop: "no flow"},
		{name: "ICMP that is neither echo nor error", on: []proto{echo}, in: "pod:4000 > remote:80", edit: func(p *testenv.Packet) { p.Type, p.Rest = 137, 0 }, drop: "protocol"},
		{name: "a routing header", only: "v6", in: "pod:4000 > remote:80", raw: routed, drop: "protocol"},
		{name: "a mapped IPv4 address in IPv6", only: "v6", in: "pod:4000 > ::ffff:8.0.113.9:80", drop: "protocol"},
		{name: "a truncated header", in: "pod:4000 > remote:80", raw: cut(4), drop: "truncated"},
		{name: "an IP header alone", in: "pod:4000 > remote:80", raw: cut(0), drop: "truncated"},
	}
}

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
