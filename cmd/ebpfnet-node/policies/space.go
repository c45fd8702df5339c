package policies

import (
	"slices"

	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/policy"
)

// space is a set of protocols with their ports, as numbers: those of TCP come first, then those of UDP and of SCTP. The last
// number stands for all other protocols. Its spans are sorted, and do not touch.
type space []span

type span struct{ first, last int }

var (
	withPorts  = [...]maps.Protocol{maps.TCP, maps.UDP, maps.SCTP}
	everything = space{{0, others}}
)

const (
	portCount = lastPort + 1
	others    = 3 * portCount // len(withPorts)
)

// spaceOf returns the numbers of ports.
func spaceOf(ports []policy.Ports) (s space) {
	spans := make(space, 0, len(ports))
	for _, p := range ports {
		first := portCount * slices.Index(withPorts[:], p.Protocol)
		spans = append(spans, span{first + int(p.First), first + int(p.Last)})
	}
	slices.SortFunc(spans, func(a, b span) int { return a.first - b.first })
	for _, next := range spans {
		if last := len(s) - 1; last >= 0 && next.first <= s[last].last+1 {
			s[last].last = max(s[last].last, next.last)
		} else {
			s = append(s, next)
		}
	}
	return s
}

func (s space) complement() (c space) {
	next := 0
	for _, out := range append(slices.Clone(s), span{others + 1, others + 1}) {
		if next < out.first {
			c = append(c, span{next, out.first - 1})
		}
		next = out.last + 1
	}
	return c
}

func (s space) and(o space) (common space) {
	for i, j := 0, 0; i < len(s) && j < len(o); {
		if both := (span{max(s[i].first, o[j].first), min(s[i].last, o[j].last)}); both.first <= both.last {
			common = append(common, both)
		}
		if s[i].last < o[j].last {
			i++
		} else {
			j++
		}
	}
	return common
}

func (s space) minus(o space) space { return s.and(o.complement()) }
func (s space) plus(o space) space  { return s.complement().and(o.complement()).complement() }

func (s space) isEverything() bool { return slices.Equal(s, everything) }
func (s space) hasOthers() bool    { return len(s) > 0 && s[len(s)-1].last == others }

// ports returns the ports, without other protocols.
func (s space) ports() (ports []policy.Ports) {
	for i, protocol := range withPorts {
		first := portCount * i
		for _, p := range s.and(space{{first, first + lastPort}}) {
			ports = append(ports, policy.Ports{Protocol: protocol, First: uint16(p.first - first), Last: uint16(p.last - first)})
		}
	}
	return ports
}
