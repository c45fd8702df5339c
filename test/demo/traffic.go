package main

import (
	"context"
	"fmt"
	"net/netip"
	"time"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// patience is for one exchange, which takes milliseconds: what takes longer is lost.
const patience = 3 * time.Second

// family is what the steps need of IPv4 or IPv6.
type family struct {
	node, outside, loopback, gateway netip.Addr
	of                               func(*testenv.Pod) netip.Addr
}

// families takes the gateways from the result of ADD.
func (d *demo) families() []family {
	ip4 := family{node: testenv.NodeAddr4, outside: testenv.OutsideAddr4, of: (*testenv.Pod).Addr4, loopback: netip.MustParseAddr("127.0.0.1")}
	ip6 := family{node: testenv.NodeAddr6, outside: testenv.OutsideAddr6, of: (*testenv.Pod).Addr6, loopback: netip.IPv6Loopback()}
	for _, ip := range d.pods[0].Result.IPs {
		gateway, _ := netip.AddrFromSlice(ip.Gateway)
		if gateway = gateway.Unmap(); gateway.Is4() {
			ip4.gateway = gateway
		} else {
			ip6.gateway = gateway
		}
	}
	return []family{ip4, ip6}
}

func (d *demo) podToPod() error {
	for _, f := range d.families() {
		for i, from := range d.pods {
			to := d.pods[(i+1)%len(d.pods)]
			if err := d.exchange(from.Namespace, netip.AddrPortFrom(f.of(to), podPort), to.Name, f.of(from)); err != nil {
				return err
			}
		}
	}
	return nil
}

func (d *demo) podToOutside() error {
	for _, f := range d.families() {
		to := netip.AddrPortFrom(f.outside, podPort)
		if err := d.exchange(d.pods[0].Namespace, to, d.topology.Outside.Name, f.node); err != nil {
			return err
		}
	}
	return nil
}

// toHostPort asks from the outside, the node, another pod and the same pod.
func (d *demo) toHostPort() error {
	other, same := d.pods[0], d.pods[2]
	for _, f := range d.families() {
		for _, client := range []struct {
			ns         *testenv.Namespace
			to, seenAs netip.Addr
		}{
			{d.topology.Outside, f.node, f.outside},
			{d.topology.Node, f.loopback, f.gateway},
			{other.Namespace, f.node, f.gateway},
			{same.Namespace, f.node, f.gateway},
		} {
			if err := d.exchange(client.ns, netip.AddrPortFrom(client.to, hostPort), same.Name, client.seenAs); err != nil {
				return err
			}
		}
	}
	return nil
}

// exchange sends a request by TCP and by UDP. The given server must reply, and see the client as peer.
func (d *demo) exchange(from *testenv.Namespace, to netip.AddrPort, server string, peer netip.Addr) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	for _, network := range []string{"tcp", "udp"} {
		reply, err := testenv.Ask(ctx, from, network, to, "hello")
		if err != nil {
			return fmt.Errorf("%s to %s by %s: expected a reply from %s: %w", from.Name, to, network, server, err)
		}
		if reply.Server != server || reply.Peer.Addr() != peer {
			return fmt.Errorf("%s to %s by %s: expected %s to reply and see %s, got %s that saw %s",
				from.Name, to, network, server, peer, reply.Server, reply.Peer.Addr())
		}
	}
	d.ok(fmt.Sprintf("%-7s → %s", from.Name, to), "%s replies and sees %s", server, peer)
	return nil
}

func (d *demo) checkPortClosed() error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	to := netip.AddrPortFrom(testenv.NodeAddr4, hostPort)
	reply, err := testenv.Ask(ctx, d.topology.Outside, "tcp", to, "hello")
	if err == nil {
		return fmt.Errorf("expected no reply from %s after DEL, got one from %s", to, reply.Server)
	}
	d.ok(fmt.Sprintf("outside → %s", to), "no reply")
	return nil
}
