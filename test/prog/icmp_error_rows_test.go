package prog

import (
	"fmt"
	"testing"

	"github.com/ebpfnet/ebpfnet/bpf"
)

func TestErrorsIn(t *testing.T) {
	for _, program := range []string{bpf.ProgFromUplink, bpf.ProgFromUplinkL3} {
		t.Run(program, func(t *testing.T) { runErrors(t, program, errorsIn()) })
	}
}

func errorsIn() []errorRow {
	masqueraded := []flow{out("remote:80", "node:20000", "pod:4000").state(replied)}
	unported := []flow{out("remote:0", "node:0", "pod:0")}
	const ours = "node:20000 > remote:80"
	ports := []port{{host: "any:8080", to: "pod:80"}}
	answered := []flow{in("remote:5000", "pod:80", "node:8080")}
	return []errorRow{
		{name: "a router about a masqueraded flow", flows: masqueraded, from: "router", about: ours, out: "pod:4000 > remote:80"},
		{name: "the remote about a masqueraded flow", flows: masqueraded, from: "remote", about: ours, out: "pod:4000 > remote:80"},
		{name: "about one without ports", on: portless, flows: unported, from: "router", about: "node:0 > remote:0", out: "pod:0 > remote:0"},
		{name: "about UDP without checksum", on: []proto{udp}, only: "v4", flows: masqueraded, from: "router", about: ours, edit: without, out: "pod:4000 > remote:80"},
		{name: "about a packet with options", only: "v4", flows: masqueraded, from: "router", about: ours, edit: withOptions, out: "pod:4000 > remote:80"},
		{name: "about a first fragment", flows: masqueraded, from: "router", about: ours, edit: firstFragment, out: "pod:4000 > remote:80"},
		{name: "about a later fragment", flows: masqueraded, from: "router", about: ours, edit: lastFragment},
		{
			name: "about an answer from a host port", on: ported, ports: ports, flows: answered,
			from: "router", about: "node:8080 > remote:5000", reply: true, out: "pod:80 > remote:5000",
		},
		{
			name: "the remote about an answer from a host port", on: ported, ports: ports, flows: answered,
			from: "remote", about: "node:8080 > remote:5000", reply: true, out: "pod:80 > remote:5000",
		},
		{
			name: "about an answer from a host port of an exact address", on: ported, ports: []port{{host: "node2:8080", to: "plain:80"}},
			flows: []flow{in("remote:5000", "plain:80", "node2:8080")},
			from:  "router", about: "node2:8080 > remote:5000", reply: true, out: "plain:80 > remote:5000",
		},
		{name: "about what a pod has sent as itself", from: "router", about: "pod:80 > remote:5000", reply: true},
		{name: "about what the host has sent", from: "router", about: "node:4000 > remote:80"},
		{name: "about an unknown flow", flows: masqueraded, from: "router", about: "node:20001 > remote:80"},
		{name: "about another remote", flows: masqueraded, from: "router", about: "node:20000 > remote2:80"},
		{name: "about another address of ours", flows: masqueraded, from: "router", about: "node2:20000 > remote:80"},
		{name: "about an unknown answer from a host port", on: ported, ports: ports, from: "router", about: "node:8080 > remote:5000", reply: true},
		{
			name: "about an answer from what is no host port any more", on: ported, flows: answered,
			from: "router", about: "node:8080 > remote:5000", reply: true,
		},
		{name: "to another than who has sent the packet", flows: masqueraded, from: "router", to: "node2", about: ours},
		{name: "to another, about an answer", on: ported, ports: ports, flows: answered, from: "router", to: "node2", about: "node:8080 > remote:5000", reply: true},
		{
			name: "about IPv4 in IPv6", only: "v6", on: ported, flows: []flow{out("8.0.113.9:80", "8.0.2.1:20000", "pod:4000")},
			from: "router", to: "node", about: "::ffff:8.0.2.1:20000 > ::ffff:8.0.113.9:80",
		},
		{name: "about what is passing through", flows: masqueraded, from: "router", about: "onlink:20000 > remote:80"},
	}
}

func TestErrorsOut(t *testing.T) {
	for _, program := range []string{bpf.ProgToUplink, bpf.ProgToUplinkL3} {
		t.Run(program, func(t *testing.T) { runErrors(t, program, errorsOut()) })
	}
}

