package main

import (
	"fmt"
	"net/netip"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// betweenPods pings around, in both families, and fetches a page.
func (s *scene) betweenPods() error {
	for i, from := range s.pods {
		to := s.pods[(i+1)%len(s.pods)]
		for _, addr := range to.addrs() {
			if err := s.ping(from, addr, to.title); err != nil {
				return err
			}
		}
	}
	from, to := s.pods[0], s.pods[1]
	for _, addr := range to.addrs() {
		err := s.get(from.Namespace, from.title, netip.AddrPortFrom(addr, podPort), to.title, from.addrLike(addr))
		if err != nil {
			return err
		}
	}
	return nil
}

func (s *scene) toOutside() error {
	if !s.conflist.masq {
		s.report.skip("masquerading", "the configuration does not ask for it: no ipMasq")
		return nil
	}
	from := s.pods[0]
	for _, own := range from.addrs() {
		outside, node := testenv.OutsideAddr4, testenv.NodeAddr4
		if own.Is6() {
			outside, node = testenv.OutsideAddr6, testenv.NodeAddr6
		}
		if err := s.ping(from, outside, "outside"); err != nil {
			return err
		}
		if err := s.get(from.Namespace, from.title, netip.AddrPortFrom(outside, podPort), "outside", node); err != nil {
			return err
		}
		s.report.note(fmt.Sprintf("  The outside host saw the node, %s, and not the pod, %s.", node, own))
	}
	return nil
}

func (s *scene) fromOutside() error {
	if !s.conflist.ports {
		s.report.skip("host port", "the configuration does not ask for it: no portMappings among its capabilities")
		return nil
	}
	to, neighbour := s.pods[len(s.pods)-1], s.pods[0]
	for _, ip := range to.Result.IPs {
		own, _ := netip.AddrFromSlice(ip.Address.IP)
		gateway, _ := netip.AddrFromSlice(ip.Gateway)
		node, client, loopback := testenv.NodeAddr4, testenv.OutsideAddr4, netip.MustParseAddr("127.0.0.1")
		if own.Unmap().Is6() {
			node, client, loopback = testenv.NodeAddr6, testenv.OutsideAddr6, netip.IPv6Loopback()
		}
		for _, from := range []struct {
			namespace *testenv.Namespace
			title     string
			address   netip.Addr
			seenAs    netip.Addr
		}{
			{s.topology.Outside, "outside", node, client},
			{s.topology.Node, "node", loopback, gateway.Unmap()},
			{neighbour.Namespace, neighbour.title, node, gateway.Unmap()},
			{to.Namespace, to.title, node, gateway.Unmap()},
		} {
			port := netip.AddrPortFrom(from.address, hostPort)
			if err := s.get(from.namespace, from.title, port, to.title, from.seenAs); err != nil {
				return err
			}
		}
	}
	return nil
}

// addrLike returns the pod's address of the family of addr.
func (p *pod) addrLike(addr netip.Addr) netip.Addr {
	if addr.Is4() {
		return p.Addr4()
	}
	return p.Addr6()
}

// ping also tells how long the answer took.
func (s *scene) ping(from *pod, to netip.Addr, who string) error {
	what := fmt.Sprintf("%s> ping %s", from.title, to)
	took, err := ping(from.Namespace, to)
	if err != nil {
		return &mismatch{what, "an answer", err.Error()}
	}
	s.report.ok(what, "%s answers after %.2f ms", who, milliseconds(took))
	return nil
}

// get fetches a page, which must come from the machine named answerer, to whom the client
// must have looked like client.
func (s *scene) get(from *testenv.Namespace, title string, to netip.AddrPort, answerer string, client netip.Addr) error {
	what := fmt.Sprintf("%s> GET http://%s/", title, to)
	answered, seen, body, err := fetch(from, to)
	if err != nil {
		return &mismatch{what, "a page from " + answerer, err.Error()}
	}
	if answered != answerer || seen.Addr().Unmap() != client {
		return &mismatch{what, fmt.Sprintf("%q", answerer+saw+client.String()), fmt.Sprintf("%q", body)}
	}
	s.report.ok(what, "%q (%d bytes)", body, len(body))
	return nil
}
