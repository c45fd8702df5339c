package maps

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/ebpfnet/ebpfnet/bpf"
)

// TestImpossibleNodes wants errors that name the value and what is expected.
func TestImpossibleNodes(t *testing.T) {
	possible := Node{netip.MustParsePrefix("10.244.1.0/24"), netip.MustParseAddr("192.0.2.1"), NodeTunnel, 1450}
	with := func(change func(*Node)) Node {
		n := possible
		change(&n)
		return n
	}
	for name, tc := range map[string]struct {
		node Node
		want string // in the error; "": none
	}{
		"a node":                 {possible, ""},
		"IPv6 over IPv4":         {with(func(n *Node) { n.Prefix = netip.MustParsePrefix("fd00::/64") }), ""},
		"no prefix":              {with(func(n *Node) { n.Prefix = netip.Prefix{} }), "prefix invalid Prefix"},
		"bits beyond the prefix": {with(func(n *Node) { n.Prefix = netip.MustParsePrefix("10.244.1.7/24") }), "prefix 10.244.1.7/24"},
		"everything":             {with(func(n *Node) { n.Prefix = netip.MustParsePrefix("::/0") }), "prefix ::/0"},
		"mapped IPv4":            {with(func(n *Node) { n.Prefix = netip.MustParsePrefix("::ffff:10.244.1.0/120") }), "prefix ::ffff:10.244.1.0/120"},
		"no address":             {with(func(n *Node) { n.Remote = netip.Addr{} }), "address invalid IP"},
		"loopback":               {with(func(n *Node) { n.Remote = netip.MustParseAddr("::1") }), "address ::1"},
		"multicast":              {with(func(n *Node) { n.Remote = netip.MustParseAddr("224.0.0.1") }), "address 224.0.0.1"},
		"an address with a zone": {with(func(n *Node) { n.Remote = netip.MustParseAddr("fe80::1%eth0") }), "address fe80::1%eth0"},
		"no mode":                {with(func(n *Node) { n.Mode = 0 }), "mode 0 of the node that has 10.244.1.0/24: want tunnel, direct or either"},
		"a small MTU":            {with(func(n *Node) { n.MTU = 67 }), "MTU 67 of the node that has 10.244.1.0/24: want 68 to 65535"},
		"too small for IPv6":     {with(func(n *Node) { n.Prefix, n.MTU = netip.MustParsePrefix("fd00::/64"), 1279 }), "want 1280 to 65535"},
		"a large MTU":            {with(func(n *Node) { n.MTU = 65536 }), "MTU 65536"},
	} {
		err := tc.node.check()
		if tc.want == "" && err != nil || tc.want != "" && (err == nil || !strings.Contains(err.Error(), tc.want)) {
			t.Errorf("%s: got %v, want %q", name, err, tc.want)
		}
	}
}

// TestImpossibleTunnels wants the same.
func TestImpossibleTunnels(t *testing.T) {
	addr4, addr6 := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")
	prefix4, prefix6 := netip.MustParsePrefix("10.244.1.0/24"), netip.MustParsePrefix("fd00::/64")
	possible := Tunnel{IfIndex: 7, VNI: 1<<24 - 1, Port: 4789, Addr4: addr4, Addr6: addr6, Containers4: prefix4, Containers6: prefix6}
	for name, tc := range map[string]struct {
		change func(*Tunnel)
		want   string // in the error; "": none
	}{
		"a tunnel":         {func(*Tunnel) {}, ""},
		"no more than it":  {func(t *Tunnel) { *t = Tunnel{IfIndex: 7, Port: 4789} }, ""},
		"of one family":    {func(t *Tunnel) { t.Containers6 = netip.MustParsePrefix("::/128") }, ""},
		"no device":        {func(t *Tunnel) { t.IfIndex = 0 }, "tunnel by device 0"},
		"no port":          {func(t *Tunnel) { t.Port = 0 }, "port 0"},
		"a large VNI":      {func(t *Tunnel) { t.VNI++ }, "VNI 16777216"},
		"the other family": {func(t *Tunnel) { t.Addr4 = addr6 }, "tunnel with the sources 2001:db8::1 and"},
		"loopback":         {func(t *Tunnel) { t.Addr6 = netip.IPv6Loopback() }, "and ::1: want"},
		"others' family":   {func(t *Tunnel) { t.Containers6 = prefix4 }, "tunnel for the containers 10.244.1.0/24 and 10.244.1.0/24"},
		"everybody":        {func(t *Tunnel) { t.Containers4 = netip.MustParsePrefix("0.0.0.0/0") }, "containers 0.0.0.0/0 and"},
	} {
		tunnel := possible
		tc.change(&tunnel)
		err := tunnel.check()
		if tc.want == "" && err != nil || tc.want != "" && (err == nil || !strings.Contains(err.Error(), tc.want)) {
			t.Errorf("%s: got %v, want %q", name, err, tc.want)
		}
	}
}

// TestMaskedPrefix writes prefixes as the programs compare them, and reads them again.
func TestMaskedPrefix(t *testing.T) {
	for _, prefix := range []netip.Prefix{
		{}, netip.MustParsePrefix("10.244.0.0/16"), netip.MustParsePrefix("10.244.1.7/32"), netip.MustParsePrefix("fd00::/8"), netip.MustParsePrefix("fd00::1/128"),
		netip.MustParsePrefix("0.0.0.0/32"), netip.MustParsePrefix("::/128"),
	} {
		masked := wireMasked(prefix)
		if got := maskedPrefix(masked); got != prefix {
			t.Errorf("%s as %x: got %s", prefix, masked, got)
		}
	}
	masked := wireMasked(netip.MustParsePrefix("10.244.0.0/20"))
	want := bpf.Prefix{
		Addr: bpf.Addr{Bytes: [16]byte{10: 0xff, 11: 0xff, 12: 10, 13: 244}},
		Mask: bpf.Addr{Bytes: [16]byte{255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 0xf0}},
	}
	if masked != want {
		t.Errorf("got %x, want %x", masked, want)
	}
}
