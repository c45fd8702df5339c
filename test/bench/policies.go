package main

import (
	"fmt"
	"net/netip"
	"strings"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// Variants whose pods have rules: the key policy, or the same as rules of nftables in the forward hook. All rules but
// the last are about other peers.

// policySizes are numbers of rules of each direction.
var policySizes = []int{1, 1000, 10000}

// policyVariants returns a variant of ebpfnet and one of ptp for each size.
func policyVariants() (all []variant) {
	for _, n := range policySizes {
		for _, v := range variantsOf(autoName, establishedName) {
			plugins := []plugin{{"policy": map[string]any{"ingress": policyRules("from", n), "egress": policyRules("to", n)}}}
			for key, value := range v.plugins[0] {
				plugins[0][key] = value
			}
			v.policy = true
			v.name, v.title = fmt.Sprintf("%s-policy-%d", v.name, n), fmt.Sprintf("%s, %s rules", v.title, testenv.Thousands(n))
			v.plugins = plugins
			all = append(all, v)
		}
		for _, v := range variantsOf(ptpName) {
			v.name, v.title = fmt.Sprintf("ptp-nft-policy-%d", n), fmt.Sprintf("ptp + nftables, %s rules", testenv.Thousands(n))
			v.reference = false
			v.rules = &ruleset{
				name: fmt.Sprintf("policy-%d", n), title: "rules for pods", text: func(f *ruleFamily, _ netip.Addr) string { return nftPolicy(f, n) }, restore: nftRestore,
				counters: []ruleCounter{{"nft list chain %s pods forward", `counter packets (\d+) `}},
			}
			all = append(all, v)
		}
	}
	return all
}

// policyPeer is another peer of a rule, which has no part in what is measured.
func policyPeer(f *ruleFamily, rule int) string {
	if f.bits == 32 {
		return fmt.Sprintf("198.18.%d.%d", rule>>8, rule&0xff)
	}
	return fmt.Sprintf("2001:2::%x", rule+1)
}

func policyRules(peers string, n int) (rules []any) {
	for i := range n - 1 {
		var list []any
		for _, f := range ruleFamilies {
			list = append(list, map[string]any{"cidr": fmt.Sprintf("%s/%d", policyPeer(f, i), f.bits)})
		}
		rules = append(rules, map[string]any{peers: list, "ports": []any{map[string]any{"protocol": "tcp", "port": 1000 + i}}})
	}
	return append(rules, map[string]any{
		peers:   measuredPeers(),
		"ports": []any{map[string]any{"protocol": "tcp"}, map[string]any{"protocol": "udp"}},
	})
}

// measuredPeers contain all addresses that traffic is measured with.
func measuredPeers() (peers []any) {
	for _, cidr := range []string{"10.0.0.0/8", "192.0.0.0/8", "203.0.113.0/24", "fd00::/8", "2001:db8::/32"} {
		peers = append(peers, map[string]any{"cidr": cidr})
	}
	return peers
}

// nftPolicy returns the rules of one family, as a user would write them.
func nftPolicy(f *ruleFamily, n int) string {
	var text strings.Builder
	fmt.Fprintf(&text, "table %s pods {\n\tchain forward {\n\t\ttype filter hook forward priority 0; policy drop;\n", f.table)
	text.WriteString("\t\tct state established,related counter accept\n")
	for i := range n - 1 {
		fmt.Fprintf(&text, "\t\t%s saddr %s tcp dport %d accept\n", f.table, policyPeer(f, i), 1000+i)
	}
	text.WriteString("\t\tmeta l4proto { tcp, udp } accept\n\t\tmeta l4proto { icmp, icmpv6 } accept\n\t}\n}\n")
	return text.String()
}
