package rtnl

import (
	"net/netip"
	"testing"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// TestTracked reads entries of conntrack, of which none but TCP's and UDP's count, and nothing where they are cut off.
func TestTracked(t *testing.T) {
	nested := func(kind int, children ...*nl.RtAttr) *nl.RtAttr {
		attr := nl.NewRtAttr(unix.NLA_F_NESTED|kind, nil)
		for _, child := range children {
			attr.AddChild(child)
		}
		return attr
	}
	tuple := func(kind int, protocol uint8, source, destination netip.AddrPort) *nl.RtAttr {
		src, dst := nl.CTA_IP_V4_SRC, nl.CTA_IP_V4_DST
		if source.Addr().Is6() {
			src, dst = nl.CTA_IP_V6_SRC, nl.CTA_IP_V6_DST
		}
		return nested(kind,
			nested(nl.CTA_TUPLE_IP, nl.NewRtAttr(src, source.Addr().AsSlice()), nl.NewRtAttr(dst, destination.Addr().AsSlice())),
			nested(nl.CTA_TUPLE_PROTO, nl.NewRtAttr(nl.CTA_PROTO_NUM, []byte{protocol}),
				nl.NewRtAttr(nl.CTA_PROTO_SRC_PORT, nl.BEUint16Attr(source.Port())),
				nl.NewRtAttr(nl.CTA_PROTO_DST_PORT, nl.BEUint16Attr(destination.Port()))))
	}
	for _, sides := range [][4]string{
		{"10.0.0.1:1000", "10.96.0.1:80", "10.0.0.2:8080", "10.0.0.1:1000"},
		{"[fd00::1]:1000", "[fd00::96]:80", "[fd00::2]:8080", "[fd00::1]:1000"},
	} {
		want := Tracked{Protocol: unix.IPPROTO_UDP, Opener: netip.MustParseAddrPort(sides[0]), Asked: netip.MustParseAddrPort(sides[1]),
			Server: netip.MustParseAddrPort(sides[2]), Client: netip.MustParseAddrPort(sides[3])}
		entry := append(tuple(nl.CTA_TUPLE_ORIG, want.Protocol, want.Opener, want.Asked).Serialize(),
			tuple(nl.CTA_TUPLE_REPLY, want.Protocol, want.Server, want.Client).Serialize()...)
		if got, ok := trackedOf(entry); !ok || got != want {
			t.Errorf("got %+v, %t, want %+v", got, ok, want)
		}
		for size := range entry {
			if got, ok := trackedOf(entry[:size]); ok && got == want {
				t.Errorf("the first %d bytes: got all of it", size)
			}
		}
	}
	addr := netip.MustParseAddrPort("10.0.0.1:1")
	if got, ok := trackedOf(tuple(nl.CTA_TUPLE_ORIG, unix.IPPROTO_ICMP, addr, addr).Serialize()); ok {
		t.Errorf("ICMP: got %+v, want nothing", got)
	}
}