func errorsOut() []errorRow {
	asked := []flow{in("remote:5000", "pod:80", "node2:8080").state(replied)}
	direct := []flow{in("remote:5000", "pod:80", "pod:80")}
	ports := []port{{host: "any:8080", to: "pod:80"}}
	const ask = "remote:5000 > pod:80"
	return []errorRow{
		{
			name: "a pod about what came by a host port", on: ported, flows: asked,
			from: "pod", about: ask, out: "remote:5000 > node2:8080", sender: "node2",
		},
		{
			name: "the host about what came by a host port", on: ported, flows: asked,
			from: "node", about: ask, out: "remote:5000 > node2:8080",
		},
		{
			name: "a plain pod about what came by a host port", on: ported, flows: []flow{in("remote:5000", "plain:80", "node:8080")},
			from: "plain", about: "remote:5000 > plain:80", out: "remote:5000 > node:8080", sender: "node",
		},
		{
			name: "about UDP without checksum", on: []proto{udp}, only: "v4", flows: asked, edit: without,
			from: "pod", about: ask, out: "remote:5000 > node2:8080", sender: "node2",
		},
		{
			name: "about a packet with options", only: "v4", on: ported, flows: asked, edit: withOptions,
			from: "pod", about: ask, out: "remote:5000 > node2:8080", sender: "node2",
		},
		{
			name: "about a first fragment", on: ported, flows: asked, edit: firstFragment,
			from: "pod", about: ask, out: "remote:5000 > node2:8080", sender: "node2",
		},
		{name: "a pod about what came to itself", flows: direct, from: "pod", about: ask},
		{name: "the host about what came to a pod", flows: direct, from: "node", about: ask},
		{
			name: "a pod about answers without ports", on: portless, flows: []flow{out("remote:0", "node:0", "pod:0")},
			from: "pod", about: "remote:0 > pod:0", out: "remote:0 > node:0", sender: "node",
		},
		{
			name: "the host about answers without ports", on: portless, flows: []flow{out("remote:0", "node:0", "pod:0")},
			from: "node2", about: "remote:0 > pod:0", out: "remote:0 > node:0",
		},
		{name: "a pod about nothing known", from: "pod", about: ask, drop: "no flow"},
		{name: "a pod about nothing known without ports", on: portless, from: "pod", about: "remote:0 > pod:0", drop: "no flow"},
		{name: "the host about nothing known", from: "node", about: ask, drop: "no flow"},
		{name: "a pod about another pod's host port", on: ported, ports: ports, flows: asked, from: "pod2", about: "remote:5001 > pod2:80", drop: "no flow"},
		{
			name: "a pod about what came by a host port, and is lost", on: ported, ports: ports,
			from: "pod", about: ask, out: "remote:5000 > node:8080", sender: "node",
		},
		{name: "a plain pod about nothing known", from: "plain", about: "remote:5000 > plain:80"},
		{name: "the host about what it got itself", from: "node", about: "remote:5000 > node:80"},
	}
}

