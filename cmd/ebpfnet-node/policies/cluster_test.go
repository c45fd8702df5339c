package policies

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/util/yaml"
	api "sigs.k8s.io/network-policy-api/apis/v1alpha2"

	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/nodestate"
)

// clusterWide returns a ClusterNetworkPolicy of a tier for all pods, unless its text names a subject.
func clusterWide(t *testing.T, name, text string) *api.ClusterNetworkPolicy {
	t.Helper()
	object := &api.ClusterNetworkPolicy{}
	object.Name, object.Spec.Tier = name, api.AdminTier
	if !strings.Contains(text, "subject:") {
		text = strings.Replace(text, "{", "{subject: {namespaces: {}}, ", 1)
	}
	if err := yaml.Unmarshal([]byte(text), &object.Spec); err != nil {
		t.Fatalf("%s: %v", text, err)
	}
	return object
}

func nodesForTest() []Node {
	node := func(name, addr string, podCIDRs ...string) Node {
		n := Node{Name: name, Labels: map[string]string{"node": name}, Addresses: []netip.Addr{netip.MustParseAddr(addr)}}
		for _, text := range podCIDRs {
			n.PodCIDRs = append(n.PodCIDRs, netip.MustParsePrefix(text))
		}
		return n
	}
	return []Node{node("this", "192.0.2.10", "10.0.0.0/24"), node("other", "192.0.2.1", "10.0.1.0/24", "fd00::/64")}
}

