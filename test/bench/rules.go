package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strings"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// ruleset are a node's firewall rules beside those of its network plugin.
type ruleset struct {
	name, title string
	// services rulesets have services; the server is the endpoint of the measured one.
	services bool
	// text returns the rules of a family, for the standard input of restore.
	text    func(f *ruleFamily, server netip.Addr) string
	restore func(*ruleFamily) []string
	// counters are rules that each connection has passed: commands that print them, and how they print the number.
	counters []ruleCounter
}

type ruleCounter struct{ command, pattern string }

// ruleFamily has what differs between the families.
type ruleFamily struct {
	testenv.Family
	iptables, table, addrType string
	bits                      int
	service                   func(service int) netip.Addr
	endpoint                  func(service, endpoint int) netip.Addr
	cluster                   netip.Prefix
}

var ruleFamilies = []*ruleFamily{
	{
		testenv.IPv4, "iptables", "ip", "ipv4_addr", 32,
		func(s int) netip.Addr { return netip.AddrFrom4([4]byte{10, 96, byte(s >> 8), byte(s)}) },
		func(s, e int) netip.Addr { return netip.AddrFrom4([4]byte{10, byte(97 + e), byte(s >> 8), byte(s)}) },
		clusterSubnets[0],
	},
	{
		testenv.IPv6, "ip6tables", "ip6", "ipv6_addr", 128,
		func(s int) netip.Addr { return netip.MustParseAddr(fmt.Sprintf("fd00:96::%x", s+1)) },
		func(s, e int) netip.Addr { return netip.MustParseAddr(fmt.Sprintf("fd00:%d::%x", 97+e, s+1)) },
		clusterSubnets[1],
	},
}

func rulesOf(f testenv.Family) *ruleFamily {
	return ruleFamilies[slices.IndexFunc(ruleFamilies, func(r *ruleFamily) bool { return r.Name == f.Name })]
}

// kubeServices is the number of services with two endpoints each, beside the measured one.
var kubeServices = 1000

// maxServices is what the addresses of IPv4 suffice for.
const maxServices = 1<<16 - 1

// kubeService is a port of a service. Its number is unique.
type kubeService struct {
	number    int
	protocol  string
	addr      netip.Addr
	endpoints []netip.AddrPort
}

// services returns kube-proxy's services. The last ones are measured.
func (f *ruleFamily) services(server netip.Addr) (all []kubeService) {
	for s := range kubeServices {
		all = append(all, kubeService{
			s, "tcp", f.service(s), []netip.AddrPort{netip.AddrPortFrom(f.endpoint(s, 0), 8080), netip.AddrPortFrom(f.endpoint(s, 1), 8080)},
		})
	}
	for _, protocol := range []string{"tcp", "udp"} {
		all = append(all, kubeService{
			len(all), protocol, f.service(kubeServices), []netip.AddrPort{netip.AddrPortFrom(server, serverPort)},
		})
	}
	return all
}

var rulesets = []*ruleset{
	{
		name: "kube-iptables", title: "kube-proxy's tables (iptables)", services: true, text: kubeIPTables, restore: iptablesRestore,
		counters: []ruleCounter{
			{"%s -t nat -vS PREROUTING", `-c (\d+) \d+ -j KUBE-SERVICES`}, {"%s -vS KUBE-FORWARD", `ESTABLISHED -c (\d+) `},
		},
	},
	{
		name: "kube-nftables", title: "kube-proxy's tables (nftables)", services: true, text: kubeNFTables, restore: nftRestore,
		counters: []ruleCounter{
			{"nft list chain %s kube-proxy nat-prerouting", `counter packets (\d+) `}, {"nft list chain %s kube-proxy filter-forward", `counter packets (\d+) `},
		},
	},
	{
		name: "firewall", title: "stateful firewall", text: statefulFirewall, restore: iptablesRestore,
		counters: []ruleCounter{{"%s -vS FORWARD", `ESTABLISHED -c (\d+) `}, {"%s -vS FORWARD", `NEW -c (\d+) `}},
	},
}

func iptablesRestore(f *ruleFamily) []string { return []string{f.iptables + "-restore", "--noflush"} }
func nftRestore(*ruleFamily) []string        { return []string{"nft", "-f", "-"} }

// withRules returns variants beside each of the rulesets.
func withRules(beside []*ruleset, all []variant) (ruled []variant) {
	for _, rules := range beside {
		for _, v := range all {
			v.rules, v.reference = rules, false
			v.name, v.title = ruledName(v.name, rules), v.title+", "+rules.title
			ruled = append(ruled, v)
		}
	}
	return ruled
}

func ruledName(variant string, rules *ruleset) string {
	for _, suffix := range []string{"-iptables", "-established"} {
		variant = strings.TrimSuffix(variant, suffix)
	}
	return variant + "-" + rules.name
}

// serviceVariants returns further variants for connections to services.
func serviceVariants() []variant {
	all := withRules(rulesets[:2], variantsOf(neverName, autoName, routesName, kindnetName, flannelName, directName, tunnelName))
	for i := range all {
		all[i].named = true
	}
	return all
}

