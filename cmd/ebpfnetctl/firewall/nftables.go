package firewall

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// nftHooks are the hooks that forwarded packets meet, in their order.
var nftHooks = map[string]int{"prerouting": -1 << 20, "forward": 0, "postrouting": 1 << 20}

// nftObject is an element of what `nft -j list ruleset` prints: one of the fields is set.
type nftObject struct {
	Chain *struct {
		Family, Table, Name, Type, Hook, Policy string
		Prio                                    int
	}
	Rule *struct {
		Family, Table, Chain string
		Handle               int
		Expr                 []map[string]json.RawMessage
	}
	Set, Map *nftSet
}

type nftSet struct {
	Family, Table, Name string
	Elem                []json.RawMessage
}

// addNFTables adds the chains of a ruleset, but not of tables that skip names: those of iptables, which
// nft cannot print in full.
func (r *Rules) addNFTables(text []byte, skip func(family, table string) bool) error {
	var document struct{ NFTables []nftObject }
	if err := json.Unmarshal(text, &document); err != nil {
		return fmt.Errorf("read what nft prints: %w", err)
	}
	tables := map[string]map[string]*chain{}
	sets := map[string][]json.RawMessage{}
	for _, o := range document.NFTables {
		switch {
		case o.Chain != nil && !skip(o.Chain.Family, o.Chain.Table):
			key := o.Chain.Family + " " + o.Chain.Table
			if tables[key] == nil {
				tables[key] = map[string]*chain{}
			}
			order, isHook := nftHooks[o.Chain.Hook]
			tables[key]["nft "+key+" "+o.Chain.Name] = &chain{
				ruleset: "nft " + key, family: o.Chain.Family, order: order + o.Chain.Prio,
				name:    fmt.Sprintf("chain %s of table %s (nftables)", o.Chain.Name, key),
				isBase:  isHook && o.Chain.Type == "filter" && slices.Contains([]string{"ip", "ip6", "inet"}, o.Chain.Family),
				isEarly: o.Chain.Hook == "prerouting", position: key + " " + o.Chain.Name,
				policy: map[bool]kind{true: drop, false: accept}[o.Chain.Policy == "drop"],
			}
		case o.Set != nil:
			sets[o.Set.Family+" "+o.Set.Table+" @"+o.Set.Name] = o.Set.Elem
		case o.Map != nil:
			sets[o.Map.Family+" "+o.Map.Table+" @"+o.Map.Name] = o.Map.Elem
		}
	}
	for _, o := range document.NFTables {
		if o.Rule == nil {
			continue
		}
		key := o.Rule.Family + " " + o.Rule.Table
		if c := tables[key]["nft "+key+" "+o.Rule.Chain]; c != nil {
			reader := nftReader{sets: func(name string) []json.RawMessage { return sets[key+" "+name] }}
			text := fmt.Sprintf("the rule with handle %d of %s", o.Rule.Handle, c.name)
			c.rules = append(c.rules, rule{text, func(p Packet) (answer, action) { return reader.decide(p, o.Rule.Expr) }})
		}
	}
	for key, own := range tables {
		_, table, _ := strings.Cut(key, " ")
		r.add(Nft, table, own)
	}
	return nil
}

// nftReader reads the expressions of one table's rules.
type nftReader struct {
	sets func(name string) []json.RawMessage // the elements of @name
}

// decide reads the statements of a rule one after another.
func (n nftReader) decide(p Packet, statements []map[string]json.RawMessage) (matches answer, do action) {
	matches = yes
	for _, statement := range statements {
		for name, body := range statement {
			switch name {
			case "match":
				matches = min(matches, n.match(p, body))
			case "vmap":
				var found answer
				found, do = n.verdictMap(p, body)
				matches = min(matches, found)
			case "counter", "log", "notrack", "mangle", "comment", "masquerade", "snat", "dnat", "redirect", "flow", "ct helper", "ct timeout":
			default:
				var known bool
				if do, known = verdictOf(name, body); !known { // such as limit, or an extension of iptables
					matches = min(matches, maybe)
				}
			}
			if matches == no {
				return no, action{}
			}
		}
	}
	return matches, do
}

// verdictOf returns the action of a statement.
func verdictOf(name string, body json.RawMessage) (do action, known bool) {
	var to struct{ Target string }
	_ = json.Unmarshal(body, &to) // null where there is none
	kinds := map[string]kind{"accept": accept, "drop": drop, "reject": drop, "return": giveBack, "continue": next, "jump": jump, "goto": goTo}
	kind, known := kinds[name]
	return action{kind, to.Target}, known
}

// verdictMap finds the action for a packet. Where the key is not known, the packet may be accepted.
func (n nftReader) verdictMap(p Packet, body json.RawMessage) (answer, action) {
	var vmap struct{ Key, Data json.RawMessage }
	if json.Unmarshal(body, &vmap) != nil {
		return maybe, action{kind: accept}
	}
	field := fieldOf(p, vmap.Key)
	for _, element := range n.elements(vmap.Data) {
		var pair []json.RawMessage
		var verdict map[string]json.RawMessage
		if json.Unmarshal(element, &pair) != nil || len(pair) != 2 || json.Unmarshal(pair[1], &verdict) != nil {
			return maybe, action{kind: accept}
		}
		switch n.contains(field, pair[0]) {
		case maybe:
			return maybe, action{kind: accept}
		case yes:
			for name, body := range verdict {
				do, _ := verdictOf(name, body)
				return yes, do
			}
		}
	}
	return no, action{}
}

