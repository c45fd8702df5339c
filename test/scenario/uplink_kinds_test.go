package scenario

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/rlimit"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// On every kind of uplink, pods are masqueraded and host ports are reachable.
func TestUplinkKinds(t *testing.T) {
	for _, kind := range testenv.UplinkKinds {
		t.Run(kind.Name, func(t *testing.T) {
			testenv.Require(t, kind.Feature)
			n := newNetwork(t)
			device := n.MoveUplink(t, kind)
			pod := n.AddPod(t, "a", mapBoth(8080, 80))
			n.wantUplinks(t, device)
			n.useUplink(t, pod)
			n.transferByUplink(t, pod)
		})
	}
}

// useUplink sends traffic out by the first uplink, and in to host port 8080 of the pod.
func (n *network) useUplink(t *testing.T, pod *testenv.Pod) {
	t.Helper()
	forEachProtocol(t, func(t *testing.T, f testenv.Family, protocol string) {
		ping(t, pod.Namespace, f.Outside)
		server := serve(t, n.Outside, protocol, at(f.Outside, 0))
		serve(t, pod.Namespace, protocol, at(f.Pod(pod), 80))
		n.reachInAndOut(t, f, protocol, pod, server)
	})
}

// transferByUplink transfers data out by the first uplink, and in to host port 8080 of the pod.
func (n *network) transferByUplink(t *testing.T, pod *testenv.Pod) {
	t.Helper()
	for _, f := range testenv.Families {
		large := sizeOf(4 * mebibyte)
		upload(large)(t, pod.Namespace, n.Outside, at(f.Outside, 7000), at(f.Outside, 7000))
		download(large)(t, n.Outside, pod.Namespace, at(f.Pod(pod), 80), at(f.Node, 8080))
	}
}

// wantUplinks compares the datapath's uplinks.
func (n *network) wantUplinks(t *testing.T, devices ...string) {
	t.Helper()
	n.withDatapath(t, func(datapath *loader.Datapath) {
		uplinks := must(maps.Uplinks(datapath))
		if len(uplinks) != len(devices) {
			t.Errorf("uplinks: got %v, want %v", uplinks, devices)
		}
		for _, device := range devices {
			n.wantUplink(t, indexOf(t, n.node(), device), true)
		}
	})
}

// Connections survive the renaming of their uplink, and new ones work.
func TestUplinkRenamed(t *testing.T) {
	testenv.Require(t, testenv.LiveRename)
	n := newNetwork(t)
	pod := n.AddPod(t, "a", mapBoth(8080, 80))
	f := testenv.IPv4
	out := connect(t, pod.Namespace, "tcp", netip.AddrPort{}, serve(t, n.Outside, "tcp", at(f.Outside, 0)))
	defer out.Close()
	server := testenv.ServeTCP(t, pod.Namespace, at(f.Pod(pod), 80))
	in := connect(t, n.Outside, "tcp", netip.AddrPort{}, at(f.Node, 8080))
	defer in.Close()
	ask(t, out, n.Outside)
	ask(t, in, pod.Namespace)

	link, err := n.node().Netlink().LinkByName(testenv.UplinkName)
	testenv.Must(t, err)
	testenv.Must(t, n.node().Netlink().LinkSetName(link, "wan0"))
	ask(t, out, n.Outside)
	ask(t, in, pod.Namespace)
	server.Close()
	n.useUplink(t, pod)
	n.AddPod(t, "b", nil)
	n.wantUplinks(t, "wan0")
}

// Frames with a priority tag, of no VLAN, are treated like untagged ones.
func TestUplinkWithPriorityTags(t *testing.T) {
	for _, path := range []string{"never", "established", "always"} {
		t.Run(path, func(t *testing.T) {
			n := newNetworkWith(t, withKeys(`"ipMasq": true, "fastPath": "`+path+`"`))
			pod := n.AddPod(t, "a", mapBoth(8080, 80))
			setPriority(t, n.Outside, testenv.UplinkName)
			n.useUplink(t, pod)
			n.transferByUplink(t, pod)
		})
	}
}

// setPriority adds a tag with priority 5 to all frames that leave by a device.
func setPriority(t *testing.T, ns *testenv.Namespace, device string) {
	t.Helper()
	protocol := binary.BigEndian.Uint16(binary.NativeEndian.AppendUint16(nil, unix.ETH_P_8021Q))
	const next = -1                         // TC_ACT_UNSPEC
	testenv.Must(t, rlimit.RemoveMemlock()) // before Linux 5.11
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
	testenv.Must(t, err)
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
	testenv.Must(t, errors.Join(ns.Netlink().QdiscAdd(qdisc), ns.Netlink().FilterAdd(filter)))
}