// TestCompileTiers has the cases of ClusterNetworkPolicy's semantics. The address outside is that of node other.
func TestCompileTiers(t *testing.T) {
	const all = "x/a x/b y/a z/c outside"
	const noMail = "{priority: 5, egress: [{action: Deny, to: [{namespaces: {}}], protocols: [{tcp: {destinationPort: {number: 81}}}]}]}"
	const some = "80,82,53,u80,u53,s80,icmp"
	for name, test := range map[string]struct {
		cluster         string // policies of the tier Admin, and of Baseline after a |
		policy          string // of namespace x
		ingress, egress string
		why             string // of x/b's TCP 81, for egress
	}{
		"not selected":       {"{subject: {namespaces: {matchLabels: {team: two}}}, egress: [{action: Deny, to: [{namespaces: {}}]}]}", "", all, all, "not isolated"},
		"a subject by pods":  {"{subject: {pods: {namespaceSelector: {}, podSelector: {matchLabels: {app: web}}}}, ingress: [{action: Deny, from: [{namespaces: {matchLabels: {team: two}}}]}]}", "", "x/a x/b z/c outside", all, "not isolated"},
		"no rules":           {"{}", "", all, all, "not isolated"},
		"deny pods":          {"{egress: [{name: all, action: Deny, to: [{namespaces: {}}]}]}", "", all, "outside", `a0 egress[0] "all" denies it`},
		"deny a port":        {noMail, "", all, "x/a:" + some + " x/b:" + some + " y/a:" + some + " z/c:" + some + " outside", "a0 egress[0] denies it"},
		"deny networks":      {"{egress: [{action: Deny, to: [{networks: ['10.0.0.2/31', '2001:db8::/32']}]}]}", "", all, "x/a:none|all x/b:none|all y/a z/c outside:all|none", "a0 egress[0] denies it"},
		"deny nodes":         {"{egress: [{action: Deny, to: [{nodes: {matchLabels: {node: other}}}]}]}", "", all, "x/a x/b y/a z/c outside:none|all", "the default admits it"},
		"accept, then deny":  {"{egress: [{action: Accept, to: [{pods: {namespaceSelector: {}, podSelector: {matchLabels: {app: a}}}}]}, {action: Deny, to: [{networks: ['0.0.0.0/0', '::/0']}]}]}", "", all, "x/a y/a", "a0 egress[1] denies it"},
		"deny, then accept":  {"{egress: [{action: Deny, to: [{pods: {namespaceSelector: {}, podSelector: {matchLabels: {app: a}}}}]}, {action: Accept, to: [{networks: ['0.0.0.0/0', '::/0']}]}]}", "{podSelector: {}, policyTypes: [Egress]}", all, "x/b z/c outside", "a0 egress[1] admits it"},
		"priorities":         {"{priority: 7, egress: [{action: Deny, to: [{namespaces: {}}]}]}; {priority: 6, egress: [{action: Accept, to: [{namespaces: {matchLabels: {team: one}}}]}]}", "", all, "x/a x/b outside", "a1 egress[0] admits it"},
		"before the others":  {"{egress: [{action: Accept, to: [{namespaces: {}}], protocols: [{tcp: {destinationPort: {number: 81}}}]}]}", "{podSelector: {}, policyTypes: [Egress]}", all, "x/a:81 x/b:81 y/a:81 z/c:81", "a0 egress[0] admits it"},
		"pass":               {"{egress: [{action: Pass, to: [{namespaces: {matchLabels: {team: one}}}]}, {action: Deny, to: [{networks: ['0.0.0.0/0', '::/0']}]}]}", "{podSelector: {}, egress: [{ports: [{port: 81}]}], policyTypes: [Egress]}", all, "x/a:81 x/b:81", "x/p0 egress[0] admits it"},
		"pass to nobody":     {"{egress: [{action: Pass, to: [{namespaces: {matchLabels: {team: one}}}]}, {action: Deny, to: [{networks: ['0.0.0.0/0', '::/0']}]}]}", "", all, "x/a x/b", "the default admits it"},
		"isolated":           {noMail, "{podSelector: {}, egress: [{to: [{podSelector: {}}]}], policyTypes: [Egress]}", all, "x/a:" + some + " x/b:" + some, "a0 egress[0] denies it"},
		"a block of pods":    {noMail, "{podSelector: {}, egress: [{to: [{ipBlock: {cidr: 10.0.0.0/8, except: [10.0.0.4/31]}}]}], policyTypes: [Egress]}", all, "x/a:" + some + "|none x/b:" + some + "|none", "a0 egress[0] denies it"},
		"baseline":           {"|{egress: [{action: Deny, to: [{namespaces: {}}]}]}", "", all, "outside", "b0 egress[0] denies it"},
		"baseline, isolated": {"|{egress: [{action: Deny, to: [{namespaces: {}}]}]}", "{podSelector: {}, egress: [{to: [{podSelector: {}}]}], policyTypes: [Egress]}", all, "x/a x/b", "x/p0 egress[0] admits it"},
		"all tiers":          {"{egress: [{action: Pass, to: [{namespaces: {matchLabels: {team: one}}}]}, {action: Deny, to: [{namespaces: {}}]}]}|{egress: [{action: Deny, to: [{pods: {namespaceSelector: {}, podSelector: {matchLabels: {app: b}}}}]}]}", "", all, "x/a outside", "b0 egress[0] denies it"},
		"baseline's pass":    {"|{egress: [{action: Pass, to: [{namespaces: {matchLabels: {team: one}}}]}, {action: Deny, to: [{namespaces: {}}]}]}", "", all, "x/a x/b outside", "the default admits it"},
		"ingress":            {"{ingress: [{action: Accept, from: [{pods: {namespaceSelector: {}, podSelector: {matchLabels: {app: a}}}}], protocols: [{destinationNamedPort: http}]}, {action: Deny, from: [{namespaces: {}}]}]}", "", "x/a:80 y/a:80 outside", all, "not isolated"},
		"named egress":       {"{egress: [{action: Deny, to: [{namespaces: {}}], protocols: [{destinationNamedPort: http}]}]}", "", all, "x/a:81,82,53,u80,u53,s80,icmp x/b:80,82,53,u80,u53,s80,icmp y/a:80,81,82,53,u53,s80,icmp z/c outside", "a0 egress[0] denies it"},
		"a range":            {"{egress: [{action: Deny, to: [{namespaces: {matchLabels: {team: one}}}], protocols: [{tcp: {destinationPort: {range: {start: 1, end: 81}}}}, {udp: {}}, {sctp: {destinationPort: {number: 80}}}]}]}", "", all, "x/a:82,icmp x/b:82,icmp y/a z/c outside", "a0 egress[0] denies it"},
		"domain names":       {"{egress: [{action: Accept, to: [{domainNames: [example.com]}, {namespaces: {}}]}, {action: Deny, to: [{namespaces: {}}]}]}", "", all, "outside", "a0 egress[1] denies it"},
		"an unknown peer":    {"{egress: [{action: Pass, to: [{}]}]}", "", all, "", "a0 egress[0] denies it"},
		"an invalid network": {"{egress: [{action: Deny, to: [{networks: [nonsense]}]}]}", "", all, "", "a0 egress[0] denies it"},
		"an invalid port":    {"{egress: [{action: Accept, to: [{namespaces: {}}], protocols: [{tcp: {destinationPort: {}}}]}]}", "", all, all, "the default admits it"},
		"an unknown action":  {"{egress: [{action: Log, to: [{namespaces: {}}]}]}", "", all, "", "a0 egress[0] denies it"},
	} {
		t.Run(name, func(t *testing.T) {
			peers := peersOf()
			cluster := clusterOf(t, peers)
			if test.policy != "" {
				cluster = clusterOf(t, peers, test.policy)
			}
			cluster.Nodes = nodesForTest()
			admin, baseline, _ := strings.Cut(test.cluster, "|")
			for tier, texts := range map[api.Tier]string{api.AdminTier: admin, api.BaselineTier: baseline} {
				for i, text := range strings.Split(texts, "; ") {
					if text != "" {
						object := clusterWide(t, fmt.Sprintf("%c%d", strings.ToLower(string(tier))[0], i), text)
						object.Spec.Tier, cluster.ClusterPolicies = tier, append(cluster.ClusterPolicies, object)
					}
				}
			}
			state := (&Compiler{Node: "this"}).Compile(cluster)
			if got := admitted(state, ingress, peers); got != test.ingress {
				t.Errorf("ingress: got %q, want %q", got, test.ingress)
			}
			if got := admitted(state, egress, peers); got != test.egress {
				t.Errorf("egress: got %q, want %q", got, test.egress)
			}
			if _, why := state.judge(nodestate.Connection{Pod: peers[0].Addresses[0], IsEgress: true, Peer: peers[2].Addresses[0], Protocol: uint8(maps.TCP), Port: 81}); !strings.HasSuffix(why, test.why) {
				t.Errorf("got %q, want %q", why, test.why)
			}
		})
	}
}