// match answers {"op": …, "left": …, "right": …}.
func (n nftReader) match(p Packet, body json.RawMessage) answer {
	var match struct {
		Op          string
		Left, Right json.RawMessage
	}
	if json.Unmarshal(body, &match) != nil {
		return maybe
	}
	found := n.contains(fieldOf(p, match.Left), match.Right)
	switch match.Op {
	case "==", "in":
		return found
	case "!=":
		if isAbsent(p, match.Left) {
			return no
		}
		return found.not()
	default: // < and the like
		return maybe
	}
}

// elements returns the members of {"set": […]}, of @name, or of a list, or the value itself.
func (n nftReader) elements(value json.RawMessage) (all []json.RawMessage) {
	var name string
	if json.Unmarshal(value, &name) == nil && name != "" && name[0] == '@' {
		return n.sets(name)
	}
	var set struct{ Set []json.RawMessage }
	if json.Unmarshal(value, &set) == nil && set.Set != nil {
		return set.Set
	}
	if json.Unmarshal(value, &all) == nil {
		return all
	}
	return []json.RawMessage{value}
}

// contains returns whether a packet's field has one of the values.
func (n nftReader) contains(f field, values json.RawMessage) answer {
	best := no
	for _, value := range n.elements(values) {
		var wrapped struct{ Elem struct{ Val json.RawMessage } }
		if json.Unmarshal(value, &wrapped) == nil && wrapped.Elem.Val != nil {
			value = wrapped.Elem.Val
		}
		best = max(best, n.equals(f, value))
	}
	return best
}

func (n nftReader) equals(f field, value json.RawMessage) answer {
	var concat struct{ Concat []json.RawMessage }
	if json.Unmarshal(value, &concat) == nil && concat.Concat != nil && len(concat.Concat) == len(f.parts) {
		all := yes
		for i, part := range f.parts {
			all = min(all, n.equals(part, concat.Concat[i]))
		}
		return all
	}
	if f.is == nil {
		return maybe
	}
	return f.is(value)
}

// field is a field of a packet.
type field struct {
	is    func(value json.RawMessage) answer // nil: not known
	parts []field                            // of a concatenation
}

// fieldOf finds the field that an expression means.
func fieldOf(p Packet, left json.RawMessage) field {
	var e struct {
		Meta    struct{ Key string }
		Payload struct{ Protocol, Field string }
		CT      struct{ Key string }
		Concat  []json.RawMessage
	}
	if json.Unmarshal(left, &e) != nil {
		return field{}
	}
	var f field
	for _, part := range e.Concat {
		f.parts = append(f.parts, fieldOf(p, part))
	}
	if isAbsent(p, left) {
		return field{is: func(json.RawMessage) answer { return no }}
	}
	names := map[string]string{"nfproto": "ipv4", "protocol": "ip", "l4proto": "tcp"}
	if p.From.Is6() {
		names["nfproto"], names["protocol"] = "ipv6", "ip6"
	}
	switch key := e.Meta.Key; {
	case key == "iifname" || key == "iif":
		f.is = func(v json.RawMessage) answer { return isDevice(p.In, textOf(v), "*") }
	case key == "oifname" || key == "oif":
		f.is = func(v json.RawMessage) answer { return isDevice(p.Out, textOf(v), "*") }
	case names[key] != "":
		f.is = func(v json.RawMessage) answer { return answerOf(textOf(v) == names[key]) }
	case e.CT.Key == "state":
		f.is = func(v json.RawMessage) answer { return answerOf(textOf(v) == "new") }
	case e.CT.Key == "status":
		f.is = func(json.RawMessage) answer { return no }
	case e.Payload.Field == "saddr":
		f.is = func(v json.RawMessage) answer { return hasAddress(p.From, v) }
	case e.Payload.Field == "daddr":
		f.is = func(v json.RawMessage) answer { return hasAddress(p.To, v) }
	case e.Payload.Field == "protocol" || e.Payload.Field == "nexthdr":
		f.is = func(v json.RawMessage) answer { return answerOf(textOf(v) == "tcp") }
	}
	return f
}

// isAbsent returns whether a packet has no such header at all.
func isAbsent(p Packet, left json.RawMessage) bool {
	var e struct{ Payload struct{ Protocol string } }
	_ = json.Unmarshal(left, &e) // then it is none
	switch e.Payload.Protocol {
	case "ip":
		return p.From.Is6()
	case "ip6":
		return p.From.Is4()
	case "udp", "icmp", "icmpv6", "sctp", "dccp", "udplite", "esp", "ah", "igmp", "arp":
		return true
	}
	return false
}

func textOf(value json.RawMessage) (text string) {
	_ = json.Unmarshal(value, &text) // numbers are no names
	return text
}

// hasAddress returns whether a value is an address, its prefix, or a range with it.
func hasAddress(addr netip.Addr, value json.RawMessage) answer {
	var v struct {
		Prefix struct {
			Addr string
			Len  int
		}
		Range []string
	}
	if text := textOf(value); text != "" {
		return inPrefix(addr, text)
	}
	if json.Unmarshal(value, &v) != nil {
		return maybe
	}
	if v.Prefix.Addr != "" {
		return inPrefix(addr, fmt.Sprintf("%s/%d", v.Prefix.Addr, v.Prefix.Len))
	}
	if len(v.Range) == 2 {
		first, err := netip.ParseAddr(v.Range[0])
		last, errLast := netip.ParseAddr(v.Range[1])
		if err == nil && errLast == nil {
			return answerOf(first.Compare(addr) <= 0 && addr.Compare(last) <= 0)
		}
	}
	return maybe
}
