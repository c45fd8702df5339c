package firewall

import (
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// TestForward reads rulesets as `nft -j list ruleset` of nftables 1.0.6 prints them.
func TestForward(t *testing.T) {
	const (
		chain = `{"chain": {"family": "ip", "table": "filter", "name": "FORWARD", "hook": "forward", "prio": 0, "policy": "accept"}},`
		rule  = chain + `{"rule": {"family": "ip", "table": "filter", "chain": "FORWARD", "handle": 7, "expr": [{"counter": {}}, `
	)
	for text, want := range map[string]string{
		`{"chain": {"family": "inet", "table": "fw", "name": "c", "hook": "input", "prio": 0, "policy": "drop"}}`:     "",
		`{"chain": {"family": "bridge", "table": "fw", "name": "c", "hook": "forward", "prio": 0, "policy": "drop"}}`: "",
		`{"chain": {"family": "inet", "table": "fw", "name": "c", "hook": "forward", "prio": -5, "policy": "drop"}}`:  "chain c of table inet fw (nftables, priority -5): its policy is drop",
		rule + `{"drop": null}]}}`:                               "chain FORWARD of table ip filter (nftables, priority 0): its rule with handle 7 matches all packets",
		rule + `{"reject": {"type": "icmp"}}]}}`:                 "chain FORWARD of table ip filter (nftables, priority 0): its rule with handle 7 matches all packets",
		rule + `{"xt": {"type": "target", "name": "REJECT"}}]}}`: "chain FORWARD of table ip filter (nftables, priority 0): its rule with handle 7 matches all packets",
		rule + `{"match": {}}, {"drop": null}]}}`:                "chain FORWARD of table ip filter (nftables, priority 0): ",
		rule + `{"accept": null}]}}`:                             "chain FORWARD of table ip filter (nftables, priority 0): ",
	} {
		r := &Rules{}
		err := r.addNFTables([]byte(`{"nftables": [` + text + `]}`))
		got := ""
		for _, c := range r.Forward {
			got += c.String() + ": " + c.Drops
		}
		if err != nil || got != want {
			t.Errorf("%s: got %q (%v), want %q", text, got, err, want)
		}
	}
}

// TestAccept wants the command for the chain.
func TestAccept(t *testing.T) {
	v4, v6 := netip.MustParsePrefix("10.88.0.0/16"), netip.MustParsePrefix("fd00:88::/64")
	for _, test := range []struct {
		table  string
		subnet netip.Prefix
		want   string
	}{
		{"fw", v6, "nft insert rule inet fw FORWARD ip6 saddr fd00:88::/64 accept && nft insert"},
		{"filter", v4, "iptables -I FORWARD -s 10.88.0.0/16 -j ACCEPT && iptables -I FORWARD -d"},
		{"filter", v6, "ip6tables -I FORWARD -s fd00:88::/64"},
		{"firewalld", v4, "firewall-cmd --permanent --zone=trusted --add-source=10.88.0.0/16"},
	} {
		got := Chain{Family: "inet", Table: test.table, Name: "FORWARD"}.Accept(test.subnet)
		if !strings.HasPrefix(got, test.want) {
			t.Errorf("%s: got %q, want %q", test.table, got, test.want)
		}
	}
}

// TestDropsOf reads what `nft monitor trace` prints.
func TestDropsOf(t *testing.T) {
	got := dropsOf(strings.Split(`trace id 1 inet ebpfnet_trace output packet: oif "lo" ip saddr 10.88.0.2 ip daddr 192.0.2.2 ip dscp cs0
trace id 1 inet ebpfnet_trace output rule ip daddr 10.88.0.2 meta nftrace set 1 (verdict continue)
trace id 1 inet ebpfnet_trace output policy accept 
trace id 1 inet fw out rule ip daddr 192.0.2.2 counter packets 0 bytes 0 reject (verdict drop)
trace id 2 inet fw out packet: iif "eth0" ip6 saddr fd00:88::2 ip6 daddr 3fff::1 ip6 dscp cs0
trace id 2 inet fw out policy drop 
trace id 2 inet fw out policy drop `, "\n"))
	want := []string{
		"chain out of table inet fw drops ip saddr 10.88.0.2 ip daddr 192.0.2.2: rule ip daddr 192.0.2.2 counter packets 0 bytes 0 reject",
		"chain out of table inet fw drops ip6 saddr fd00:88::2 ip6 daddr 3fff::1: policy drop",
	}
	if !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

// TestReadHanging has a tool that gives no answer, with a child that keeps its output open: it ends and is named.
func TestReadHanging(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "nft"), []byte("#!/bin/sh\nsleep 1000; true\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
	defer func(before time.Duration) { patience = before }(patience)
	patience = time.Second

	if r := Read(t.Context()); len(r.Unread) != 1 || r.Unread[0] != "nft: no answer within 1s" {
		t.Errorf("got %q, want the one that hangs", r.Unread)
	}
}
