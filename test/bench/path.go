package main

import (
	"context"
	"net/netip"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// path is a pair of ends: who sends to whom.
type path struct {
	name  string
	title string
	// ends are those of a setup whose variant has the path.
	ends func(*setup, testenv.Family) ends
}

const (
	podPod         = "pod-pod"
	podNode        = "pod-node"
	podService     = "pod-service"
	nodeService    = "node-service"
	outsideService = "outside-service"
)

var paths = []path{
	{podPod, "pod ↔ pod", podToPod},
	{"pod-outside", "pod → outside", podToOutside},
	{"outside-port", "outside → host port", outsideToPort},
	{podNode, "pod ↔ pod of another node", podToPod},
	{podService, "pod → service, same node", podToService},
	{nodeService, "pod → service, another node", podToService},
	{outsideService, "outside → service, masqueraded", outsideToService},
}

// hasPath reports whether a variant has the ends of a path.
func (v variant) hasPath(name string) bool {
	switch {
	case isService(name):
		return v.rules != nil && v.rules.services && (v.join != nil) == (name == nodeService)
	case v.join != nil:
		return name == podNode
	case v.redirect:
		return name == podPod
	case len(v.plugins) == 0: // the two ends of a veth are pods of one node, or processes of two nodes
		return name == podPod || name == podNode
	}
	return name != podNode
}

// isService reports whether a path leads to a service, which only kube-proxy's rules know.
func isService(name string) bool {
	return name == podService || name == nodeService || name == outsideService
}

func pathTitle(name string) string {
	for _, p := range paths {
		if p.name == name {
			return p.title
		}
	}
	return name
}

func podToPod(s *setup, f testenv.Family) ends {
	if s.redirect {
		return direct(s.topology.Outside, s.topology.SecondOutside, f.SecondOutside)
	}
	if len(s.plugins) == 0 {
		return direct(s.topology.Outside, s.topology.Node, f.Node)
	}
	return direct(s.client.Namespace, s.server.Namespace, f.Pod(s.server))
}

// podToService sends to the last of kube-proxy's services, whose endpoint is the server.
func podToService(s *setup, f testenv.Family) ends {
	e := podToPod(s, f)
	e.dial = netip.AddrPortFrom(rulesOf(f).service(kubeServices), servicePort)
	return e
}

// outsideToService does the same from the outside, like a client of a load balancer's address: kube-proxy's rules masquerade it.
func outsideToService(s *setup, f testenv.Family) ends {
	e := podToService(s, f)
	e.client = s.topology.Outside
	service := e.dial.Addr()
	if _, err := e.client.Run(context.Background(), "ip", "route", "replace", netip.PrefixFrom(service, service.BitLen()).String(), "via", f.Node.String()); err != nil {
		panic(err)
	}
	return e
}

func podToOutside(s *setup, f testenv.Family) ends {
	return direct(s.client.Namespace, s.topology.Outside, f.Outside)
}

func outsideToPort(s *setup, f testenv.Family) ends {
	e := direct(s.topology.Outside, s.server.Namespace, f.Pod(s.server))
	if !s.routed {
		e.dial = netip.AddrPortFrom(f.Node, hostPort)
	}
	return e
}

func direct(client, server *testenv.Namespace, addr netip.Addr) ends {
	to := netip.AddrPortFrom(addr, serverPort)
	return ends{client: client, server: server, listen: to, dial: to, cpu: cpu}
}
