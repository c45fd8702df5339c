package prog

import (
	"context"
	"net/netip"
	"testing"
	"time"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

func TestHostPortFromUplink(t *testing.T) {
	toAny := []port{{host: "any:8080", to: "pod:80"}}
	const from5000 = "remote:5000 > node:8080"
	runRows(t, bpf.DatapathProgFromUplink, []row{
		{
			name: "of an exact address", on: ported,
			ports: []port{{host: "node:8080", to: "pod:80"}},
			in:    from5000, out: "remote:5000 > pod:80",
			after: []flow{in("remote:5000", "pod:80", "node:8080")},
		},
		{
			name: "of any address", on: ported, ports: toAny,
			in: from5000, out: "remote:5000 > pod:80",
			after: []flow{in("remote:5000", "pod:80", "node:8080")},
		},
		{
			name: "of any address, by another one", on: ported, ports: toAny,
			in: "remote:5000 > node2:8080", out: "remote:5000 > pod:80",
			after: []flow{in("remote:5000", "pod:80", "node2:8080")},
		},
		{
			name: "of any address, by one that is alone", on: ported, ports: toAny,
			in: "remote:5000 > vip:8080", out: "remote:5000 > pod:80",
			after: []flow{in("remote:5000", "pod:80", "vip:8080")},
		},
		{
			name: "of any address, by one among others of the host", on: ported, ports: toAny,
			in: "remote:5000 > crowded:8080", out: "remote:5000 > pod:80",
			after: []flow{in("remote:5000", "pod:80", "crowded:8080")},
		},
		{
			name: "of an exact address before any", on: ported,
			ports: []port{{host: "any:8080", to: "pod:80"}, {host: "node:8080", to: "pod2:80"}},
			in:    from5000, out: "remote:5000 > pod2:80",
			after: []flow{in("remote:5000", "pod2:80", "node:8080")},
		},
		{
			name: "of another exact address", on: ported,
			ports: []port{{host: "any:8080", to: "pod:80"}, {host: "node2:8080", to: "pod2:80"}},
			in:    from5000, out: "remote:5000 > pod:80",
			after: []flow{in("remote:5000", "pod:80", "node:8080")},
		},
		{
			name: "TCP and UDP of one number", on: []proto{tcp},
			ports: []port{{host: "any:8080", to: "pod:80", proto: tcp}, {host: "any:8080", to: "pod2:53", proto: udp}},
			in:    from5000, out: "remote:5000 > pod:80",
			after: []flow{in("remote:5000", "pod:80", "node:8080")},
		},
		{
			name: "UDP and TCP of one number", on: []proto{udp},
			ports: []port{{host: "any:8080", to: "pod:80", proto: tcp}, {host: "any:8080", to: "pod2:53", proto: udp}},
			in:    from5000, out: "remote:5000 > pod2:53",
			after: []flow{in("remote:5000", "pod2:53", "node:8080")},
		},
		{
			name: "the same port inside", on: ported, ports: []port{{host: "any:80", to: "pod:80"}},
			in: "remote:5000 > node:80", out: "remote:5000 > pod:80",
			after: []flow{in("remote:5000", "pod:80", "node:80")},
		},
		{
			name: "a pod without ipMasq", on: ported, ports: []port{{host: "any:8080", to: "plain:80"}},
			in: from5000, out: "remote:5000 > plain:80",
			after: []flow{in("remote:5000", "plain:80", "node:8080")},
		},
		{
			name: "a known connection goes on", on: ported, ports: toAny,
			flows: []flow{in("remote:5000", "pod:80", "node:8080").state(replied).unused(20 * time.Second)},
			in:    from5000, out: "remote:5000 > pod:80",
			edit:  func(p *testenv.Packet) { p.TCPFlags &= testenv.ACK },
			after: []flow{in("remote:5000", "pod:80", "node:8080").state(replied)},
		},
		{
			name: "a connection goes where the port leads now", on: ported,
			ports: []port{{host: "any:8080", to: "pod2:80"}},
			flows: []flow{in("remote:5000", "pod:80", "node:8080").state(replied).unused(20 * time.Second)},
			in:    from5000, out: "remote:5000 > pod2:80",
			after: []flow{
				in("remote:5000", "pod:80", "node:8080").state(replied).unused(20 * time.Second),
				in("remote:5000", "pod2:80", "node:8080"),
			},
		},
		{
			name: "a connection to a former owner of the address", on: ported, ports: toAny,
			flows: []flow{in("remote:5000", "pod:80", "node:8080").of(stranger).state(replied)},
			in:    from5000, out: "remote:5000 > pod:80",
			after: []flow{in("remote:5000", "pod:80", "node:8080")},
		},
		{
			name: "a connection by another address of the host", on: ported, ports: toAny,
			flows: []flow{in("remote:5000", "pod:80", "node2:8080").state(replied)},
			in:    from5000, out: "remote:5000 > pod:80",
			after: []flow{in("remote:5000", "pod:80", "node:8080")},
		},
		{
			name: "a connection by another port of the host", on: ported, ports: toAny,
			flows: []flow{in("remote:5000", "pod:80", "node:8081").state(replied)},
			in:    from5000, out: "remote:5000 > pod:80",
			after: []flow{in("remote:5000", "pod:80", "node:8080")},
		},
		{
			name: "the remote's direct connection is over", on: ported, ports: toAny,
			flows: []flow{in("remote:5000", "pod:80", "pod:80").state(replied | closing)},
			in:    from5000, out: "remote:5000 > pod:80",
			after: []flow{in("remote:5000", "pod:80", "node:8080")},
		},
		{
			name: "IP options", on: ported, only: "v4", ports: toAny,
			edit: func(p *testenv.Packet) { p.Options = "\x94\x04\x00\x00\x01\x01\x01\x01" },
			in:   from5000, out: "remote:5000 > pod:80",
			after: []flow{in("remote:5000", "pod:80", "node:8080")},
		},
		{
			name: "no UDP checksum", on: []proto{udp}, only: "v4", ports: toAny,
			edit: func(p *testenv.Packet) { p.NoChecksum = true },
			in:   from5000, out: "remote:5000 > pod:80",
			after: []flow{in("remote:5000", "pod:80", "node:8080")},
		},
		{name: "not where the route is a blackhole", on: ported, ports: toAny, in: "remote:5000 > blackhole:8080"},
		{name: "not where the route is unreachable", on: ported, ports: toAny, in: "remote:5000 > refused:8080"},
		{name: "not in an IPv6 packet with mapped addresses", on: ported, only: "v6", ports: []port{{host: "192.0.2.1:8080", to: "pod:80"}}, in: "remote:5000 > ::ffff:192.0.2.1:8080"},
	})
}

func TestHostPortFromContainer(t *testing.T) {
	ports := []port{{host: "any:8080", to: "pod2:80"}}
	runRows(t, bpf.DatapathProgFromContainer, []row{
		{
			name: "another pod's, by the node's address", on: ported, ports: ports,
			in: "pod:5000 > node:8080", out: "pod:5000 > pod2:80",
			after: []flow{in("pod:5000", "pod2:80", "node:8080")},
		},
		{
			name: "another pod's, exact", on: ported, ports: []port{{host: "node2:8080", to: "pod2:80"}},
			in: "plain:5000 > node2:8080", out: "plain:5000 > pod2:80",
			after: []flow{in("plain:5000", "pod2:80", "node2:8080")},
		},
		{name: "its own", on: ported, ports: ports, in: "pod2:5000 > node:8080"},
		{name: "of a host outside", on: ported, ports: ports, in: "pod:5000 > remote:8080"},
		{name: "of a host of the uplink's network", on: ported, ports: ports, in: "pod:5000 > onlink:8080"},
		{name: "of another pod", on: ported, ports: ports, in: "pod:5000 > plain:8080"},
		{name: "of loopback", on: ported, ports: ports, in: "pod:5000 > loopback:8080"},
		{name: "of all hosts", on: ported, only: "v4", ports: ports, in: "pod:5000 > 255.255.255.255:8080"},
		{name: "no host port", ports: ports, in: "pod:5000 > node:8081"},
		{name: "ping", on: []proto{echo}, ports: ports, in: "pod:5000 > node:8080"},
		{name: "a fragment", ports: ports, in: "pod:5000 > node:8080", raw: fragment(0)},
		{name: "a VLAN's frame", ports: ports, in: "pod:5000 > node:8080", raw: tagged},
	})
}

func TestToContainer(t *testing.T) {
	runRows(t, bpf.DatapathProgToContainer, []row{
		{
			name: "the answer from a host port", on: ported,
			flows: []flow{in("pod:5000", "pod2:80", "node:8080")},
			in:    "pod2:80 > pod:5000", reply: true, out: "node:8080 > pod:5000",
			after: []flow{in("pod:5000", "pod2:80", "node:8080").state(replied)},
		},
		{name: "from another port of that pod", on: ported, flows: []flow{in("pod:5000", "pod2:80", "node:8080")}, in: "pod2:81 > pod:5000"},
		{name: "to another port", on: ported, flows: []flow{in("pod:5000", "pod2:80", "node:8080")}, in: "pod2:80 > pod:5001"},
		{name: "of another protocol", on: ported, flows: []flow{in("pod:5000", "pod2:80", "node:8080")}, in: "pod2:80 > pod:5000", edit: otherPorted},
		{name: "of a flow out of the same numbers", on: ported, flows: []flow{out("pod:5000", "pod2:80", "node:8080")}, in: "pod2:80 > pod:5000"},
		{name: "from outside", in: "remote:80 > pod:4000", reply: true},
		{name: "from another pod", in: "pod2:5000 > pod:80"},
		{name: "to a host port", on: ported, ports: []port{{host: "any:8080", to: "pod:80"}}, in: "remote:5000 > node:8080"},
		{name: "a fragment", flows: []flow{in("pod:5000", "pod2:80", "node:8080")}, in: "pod2:80 > pod:5000", raw: fragment(0)},
		{name: "SCTP", in: "pod2:80 > pod:5000", edit: protocol(132)},
		{name: "a VLAN's frame", on: ported, flows: []flow{in("pod:5000", "pod2:80", "node:8080")}, in: "pod2:80 > pod:5000", raw: tagged},
	})
}

// TestHostsOwnConnections has a connection from the host to the remote, whose
// port on the host is a host port as well.
func TestHostsOwnConnections(t *testing.T) {
	h := newHost(t)
	r := row{ports: []port{{host: "any:8080", to: "pod:80"}}, in: "remote:53 > node:8080", reply: true}
	for _, s := range (row{on: []proto{udp}}).scenes() {
		t.Run(s.name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), testenv.Timeout)
			defer cancel()
			local, remote := netip.AddrPortFrom(s.addr("node"), 8080), netip.AddrPortFrom(s.addr("remote"), 53)
			conn, err := h.DialFrom(ctx, "udp", local, remote)
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			if err := h.check(bpf.DatapathProgFromUplink, s, r); err != nil {
				t.Error(err)
			}
		})
	}
}
