// Package firewall tells what the host's firewall does to the first packet of a connection that the host
// forwards. It reads the rules of nftables, and of both kinds of iptables, by the tools that are present,
// and changes nothing.
//
// It answers only what it knows for certain: a match that it does not understand may match or not.
//
// It imports no other package of this module.
package firewall

import (
	"cmp"
	"net/netip"
	"slices"
	"strings"
)

// Packet is the first packet of a TCP connection, of which the ports are not known.
type Packet struct {
	From, To netip.Addr
	In, Out  string // devices of the host
}

// answer is whether a packet matches.
type answer int

const (
	no answer = iota
	maybe
	yes
)

func answerOf(b bool) answer {
	if b {
		return yes
	}
	return no
}

// not is the answer to the negated question.
func (a answer) not() answer { return yes - a }

// action is what a rule does with a packet that matches.
type action struct {
	kind   kind
	target string // of jump and goto: a chain
}

type kind int

const (
	next   kind = iota // goes to the next rule
	accept             // ends this base chain
	drop               // ends the packet
	giveBack
	jump
	goTo
)

// rule returns what it does with a packet, and whether it does so.
type rule struct {
	text   string // names it in a message
	decide func(Packet) (answer, action)
}

// chain is a list of rules. Those with a hook are asked by the kernel.
type chain struct {
	ruleset  string // names whose chains those of jumps are
	name     string // names it in a message
	isBase   bool
	family   string // ip, ip6 or inet
	order    int    // of base chains: first the hook, then the priority
	isEarly  bool   // before the route is known
	policy   kind   // accept or drop
	rules    []rule
	manager  Manager
	position string // for commands that insert a rule: family, table and chain
}

// Rules are all rules that forwarded packets meet.
type Rules struct {
	chains map[string]*chain // by ruleset and name
	// Unread says what could not be read, and why.
	Unread []string
}

// Fate is what becomes of a packet.
type Fate int

// The fates.
const (
	Passes Fate = iota
	MayBeDropped
	IsDropped
)

// Verdict is the fate of a packet, by which rule or policy, and of whom it is.
type Verdict struct {
	Fate     Fate
	By       string
	Manager  Manager
	Position string // for commands that insert a rule before
}

// Judge returns what the rules do to a packet: the worst that any base chain does.
func (r *Rules) Judge(p Packet) Verdict {
	var base []*chain
	for _, c := range r.chains {
		if c.isBase && (c.family == "inet" || (c.family == "ip") == p.From.Is4()) {
			base = append(base, c)
		}
	}
	slices.SortFunc(base, func(a, b *chain) int { return cmp.Or(cmp.Compare(a.order, b.order), cmp.Compare(a.name, b.name)) })
	worst := Verdict{}
	for _, c := range base {
		if v := r.judgeChain(c, p); v.Fate > worst.Fate {
			worst = v
		}
	}
	return worst
}

func (r *Rules) judgeChain(c *chain, p Packet) Verdict {
	if c.isEarly {
		p.Out = ""
	}
	w := &walk{rules: r, packet: p}
	kind, by := w.chain(c, 0)
	if kind == next || kind == giveBack {
		kind, by = c.policy, "the policy of "+c.name
	}
	v := Verdict{By: by, Manager: c.manager, Position: c.position}
	switch {
	case kind == drop && w.spared:
		v.Fate = MayBeDropped
	case kind == drop:
		v.Fate = IsDropped
	default:
		return Verdict{}
	}
	return v
}

// walk is a packet's way through the chains.
type walk struct {
	rules  *Rules
	packet Packet
	spared bool // a rule that may match would have let the packet pass
	steps  int
}

// The kernel bounds the depth of jumps; the number of rules on all ways is bounded here.
const deepest, mostSteps = 32, 1 << 20

// chain returns what ends the packet's way in a chain, and by which rule. next means that nothing did.
func (w *walk) chain(c *chain, depth int) (kind, string) {
	if c == nil || depth > deepest {
		w.spared = true // not understood
		return next, ""
	}
	for _, rule := range c.rules {
		if w.steps++; w.steps > mostSteps {
			w.spared = true
			return next, ""
		}
		matches, do := rule.decide(w.packet)
		if matches == no {
			continue
		}
		end, by := do.kind, rule.text
		if do.kind == jump || do.kind == goTo {
			end, by = w.chain(w.rules.chains[c.ruleset+" "+do.target], depth+1)
			if end == giveBack || do.kind == jump && end == next {
				end = next
				if do.kind == goTo {
					end = giveBack
				}
			} else if do.kind == goTo && end == next {
				end = giveBack
			}
		}
		switch {
		case end == next:
		case matches == maybe:
			w.spared = w.spared || end != drop
		default:
			return end, by
		}
	}
	return next, ""
}

// ChainsLike returns the names of chains with a beginning, sorted.
func (r *Rules) ChainsLike(prefix string) (names []string) {
	for key := range r.chains {
		if name := key[strings.LastIndexByte(key, ' ')+1:]; strings.HasPrefix(name, prefix) {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}
