package conformance

import (
	"fmt"
	"path/filepath"
	"strings"
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

// TestBigTCPByUplinks compares the sizes of a new container's packets with what the uplinks take. Each row goes on
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
		{"as made, always", "always", func() {}, raised},
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

// TestBigTCPWithoutUplinks has a first uplink later.
func TestBigTCPWithoutUplinks(t *testing.T) {
	requireBigTCP(t)
	h := newHost(t)
	h.ip(t, "link del "+testenv.UplinkName)
	p := h.pod(t, "c1", dual("1.1.0"))
	p.add(t)
	wantSizes(t, p.Namespace, p.ifName, raised)
	h.AddSecondUplink(t)
	h.wantCtl(t, 0, []string{"repair"}, "container behind ebpf", "for uplink "+testenv.SecondUplinkName)
	wantSizes(t, p.Namespace, p.ifName, usual)
}

// TestBigTCPBesideTunnel has a tunnel to other nodes, whose size cannot be raised.
func TestBigTCPBesideTunnel(t *testing.T) {
	requireBigTCP(t)
	testenv.Require(t, testenv.VXLAN)
	h := newHost(t)
	h.raise(t, testenv.UplinkName, raised)
	h.ip(t, "link add nodes type vxlan external dstport 4789 nolearning")
	for _, mode := range []string{"auto", "raise-uplinks"} {
		p := h.pod(t, mode, with(dual("1.1.0"), "bigTCP", mode))
		p.add(t)
		wantSizes(t, p.Namespace, p.ifName, raised)
		h.wantCtl(t, 0, []string{"repair"})
		wantSizes(t, p.Namespace, p.ifName, raised)
		p.del(t)
	}
	h.ip(t, "link add other type vxlan id 7 remote "+testenv.OutsideAddr4.String()+" dstport 4790")
	p := h.pod(t, "c1", with(dual("1.1.0"), "bigTCP", "auto"))
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

// TestBigTCPRaisesUplinks raises what an uplink can take, and no more: a bridge without ports segments 64 KiB.
func TestBigTCPRaisesUplinks(t *testing.T) {
	requireBigTCP(t)
	conf := with(dual("1.1.0"), "bigTCP", "raise-uplinks")
	h := newHost(t)
	h.pod(t, "c1", dual("1.1.0")).add(t)
	wantSizes(t, h.Node, testenv.UplinkName, usual)
	p := h.pod(t, "c2", conf)
	p.add(t)
	wantExit(t, p.try(t, "CHECK"), 0)
	h.AddSecondUplink(t)
	for name, look := range map[string]func(){
		"STATUS":        func() { wantSuccess(t, h.status(t, conf), "") },
		"repair":        func() { h.wantCtl(t, 0, []string{"repair"}, "packet size of uplink eth1") },
		"repair --hook": func() { h.wantCtl(t, 0, []string{"repair", "--hook"}, "packet size of uplink eth1") },
	} {
		t.Run(name, func(t *testing.T) {
			h.raise(t, testenv.SecondUplinkName, usual)
			look()
			wantSizes(t, h.Node, testenv.UplinkName, raised)
			wantSizes(t, h.Node, testenv.SecondUplinkName, raised)
			wantSizes(t, p.Namespace, p.ifName, raised)
		})
	}
	t.Run("one cannot", func(t *testing.T) {
		h.ip(t, "link add old type bridge")
		file := filepath.Join(t.TempDir(), "log")
		p := h.pod(t, "c3", with(conf, "logFile", file))
		p.add(t)
		wantSizes(t, p.Namespace, p.ifName, usual)
		wantLog(t, file, []string{"level=WARN", "uplink=old"}, nil)
	})
}

// TestBigTCPFollowsUplinks lowers the sizes of running containers when an uplink takes less than at ADD. Those
// of bigTCP always stay.
func TestBigTCPFollowsUplinks(t *testing.T) {
	requireBigTCP(t)
	h := newHost(t)
	h.raise(t, testenv.UplinkName, raised)
	always := h.pod(t, "c0", with(dual("1.1.0"), "bigTCP", "always"))
	always.add(t)
	const repaired = "packet size of the container behind ebpf"
	for n, test := range []struct {
		name string
		to   sizes
		look func()
	}{
		{"STATUS", usual, func() { wantSuccess(t, h.status(t, dual("1.1.0")), "") }},
		{"repair", sizes{defaultSize, largestSize}, func() { h.wantCtl(t, 0, []string{"repair"}, repaired) }},
		{"repair --hook", sizes{largestSize, 100_000}, func() { h.wantCtl(t, 0, []string{"repair", "--hook"}, repaired) }},
	} {
		t.Run(test.name, func(t *testing.T) {
			h.raise(t, testenv.UplinkName, raised)
			p := h.pod(t, fmt.Sprint("c", n+1), dual("1.1.0"))
			p.add(t)
			h.wantCtl(t, 0, []string{"repair"}, "nothing to repair")
			wantSizes(t, p.Namespace, p.ifName, raised)

			h.raise(t, testenv.UplinkName, test.to)
			test.look()
			wantSizes(t, p.Namespace, p.ifName, test.to)
			wantSizes(t, always.Namespace, always.ifName, raised)
			h.wantCtl(t, 0, []string{"repair"}, "nothing to repair")
			wantExit(t, p.try(t, "CHECK"), 0)
			p.del(t)
		})
	}
}

// TestCtlNamesNarrowUplink looks for the uplink that limits BIG TCP.
func TestCtlNamesNarrowUplink(t *testing.T) {
	requireBigTCP(t)
	h := newHost(t)
	h.AddSecondUplink(t)
	h.pod(t, "c1", dual("1.1.0")).add(t)
	for _, test := range []struct {
		device string
		sizes  sizes
		v6, v4 string
	}{
		{testenv.UplinkName, sizes{largestSize, largestSize}, "no eth1", "no eth1"},
		{testenv.SecondUplinkName, sizes{largestSize, 100_000}, "196608 bytes", "100000 bytes eth1"},
	} {
		h.raise(t, test.device, test.sizes)
		_, stdout, stderr := h.ctl(t, "status", "-o", "wide")
		for family, want := range map[string]string{"IPv6": test.v6, "IPv4": test.v4} {
			_, line, _ := strings.Cut(stdout, "BIG TCP, "+family)
			line, _, _ = strings.Cut(line, "\n")
			for _, word := range strings.Fields(want) {
				if !strings.Contains(line, word) {
					t.Errorf("%s: got %q, want %q%s", family, line, word, stderr)
				}
			}
		}
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
	must(t, err)
	must(t, h.Node.Netlink().LinkSetGSOMaxSize(link, to.v6))
	must(t, h.Node.Netlink().LinkSetGSOIPv4MaxSize(link, to.v4))
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
	if err != nil {
		t.Fatal(err)
	}
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