// besideRules compares ebpfnet with the reference plugins beside the same rules.
func besideRules() (all []comparison) {
	for _, rules := range rulesets {
		for _, against := range []string{ptpName, bridgeName} {
			all = append(all, comparison{ruledName(establishedName, rules), ruledName(against, rules)})
		}
	}
	return all
}

// addRules loads the variant's rules.
func (s *setup) addRules() error {
	if s.rules == nil {
		return nil
	}
	nodes := []*testenv.Namespace{s.topology.Node}
	if s.join != nil {
		nodes = append(nodes, s.topology.Outside)
	}
	var errs []error
	for _, f := range ruleFamilies {
		command, text := s.rules.restore(f), s.rules.text(f, f.Pod(s.server))
		for _, node := range nodes {
			errs = append(errs, restore(node, text, command[0], command[1:]...))
		}
	}
	return errors.Join(errs...)
}

// checkRules returns an error unless connections of both families have passed the variant's rules.
func (s *setup) checkRules() error {
	if s.rules == nil {
		return nil
	}
	for _, f := range ruleFamilies {
		for _, counter := range s.rules.counters {
			tool := f.iptables
			if strings.HasPrefix(counter.command, "nft") {
				tool = f.table
			}
			command := strings.Fields(fmt.Sprintf(counter.command, tool))
			err := within(func(ctx context.Context) error {
				out, err := s.topology.Node.Run(ctx, command[0], command[1:]...)
				if found := regexp.MustCompile(counter.pattern).FindStringSubmatch(out); err == nil && (found == nil || found[1] == "0") {
					err = fmt.Errorf("%s: no packet has passed %s:\n%s", s.name(), strings.Join(command, " "), out)
				}
				return err
			})
			if err != nil {
				return err
			}
		}
	}
	return nil
}

// checkRules checks all setups, after the measurements.
func (r *run) checkRules() (err error) {
	for _, s := range r.setups {
		err = errors.Join(err, s.checkRules())
	}
	return err
}

// restore passes rules to the standard input of a command.
func restore(ns *testenv.Namespace, rules, name string, args ...string) error {
	return within(func(ctx context.Context) error {
		cmd := ns.Command(ctx, name, args...)
		cmd.Stdin = strings.NewReader(rules)
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("%s: %w: %s", name, err, out)
		}
		return nil
	})
}

func statefulFirewall(*ruleFamily, netip.Addr) string {
	return `*filter
-A FORWARD -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A FORWARD -m conntrack --ctstate INVALID -j DROP
-A FORWARD -m conntrack --ctstate NEW -j ACCEPT
COMMIT
`
}

// kubeIPTables returns the rules that kube-proxy writes in mode iptables. They precede those of portmap.
func kubeIPTables(f *ruleFamily, server netip.Addr) string {
	var chains, services, rules strings.Builder
	for _, s := range f.services(server) {
		service := fmt.Sprintf(`-d %s/%d -p %s -m comment --comment "default/service-%d:http cluster IP" -m %[3]s --dport %[5]d`,
			s.addr, f.bits, s.protocol, s.number, servicePort)
		chain := fmt.Sprintf("KUBE-SVC-%016d", s.number)
		fmt.Fprintf(&chains, ":%s - [0:0]\n", chain)
		fmt.Fprintf(&services, "-A KUBE-SERVICES %s -j %s\n", service, chain)
		fmt.Fprintf(&rules, "-A %s ! -s %s %s -j KUBE-MARK-MASQ\n", chain, f.cluster, service)
		for e, endpoint := range s.endpoints {
			random, name := "", fmt.Sprintf("KUBE-SEP-%015d%d", s.number, e)
			if left := len(s.endpoints) - e; left > 1 {
				random = fmt.Sprintf("-m statistic --mode random --probability %.10f ", 1/float64(left))
			}
			comment := fmt.Sprintf(`-m comment --comment "default/service-%d:http"`, s.number)
			fmt.Fprintf(&chains, ":%s - [0:0]\n", name)
			fmt.Fprintf(&rules, "-A %s %s %s-j %s\n", chain, comment, random, name)
			fmt.Fprintf(&rules, "-A %s -s %s/%d %s -j KUBE-MARK-MASQ\n", name, endpoint.Addr(), f.bits, comment)
			fmt.Fprintf(&rules, "-A %s -p %s %s -m %[2]s -j DNAT --to-destination %[4]s\n", name, s.protocol, comment, endpoint)
		}
	}
	return kubeFilter + kubeNAT + chains.String() + kubeNATRules + services.String() +
		`-A KUBE-SERVICES -m comment --comment "kubernetes service nodeports; NOTE: this must be the last rule in this chain" -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS
` + rules.String() + "COMMIT\n"
}

