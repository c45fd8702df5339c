package firewall

import (
	"fmt"
	"net/netip"
	"os"
	"strings"
	"testing"
)

var (
	out4 = Packet{netip.MustParseAddr("10.88.0.9"), netip.MustParseAddr("203.0.113.1"), "ebpf0123456789a", "eth0"}
	in4  = Packet{out4.To, out4.From, out4.Out, out4.In}
	out6 = Packet{netip.MustParseAddr("fd00:88::9"), netip.MustParseAddr("3fff::1"), "ebpf0123456789a", "eth0"}
)

// TestIPTables judges rules as iptables-save prints them.
func TestIPTables(t *testing.T) {
	const dropping = "*filter\n:INPUT DROP [0:0]\n:FORWARD DROP [0:0]\n"

	for name, test := range map[string]struct {
		rules  string
		packet Packet
		want   Fate
		by     string
	}{
		"nothing":       {"*filter\n:FORWARD ACCEPT [0:0]\nCOMMIT\n", out4, Passes, ""},
		"INPUT":         {"*filter\n:INPUT DROP [0:0]\n:FORWARD ACCEPT [0:0]\n", out4, Passes, ""},
		"policy":        {dropping, out4, IsDropped, "the policy of chain FORWARD of table filter (iptables)"},
		"other family":  {dropping, out6, Passes, ""},
		"established":   {dropping + "-A FORWARD -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT\n", out4, IsDropped, "policy"},
		"new":           {dropping + "-A FORWARD -m conntrack --ctstate NEW -j ACCEPT\n", out4, Passes, ""},
		"our subnet":    {dropping + "-A FORWARD -s 10.88.0.0/16 -j ACCEPT\n", out4, Passes, ""},
		"not back":      {dropping + "-A FORWARD -s 10.88.0.0/16 -j ACCEPT\n", in4, IsDropped, "policy"},
		"other subnet":  {dropping + "-A FORWARD ! -s 10.88.0.0/16 -j ACCEPT\n", out4, IsDropped, "policy"},
		"their device":  {dropping + "-A FORWARD -o docker0 -j ACCEPT\n-A FORWARD -i docker0 ! -o docker0 -j ACCEPT\n", out4, IsDropped, "policy"},
		"our devices":   {dropping + "-A FORWARD -i ebpf+ -j ACCEPT\n", out4, Passes, ""},
		"a rule":        {"*filter\n:FORWARD ACCEPT [0:0]\n-A FORWARD -i ebpf+ -j REJECT --reject-with icmp-port-unreachable\n", out4, IsDropped, "-A FORWARD -i ebpf+ -j REJECT"},
		"a set":         {dropping + "-A FORWARD -m set --match-set ours src -j ACCEPT\n", out4, MayBeDropped, "policy"},
		"may drop":      {"*filter\n:FORWARD ACCEPT [0:0]\n-A FORWARD -m limit --limit 1/s -j DROP\n", out4, Passes, ""},
		"a port":        {dropping + "-A FORWARD -p tcp -m tcp --dport 80 -j ACCEPT\n", out4, MayBeDropped, "policy"},
		"udp":           {dropping + "-A FORWARD -p udp -m udp --dport 53 -j ACCEPT\n", out4, IsDropped, "policy"},
		"jump, return":  {dropping + ":U - [0:0]\n-A FORWARD -j U\n-A U -j RETURN\n-A U -j ACCEPT\n", out4, IsDropped, "policy"},
		"jump, accept":  {dropping + ":U - [0:0]\n-A FORWARD -j U\n-A U -s 10.88.0.9/32 -j ACCEPT\n", out4, Passes, ""},
		"jump, drop":    {"*filter\n:FORWARD ACCEPT [0:0]\n:U - [0:0]\n-A FORWARD -j U\n-A U -j DROP\n", out4, IsDropped, "-A U -j DROP"},
		"goto":          {dropping + ":U - [0:0]\n-A FORWARD -g U\n-A FORWARD -j ACCEPT\n-A U -j RETURN\n", out4, IsDropped, "policy"},
		"extension":     {dropping + "-A FORWARD -j EXTENSION\n", out4, MayBeDropped, "policy"},
		"log":           {dropping + "-A FORWARD -j LOG --log-prefix \"-j ACCEPT \"\n", out4, IsDropped, "policy"},
		"comment":       {dropping + "-A FORWARD -m comment --comment \"a \\\"b\\\" -s 1.2.3.4\" -j ACCEPT\n", out4, Passes, ""},
		"loop":          {dropping + ":U - [0:0]\n-A FORWARD -j U\n-A U -j U\n", out4, MayBeDropped, "policy"},
		"raw":           {"*raw\n:PREROUTING ACCEPT [0:0]\n-A PREROUTING -s 10.0.0.0/8 -j DROP\n", out4, IsDropped, "-A PREROUTING"},
		"raw, route":    {"*raw\n:PREROUTING DROP [0:0]\n-A PREROUTING -o eth1 -j ACCEPT\n", out4, MayBeDropped, "policy"},
		"nat":           {"*nat\n:PREROUTING DROP [0:0]\n:POSTROUTING DROP [0:0]\n", out4, Passes, ""},
		"kube-proxy":    {dropping + ":K - [0:0]\n-A FORWARD -j K\n-A K -m conntrack --ctstate INVALID -j DROP\n-A K -m mark --mark 0x4000/0x4000 -j ACCEPT\n", out4, MayBeDropped, "policy"},
		"module, later": {dropping + "-A FORWARD -i other0 -m set --match-set ours src -j ACCEPT\n", out4, IsDropped, "policy"},
	} {
		r := &Rules{chains: map[string]*chain{}}
		r.addIPTables(IPTables, "ip", test.rules)
		if got := r.Judge(test.packet); got.Fate != test.want || !strings.Contains(got.By, test.by) {
			t.Errorf("%s: got %d by %q, want %d by %q", name, got.Fate, got.By, test.want, test.by)
		}
	}
}

