package main

import (
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// setUpRedirect uses the outside hosts of two uplinks as pods, and a minimal program on the node that passes
// packets from one to the other.
func (s *setup) setUpRedirect(m *testenv.Machine) error {
	s.topology.AddSecondUplink(m)
	first := redirectEnd{testenv.UplinkName, s.topology.Outside, []netip.Addr{testenv.NodeAddr4, testenv.NodeAddr6}}
	second := redirectEnd{testenv.SecondUplinkName, s.topology.SecondOutside, []netip.Addr{testenv.SecondNodeAddr4, testenv.SecondNodeAddr6}}
	return errors.Join(
		s.redirectTo(m, first, second),
		s.redirectTo(m, second, first),
	)
}

// redirectEnd is an outside host that is used as a pod.
type redirectEnd struct {
	device   string // the node's
	pod      *testenv.Namespace
	gateways []netip.Addr // on the device
}

// redirectTo gives a pod routes to the other, with static neighbors, and its device the program.
func (s *setup) redirectTo(m *testenv.Machine, from, to redirectEnd) error {
	node := s.topology.Node.Netlink()
	source, err := node.LinkByName(from.device)
	if err != nil {
		return err
	}
	target, err := node.LinkByName(to.device)
	if err != nil {
		return err
	}
	inside, err := from.pod.Netlink().LinkByName(testenv.UplinkName)
	if err != nil {
		return err
	}
	for i, gateway := range from.gateways {
		err := from.pod.Netlink().NeighSet(&netlink.Neigh{
			LinkIndex: inside.Attrs().Index, State: netlink.NUD_PERMANENT,
			IP: net.IP(gateway.AsSlice()), HardwareAddr: source.Attrs().HardwareAddr,
		})
		if err != nil {
			return fmt.Errorf("add neighbor %s in %s: %w", gateway, from.pod.Name, err)
		}
		if err := from.pod.AddRoute(netip.PrefixFrom(to.gateways[i], to.gateways[i].BitLen()*3/4).Masked(), gateway); err != nil {
			return err
		}
	}
	return s.topology.Node.Do(func() error { return attachRedirect(m, source.Attrs().Index, target.Attrs().Index) })
}

// attachRedirect attaches the program that passes all packets of a device to the peer of another.
func attachRedirect(m *testenv.Machine, from, to int) error {
	program, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: "redirect", Type: ebpf.SchedCLS, License: "Dual BSD/GPL",
		Instructions: asm.Instructions{
			asm.Mov.Imm(asm.R1, int32(to)),
			asm.Mov.Imm(asm.R2, 0),
			asm.FnRedirectPeer.Call(),
			asm.Return(),
		},
	})
	if err != nil {
		return fmt.Errorf("load the redirecting program: %w", err)
	}
	defer program.Close()
	attached, err := link.AttachTCX(link.TCXOptions{Interface: from, Program: program, Attach: ebpf.AttachTCXIngress})
	if err != nil {
		return fmt.Errorf("attach the redirecting program: %w", err)
	}
	m.Cleanup(func() { attached.Close() })
	return nil
}
