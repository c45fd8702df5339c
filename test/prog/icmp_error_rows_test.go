package prog

import (
	"fmt"
	"testing"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

func TestICMPErrorsIn(t *testing.T) {
	for _, program := range []string{bpf.ProgFromUplink, bpf.ProgFromUplinkL3} {
		t.Run(program, func(t *testing.T) { runErrors(t, program, errorsIn()) })
	}
}

func errorsIn() []errorRow {
	masqueraded := []flow{snat("remote:80", "node:20000", "pod:4000").established()}
	noPorts := []flow{snat("remote:0", "node:0", "pod:0")}
	const ours = "node:20000 > remote:80"
	ports := []hostPort{{host: "any:8080", to: "pod:80"}}
	dnatFlow := []flow{dnat("remote:5000", "pod:80", "node:8080")}
	return []errorRow{
		{name: "a router about a masqueraded flow", flows: masqueraded, from: "router", about: ours, out: "pod:4000 > remote:80"},
		{name: "the remote about a masqueraded flow", flows: masqueraded, from: "remote", about: ours, out: "pod:4000 > remote:80"},
		{name: "about a flow without ports", on: withoutPorts, flows: noPorts, from: "router", about: "node:0 > remote:0", out: "pod:0 > remote:0"},
		{name: "about UDP without checksum", on: []proto{udp}, only: "v4", flows: masqueraded, from: "router", about: ours, edit: without, out: "pod:4000 > remote:80"},
		{name: "about a packet with options", only: "v4", flows: masqueraded, from: "router", about: ours, edit: withOptions, out: "pod:4000 > remote:80"},
		{name: "about a first fragment", flows: masqueraded, from: "router", about: ours, edit: firstFragment, out: "pod:4000 > remote:80"},
		{name: "about a later fragment", flows: masqueraded, from: "router", about: ours, edit: lastFragment},
		{
			name: "about a reply from a host port", on: withPorts, ports: ports, flows: dnatFlow,
			from: "router", about: "node:8080 > remote:5000", reply: true, out: "pod:80 > remote:5000",
		},
		{
			name: "the remote about a reply from a host port", on: withPorts, ports: ports, flows: dnatFlow,
			from: "remote", about: "node:8080 > remote:5000", reply: true, out: "pod:80 > remote:5000",
		},
		{
			name: "about a reply from a host port of an exact address", on: withPorts, ports: []hostPort{{host: "node2:8080", to: "plain:80"}},
			flows: []flow{dnat("remote:5000", "plain:80", "node2:8080")},
			from:  "router", about: "node2:8080 > remote:5000", reply: true, out: "plain:80 > remote:5000",
		},
		{name: "about a packet that a pod has sent from its own address", from: "router", about: "pod:80 > remote:5000", reply: true},
		{name: "about the host's own packet", from: "router", about: "node:4000 > remote:80"},
		{name: "about an unknown flow", flows: masqueraded, from: "router", about: "node:20001 > remote:80"},
		{name: "about another remote", flows: masqueraded, from: "router", about: "node:20000 > remote2:80"},
		{name: "about another address of the node", flows: masqueraded, from: "router", about: "node2:20000 > remote:80"},
		{name: "about an unknown reply from a host port", on: withPorts, ports: ports, from: "router", about: "node:8080 > remote:5000", reply: true},
		{
			name: "about a reply from a host port that was removed", on: withPorts, flows: dnatFlow,
			from: "router", about: "node:8080 > remote:5000", reply: true,
		},
		{name: "to an address that did not send the packet", flows: masqueraded, from: "router", to: "node2", about: ours},
		{name: "to an address that did not send the reply", on: withPorts, ports: ports, flows: dnatFlow, from: "router", to: "node2", about: "node:8080 > remote:5000", reply: true},
		{
			name: "about mapped IPv4 addresses in IPv6", only: "v6", on: withPorts, flows: []flow{snat("8.0.113.9:80", "8.0.2.1:20000", "pod:4000")},
			from: "router", to: "node", about: "::ffff:8.0.2.1:20000 > ::ffff:8.0.113.9:80",
		},
		{name: "about a forwarded packet of another host", flows: masqueraded, from: "router", about: "onlink:20000 > remote:80"},
	}
}

func TestICMPErrorsOut(t *testing.T) {
	for _, program := range []string{bpf.ProgToUplink, bpf.ProgToUplinkL3} {
		t.Run(program, func(t *testing.T) { runErrors(t, program, errorsOut()) })
	}
}

func errorsOut() []errorRow {
	viaNode2 := []flow{dnat("remote:5000", "pod:80", "node2:8080").established()}
	direct := []flow{dnat("remote:5000", "pod:80", "pod:80")}
	ports := []hostPort{{host: "any:8080", to: "pod:80"}}
	const request = "remote:5000 > pod:80"
	return []errorRow{
		{
			name: "a pod about a packet to its host port", on: withPorts, flows: viaNode2,
			from: "pod", about: request, out: "remote:5000 > node2:8080", sender: "node2",
		},
		{
			name: "the host about a packet to a host port", on: withPorts, flows: viaNode2,
			from: "node", about: request, out: "remote:5000 > node2:8080",
		},
		{
			name: "a pod without ipMasq about a packet to its host port", on: withPorts, flows: []flow{dnat("remote:5000", "plain:80", "node:8080")},
			from: "plain", about: "remote:5000 > plain:80", out: "remote:5000 > node:8080", sender: "node",
		},
		{
			name: "about UDP without checksum", on: []proto{udp}, only: "v4", flows: viaNode2, edit: without,
			from: "pod", about: request, out: "remote:5000 > node2:8080", sender: "node2",
		},
		{
			name: "about a packet with options", only: "v4", on: withPorts, flows: viaNode2, edit: withOptions,
			from: "pod", about: request, out: "remote:5000 > node2:8080", sender: "node2",
		},
		{
			name: "about a first fragment", on: withPorts, flows: viaNode2, edit: firstFragment,
			from: "pod", about: request, out: "remote:5000 > node2:8080", sender: "node2",
		},
		{name: "a pod about a packet to its own address", flows: direct, from: "pod", about: request},
		{name: "the host about a packet to a pod's own address", flows: direct, from: "node", about: request},
		{
			name: "a pod about replies without ports", on: withoutPorts, flows: []flow{snat("remote:0", "node:0", "pod:0")},
			from: "pod", about: "remote:0 > pod:0", out: "remote:0 > node:0", sender: "node",
		},
		{
			name: "the host about replies without ports", on: withoutPorts, flows: []flow{snat("remote:0", "node:0", "pod:0")},
			from: "node2", about: "remote:0 > pod:0", out: "remote:0 > node:0",
		},
		{name: "a pod about an unknown flow", from: "pod", about: request, drop: "no flow"},
		{name: "a pod about an unknown flow without ports", on: withoutPorts, from: "pod", about: "remote:0 > pod:0", drop: "no flow"},
		{name: "the host about an unknown flow", from: "node", about: request, drop: "no flow"},
		{name: "a pod about another pod's host port", on: withPorts, ports: ports, flows: viaNode2, from: "pod2", about: "remote:5001 > pod2:80", drop: "no flow"},
		{
			name: "a pod about a packet to its host port, with the flow lost", on: withPorts, ports: ports,
			from: "pod", about: request, out: "remote:5000 > node:8080", sender: "node",
		},
		{name: "a pod without ipMasq about an unknown flow", from: "plain", about: "remote:5000 > plain:80"},
		{name: "the host about a packet to itself", from: "node", about: "remote:5000 > node:80"},
	}
}

// TestICMPErrorsAboutMasqueradedReplies first finds out the port, which the errors quote.
func TestICMPErrorsAboutMasqueradedReplies(t *testing.T) {
	h := newHost(t)
	for _, program := range []string{bpf.ProgToUplink, bpf.ProgToUplinkL3} {
		for _, s := range (row{}).scenes() {
			t.Run(program+" "+s.name+" "+string(s.proto), func(t *testing.T) {
				s.star = h.candidates(t, s, outgoing)[0]
				for sender, as := range map[string]string{"pod": "node", "node2": "node2"} {
					r := errorRow{
						flows: []flow{snat("remote:80", "node:*", "pod:4000")}, reply: true,
						from: sender, about: "remote:80 > pod:4000", out: "remote:80 > node:*", sender: as,
					}
					for _, kind := range errorKinds[s.name] {
						for _, quote := range quotes {
							if err := h.checkError(program, s, r, kind, quote); err != nil {
								t.Errorf("from %s, %+v, %d bytes: %v", sender, kind, quote, err)
							}
						}
					}
				}
			})
		}
	}
}

// TestICMPErrorsFromHairpinServer has the container behind a host port report errors to a hairpin client.
func TestICMPErrorsFromHairpinServer(t *testing.T) {
	ports := []hostPort{{host: "any:8080", to: "pod2:80"}}
	flows := hairpin("pod:5000", "node:8080", "podgw:20000", "pod2:80")
	loopback := hairpin("loopback:5000", "loopback:8080", "podgw:20000", "pod2:80")
	self := hairpin("pod2:5000", "node:8080", "podgw:20000", "pod2:80")
	rows := []errorRow{
		{
			name: "to another pod", on: withPorts, ports: ports, flows: flows,
			from: "pod2", about: "podgw:20000 > pod2:80", out: "pod:5000 > node:8080", sender: "node", redirect: true,
		},
		{
			name: "to loopback", on: withPorts, ports: ports, flows: loopback,
			from: "pod2", about: "podgw:20000 > pod2:80", out: "loopback:5000 > loopback:8080", sender: "loopback", redirect: true,
		},
		{
			name: "to the server itself", on: withPorts, ports: ports, flows: self,
			from: "pod2", about: "podgw:20000 > pod2:80", out: "pod2:5000 > node:8080", sender: "node", redirect: true,
		},
		{name: "DNAT flow lost", on: withPorts, ports: ports, flows: flows[:1], from: "pod2", about: "podgw:20000 > pod2:80", drop: "no flow"},
		{name: "SNAT flow lost", on: []proto{tcp}, ports: ports, flows: flows[1:], from: "pod2", about: "podgw:20000 > pod2:80"},
		{name: "SNAT flow lost, UDP", on: []proto{udp}, ports: ports, flows: flows[1:], from: "pod2", about: "podgw:20000 > pod2:80"},
		{name: "about the host's own packet", ports: ports, from: "pod2", about: "node:40000 > pod2:80"},
		{name: "about an unknown reply from a host port", on: withPorts, ports: ports, from: "pod", about: "node:8080 > pod:5000", reply: true, drop: "no flow"},
		{name: "in the name of the server", on: withPorts, ports: ports, flows: flows, from: "pod", about: "podgw:20000 > pod2:80"},
	}
	for i := range rows {
		rows[i].device, rows[i].kinds = "pod2", others
	}
	runErrors(t, bpf.ProgFromContainer, append(rows, errorRow{
		name: "no path on this host has a smaller MTU", on: withPorts, ports: ports, flows: flows, device: "pod2", kinds: tooBig,
		from: "pod2", about: "podgw:20000 > pod2:80",
	}, errorRow{
		name: "by another container's device", on: withPorts, ports: ports, flows: flows, device: "pod", from: "pod2", about: "podgw:20000 > pod2:80",
	}))
}

// TestICMPErrorsFromHairpinClient first finds out the gateway's port, which the errors quote.
func TestICMPErrorsFromHairpinClient(t *testing.T) {
	h := newHost(t)
	for client, program := range map[string]string{
		"loopback": bpf.ProgToLoopback, "pod": bpf.ProgFromContainer, "pod2": bpf.ProgFromContainer,
	} {
		device, target := client, "node:8080"
		if client == "loopback" {
			device, target = "", "loopback:8080"
		}
		for _, s := range (row{on: withPorts}).scenes() {
			t.Run(client+" "+s.name+" "+string(s.proto), func(t *testing.T) {
				request := row{
					device: device,
					ports:  []hostPort{{host: "any:8080", to: "pod2:80"}},
					in:     client + ":5000 > " + target, out: "podgw:* > pod2:80", redirect: true,
					after: hairpin(client+":5000", target, "podgw:*", "pod2:80"),
				}
				testenv.Must(t, h.check(program, s, request))
				key := onlyKey(t, h, bpf.FlowSNAT)
				s.star = key.LocalPort
				r := errorRow{
					device: device, ports: request.ports, flows: request.after, reply: true, redirect: true,
					from: client, about: target + " > " + client + ":5000", out: "pod2:80 > podgw:*", sender: "podgw",
				}
				for _, kind := range errorKinds[s.name] {
					for _, quote := range quotes {
						if err := h.checkError(program, s, r, kind, quote); err != nil {
							t.Errorf("%+v, %d bytes: %v", kind, quote, err)
						}
					}
				}
			})
		}
	}
}

func onlyKey(t *testing.T, h *host, kind bpf.FlowKind) bpf.FlowKey {
	t.Helper()
	all, err := h.flows().all()
	testenv.Must(t, err)
	for key := range all {
		if key.Kind == kind {
			return key
		}
	}
	t.Fatalf("no flow of kind %d in %+v", kind, all)
	return bpf.FlowKey{}
}

// TestICMPNonErrors has ICMP messages that quote packets but are no errors.
func TestICMPNonErrors(t *testing.T) {
	h := newHost(t)
	for _, s := range (row{on: withPorts}).scenes() {
		kinds := []errorKind{{4, 0, 0}, {5, 1, 0}, {13, 0, 0}} // source quench, redirect, timestamp
		if s.name == "v6" {
			kinds = []errorKind{{0, 0, 0}, {5, 0, 0}, {100, 0, 0}, {127, 0, 0}, {137, 0, 0}}
		}
		for _, kind := range kinds {
			t.Run(fmt.Sprintf("%s %s %d", s.name, s.proto, kind.typ), func(t *testing.T) {
				comes := errorRow{flows: []flow{snat("remote:80", "node:20000", "pod:4000")}, from: "router", about: "node:20000 > remote:80"}
				if err := h.checkError(bpf.ProgFromUplink, s, comes, kind, 8); err != nil {
					t.Error("in:", err)
				}
				goes := errorRow{flows: []flow{dnat("remote:5000", "pod:80", "node:8080")}, from: "pod", about: "remote:5000 > pod:80", drop: "protocol"}
				if err := h.checkError(bpf.ProgToUplink, s, goes, kind, 8); err != nil {
					t.Error("out:", err)
				}
			})
		}
	}
}
