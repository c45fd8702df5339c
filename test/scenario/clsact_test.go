package scenario

import (
	"errors"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/loader/rtnl"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

func usesTCX(datapath *loader.Datapath) bool {
	return bpf.Attach(datapath.Config.Attach) == bpf.AttachTCX
}

// loadForClsact loads the datapath as on a kernel without tcx, before the plugin would load it.
func (n *network) loadForClsact(t *testing.T) {
	t.Helper()
	n.loadWith(t, loader.Options{Attach: bpf.AttachClsact})
}

func TestClsact(t *testing.T) {
	n := newNetwork(t)
	n.loadForClsact(t)
	for _, test := range []struct {
		name string
		run  func(*testing.T, *network)
	}{
		{"pods reach each other", podsReachEachOther},
		{"pod and host reach each other", podAndHostReachEachOther},
		{"pod reaches outside", podReachesOutside},
		{"host ports forward", hostPortsForward},
	} {
		t.Run(test.name, func(t *testing.T) { test.run(t, n) })
	}

	pod := n.AddPod(t, "a", nil)
	hostDevice := pod.Result.Interfaces[0].Name
	wantFilters(t, n, hostDevice, netlink.HANDLE_MIN_INGRESS, "from_container")
	wantFilters(t, n, hostDevice, netlink.HANDLE_MIN_EGRESS, "to_container")
	wantFilters(t, n, testenv.UplinkName, netlink.HANDLE_MIN_INGRESS, "from_uplink")
	wantFilters(t, n, testenv.UplinkName, netlink.HANDLE_MIN_EGRESS, "to_uplink")
	if testenv.TCX.Probe() == nil {
		wantNoTCX(t, n, hostDevice)
		wantNoTCX(t, n, testenv.UplinkName)
	}
	wantCheck(t, pod)
	wantProgramsBefore(t, n, pod)
	addForeignFilters(t, n, hostDevice, 1)
	addForeignFilters(t, n, hostDevice, 0x7fff)
	wantProgramsBefore(t, n, pod, "foreign (tc priority 1)")
	removeFilter(t, n, hostDevice, netlink.HANDLE_MIN_INGRESS)
	wantRepaired(t, n, pod, hostDevice+" has lost its BPF programs")
	removeFilter(t, n, testenv.UplinkName, netlink.HANDLE_MIN_EGRESS)
	wantRepaired(t, n, pod, "uplink "+testenv.UplinkName+" has lost its BPF programs")
}

// removeFilter removes all filters of one direction, as another tool may.
func removeFilter(t *testing.T, n *network, device string, parent uint32) {
	t.Helper()
	at := &netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: indexOf(t, n.node(), device)}}
	filters, err := rtnl.Filters(n.node().Netlink(), at, parent)
	if err != nil || len(filters) == 0 {
		t.Fatalf("filters of %s: got %v (%v), want some", device, filters, err)
	}
	for _, filter := range filters {
		testenv.Must(t, n.node().Netlink().FilterDel(filter))
	}
}

// wantRepaired wants CHECK to report a difference, and a repair to remove it.
func wantRepaired(t *testing.T, n *network, pod *testenv.Pod, difference string) {
	t.Helper()
	if err := pod.Check(testenv.Context(t)); err == nil || !strings.Contains(err.Error(), difference) {
		t.Errorf("CHECK: got %v, want %q", err, difference)
	}
	n.ctl(t, "repair")
	wantCheck(t, pod)
}

// Another tool's filters, before and after ours on the uplink, see all packets while pods come and
// go. The qdisc belongs to the other tool too, and stays.
func TestForeignClsactFilters(t *testing.T) {
	n := newNetworkWith(t, autoConflist)
	n.loadForClsact(t)
	hooks := slices.Concat(
		addForeignFilters(t, n, testenv.UplinkName, 1),
		addForeignFilters(t, n, testenv.UplinkName, 0x7fff))
	wantFilters(t, n, testenv.UplinkName, netlink.HANDLE_MIN_INGRESS, "foreign", "foreign")

	web := n.AddPod(t, "web", mapBoth(8080, 80))
	n.wantSeenAfterEachVerb(t, hooks, web)
	wantFilters(t, n, testenv.UplinkName, netlink.HANDLE_MIN_INGRESS, "foreign", "from_uplink", "foreign")
	wantFilters(t, n, testenv.UplinkName, netlink.HANDLE_MIN_EGRESS, "foreign", "to_uplink", "foreign")
	del(t, web)
	wantSeen(t, hooks, func() { ping(t, n.Outside, testenv.NodeAddr4) })
	n.ctl(t, "unload", "--yes")
	wantFilters(t, n, testenv.UplinkName, netlink.HANDLE_MIN_INGRESS, "foreign", "foreign")
	wantFilters(t, n, testenv.UplinkName, netlink.HANDLE_MIN_EGRESS, "foreign", "foreign")
	wantSeen(t, hooks, func() { ping(t, n.Outside, testenv.NodeAddr4) })
}

// Another tool's ingress qdisc has only filters of ingress. ADD refuses the uplink, and works once the qdisc is a clsact.
func TestForeignIngressQdisc(t *testing.T) {
	n := newNetwork(t)
	n.loadForClsact(t)
	tc := func(args ...string) {
		if _, err := n.node().Run(testenv.Context(t), "tc", append([]string{"qdisc"}, args...)...); err != nil {
			t.Fatal(err)
		}
	}
	tc("add", "dev", testenv.UplinkName, "ingress")
	pod := n.NewPod(t, "a")
	err := pod.Add(testenv.Context(t))
	if err == nil || !strings.Contains(err.Error(), "qdisc ingress") || !strings.Contains(err.Error(), "tc qdisc del") {
		t.Errorf("ADD: got %v, want an error that names the qdisc, and what to do", err)
	}
	wantFilters(t, n, testenv.UplinkName, netlink.HANDLE_MIN_INGRESS)
	tc("del", "dev", testenv.UplinkName, "ingress")
	tc("add", "dev", testenv.UplinkName, "clsact")
	podReachesOutside(t, n)
}

