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
	toAny := []port{{host: "any:8080", to: "pod:80"}}
	const from5000 = "remote:5000 > node:8080"
	return []row{
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
			flows: []flow{in("remote:5000", "pod:80", "pod:80").state(replied | fin)},
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
		{name: "not in an IPv6 packet with mapped addresses", on: ported, only: "v6", ports: []port{{host: "8.0.2.1:8080", to: "pod:80"}}, in: "remote:5000 > ::ffff:8.0.2.1:8080"},
	}
}