// TestYoungPods has addresses that the agent does not know yet: a block of pods' addresses admits what all classes do, but
// nodes are no pods. A node's status that has such an address makes it no node's.
func TestYoungPods(t *testing.T) {
	cluster := clusterOf(t, peersOf())
	cluster.Nodes = nodesForTest()
	cluster.Nodes[1].Addresses = append(cluster.Nodes[1].Addresses, netip.MustParseAddr("10.0.0.200"), netip.MustParseAddr("10.0.1.7"))
	cluster.ClusterPolicies = []*api.ClusterNetworkPolicy{
		clusterWide(t, "a", "{egress: [{action: Deny, to: [{namespaces: {matchLabels: {team: two}}}, {nodes: {matchLabels: {node: this}}}], protocols: [{tcp: {}}]}]}"),
	}
	c := &Compiler{Node: "this"}
	set := c.Compile(cluster).Pods["x/web"].Sets[egress]
	for address, want := range map[string]string{
		"10.0.0.200": "u80,u53,s80,icmp", "10.0.1.7": "u80,u53,s80,icmp", "10.0.1.1": "all", "10.0.2.7": "all", "fd00::77": "u80,u53,s80,icmp", "fd00:0:0:1::7": "all",
		"192.0.2.1": "all", "192.0.2.10": "u80,u53,s80,icmp",
	} {
		addr := netip.MustParseAddr(address)
		if got := ports(set, maps.Peer{Addr: addr, Host: address == "192.0.2.10"}); got != want {
			t.Errorf("%s: got %s, want %s", address, got, want)
		}
	}
	young := &Pod{UID: "y/young", Namespace: "y", Name: "young", Node: "other", Addresses: []netip.Addr{netip.MustParseAddr("10.0.1.7")}}
	if classes, isAll := c.Update([]Event{{Now: young}}); len(classes) != 1 || !isAll {
		t.Errorf("a known class: got %v, %t", classes, isAll)
	}
	young.Addresses[0] = netip.MustParseAddr("10.0.9.7")
	if _, isAll := c.Update([]Event{{Now: young}}); isAll {
		t.Error("an address outside of the nodes' prefixes changes only classes")
	}
}
