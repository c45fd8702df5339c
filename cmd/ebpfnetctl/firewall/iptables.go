package firewall

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// iptablesHooks are the base chains that forwarded packets meet, in their order.
var iptablesHooks = map[string]int{"PREROUTING": -1 << 20, "FORWARD": 0, "POSTROUTING": 1 << 20}

// addIPTables adds what iptables-save has printed. tool and family name whose rules they are.
func (r *Rules) addIPTables(tool Manager, family, text string) {
	own := map[string]*chain{}
	table := ""
	at := func(name string) *chain {
		key := string(tool) + " " + family + " " + table
		c := own[key+" "+name]
		if c == nil {
			c = &chain{ruleset: key, family: family, position: table + " -I " + name,
				name: fmt.Sprintf("chain %s of table %s (%s)", name, table, tool)}
			own[key+" "+name] = c
		}
		return c
	}
	for line := range strings.Lines(text) {
		words := splitWords(strings.TrimSpace(line))
		switch {
		case len(words) == 0 || words[0] == "":
		case words[0][0] == '*':
			table = words[0][1:]
		case words[0][0] == ':' && len(words) > 1:
			c := at(words[0][1:])
			order, isHook := iptablesHooks[words[0][1:]]
			c.order, c.isBase, c.isEarly = order, isHook && table != "nat", words[0] == ":PREROUTING"
			c.policy = map[bool]kind{true: drop, false: accept}[words[1] == "DROP"]
		case words[0] == "-A" && len(words) > 1:
			c := at(words[1])
			c.rules = append(c.rules, iptablesRule(fmt.Sprintf("rule %s (%s)", strings.TrimSpace(line), tool), words[2:]))
		}
	}
	r.add(tool, "", own)
}

// add adds chains of one tool.
func (r *Rules) add(tool Manager, table string, own map[string]*chain) {
	manager := managerOf(tool, table, own)
	for key, c := range own {
		c.manager = manager
		r.chains[key] = c
	}
}

// splitWords splits a line of iptables-save, which quotes comments and the like.
func splitWords(line string) (words []string) {
	var word strings.Builder
	inQuotes, begun, escaped := false, false, false
	for _, c := range line {
		switch {
		case escaped:
			word.WriteRune(c)
			escaped = false
		case c == '\\' && inQuotes:
			escaped = true
		case c == '"':
			inQuotes, begun = !inQuotes, true
		case c == ' ' && !inQuotes:
			if begun {
				words = append(words, word.String())
			}
			word.Reset()
			begun = false
		default:
			word.WriteRune(c)
			begun = true
		}
	}
	if begun {
		words = append(words, word.String())
	}
	return words
}

// iptablesMatch returns whether a packet matches one option of a rule.
type iptablesMatch func(p Packet, value string) answer

var iptablesMatches = map[string]iptablesMatch{
	"-s": func(p Packet, value string) answer { return inPrefix(p.From, value) },
	"-d": func(p Packet, value string) answer { return inPrefix(p.To, value) },
	"-i": func(p Packet, value string) answer { return isDevice(p.In, value, "+") },
	"-o": func(p Packet, value string) answer { return isDevice(p.Out, value, "+") },
	"-p": func(_ Packet, value string) answer {
		return answerOf(slices.Contains([]string{"tcp", "all", "6", "0"}, value))
	},
	"--ctstate":    isNew,
	"--state":      isNew,
	"--ctstatus":   func(_ Packet, value string) answer { return answerOf(value == "NONE") },
	"--comment":    func(Packet, string) answer { return yes },
	"-m":           func(Packet, string) answer { return yes }, // its options follow, and those without are not known
	"--mac-source": func(Packet, string) answer { return maybe },
}

func isNew(_ Packet, value string) answer {
	return answerOf(slices.Contains(strings.Split(value, ","), "NEW"))
}

// bareMatches are modules whose options are all above, or that have none that matters.
var bareMatches = []string{"conntrack", "state", "comment", "tcp", "udp", "icmp", "icmp6", "ipv6-icmp", "sctp"}

// iptablesRule parses the options of a rule.
func iptablesRule(text string, words []string) rule {
	type option struct {
		match   iptablesMatch
		value   string
		negated bool
	}
	var options []option
	do, unclear := action{}, no
	negated := false
	for i := 0; i < len(words); i++ {
		word := words[i]
		value := ""
		if i+1 < len(words) {
			value = words[i+1]
		}
		switch match := iptablesMatches[word]; {
		case word == "!":
			negated = true
			continue
		case word == "-j" || word == "-g":
			var mayMiss bool
			do, mayMiss = iptablesTarget(word, value)
			if mayMiss {
				unclear = maybe
			}
			i = len(words) // what follows belongs to the target
		case word == "-m" && !slices.Contains(bareMatches, value):
			unclear = maybe
			i++
		case match != nil:
			options = append(options, option{match, value, negated})
			i++
		case strings.HasPrefix(word, "-"):
			unclear = maybe
		}
		negated = false
	}
	return rule{text, func(p Packet) (answer, action) {
		matches := yes
		if unclear == maybe {
			matches = maybe
		}
		for _, o := range options {
			one := o.match(p, o.value)
			if o.negated {
				one = one.not()
			}
			matches = min(matches, one)
		}
		return matches, do
	}}
}

// iptablesTarget returns what a rule does, and whether that is not certain.
func iptablesTarget(option, name string) (do action, unclear bool) {
	switch name {
	case "ACCEPT":
		return action{kind: accept}, false
	case "DROP", "REJECT":
		return action{kind: drop}, false
	case "RETURN":
		return action{kind: giveBack}, false
	case "QUEUE", "NFQUEUE", "SYNPROXY":
		return action{kind: drop}, true
	}
	if slices.Contains(goingOn, name) {
		return action{}, false
	}
	return action{map[string]kind{"-j": jump, "-g": goTo}[option], name}, false
}

// goingOn are the targets after which the next rule follows.
var goingOn = []string{
	"LOG", "NFLOG", "ULOG", "TRACE", "MARK", "CONNMARK", "CONNSECMARK", "SECMARK", "CT", "NOTRACK", "TCPMSS", "TOS", "DSCP", "TTL", "HL",
	"CHECKSUM", "CLASSIFY", "SET", "AUDIT", "HMARK", "IDLETIMER", "LED", "RATEEST", "TEE", "TCPOPTSTRIP", "ECN",
	"MASQUERADE", "SNAT", "DNAT", "REDIRECT", "NETMAP",
}

// inPrefix returns whether an address is in a prefix, or is the address itself.
func inPrefix(addr netip.Addr, text string) answer {
	if !strings.Contains(text, "/") {
		other, err := netip.ParseAddr(text)
		if err != nil {
			return maybe
		}
		return answerOf(addr == other)
	}
	prefix, err := netip.ParsePrefix(text)
	if err != nil { // such as 10.0.0.0/255.0.255.0
		return maybe
	}
	return answerOf(prefix.Contains(addr))
}

// isDevice returns whether a device has a name, which may end in a wildcard.
func isDevice(device, name, wildcard string) answer {
	if device == "" {
		return maybe
	}
	if begin, ok := strings.CutSuffix(name, wildcard); ok {
		return answerOf(strings.HasPrefix(device, begin))
	}
	return answerOf(device == name)
}
