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
func Explain(set *maps.RuleSet, rules Namer, c Connection) (admitted bool, why string) {
	number, admitted := set.Verdict(c.Peer, uint8(c.Protocol), c.Port)
	switch {
	case set == nil:
		return true, "not isolated"
	case c.Peer.Self:
		return true, "the container itself is admitted"
	case admitted && number != 0:
		return true, rules.name(number) + " admits it"
	case admitted && c.Peer.Host:
		return true, "the own node is admitted"
	case admitted:
		return true, "ingressPolicy, or what the policy implies, admits it"
	}
	if number, isDenied := set.Denier(c.Peer, uint8(c.Protocol), c.Port); isDenied {
		return false, rules.name(number) + " denies it"
	}
	number, miss := set.NearestMiss(c.Peer, uint8(c.Protocol), c.Port)
	switch place := rules.name(number); {
	case miss == maps.MissPort && place != "":
		return false, fmt.Sprintf("%s admits the peer, but not %s", place, c)
	case miss == maps.MissPeer && place != "":
		return false, fmt.Sprintf("%s admits %s, but not the peer", place, c)
	case len(set.Rules) == 0:
		return false, "there are no rules"
	}
	return false, fmt.Sprintf("no rule admits the peer, or %s", c)
}

// Candidate is a rule of a policy that could admit a connection.
type Candidate struct {
	Rule   string `json:"rule"`
	Admits bool   `json:"admits"`
	Why    string `json:"why"` // or why not
}

// Candidates says of each rule whether it admits a connection, and else why not. names has the rules by their numbers,
// from 1; those that follow each other with one name are one rule. missOf says what of the peer a rule does not match, or
// "" if it matches, and what the rule does with it: "" (it admits), deny or pass.
func Candidates(set *maps.RuleSet, names []string, c Connection, missOf func(name string) (miss, action string)) (list []Candidate) {
	_, isAdmitted := set.Verdict(c.Peer, uint8(c.Protocol), c.Port)
	matches := set.Matches(c.Peer, uint8(c.Protocol), c.Port)
	for first := 0; first < len(names); {
		all, hasEntries := maps.Match{}, false
		end := first
		for ; end < len(names) && names[end] == names[first]; end++ {
			match, ok := matches[uint32(end+1)]
			all = maps.Match{Peer: all.Peer || match.Peer, Port: all.Port || match.Port, Both: all.Both || match.Both}
			hasEntries = hasEntries || ok
		}
		miss, action := missOf(names[first])
		rule := Candidate{Rule: names[first], Admits: all.Both && action == "", Why: "it admits the peer and " + c.String()}
		if all.Peer {
			miss = ""
		}
		switch {
		case all.Both && action == "deny":
			rule.Why = "it denies the peer and " + c.String()
		case action == "pass" && miss == "":
			rule.Why = "it leaves the peer to the next tier, if it matches " + c.String()
		case action == "deny" && miss == "":
			rule.Why = "a rule before it decides, or it does not match " + c.String()
		case all.Both:
		case miss != "" && hasEntries && !all.Port:
			rule.Why = fmt.Sprintf("%s; port: not %s", miss, c)
		case miss != "":
			rule.Why = miss
		case all.Port && isAdmitted, !hasEntries && isAdmitted:
			rule.Why = "a rule before it admits the same"
		default:
			rule.Why = fmt.Sprintf("port: it admits the peer, but not %s", c)
		}
		list, first = append(list, rule), end
	}
	return list
}
