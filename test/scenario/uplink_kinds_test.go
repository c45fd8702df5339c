package scenario

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// Whatever leads outside: pods are masqueraded by it, and reached at host ports.
func TestUplinkKinds(t *testing.T) {
	for _, kind := range testenv.UplinkKinds {
		t.Run(kind.Name, func(t *testing.T) {
			testenv.Require(t, kind.Feature)
			n := newNetwork(t)
			device := n.MoveUplink(t, kind)
			pod := n.AddPod(t, "a", mapBoth(8080, 80))
			n.wantUplinks(t, device)
			n.useUplink(t, pod)
			for _, f := range families {
				large := sizeOf(4 * mebibyte)
				upload(large)(t, pod.Namespace, n.Outside, at(f.outside, 7000), at(f.outside, 7000))
				download(large)(t, n.Outside, pod.Namespace, at(f.pod(pod), 80), at(f.node, 8080))
			}
		})
	}
}

// useUplink goes out by the first uplink, and comes in by a host port that leads to port 80.
func (n *network) useUplink(t *testing.T, pod *testenv.Pod) {
	t.Helper()
	byEachProtocol(t, func(t *testing.T, f family, protocol string) {
		ping(t, pod.Namespace, f.outside)
		server := serve(t, n.Outside, protocol, at(f.outside, 0))
		reachAsNode(t, pod.Namespace, protocol, server, n.Outside, f.node)
		serve(t, pod.Namespace, protocol, at(f.pod(pod), 80))
		reachAsOneself(t, n.Outside, protocol, at(f.node, 8080), pod.Namespace)
	})
}

// wantUplinks compares the datapath's uplinks.
func (n *network) wantUplinks(t *testing.T, devices ...string) {
	t.Helper()
	n.withDatapath(t, func(datapath *loader.Datapath) {
		uplinks := must(maps.Uplinks(datapath))
		if len(uplinks) != len(devices) {
			t.Errorf("uplinks are %v, want %v", uplinks, devices)
		}
		for _, device := range devices {
			n.checkUplink(t, indexOf(t, n.node(), device), true)
		}
	})
}

// An uplink is renamed while connections are open: they go on, and new ones work.
func TestUplinkIsRenamed(t *testing.T) {
	testenv.Require(t, testenv.LiveRename)
	n := newNetwork(t)
	pod := n.AddPod(t, "a", mapBoth(8080, 80))
	f := families[0]
	out := connect(t, pod.Namespace, "tcp", netip.AddrPort{}, serve(t, n.Outside, "tcp", at(f.outside, 0)))
	defer out.Close()
	server := testenv.ServeTCP(t, pod.Namespace, at(f.pod(pod), 80))
	in := connect(t, n.Outside, "tcp", netip.AddrPort{}, at(f.node, 8080))
	defer in.Close()
	ask(t, out, n.Outside)
	ask(t, in, pod.Namespace)

	link, err := n.node().Netlink().LinkByName(testenv.UplinkName)
	if err != nil {
		t.Fatal(err)
	}
	if err := n.node().Netlink().LinkSetName(link, "wan0"); err != nil {
		t.Fatal(err)
	}
	ask(t, out, n.Outside)
	ask(t, in, pod.Namespace)
	server.Close()
	n.useUplink(t, pod)
	n.AddPod(t, "b", nil)
	n.wantUplinks(t, "wan0")
}

// A network whose frames have tags of priority, in no VLAN: to the stack they are as without.
func TestUplinkWithPriorities(t *testing.T) {
	for _, path := range []string{"never", "established", "always"} {
		t.Run(path, func(t *testing.T) {
			n := newNetworkOf(t, withKeys(`"ipMasq": true, "fastPath": "`+path+`"`))
			pod := n.AddPod(t, "a", mapBoth(8080, 80))
			setPriority(t, n.Outside, testenv.UplinkName)
			n.useUplink(t, pod)
			for _, f := range families {
				large := sizeOf(4 * mebibyte)
				upload(large)(t, pod.Namespace, n.Outside, at(f.outside, 7000), at(f.outside, 7000))
				download(large)(t, n.Outside, pod.Namespace, at(f.pod(pod), 80), at(f.node, 8080))
			}
		})
	}
}

// setPriority gives all frames that leave by a device a tag of priority 5.
func setPriority(t *testing.T, ns *testenv.Namespace, device string) {
	t.Helper()
	protocol := binary.BigEndian.Uint16(binary.NativeEndian.AppendUint16(nil, unix.ETH_P_8021Q))
	const next = -1 // TC_ACT_UNSPEC
	program, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type: ebpf.SchedCLS, License: "GPL",
		Instructions: asm.Instructions{
			asm.Mov.Imm(asm.R2, int32(protocol)),
			asm.Mov.Imm(asm.R3, 5<<13),
			asm.FnSkbVlanPush.Call(),
			asm.Mov.Imm(asm.R0, next),
			asm.Return(),
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer program.Close()
	index := indexOf(t, ns, device)
	qdisc := &netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{
		LinkIndex: index, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT,
	}}
	filter := &netlink.BpfFilter{
		FilterAttrs:  netlink.FilterAttrs{LinkIndex: index, Parent: netlink.HANDLE_MIN_EGRESS, Priority: 1, Protocol: unix.ETH_P_ALL},
		Fd:           program.FD(),
		DirectAction: true,
	}
	if err := errors.Join(ns.Netlink().QdiscAdd(qdisc), ns.Netlink().FilterAdd(filter)); err != nil {
		t.Fatal(err)
	}
}
