package policy

import (
	"fmt"

	"github.com/ebpfnet/ebpfnet/maps"
)

// Connection is one that a container opens or accepts.
type Connection struct {
	Peer     maps.Peer
	Protocol maps.Protocol
	Port     uint16 // the destination's; 0: the protocol has none
}

func (c Connection) String() string {
	if c.Port == 0 {
		return c.Protocol.String()
	}
	return fmt.Sprintf("%s %d", c.Protocol, c.Port)
}

// Explain says why a rule set admits a connection or not: which rule does, or which one comes nearest.
func Explain(set *maps.RuleSet, isEgress bool, c Connection) (admitted bool, why string) {
	number, admitted := set.Verdict(c.Peer, uint8(c.Protocol), c.Port)
	switch {
	case set == nil:
		return true, "not isolated"
	case c.Peer.Self:
		return true, "the container itself is admitted"
	case admitted && number != 0:
		return true, Place(isEgress, number) + " admits it"
	case admitted && c.Peer.Host:
		return true, "the own node is admitted"
	case admitted:
		return true, "ingressPolicy, or what the policy implies, admits it"
	}
	number, miss := set.NearestMiss(c.Peer, uint8(c.Protocol), c.Port)
	switch place := Place(isEgress, number); {
	case miss == maps.MissPort && place != "":
		return false, fmt.Sprintf("%s admits the peer, but not %s", place, c)
	case miss == maps.MissPeer && place != "":
		return false, fmt.Sprintf("%s admits %s, but not the peer", place, c)
	case len(set.Rules) == 0:
		return false, "there are no rules"
	}
	return false, fmt.Sprintf("no rule admits the peer, or %s", c)
}