// TestNFTables judges rulesets as `nft -j list ruleset` of nftables 1.0.6 has printed them.
func TestNFTables(t *testing.T) {
	for _, test := range []struct {
		file    string
		packet  Packet
		want    Fate
		by      string
		manager Manager
	}{
		{"accepting", out4, Passes, "", ""},
		{"accepting", out6, Passes, "", ""},
		{"dropping", out4, IsDropped, "the policy of chain forward of table inet fw (nftables)", Nft},
		{"dropping", out6, IsDropped, "policy", Nft},
		{"sets", out4, Passes, "", ""},
		{"sets", in4, IsDropped, "the rule with handle", Nft},
		{"sets", out6, MayBeDropped, "policy", Nft},
		{"firewalld", out4, IsDropped, "the rule with handle", Firewalld},
	} {
		text, err := os.ReadFile("testdata/" + test.file + ".json")
		if err != nil {
			t.Fatal(err)
		}
		r := &Rules{chains: map[string]*chain{}}
		if err := r.addNFTables(text, func(string, string) bool { return false }); err != nil {
			t.Fatal(err)
		}
		got := r.Judge(test.packet)
		if got.Fate != test.want || !strings.Contains(got.By, test.by) || got.Manager != test.manager {
			t.Errorf("%s, from %s: got %+v, want %d by %q, %s", test.file, test.packet.From, got, test.want, test.by, test.manager)
		}
	}
}

// TestManyWays has chains that jump twice to the next: more ways than anybody can go.
func TestManyWays(t *testing.T) {
	text := "*filter\n:FORWARD DROP [0:0]\n-A FORWARD -j C0\n"
	for n := range 30 {
		text += fmt.Sprintf(":C%d - [0:0]\n-A C%d -j C%d\n-A C%d -j C%d\n", n, n, n+1, n, n+1)
	}
	r := &Rules{chains: map[string]*chain{}}
	r.addIPTables(IPTables, "ip", text+":C30 - [0:0]\n")
	if got := r.Judge(out4); got.Fate != MayBeDropped {
		t.Errorf("got %+v, want that it may be dropped", got)
	}
}

// TestAccept names the command for each keeper of rules.
func TestAccept(t *testing.T) {
	v4, v6 := netip.MustParsePrefix("10.88.0.0/16"), netip.MustParsePrefix("fd00:88::/64")
	for _, test := range []struct {
		chains, want string
		subnet       netip.Prefix
	}{
		{"", "iptables -t filter -I FORWARD -s 10.88.0.0/16 -j ACCEPT", v4},
		{"", "ip6tables -t filter -I FORWARD -s fd00:88::/64 -j ACCEPT", v6},
		{":DOCKER-USER - [0:0]\n", "iptables -I DOCKER-USER -s 10.88.0.0/16", v4},
		{":DOCKER-USER - [0:0]\n", "ip6tables -I DOCKER-USER -s fd00:88::/64", v6},
		{":ufw-user-forward - [0:0]\n", "ufw route allow from 10.88.0.0/16", v4},
	} {
		r := &Rules{chains: map[string]*chain{}}
		r.addIPTables(IPTables, "ip", "*filter\n:FORWARD DROP [0:0]\n"+test.chains)
		if got := r.Judge(out4).Accept(test.subnet); !strings.HasPrefix(got, test.want) {
			t.Errorf("%q: got %q, want %q", test.chains, got, test.want)
		}
	}
}

// FuzzRules reads anything.
func FuzzRules(f *testing.F) {
	f.Add([]byte(`{"nftables": [{"chain": {"family": "inet", "table": "t", "name": "c", "type": "filter", "hook": "forward", "policy": "drop"}},
		{"rule": {"family": "inet", "table": "t", "chain": "c", "expr": [{"vmap": {"key": {"ct": {"key": "state"}}, "data": {"set": [["new", {"jump": {"target": "c"}}]]}}}]}}]}`))
	f.Add([]byte("*filter\n:FORWARD DROP [0:0]\n-A FORWARD ! -s \"10.0.0.0/8 -j\n-A FORWARD -g FORWARD\n"))
	f.Add([]byte("\"\"\n*\n:\n-A\n"))
	f.Fuzz(func(t *testing.T, text []byte) {
		r := &Rules{chains: map[string]*chain{}}
		r.addIPTables(IPTables, "ip", string(text))
		_ = r.addNFTables(text, func(string, string) bool { return false }) // most of it is none
		r.Judge(out4)
		r.Judge(out6)
	})
}