// After the pins are lost, the former programs are still on the uplink, with maps of their own. The next ADD replaces them.
func TestClsactAfterLostPins(t *testing.T) {
	n := newNetwork(t)
	n.loadForClsact(t)
	del(t, n.AddPod(t, "a", nil))
	testenv.Must(t, os.RemoveAll(loader.Root))
	n.loadForClsact(t)
	podReachesOutside(t, n)
}

// Another tool deletes the qdisc with our filters, or a single filter: CHECK says so, ADD and STATUS restore
// those of the uplinks, and `ebpfnetctl repair` all of them.
func TestFiltersDeleted(t *testing.T) {
	n := newNetworkWith(t, allVerbsConflist)
	n.loadForClsact(t)
	web := n.AddPod(t, "web", mapBoth(8080, 80))
	serve(t, web.Namespace, "tcp", at(web.Addr4(), 80))
	server := serve(t, n.Outside, "tcp", at(testenv.OutsideAddr4, 0))
	hostDevice := web.Result.Interfaces[0].Name
	deleteQdisc := func(device string) {
		qdisc := &netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{
			LinkIndex: indexOf(t, n.node(), device), Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT,
		}}
		testenv.Must(t, n.node().Netlink().QdiscDel(qdisc))
	}
	for _, test := range []struct {
		name, device string
		damage       func()
		repair       func()
	}{
		{"qdisc of the uplink, STATUS", testenv.UplinkName, func() { deleteQdisc(testenv.UplinkName) }, func() {
			testenv.NoError(t, n.Status(testenv.Context(t)))
		}},
		{"qdisc of the uplink, ADD", testenv.UplinkName, func() { deleteQdisc(testenv.UplinkName) }, func() { del(t, n.AddPod(t, "other", nil)) }},
		{"filter of the uplink, repair", testenv.UplinkName, func() {
			if _, err := n.node().Run(testenv.Context(t), "tc", "filter", "del", "dev", testenv.UplinkName, "egress"); err != nil {
				t.Fatal(err)
			}
		}, func() { n.ctl(t, "repair") }},
		{"qdisc of the pod, repair", hostDevice, func() { deleteQdisc(hostDevice) }, func() { n.ctl(t, "repair") }},
	} {
		t.Run(test.name, func(t *testing.T) {
			test.damage()
			if err := web.Check(testenv.Context(t)); err == nil || !strings.Contains(err.Error(), test.device) {
				t.Errorf("CHECK: got %v, want it to name %s", err, test.device)
			}
			test.repair()
			wantCheck(t, web)
			n.reachInAndOut(t, testenv.IPv4, "tcp", web, server)
		})
	}
}

// addForeignFilters attaches another tool's filters to both directions of a device.
func addForeignFilters(t *testing.T, n *network, device string, priority uint16) (hooks []foreignHook) {
	t.Helper()
	index := indexOf(t, n.node(), device)
	qdisc := &netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{
		LinkIndex: index, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT,
	}}
	if err := n.node().Netlink().QdiscAdd(qdisc); err != nil && !errors.Is(err, unix.EEXIST) {
		t.Fatal(err)
	}
	for direction, parent := range map[string]uint32{"ingress": netlink.HANDLE_MIN_INGRESS, "egress": netlink.HANDLE_MIN_EGRESS} {
		program := newForeignProgram(t)
		filter := &netlink.BpfFilter{
			FilterAttrs: netlink.FilterAttrs{LinkIndex: index, Parent: parent, Priority: priority, Handle: 1, Protocol: unix.ETH_P_ALL},
			Fd:          program.FD(), Name: "foreign", DirectAction: true,
		}
		if err := n.node().Netlink().FilterAdd(filter); err != nil {
			t.Fatalf("add a foreign filter to %s of %s: %v", direction, device, err)
		}
		hooks = append(hooks, foreignHook{direction + " of " + device, program})
	}
	return hooks
}

// wantFilters compares the names of a device's filters, in the order they run.
func wantFilters(t *testing.T, n *network, device string, parent uint32, want ...string) {
	t.Helper()
	at := &netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: indexOf(t, n.node(), device)}}
	filters, err := rtnl.Filters(n.node().Netlink(), at, parent)
	if err != nil {
		t.Fatalf("list filters of %s: %v", device, err)
	}
	var names []string
	for _, filter := range filters {
		if filter, ok := filter.(*netlink.BpfFilter); ok {
			names = append(names, filter.Name)
		}
	}
	if !slices.Equal(names, want) {
		t.Errorf("filters of %s: got %q, want %q", device, names, want)
	}
}

func wantNoTCX(t *testing.T, n *network, device string) {
	t.Helper()
	for _, attach := range []ebpf.AttachType{ebpf.AttachTCXIngress, ebpf.AttachTCXEgress} {
		err := n.node().Do(func() error {
			result, err := link.QueryPrograms(link.QueryOptions{Target: indexOf(t, n.node(), device), Attach: attach})
			if err == nil && len(result.Programs) > 0 {
				t.Errorf("%s of %s: got %d tcx programs, want none", attach, device, len(result.Programs))
			}
			return err
		})
		testenv.NoError(t, err)
	}
}
