package main

import (
	"net/netip"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// path is a pair of ends: who sends to whom.
type path struct {
	name  string
	title string
	// ends returns false if the variant has no such path.
	ends func(*setup, family) (ends, bool)
}

var paths = []path{
	{"pod-pod", "pod ↔ pod", podToPod},
	{"pod-outside", "pod → outside", podToOutside},
	{"outside-port", "outside → host port", outsideToPort},
}

func pathTitle(name string) string {
	for _, p := range paths {
		if p.name == name {
			return p.title
		}
	}
	return name
}

// family has the addresses of one IP version.
type family struct {
	name          string
	node, outside netip.Addr
	pod           func(*testenv.Pod) netip.Addr
}

var families = []family{
	{"IPv4", testenv.NodeAddr4, testenv.OutsideAddr4, (*testenv.Pod).Addr4},
	{"IPv6", testenv.NodeAddr6, testenv.OutsideAddr6, (*testenv.Pod).Addr6},
}

func podToPod(s *setup, f family) (ends, bool) {
	if s.runtime == nil { // the two ends of one veth
		return direct(s.topology.Outside, s.topology.Node, f.node), true
	}
	return direct(s.client.Namespace, s.server.Namespace, f.pod(s.server)), true
}

func podToOutside(s *setup, f family) (ends, bool) {
	if s.runtime == nil {
		return ends{}, false
	}
	return direct(s.client.Namespace, s.topology.Outside, f.outside), true
}

func outsideToPort(s *setup, f family) (ends, bool) {
	if s.runtime == nil {
		return ends{}, false
	}
	e := direct(s.topology.Outside, s.server.Namespace, f.pod(s.server))
	if !s.routed {
		e.dial = netip.AddrPortFrom(f.node, hostPort)
	}
	return e, true
}

func direct(client, server *testenv.Namespace, addr netip.Addr) ends {
	to := netip.AddrPortFrom(addr, serverPort)
	return ends{client: client, server: server, listen: to, dial: to}
}
