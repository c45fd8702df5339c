package rtnl

import (
	"testing"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// TestIsUnfollowed reads rules as kernels list them, those that this one cannot have included.
func TestIsUnfollowed(t *testing.T) {
	attr := func(kind int, value uint32) *nl.RtAttr { return nl.NewRtAttr(kind, nl.Uint32Attr(value)) }
	const none = 0xffffffff
	for _, test := range []struct {
		name   string
		tos    uint8
		attrs  []*nl.RtAttr
		v4, v6 bool
	}{
		{"default", 0, []*nl.RtAttr{attr(nl.FRA_TABLE, unix.RT_TABLE_MAIN), attr(nl.FRA_SUPPRESS_PREFIXLEN, none)}, false, false},
		{"from", 0, []*nl.RtAttr{attr(nl.FRA_SRC, 0x0a580000), attr(nl.FRA_SUPPRESS_PREFIXLEN, none)}, false, false},
		{"mark", 0, []*nl.RtAttr{attr(nl.FRA_FWMARK, 1)}, true, true},
		{"no mark, by mask", 0, []*nl.RtAttr{attr(nl.FRA_FWMASK, 0xff)}, true, true},
		{"ports", 0, []*nl.RtAttr{attr(nl.FRA_DPORT_RANGE, 0x00500050)}, true, true},
		{"TOS", 16, nil, true, true},
		{"DSCP", 0, []*nl.RtAttr{nl.NewRtAttr(fraDSCP, []byte{0})}, true, true},
		{"flow label", 0, []*nl.RtAttr{attr(fraFlowLabel, 1)}, true, true},
		{"prefixes suppressed", 0, []*nl.RtAttr{attr(nl.FRA_SUPPRESS_PREFIXLEN, 0)}, false, true},
		{"group suppressed", 0, []*nl.RtAttr{attr(nl.FRA_SUPPRESS_PREFIXLEN, none), attr(nl.FRA_SUPPRESS_IFGROUP, 9)}, false, true},
	} {
		for family, want := range map[uint8]bool{unix.AF_INET: test.v4, unix.AF_INET6: test.v6} {
			message := (&nl.RtMsg{RtMsg: unix.RtMsg{Family: family, Tos: test.tos}}).Serialize()
			for _, a := range test.attrs {
				message = append(message, a.Serialize()...)
			}
			got, err := isUnfollowed(message)
			if err != nil || got != want {
				t.Errorf("%s, family %d: got %v (%v), want %v", test.name, family, got, err, want)
			}
		}
	}
}
