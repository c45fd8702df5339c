package main

import (
	"context"
	"fmt"
	"net/netip"
	"time"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// patience is for what must get no answer. An exchange takes milliseconds, but a busy machine may stall it.
const patience = 3 * time.Second

// gateway returns the pods' gateway of a family, from the result of ADD.
func (d *demo) gateway(f testenv.Family) netip.Addr {
	for _, ip := range d.pods[0].Result.IPs {
		if addr, _ := netip.AddrFromSlice(ip.Gateway); addr.Unmap().Is4() == f.Is4() {
			return addr.Unmap()
		}
	}
	return netip.Addr{}
}

func (d *demo) podToPod() error {
	for _, f := range testenv.Families {
		for i, from := range d.pods {
			to := d.pods[(i+1)%len(d.pods)]
			if err := d.exchange(from.Namespace, netip.AddrPortFrom(f.Pod(to), podPort), to.Name, f.Pod(from)); err != nil {
				return err
			}
		}
	}
	return nil
}

func (d *demo) podToOutside() error {
	for _, f := range testenv.Families {
		to := netip.AddrPortFrom(f.Outside, podPort)
		if err := d.exchange(d.pods[0].Namespace, to, d.topology.Outside.Name, f.Node); err != nil {
			return err
		}
	}
	return nil
}

// toHostPort asks from the outside, the node, another pod and the same pod.
func (d *demo) toHostPort() error {
	other, same := d.pods[0], d.pods[2]
	for _, f := range testenv.Families {
		for _, client := range []struct {
			ns         *testenv.Namespace
			to, seenAs netip.Addr
		}{
			{d.topology.Outside, f.Node, f.Outside},
			{d.topology.Node, f.Loopbacks[0], d.gateway(f)},
			{other.Namespace, f.Node, d.gateway(f)},
			{same.Namespace, f.Node, d.gateway(f)},
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
	ctx, cancel := context.WithTimeout(context.Background(), testenv.Timeout)
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
