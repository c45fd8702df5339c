package prog

import (
	"strings"
	"testing"
	"time"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// hairpin returns the flows of a hairpin connection: client uses hostPort, which is forwarded to
// pod, and appears to pod as gateway. They count against a client in a pod.
func hairpin(client, hostPort, gateway, pod string) []flow {
	owner := ownerOf(pod)
	payer := ownerOf(client)
	toHost := snat(pod, gateway, client).ownedBy(owner).paidBy(payer)
	toHost.hostPort = hostPort
	return []flow{toHost, dnat(gateway, pod, hostPort).ownedBy(owner).paidBy(payer)}
}

func each(flows []flow, change func(flow) flow) []flow {
	var changed []flow
	for _, f := range flows {
		changed = append(changed, change(f))
	}
	return changed
}

func isReplied(f flow) flow      { return f.established() }
func isAccepted(f flow) flow     { return f.accepted() }
func isStreaming(f flow) flow    { return f.streaming() }
func isFormerOwners(f flow) flow { return f.ownedBy(formerOwner) }
func isIdle(f flow) flow         { return f.idleFor(20 * time.Second) }

func TestToLoopback(t *testing.T) {
	const out8080 = "podgw:* > pod:80"
	toAny := []hostPort{{host: "any:8080", to: "pod:80"}}
	var rows []row
	for _, tc := range []struct {
		name, host, client, dst string
		only                    string
		hit                     bool
	}{
		{name: "127.0.0.1, port on any address", host: "any", client: "loopback", dst: "loopback", hit: true},
		{name: "127.0.0.1 from the node's address, port on any address", host: "any", client: "node", dst: "loopback", hit: true},
		{name: "127.0.0.53, port on any address", host: "any", client: "loopback", dst: "loopback2", only: "v4", hit: true},
		{name: "127.0.0.1, port on 127.0.0.1", host: "loopback", client: "loopback", dst: "loopback", hit: true},
		{name: "127.0.0.53, port on 127.0.0.1", host: "loopback", client: "loopback", dst: "loopback2", only: "v4"},
		{name: "the node's address, port on 127.0.0.1", host: "loopback", client: "node", dst: "node"},
		{name: "the node's address, port on any address", host: "any", client: "node", dst: "node", hit: true},
		{name: "the node's address, port on it", host: "node", client: "node", dst: "node", hit: true},
		{name: "the node's other address, port on the first", host: "node", client: "node2", dst: "node2"},
		{name: "127.0.0.1, port on the node's address", host: "node", client: "loopback", dst: "loopback"},
		{name: "the pods' gateway, port on any address", host: "any", client: "podgw", dst: "podgw", hit: true},
		{name: "an address without a subnet, port on any address", host: "any", client: "vip", dst: "vip", hit: true},
	} {
		r := row{name: tc.name, only: tc.only, on: withPorts, ports: []hostPort{{host: tc.host + ":8080", to: "pod:80"}}}
		r.in = tc.client + ":5000 > " + tc.dst + ":8080"
		if tc.hit {
			r.out, r.redirect, r.after = out8080, true, hairpin(tc.client+":5000", tc.dst+":8080", "podgw:*", "pod:80")
		}
		rows = append(rows, r)
	}
	const request = "loopback:5000 > loopback:8080"
	known := hairpin("loopback:5000", "loopback:8080", "podgw:20000", "pod:80")
	runRows(t, bpf.ProgToLoopback, append(rows, []row{
		{
			name: "an exact address takes precedence over any", on: withPorts, ports: append(toAny, hostPort{host: "loopback:8080", to: "pod2:80"}),
			in: request, out: "podgw:* > pod2:80", redirect: true, after: hairpin("loopback:5000", "loopback:8080", "podgw:*", "pod2:80"),
		},
		{
			name: "a pod without ipMasq", on: withPorts, ports: []hostPort{{host: "any:8080", to: "plain:80"}},
			in: request, out: "podgw:* > plain:80", redirect: true, after: hairpin("loopback:5000", "loopback:8080", "podgw:*", "plain:80"),
		},
		{
			name: "the same port number in the pod", on: withPorts, ports: []hostPort{{host: "any:80", to: "pod:80"}},
			in: "loopback:5000 > loopback:80", out: out8080, redirect: true,
			after: hairpin("loopback:5000", "loopback:80", "podgw:*", "pod:80"),
		},
		{
			name: "another hairpin flow of the pod exists", on: withPorts, ports: toAny, flows: known[:1],
			in: "loopback:5001 > loopback:8080", out: out8080, redirect: true,
			after: append(hairpin("loopback:5001", "loopback:8080", "podgw:*", "pod:80"), known[0]),
		},
		{
			name: "no UDP checksum", only: "v4", on: []proto{udp}, ports: toAny, in: request, out: out8080, redirect: true,
			edit:  func(p *testenv.Packet) { p.NoChecksum = true },
			after: hairpin("loopback:5000", "loopback:8080", "podgw:*", "pod:80"),
		},
		{name: "another port", ports: toAny, in: "loopback:5000 > loopback:8081"},
		{name: "ping", on: []proto{echo}, ports: toAny, in: request},
		{name: "a protocol without ports", on: withoutPorts, in: "loopback:0 > loopback:0"},
		{name: "a reply from the port's number", on: withPorts, ports: toAny, in: "loopback:8080 > loopback:5000", reply: true},
		{name: "the pod is gone", on: withPorts, ports: []hostPort{{host: "any:8080", to: "onlink:80"}}, in: request},
		{name: "the other protocol", on: []proto{tcp}, ports: []hostPort{{host: "any:8080", to: "pod:80", proto: udp}}, in: request},
		{name: "multicast", on: withPorts, ports: toAny, in: "node:5000 > multicast:8080"},
		{name: "link-local destinations", on: withPorts, ports: toAny, in: "node:5000 > linklocal:8080"},
		{name: "a VLAN frame", on: withPorts, ports: toAny, in: request, raw: tagged},
		{name: "a truncated header", ports: toAny, in: request, raw: cut(7)},
	}...))
}

func TestHostPortFromContainer(t *testing.T) {
	ports := []hostPort{{host: "any:8080", to: "pod2:80"}}
	reaches := func(name, client, host string, ports []hostPort) row {
		return row{
			name: name, on: withPorts, ports: ports, in: client + " > " + host, out: "podgw:* > pod2:80", redirect: true,
			after: hairpin(client, host, "podgw:*", "pod2:80"),
		}
	}
	rows := []row{
		reaches("another pod's, on the node's address", "pod:5000", "node:8080", ports),
		reaches("another pod's, on the gateway's address", "pod:5000", "podgw:8080", ports),
		reaches("another pod's, on a gateway's address without pods near it", "pod:5000", "podgw2:8080", ports),
		reaches("another pod's, on an exact address", "plain:5000", "node2:8080", []hostPort{{host: "node2:8080", to: "pod2:80"}}),
		reaches("its own", "pod2:5000", "node:8080", ports),
		reaches("its own, from the target port", "pod2:80", "node:8080", ports),
		{
			name: "a later segment of a connection whose flows were lost", on: []proto{tcp}, ports: ports,
			in: "pod:5000 > node:8080", out: "podgw:* > pod2:80", redirect: true,
			edit:  func(p *testenv.Packet) { p.TCPFlags = testenv.ACK },
			after: each(hairpin("pod:5000", "node:8080", "podgw:*", "pod2:80"), flow.provisional),
		},
		{
			name: "another host port of the pod, with a flow of the same client", on: withPorts, ports: append(ports, hostPort{host: "any:8081", to: "pod2:80"}),
			flows: hairpin("pod:5000", "node:8080", "podgw:20000", "pod2:80"),
			in:    "pod:5000 > node:8081", out: "podgw:* > pod2:80", redirect: true,
			after: append(hairpin("pod:5000", "node:8080", "podgw:20000", "pod2:80"), hairpin("pod:5000", "node:8081", "podgw:*", "pod2:80")...),
		},
		{
			name: "no UDP checksum", only: "v4", on: []proto{udp}, ports: ports,
			in: "pod:5000 > node:8080", out: "podgw:* > pod2:80", redirect: true,
			edit:  func(p *testenv.Packet) { p.NoChecksum = true },
			after: hairpin("pod:5000", "node:8080", "podgw:*", "pod2:80"),
		},
		{name: "port on 127.0.0.1, destination the node's address", on: withPorts, ports: []hostPort{{host: "loopback:8080", to: "pod2:80"}}, in: "pod:5000 > node:8080"},
		{name: "destination outside", on: withPorts, ports: ports, in: "pod:5000 > remote:8080"},
		{name: "destination in the uplink's network", on: withPorts, ports: ports, in: "pod:5000 > onlink:8080"},
		{name: "destination no pod", on: withPorts, ports: ports, in: "pod:5000 > nopod:8080"},
		{name: "destination another pod", on: withPorts, ports: ports, in: "pod:5000 > plain:8080"},
		{name: "destination loopback", on: withPorts, ports: ports, in: "pod:5000 > loopback:8080"},
		{name: "destination broadcast", on: withPorts, only: "v4", ports: ports, in: "pod:5000 > 255.255.255.255:8080"},
		{name: "no host port", ports: ports, in: "pod:5000 > node:8081"},
		{name: "ping", on: []proto{echo}, ports: ports, in: "pod:5000 > node:8080"},
		{name: "a protocol without ports", on: withoutPorts, in: "pod:0 > node:0"},
		{name: "a later fragment to the outside", ports: ports, in: "pod:5000 > remote:8080", raw: fragment(1)},
		{name: "a VLAN frame", ports: ports, in: "pod:5000 > node:8080", raw: tagged},
	}
	for i := range rows { // without the client's device, the pod that it calls pays
		rows[i].device, _, _ = strings.Cut(rows[i].in, ":")
	}
	runRows(t, bpf.ProgFromContainer, rows)
}

// TestHairpinReplies has replies of pods to their gateway, which go to the hairpin client.
func TestHairpinReplies(t *testing.T) {
	const reply = "pod2:80 > podgw:20000"
	ports := []hostPort{{host: "any:8080", to: "pod2:80"}}
	var rows []row
	for name, sides := range map[string][2]string{
		"127.0.0.1":                            {"loopback:5000", "loopback:8080"},
		"an address of the node":               {"node2:5000", "node2:8080"},
		"another pod":                          {"pod:5000", "node:8080"},
		"the pod itself":                       {"pod2:5000", "node:8080"},
		"the pod itself, from the target port": {"pod2:80", "node:8080"},
		"another pod, from port 80 to port 80": {"pod:80", "node:80"},
	} {
		flows := hairpin(sides[0], sides[1], "podgw:20000", "pod2:80")
		rows = append(rows, row{
			name: "to " + name, on: withPorts, flows: each(flows, isIdle), in: reply, reply: true,
			out: sides[1] + " > " + sides[0], redirect: true, after: each(each(flows, isAccepted), isStreaming),
		})
	}
	flows := hairpin("pod:5000", "node:8080", "podgw:20000", "pod2:80")
	ack := func(p *testenv.Packet) { p.TCPFlags = testenv.ACK }
	runRows(t, bpf.ProgFromContainer, append(rows, []row{
		{
			name: "no UDP checksum", only: "v4", on: []proto{udp}, flows: flows, in: reply, reply: true,
			edit: func(p *testenv.Packet) { p.NoChecksum = true },
			out:  "node:8080 > pod:5000", redirect: true, after: each(flows, isAccepted),
		},
		{
			name: "flows of the address's former owner", on: withPorts, flows: each(flows, isFormerOwners), in: reply, reply: true,
		},
		{name: "from another port", on: withPorts, flows: flows, in: "pod2:81 > podgw:20000", reply: true},
		{name: "to another port", on: withPorts, flows: flows, in: "pod2:80 > podgw:20001", reply: true},
		{name: "from another pod", on: withPorts, flows: flows, in: "pod:80 > podgw:20000", reply: true},
		{name: "the other protocol", on: withPorts, flows: flows, in: reply, reply: true, edit: swapProtocol},
		{
			name: "DNAT flow lost", on: withPorts, ports: ports, flows: flows[:1], in: reply, reply: true,
			drop: "no flow", after: each(flows[:1], isAccepted),
		},
		{name: "SNAT flow lost", on: []proto{tcp}, ports: ports, flows: flows[1:], in: reply, reply: true},
		{name: "SNAT flow lost, UDP", on: []proto{udp}, ports: ports, flows: flows[1:], in: reply, reply: true},
		{name: "both flows lost", on: []proto{tcp}, ports: ports, in: reply, reply: true},
		{name: "both flows lost, a segment in the middle", on: []proto{tcp}, ports: ports, in: reply, edit: ack},
		{name: "both flows lost, to another address of the node", on: []proto{tcp}, ports: ports, in: "pod2:80 > node:20000", edit: ack},
		{name: "both flows lost, UDP", on: []proto{udp}, ports: ports, in: reply, reply: true},
		{name: "both flows and the host port lost", on: []proto{tcp}, in: reply, reply: true},
		{name: "a connection that the pod opens", on: []proto{tcp}, ports: ports, in: reply},
		{name: "a port outside of the masquerading range", on: []proto{tcp}, ports: ports, in: "pod2:80 > podgw:40000", edit: ack},
		{name: "from another port of the pod", on: []proto{tcp}, ports: ports, in: "pod2:81 > podgw:20000", edit: ack},
		{name: "to the outside", on: []proto{tcp}, ports: ports, in: "pod2:80 > remote:20000", edit: ack},
	}...))
}