const (
	kubeFilter = `*filter
:KUBE-EXTERNAL-SERVICES - [0:0]
:KUBE-FORWARD - [0:0]
:KUBE-PROXY-FIREWALL - [0:0]
:KUBE-SERVICES - [0:0]
-I FORWARD -m conntrack --ctstate NEW -m comment --comment "kubernetes externally-visible service portals" -j KUBE-EXTERNAL-SERVICES
-I FORWARD -m conntrack --ctstate NEW -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-I FORWARD -m comment --comment "kubernetes forwarding rules" -j KUBE-FORWARD
-I FORWARD -m conntrack --ctstate NEW -m comment --comment "kubernetes load balancer firewall" -j KUBE-PROXY-FIREWALL
-A KUBE-FORWARD -m conntrack --ctstate INVALID -j DROP
-A KUBE-FORWARD -m comment --comment "kubernetes forwarding rules" -m mark --mark 0x4000/0x4000 -j ACCEPT
-A KUBE-FORWARD -m comment --comment "kubernetes forwarding conntrack rule" -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
COMMIT
`
	kubeNAT = `*nat
:KUBE-MARK-MASQ - [0:0]
:KUBE-NODEPORTS - [0:0]
:KUBE-POSTROUTING - [0:0]
:KUBE-SERVICES - [0:0]
`
	kubeNATRules = `-I PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-I OUTPUT -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-I POSTROUTING -m comment --comment "kubernetes postrouting rules" -j KUBE-POSTROUTING
-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000
-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN
-A KUBE-POSTROUTING -j MARK --set-xmark 0x4000/0x0
-A KUBE-POSTROUTING -m comment --comment "kubernetes service traffic requiring SNAT" -j MASQUERADE --random-fully
`
)

// kubeNFTables returns the rules that kube-proxy writes in mode nftables, with a counter in two of its base chains.
func kubeNFTables(f *ruleFamily, server netip.Addr) string {
	var chains, services strings.Builder
	addrs := make(map[netip.Addr]bool)
	for _, s := range f.services(server) {
		addrs[s.addr] = true
		fmt.Fprintf(&services, "%s . %s . %d : goto service-%d, ", s.addr, s.protocol, servicePort, s.number)
		fmt.Fprintf(&chains, "\tchain service-%d {\n\t\tIP daddr %s %s dport %d IP saddr != %s jump mark-for-masquerade\n",
			s.number, s.addr, s.protocol, servicePort, f.cluster)
		var verdicts, endpoints strings.Builder
		for e, endpoint := range s.endpoints {
			fmt.Fprintf(&verdicts, "%d : goto endpoint-%d-%[1]d, ", e, s.number)
			fmt.Fprintf(&endpoints, "\tchain endpoint-%d-%d {\n\t\tIP saddr %s jump mark-for-masquerade\n", s.number, e, endpoint.Addr())
			fmt.Fprintf(&endpoints, "\t\tmeta l4proto %s dnat to %s\n\t}\n", s.protocol, endpoint)
		}
		fmt.Fprintf(&chains, "\t\tnumgen random mod %d vmap { %s }\n\t}\n%s", len(s.endpoints), &verdicts, &endpoints)
	}
	var clusterIPs strings.Builder
	for addr := range addrs {
		fmt.Fprintf(&clusterIPs, "%s, ", addr)
	}
	return strings.NewReplacer("IP", f.table, "ADDR", f.addrType, "SERVICES", services.String(), "CLUSTERIPS", clusterIPs.String()).
		Replace(kubeTable + chains.String() + "}\n")
}

const kubeTable = `table IP kube-proxy {
	set cluster-ips { type ADDR; elements = { CLUSTERIPS }; }
	map firewall-ips { type ADDR . inet_proto . inet_service : verdict; }
	map no-endpoint-services { type ADDR . inet_proto . inet_service : verdict; }
	map service-ips { type ADDR . inet_proto . inet_service : verdict; elements = { SERVICES }; }
	map service-nodeports { type inet_proto . inet_service : verdict; }
	set nodeport-ips { type ADDR; }
	chain mark-for-masquerade { meta mark set meta mark | 0x4000; }
	chain masquerading {
		meta mark & 0x4000 == 0 return
		meta mark set meta mark ^ 0x4000
		masquerade fully-random
	}
	chain cluster-ips-check { IP daddr @cluster-ips reject; }
	chain firewall-check { IP daddr . meta l4proto . th dport vmap @firewall-ips; }
	chain service-endpoints-check { IP daddr . meta l4proto . th dport vmap @no-endpoint-services; }
	chain services {
		IP daddr . meta l4proto . th dport vmap @service-ips
		IP daddr @nodeport-ips meta l4proto . th dport vmap @service-nodeports
	}
	chain filter-prerouting {
		type filter hook prerouting priority -110
		ct state new jump firewall-check
	}
	chain filter-forward {
		type filter hook forward priority -110
		ct state new counter jump service-endpoints-check
		ct state new jump cluster-ips-check
	}
	chain nat-prerouting {
		type nat hook prerouting priority dstnat
		counter jump services
	}
	chain nat-output {
		type nat hook output priority -100
		jump services
	}
	chain nat-postrouting {
		type nat hook postrouting priority srcnat
		jump masquerading
	}
`