// TestErrorsAboutMasqueradedAnswers learns the port first, which the errors need.
func TestErrorsAboutMasqueradedAnswers(t *testing.T) {
	h := newHost(t)
	for _, program := range []string{bpf.ProgToUplink, bpf.ProgToUplinkL3} {
		for _, s := range (row{}).scenes() {
			t.Run(program+" "+s.name+" "+string(s.proto), func(t *testing.T) {
				s.star = h.candidates(t, s, outgoing)[0]
				for sender, as := range map[string]string{"pod": "node", "node2": "node2"} {
					r := errorRow{
						flows: []flow{out("remote:80", "node:*", "pod:4000")}, reply: true,
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

// TestErrorsHere are about connections of this host to its host ports.
func TestErrorsHere(t *testing.T) {
	ports := []port{{host: "any:8080", to: "pod2:80"}}
	flows := here("pod:5000", "node:8080", "podgw:20000", "pod2:80")
	loopback := here("loopback:5000", "loopback:8080", "podgw:20000", "pod2:80")
	hairpin := here("pod2:5000", "node:8080", "podgw:20000", "pod2:80")
	runErrors(t, bpf.ProgFromContainer, []errorRow{
		{
			name: "the server's, to another pod", on: ported, ports: ports, flows: flows,
			from: "pod2", about: "podgw:20000 > pod2:80", out: "pod:5000 > node:8080", sender: "node", redirect: true,
		},
		{
			name: "the server's, to loopback", on: ported, ports: ports, flows: loopback,
			from: "pod2", about: "podgw:20000 > pod2:80", out: "loopback:5000 > loopback:8080", sender: "loopback", redirect: true,
		},
		{
			name: "the server's, to itself", on: ported, ports: ports, flows: hairpin,
			from: "pod2", about: "podgw:20000 > pod2:80", out: "pod2:5000 > node:8080", sender: "node", redirect: true,
		},
		{name: "about what is lost", on: ported, ports: ports, flows: flows[:1], from: "pod2", about: "podgw:20000 > pod2:80", drop: "no flow"},
		{name: "about what is lost on the other side", on: []proto{tcp}, ports: ports, flows: flows[1:], from: "pod2", about: "podgw:20000 > pod2:80", drop: "no flow"},
		{name: "about what is lost on the other side, UDP", on: []proto{udp}, ports: ports, flows: flows[1:], from: "pod2", about: "podgw:20000 > pod2:80"},
		{name: "about a packet of the host's own", ports: ports, from: "pod2", about: "node:40000 > pod2:80"},
		{name: "about the answer of a host port that is not known", on: ported, ports: ports, from: "pod", about: "node:8080 > pod:5000", reply: true, drop: "no flow"},
	})
}

// TestErrorsOfClientsHere learns the port of the gateway first.
func TestErrorsOfClientsHere(t *testing.T) {
	h := newHost(t)
	for client, program := range map[string]string{
		"loopback": bpf.ProgToLoopback, "pod": bpf.ProgFromContainer, "pod2": bpf.ProgFromContainer,
	} {
		asked := "node:8080"
		if client == "loopback" {
			asked = "loopback:8080"
		}
		for _, s := range (row{on: ported}).scenes() {
			t.Run(client+" "+s.name+" "+string(s.proto), func(t *testing.T) {
				asking := row{
					ports: []port{{host: "any:8080", to: "pod2:80"}},
					in:    client + ":5000 > " + asked, out: "podgw:* > pod2:80", redirect: true,
					after: here(client+":5000", asked, "podgw:*", "pod2:80"),
				}
				if err := h.check(program, s, asking); err != nil {
					t.Fatal(err)
				}
				key := onlyKey(t, h, bpf.FlowSNAT)
				s.star = key.LocalPort
				r := errorRow{
					ports: asking.ports, flows: asking.after, reply: true, redirect: true,
					from: client, about: asked + " > " + client + ":5000", out: "pod2:80 > podgw:*", sender: "podgw",
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
	all, err := contents[bpf.FlowKey, bpf.Flow](h.flows())
	if err != nil {
		t.Fatal(err)
	}
	for key := range all {
		if key.Kind == kind {
			return key
		}
	}
	t.Fatalf("no flow of kind %d in %+v", kind, all)
	return bpf.FlowKey{}
}

// TestMessagesThatAreNoErrors quote packets as well.
func TestMessagesThatAreNoErrors(t *testing.T) {
	h := newHost(t)
	for _, s := range (row{on: ported}).scenes() {
		kinds := []errorKind{{4, 0, 0}, {5, 1, 0}, {13, 0, 0}} // source quench, redirect, timestamp
		if s.name == "v6" {
			kinds = []errorKind{{0, 0, 0}, {5, 0, 0}, {100, 0, 0}, {127, 0, 0}, {137, 0, 0}}
		}
		for _, kind := range kinds {
			t.Run(fmt.Sprintf("%s %s %d", s.name, s.proto, kind.typ), func(t *testing.T) {
				comes := errorRow{flows: []flow{out("remote:80", "node:20000", "pod:4000")}, from: "router", about: "node:20000 > remote:80"}
				if err := h.checkError(bpf.ProgFromUplink, s, comes, kind, 8); err != nil {
					t.Error("in:", err)
				}
				goes := errorRow{flows: []flow{in("remote:5000", "pod:80", "node:8080")}, from: "pod", about: "remote:5000 > pod:80", drop: "protocol"}
				if err := h.checkError(bpf.ProgToUplink, s, goes, kind, 8); err != nil {
					t.Error("out:", err)
				}
			})
		}
	}
}
