package prog

import (
	"testing"
	"time"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// here is a connection from client, which is on this host, to the host port asked
// that leads to pod: the pod's gateway, with a port, stands for the client.
func here(client, asked, gateway, pod string) []flow {
	owner := ownerOf(pod)
	return []flow{out(pod, gateway, client).of(owner), in(gateway, pod, asked).of(owner)}
}

func each(flows []flow, change func(flow) flow) []flow {
	var changed []flow
	for _, f := range flows {
		changed = append(changed, change(f))
	}
	return changed
}

func isReplied(f flow) flow   { return f.state(replied) }
func isStrangers(f flow) flow { return f.of(stranger) }
func isOld(f flow) flow       { return f.unused(20 * time.Second) }

func TestFromHost(t *testing.T) {
	const out8080 = "podgw:* > pod:80"
	toAny := []port{{host: "any:8080", to: "pod:80"}}
	var rows []row
	for _, tc := range []struct {
		name, host, client, asked string
		only                      string
		hit                       bool
	}{
		{name: "127.0.0.1 of any", host: "any", client: "loopback", asked: "loopback", hit: true},
		{name: "127.0.0.1 of any, by an address of the node", host: "any", client: "node", asked: "loopback", hit: true},
		{name: "127.0.0.53 of any", host: "any", client: "loopback", asked: "loopback2", only: "v4", hit: true},
		{name: "127.0.0.1 alone", host: "loopback", client: "loopback", asked: "loopback", hit: true},
		{name: "127.0.0.53 of 127.0.0.1 alone", host: "loopback", client: "loopback", asked: "loopback2", only: "v4"},
		{name: "the node's address of 127.0.0.1 alone", host: "loopback", client: "node", asked: "node"},
		{name: "the node's address of any", host: "any", client: "node", asked: "node", hit: true},
		{name: "the node's address, exact", host: "node", client: "node", asked: "node", hit: true},
		{name: "the node's other address, exact", host: "node", client: "node2", asked: "node2"},
		{name: "127.0.0.1 of the node's address alone", host: "node", client: "loopback", asked: "loopback"},
		{name: "the gateway of the pods", host: "any", client: "podgw", asked: "podgw", hit: true},
		{name: "an address that is alone", host: "any", client: "vip", asked: "vip", hit: true},
	} {
		r := row{name: tc.name, only: tc.only, on: ported, ports: []port{{host: tc.host + ":8080", to: "pod:80"}}}
		r.in = tc.client + ":5000 > " + tc.asked + ":8080"
		if tc.hit {
			r.out, r.redirect, r.after = out8080, true, here(tc.client+":5000", tc.asked+":8080", "podgw:*", "pod:80")
		}
		rows = append(rows, r)
	}
	const ask = "loopback:5000 > loopback:8080"
	known := here("loopback:5000", "loopback:8080", "podgw:20000", "pod:80")
	runRows(t, bpf.ProgToLoopback, append(rows, []row{
		{
			name: "an exact address before any", on: ported, ports: append(toAny, port{host: "loopback:8080", to: "pod2:80"}),
			in: ask, out: "podgw:* > pod2:80", redirect: true, after: here("loopback:5000", "loopback:8080", "podgw:*", "pod2:80"),
		},
		{
			name: "a pod without ipMasq", on: ported, ports: []port{{host: "any:8080", to: "plain:80"}},
			in: ask, out: "podgw:* > plain:80", redirect: true, after: here("loopback:5000", "loopback:8080", "podgw:*", "plain:80"),
		},
		{
			name: "the same port inside", on: ported, ports: []port{{host: "any:80", to: "pod:80"}},
			in: "loopback:5000 > loopback:80", out: out8080, redirect: true,
			after: here("loopback:5000", "loopback:80", "podgw:*", "pod:80"),
		},
		{
			name: "the port that the container knows is another flow's", on: ported, ports: toAny, flows: known[:1],
			in: "loopback:5001 > loopback:8080", out: out8080, redirect: true,
			after: append(here("loopback:5001", "loopback:8080", "podgw:*", "pod:80"), known[0]),
		},
		{
			name: "no UDP checksum", only: "v4", on: []proto{udp}, ports: toAny, in: ask, out: out8080, redirect: true,
			edit:  func(p *testenv.Packet) { p.NoChecksum = true },
			after: here("loopback:5000", "loopback:8080", "podgw:*", "pod:80"),
		},
		{name: "another port", ports: toAny, in: "loopback:5000 > loopback:8081"},
		{name: "ping", on: []proto{echo}, ports: toAny, in: ask},
		{name: "a protocol without ports", on: portless, in: "loopback:0 > loopback:0"},
		{name: "the answer to the client", on: ported, ports: toAny, in: "loopback:8080 > loopback:5000", reply: true},
		{name: "the port of a pod that is gone", on: ported, ports: []port{{host: "any:8080", to: "onlink:80"}}, in: ask},
		{name: "TCP and UDP of one number", on: []proto{tcp}, ports: []port{{host: "any:8080", to: "pod:80", proto: udp}}, in: ask},
		{name: "multicast", on: ported, ports: toAny, in: "node:5000 > multicast:8080"},
		{name: "link-local destinations", on: ported, ports: toAny, in: "node:5000 > linklocal:8080"},
		{name: "a VLAN's frame", on: ported, ports: toAny, in: ask, raw: tagged},
		{name: "a header that is not all there", ports: toAny, in: ask, raw: cut(7)},
	}...))
}

func TestHostPortFromContainer(t *testing.T) {
	ports := []port{{host: "any:8080", to: "pod2:80"}}
	runRows(t, bpf.ProgFromContainer, []row{
		{
			name: "another pod's, by the node's address", on: ported, ports: ports,
			in: "pod:5000 > node:8080", out: "podgw:* > pod2:80", redirect: true,
			after: here("pod:5000", "node:8080", "podgw:*", "pod2:80"),
		},
		{
			name: "another pod's, by the gateway's address", on: ported, ports: ports,
			in: "pod:5000 > podgw:8080", out: "podgw:* > pod2:80", redirect: true,
			after: here("pod:5000", "podgw:8080", "podgw:*", "pod2:80"),
		},
		{
			name: "another pod's, exact", on: ported, ports: []port{{host: "node2:8080", to: "pod2:80"}},
			in: "plain:5000 > node2:8080", out: "podgw:* > pod2:80", redirect: true,
			after: here("plain:5000", "node2:8080", "podgw:*", "pod2:80"),
		},
		{
			name: "its own", on: ported, ports: ports,
			in: "pod2:5000 > node:8080", out: "podgw:* > pod2:80", redirect: true,
			after: here("pod2:5000", "node:8080", "podgw:*", "pod2:80"),
		},
		{
			name: "its own, from the number of the port inside", on: ported, ports: ports,
			in: "pod2:80 > node:8080", out: "podgw:* > pod2:80", redirect: true,
			after: here("pod2:80", "node:8080", "podgw:*", "pod2:80"),
		},
		{
			name: "a later segment of a lost connection", on: []proto{tcp}, ports: ports,
			in: "pod:5000 > node:8080", out: "podgw:* > pod2:80", redirect: true,
			edit:  func(p *testenv.Packet) { p.TCPFlags = testenv.ACK },
			after: here("pod:5000", "node:8080", "podgw:*", "pod2:80"),
		},
		{
			name: "no UDP checksum", only: "v4", on: []proto{udp}, ports: ports,
			in: "pod:5000 > node:8080", out: "podgw:* > pod2:80", redirect: true,
			edit:  func(p *testenv.Packet) { p.NoChecksum = true },
			after: here("pod:5000", "node:8080", "podgw:*", "pod2:80"),
		},
		{name: "of 127.0.0.1 alone", on: ported, ports: []port{{host: "loopback:8080", to: "pod2:80"}}, in: "pod:5000 > node:8080"},
		{name: "of a host outside", on: ported, ports: ports, in: "pod:5000 > remote:8080"},
		{name: "of a host of the uplink's network", on: ported, ports: ports, in: "pod:5000 > onlink:8080"},
		{name: "of another pod", on: ported, ports: ports, in: "pod:5000 > plain:8080"},
		{name: "of loopback", on: ported, ports: ports, in: "pod:5000 > loopback:8080"},
		{name: "of all hosts", on: ported, only: "v4", ports: ports, in: "pod:5000 > 255.255.255.255:8080"},
		{name: "no host port", ports: ports, in: "pod:5000 > node:8081"},
		{name: "ping", on: []proto{echo}, ports: ports, in: "pod:5000 > node:8080"},
		{name: "a protocol without ports", on: portless, in: "pod:0 > node:0"},
		{name: "a fragment, not the first", ports: ports, in: "pod:5000 > node:8080", raw: fragment(1)},
		{name: "a VLAN's frame", ports: ports, in: "pod:5000 > node:8080", raw: tagged},
	})
}

// TestAnswersHere has answers of containers to their gateway, which go to who has asked.
func TestAnswersHere(t *testing.T) {
	const answer = "pod2:80 > podgw:20000"
	ports := []port{{host: "any:8080", to: "pod2:80"}}
	var rows []row
	for name, sides := range map[string][2]string{
		"127.0.0.1":            {"loopback:5000", "loopback:8080"},
		"an address of ours":   {"node2:5000", "node2:8080"},
		"another pod":          {"pod:5000", "node:8080"},
		"the pod itself":       {"pod2:5000", "node:8080"},
		"its own server port":  {"pod2:80", "node:8080"},
		"by a port that is 80": {"pod:80", "node:80"},
	} {
		flows := here(sides[0], sides[1], "podgw:20000", "pod2:80")
		rows = append(rows, row{
			name: "to " + name, on: ported, flows: each(flows, isOld), in: answer, reply: true,
			out: sides[1] + " > " + sides[0], redirect: true, after: each(flows, isReplied),
		})
	}
	flows := here("pod:5000", "node:8080", "podgw:20000", "pod2:80")
	ack := func(p *testenv.Packet) { p.TCPFlags = testenv.ACK }
	runRows(t, bpf.ProgFromContainer, append(rows, []row{
		{
			name: "no UDP checksum", only: "v4", on: []proto{udp}, flows: flows, in: answer, reply: true,
			edit: func(p *testenv.Packet) { p.NoChecksum = true },
			out:  "node:8080 > pod:5000", redirect: true, after: each(flows, isReplied),
		},
		{
			name: "of the address's former owner", on: ported, flows: each(flows, isStrangers), in: answer, reply: true,
			after: append(each(each(flows[:1], isStrangers), isReplied), flows[1].of(stranger)),
		},
		{name: "from another port", on: ported, flows: flows, in: "pod2:81 > podgw:20000", reply: true},
		{name: "to another port", on: ported, flows: flows, in: "pod2:80 > podgw:20001", reply: true},
		{name: "from another pod", on: ported, flows: flows, in: "pod:80 > podgw:20000", reply: true},
		{name: "of another protocol", on: ported, flows: flows, in: answer, reply: true, edit: otherPorted},
		{
			name: "what was asked for is lost", on: ported, ports: ports, flows: flows[:1], in: answer, reply: true,
			drop: "no flow", after: each(flows[:1], isReplied),
		},
		{name: "who has asked is lost", on: []proto{tcp}, ports: ports, flows: flows[1:], in: answer, reply: true, drop: "no flow"},
		{name: "who has asked is lost, UDP", on: []proto{udp}, ports: ports, flows: flows[1:], in: answer, reply: true},
		{name: "all is lost", on: []proto{tcp}, ports: ports, in: answer, reply: true, drop: "no flow"},
		{name: "all is lost, in the middle", on: []proto{tcp}, ports: ports, in: answer, edit: ack, drop: "no flow"},
		{name: "all is lost, to another address of ours", on: []proto{tcp}, ports: ports, in: "pod2:80 > node:20000", edit: ack, drop: "no flow"},
		{name: "all is lost, UDP", on: []proto{udp}, ports: ports, in: answer, reply: true},
		{name: "all is lost, and the host port too", on: []proto{tcp}, in: answer, reply: true},
		{name: "a connection that the pod opens", on: []proto{tcp}, ports: ports, in: answer},
		{name: "a port that is never chosen", on: []proto{tcp}, ports: ports, in: "pod2:80 > podgw:40000", edit: ack},
		{name: "from another port of the pod", on: []proto{tcp}, ports: ports, in: "pod2:81 > podgw:20000", edit: ack},
		{name: "to the outside", on: []proto{tcp}, ports: ports, in: "pod2:80 > remote:20000", edit: ack},
	}...))
}
