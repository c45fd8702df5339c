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
	ends func(*setup, testenv.Family) (ends, bool)
}

const podPod = "pod-pod"

var paths = []path{
	{podPod, "pod ↔ pod", podToPod},
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

func podToPod(s *setup, f testenv.Family) (ends, bool) {
	if s.redirect {
		return direct(s.topology.Outside, s.topology.SecondOutside, f.SecondOutside), true
	}
	if s.runtime == nil { // the two ends of one veth
		return direct(s.topology.Outside, s.topology.Node, f.Node), true
	}
	return direct(s.client.Namespace, s.server.Namespace, f.Pod(s.server)), true
}

func podToOutside(s *setup, f testenv.Family) (ends, bool) {
	if s.runtime == nil {
		return ends{}, false
	}
	return direct(s.client.Namespace, s.topology.Outside, f.Outside), true
}

func outsideToPort(s *setup, f testenv.Family) (ends, bool) {
	if s.runtime == nil {
		return ends{}, false
	}
	e := direct(s.topology.Outside, s.server.Namespace, f.Pod(s.server))
	if !s.routed {
		e.dial = netip.AddrPortFrom(f.Node, hostPort)
	}
	return e, true
}

func direct(client, server *testenv.Namespace, addr netip.Addr) ends {
	to := netip.AddrPortFrom(addr, serverPort)
	return ends{client: client, server: server, listen: to, dial: to, cpu: cpu}
}
