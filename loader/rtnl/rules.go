package rtnl

import (
	"math"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Attributes of policy rules that the library does not know (linux/fib_rules.h).
const (
	fraDSCP      = 25 // Linux 6.14
	fraFlowLabel = 26
)

// UnfollowedRules reports for each family whether the host has policy rules that the programs do not follow as the stack
// does: bpf_fib_lookup ignores marks, TOS, flow labels and, in IPv6, suppressed routes, and the programs keep answers for
// connections with other ports. The network namespace is the calling thread's.
//
// One dump has the rules of both families. The library's own list lacks some attributes.
func UnfollowedRules() (ipv4, ipv6 bool, err error) {
	messages, err := retry(func() ([][]byte, error) {
		request := nl.NewNetlinkRequest(unix.RTM_GETRULE, unix.NLM_F_DUMP)
		request.AddData(nl.NewIfInfomsg(unix.AF_UNSPEC))
		return request.Execute(unix.NETLINK_ROUTE, unix.RTM_NEWRULE)
	})
	if err != nil {
		return false, false, err
	}
	for _, message := range messages {
		unfollowed, err := isUnfollowed(message)
		if err != nil {
			return false, false, err
		}
		switch message[0] {
		case unix.AF_INET:
			ipv4 = ipv4 || unfollowed
		case unix.AF_INET6:
			ipv6 = ipv6 || unfollowed
		}
	}
	return ipv4, ipv6, nil
}

// isUnfollowed reads one rule: a struct fib_rule_hdr, which has the layout of a route's header, and attributes.
func isUnfollowed(message []byte) (bool, error) {
	header := nl.DeserializeRtMsg(message)
	attrs, err := nl.ParseRouteAttr(message[header.Len():])
	if err != nil {
		return false, err
	}
	if header.Tos != 0 {
		return true, nil
	}
	for _, attr := range attrs {
		switch attr.Attr.Type &^ unix.NLA_F_NESTED {
		case nl.FRA_FWMARK, nl.FRA_FWMASK, nl.FRA_SPORT_RANGE, nl.FRA_DPORT_RANGE, fraDSCP, fraFlowLabel:
			return true, nil
		case nl.FRA_SUPPRESS_PREFIXLEN, nl.FRA_SUPPRESS_IFGROUP:
			const none = math.MaxUint32

			if header.Family == unix.AF_INET6 && nl.NativeEndian().Uint32(attr.Value) != none {
				return true, nil
			}
		}
	}
	return false, nil
}
