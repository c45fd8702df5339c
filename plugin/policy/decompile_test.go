package policy

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/ebpfnet/ebpfnet/maps"
)

// TestDecompile requires that a policy comes back in its own words, and that a verdict names its rules.
func TestDecompile(t *testing.T) {
	p, err := Parse([]byte(`{"egress": [
		{"to": [{"cidr": "10.0.0.0/8", "except": ["10.1.0.0/16", "10.2.0.0/16"]}, {"cidr": "10.1.2.0/24"}, {"cidr": "::/0"}, {"network": "backend"}],
		 "ports": [{"port": 80, "endPort": 90}, {"port": 91}, {"protocol": "sctp"}]},
		{"to": [{"cidr": "10.1.2.3/32"}], "ports": [{"protocol": "udp", "port": 53}]},
		{}]}`))
	if err != nil {
		t.Fatal(err)
	}
	_, egress := p.Compile("pods")
	got := ""
	for _, rule := range Decompile(asEntries(egress), Places(true), nameOf) {
		got += fmt.Sprintln(rule.Rule, rule.Peers, rule.Ports)
	}
	const want = `policy.egress[0] [network backend 10.0.0.0/8 except 10.1.0.0/16 10.2.0.0/16 10.1.2.0/24 ::/0] [80-91/tcp sctp]
policy.egress[1] [10.1.2.3/32] [53/udp]
policy.egress[2] [] []
`
	if got != want {
		t.Errorf("got\n%swant\n%s", got, want)
	}
	egress.Rules = egress.Rules[1:] // without the last rule
	dns := maps.Peer{Addr: netip.MustParseAddr("10.1.2.3")}
	for want, c := range map[string]Connection{
		"true policy.egress[1] admits it":                        {dns, maps.UDP, 53},
		"false policy.egress[0] admits the peer, but not tcp 53": {dns, maps.TCP, 53},
		"false policy.egress[1] admits udp 53, but not the peer": {maps.Peer{}, maps.UDP, 53},
		"false no rule admits the peer, or icmp":                 {maps.Peer{}, maps.ICMP, 0},
		"true the own node is admitted":                          {maps.Peer{Host: true}, maps.ICMP, 0},
		"true the container itself is admitted":                  {maps.Peer{Self: true}, maps.ICMP, 0},
	} {
		if admitted, why := Explain(egress, Places(true), c); fmt.Sprint(admitted, " ", why) != want {
			t.Errorf("%v: got %v %s, want %s", c, admitted, why, want)
		}
	}
}

// decompiled returns the entries of a rule set as a policy with one direction.
func decompiled(set *maps.RuleSet, key string) values {
	rules := []values{}
	for _, d := range Decompile(asEntries(set), Places(key == "egress"), nameOf) {
		peers, ports := []values{}, []values{}
		for _, p := range d.Peers {
			peer := values{"network": p.Network}
			if p.CIDR != "" {
				peer = values{"cidr": p.CIDR, "except": strings.Fields(strings.Trim(fmt.Sprint(p.Except), "[]"))}
			}
			peers = append(peers, peer)
		}
		for _, p := range d.Ports {
			written := values{"protocol": p.Protocol}
			if p.Port != 0 {
				written["port"], written["endPort"] = int(p.Port), int(max(p.Port, p.EndPort))
			}
			ports = append(ports, written)
		}
		rules = append(rules, values{fromOrTo[key]: peers, "ports": ports})
	}
	return values{key: rules, "host": set.Host}
}

// asEntries returns a rule set as it is read from the maps: a range of ports is a rule for each prefix of it.
func asEntries(set *maps.RuleSet) *maps.RuleSet {
	split := &maps.RuleSet{Blocks: set.Blocks}
	for _, rule := range set.Rules {
		for _, p := range maps.PortPrefixes(rule.First, rule.Last) {
			rule.First, rule.Last = p.Port, p.Port|uint16(1<<(16-p.Bits)-1)
			split.Rules = append(split.Rules, rule)
		}
	}
	split.Normalize()
	return split
}

func nameOf(network maps.Network) string {
	if network == maps.NetworkToken("pods") {
		return "pods"
	}
	return "backend"
}
