package conformance

import (
	"fmt"
	"testing"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

const (
	defaultSize = 64 << 10
	largestSize = 192 << 10
)

// sizes are the largest TCP packets of a device in bytes, for IPv6 and IPv4.
type sizes struct{ v6, v4 int }

var usual, raised = sizes{defaultSize, defaultSize}, sizes{largestSize, largestSize}

// TestBigTCPByUplinks compares the sizes of a new container's packets with what the uplinks take. Each row continues
// where the last one ended.
func TestBigTCPByUplinks(t *testing.T) {
	requireBigTCP(t)
	h := newHost(t)
	first, second := testenv.UplinkName, testenv.SecondUplinkName
	for n, test := range []struct {
		name  string
		mode  any
		setUp func()
		want  sizes
	}{
		{"as made", "auto", func() {}, usual},
		{"as made, by default", absent, func() {}, usual},
		{"raised", "auto", func() { h.raise(t, first, raised) }, raised},
		{"raised, by default", absent, func() {}, raised},
		{"raised, as before there were modes", true, func() {}, raised},
		{"raised, never", "never", func() {}, usual},
		{"raised, never, as before there were modes", false, func() {}, usual},
		{"raised for IPv6", "auto", func() { h.raise(t, first, sizes{largestSize, defaultSize}) }, sizes{largestSize, defaultSize}},
		{"raised for IPv4", "auto", func() { h.raise(t, first, sizes{defaultSize, largestSize}) }, sizes{defaultSize, largestSize}},
		{"raised by half", "auto", func() { h.raise(t, first, sizes{100_000, 120_000}) }, sizes{100_000, 120_000}},
		{"lowered", "auto", func() { h.raise(t, first, sizes{32 << 10, 32 << 10}) }, usual},
		{"one of two raised", "auto", func() { h.AddSecondUplink(t); h.raise(t, first, raised) }, usual},
		{"both raised", "auto", func() { h.raise(t, second, raised) }, raised},
		{"with few segments", "auto", func() { h.ip(t, "link set "+second+" gso_max_segs 100") }, sizes{100 * 1448, 100 * 1448}},
		{"bridge raised, its port not", "auto", func() { h.toBridge(t, second); h.raise(t, second, usual) }, usual},
		{"bridge and its port raised", "auto", func() { h.raise(t, second, sizes{120_000, 100_000}) }, sizes{120_000, 100_000}},
	} {
		t.Run(test.name, func(t *testing.T) {
			test.setUp()
			p := h.pod(t, fmt.Sprint("c", n), with(dual("1.1.0"), "bigTCP", test.mode))
			p.add(t)
			wantSizes(t, p.Namespace, p.ifName, test.want)
			wantExit(t, p.try(t, "CHECK"), 0)
			p.del(t)
		})
	}
}

// TestBigTCPWithoutUplinks has an uplink after the container.
func TestBigTCPWithoutUplinks(t *testing.T) {
	requireBigTCP(t)
	h := newHost(t)
	h.ip(t, "link del "+testenv.UplinkName)
	p := h.pod(t, "c1", dual("1.1.0"))
	p.add(t)
	wantSizes(t, p.Namespace, p.ifName, usual)
}

// TestBigTCPBesideTunnel has a tunnel to other nodes, whose size cannot be raised.
func TestBigTCPBesideTunnel(t *testing.T) {
	requireBigTCP(t)
	testenv.Require(t, testenv.VXLAN)
	h := newHost(t)
	h.raise(t, testenv.UplinkName, raised)
	h.ip(t, "link add nodes type vxlan external dstport 4789 nolearning")
	p := h.pod(t, "c0", dual("1.1.0"))
	p.add(t)
	wantSizes(t, p.Namespace, p.ifName, raised)
	h.ip(t, "link add other type vxlan id 7 remote "+testenv.OutsideAddr4.String()+" dstport 4790")
	p = h.pod(t, "c1", dual("1.1.0"))
	p.add(t)
	wantSizes(t, p.Namespace, p.ifName, usual)
}

// TestBigTCPOverMacvlan has an uplink on top of another device, as a VLAN is.
func TestBigTCPOverMacvlan(t *testing.T) {
	requireBigTCP(t)
	testenv.Require(t, testenv.Macvlan)
	h := newHost(t)
	h.ip(t, "link add wan0 link "+testenv.UplinkName+" type macvlan")
	h.raise(t, "wan0", raised)
	for n, below := range []sizes{usual, raised} {
		h.raise(t, testenv.UplinkName, below)
		p := h.pod(t, fmt.Sprint("c", n), with(dual("1.1.0"), "uplinks", list{"wan0"}))
		p.add(t)
		wantSizes(t, p.Namespace, p.ifName, below)
	}
}

func requireBigTCP(t *testing.T) {
	t.Helper()
	testenv.Require(t, testenv.BigTCP6)
	testenv.Require(t, testenv.BigTCP4)
}

// raise sets the sizes of a device of the node.
func (h *host) raise(t *testing.T, device string, to sizes) {
	t.Helper()
	link, err := h.Node.Netlink().LinkByName(device)
	testenv.Must(t, err)
	testenv.Must(t, h.Node.Netlink().LinkSetGSOMaxSize(link, to.v6))
	testenv.Must(t, h.Node.Netlink().LinkSetGSOIPv4MaxSize(link, to.v4))
}

// toBridge makes an uplink the port of a new bridge that takes all.
func (h *host) toBridge(t *testing.T, device string) {
	t.Helper()
	h.ip(t, "link add br0 type bridge")
	h.ip(t, "addr flush dev "+device)
	h.ip(t, "link set "+device+" master br0")
	h.raise(t, "br0", raised)
}

func wantSizes(t *testing.T, ns *testenv.Namespace, device string, want sizes) {
	t.Helper()
	link, err := ns.Netlink().LinkByName(device)
	testenv.Must(t, err)
	if got := (sizes{int(link.Attrs().GSOMaxSize), int(link.Attrs().GSOIPv4MaxSize)}); got != want {
		t.Errorf("%s in %s: got TCP packets of %+v bytes, want %+v", device, ns.Name, got, want)
	}
}

// wantExit compares the exit code of a call, which may warn.
func wantExit(t *testing.T, call *testenv.Call, want int) {
	t.Helper()
	if call.Exit != want {
		t.Errorf("%s: got exit code %d, want %d: %v", call.Getenv("CNI_COMMAND"), call.Exit, want, call.Err())
	}
}
