package policies

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/yaml"

	"github.com/ebpfnet/ebpfnet/maps"
)

// web is the pod that policies of the table select, on this node. The others are its peers.
func peersOf() (pods []*Pod) {
	http := func(port uint16) NamedPort { return NamedPort{"http", maps.TCP, port} }
	for i, pod := range []Pod{
		{Namespace: "x", Name: "web", Node: "this", Labels: labels.Set{"app": "web"}, Ports: []NamedPort{http(80), {"dns", maps.UDP, 53}}},
		{Namespace: "x", Name: "a", Node: "this", Labels: labels.Set{"app": "a"}, Ports: []NamedPort{http(80)}},
		{Namespace: "x", Name: "b", Node: "other", Labels: labels.Set{"app": "b"}, Ports: []NamedPort{http(81)}},
		{Namespace: "y", Name: "a", Node: "other", Labels: labels.Set{"app": "a", "tier": "front"}, Ports: []NamedPort{{"http", maps.UDP, 80}}},
		{Namespace: "z", Name: "c", Node: "other", Labels: labels.Set{"app": "c"}},
	} {
		pod.UID, pod.Created = pod.Namespace+"/"+pod.Name, time.Unix(int64(i), 0)
		pod.Addresses = []netip.Addr{netip.AddrFrom4([4]byte{10, 0, 0, byte(i + 1)}), netip.AddrFrom16([16]byte{0: 0xfd, 15: byte(i + 1)})}
		pods = append(pods, &pod)
	}
	return pods
}

func clusterOf(t *testing.T, pods []*Pod, texts ...string) Cluster {
	t.Helper()
	cluster := Cluster{Pods: pods, Namespaces: map[string]labels.Set{
		"x": {"name": "x", "team": "one"}, "y": {"name": "y", "team": "two"}, "z": nil,
	}}
	for i, text := range texts {
		object := &networkingv1.NetworkPolicy{}
		if err := yaml.Unmarshal([]byte(text), &object.Spec); err != nil {
			t.Fatalf("%s: %v", text, err)
		}
		object.Namespace, object.Name = "x", fmt.Sprint("p", i)
		cluster.Policies = append(cluster.Policies, object)
	}
	return cluster
}

// admitted lists what a direction of x/web admits: of each peer, the ports of probes. A peer that it admits in full has no ports.
func admitted(state *State, direction int, peers []*Pod) string {
	rules, list := state.Pods["x/web"], []string{}
	outside := &Pod{UID: "outside", Addresses: []netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")}}
	for _, pod := range append(slices.Clone(peers), outside) {
		var both []string
		for _, addr := range pod.Addresses {
			both = append(both, ports(rules.Sets[direction], maps.Peer{Addr: addr, Class: state.Classes[addr]}))
		}
		both = slices.Compact(both)
		if text := strings.Join(both, "|"); text != "none" && pod.UID != "x/web" {
			list = append(list, strings.TrimSuffix(pod.UID+":"+text, ":all"))
		}
	}
	return strings.Join(list, " ")
}

func ports(set *maps.RuleSet, peer maps.Peer) string {
	var list []string
	for _, probe := range []struct {
		name     string
		protocol maps.Protocol
		port     uint16
	}{
		{"80", maps.TCP, 80}, {"81", maps.TCP, 81}, {"82", maps.TCP, 82}, {"53", maps.TCP, 53},
		{"u80", maps.UDP, 80}, {"u53", maps.UDP, 53}, {"s80", maps.SCTP, 80}, {"icmp", maps.ICMP, 0},
	} {
		if _, ok := set.Verdict(peer, uint8(probe.protocol), probe.port); ok {
			list = append(list, probe.name)
		}
	}
	if len(list) == 8 {
		return "all"
	}
	return cmp.Or(strings.Join(list, ","), "none")
}

// TestCompile has the cases of NetworkPolicy's semantics.
func TestCompile(t *testing.T) {
	const all = "x/a x/b y/a z/c outside"
	for name, test := range map[string]struct {
		policies        []string
		ingress, egress string
	}{
		"not selected":             {[]string{"podSelector: {matchLabels: {app: none}}"}, all, all},
		"no types":                 {[]string{"podSelector: {}"}, "", all},
		"no types, with egress":    {[]string{"{podSelector: {}, egress: [{}]}"}, "", all},
		"deny egress":              {[]string{"{podSelector: {}, policyTypes: [Egress]}"}, all, ""},
		"rules of no type":         {[]string{"{podSelector: {}, policyTypes: [Egress], ingress: [{}]}"}, all, ""},
		"empty rule":               {[]string{"{podSelector: {}, ingress: [{}], egress: [{}], policyTypes: [Ingress, Egress]}"}, all, all},
		"empty from":               {[]string{"{podSelector: {}, ingress: [{from: []}]}"}, all, all},
		"all pods here":            {[]string{"{podSelector: {}, ingress: [{from: [{podSelector: {}}]}]}"}, "x/a x/b", all},
		"pods here":                {[]string{"{podSelector: {}, ingress: [{from: [{podSelector: {matchLabels: {app: a}}}]}]}"}, "x/a", all},
		"namespaces":               {[]string{"{podSelector: {}, ingress: [{from: [{namespaceSelector: {matchLabels: {team: two}}}]}]}"}, "y/a", all},
		"all namespaces":           {[]string{"{podSelector: {}, ingress: [{from: [{namespaceSelector: {}}]}]}"}, "x/a x/b y/a z/c", all},
		"and":                      {[]string{"{podSelector: {}, ingress: [{from: [{namespaceSelector: {matchLabels: {team: one}}, podSelector: {matchLabels: {app: a}}}]}]}"}, "x/a", all},
		"or":                       {[]string{"{podSelector: {}, ingress: [{from: [{namespaceSelector: {matchLabels: {team: two}}}, {podSelector: {matchLabels: {app: b}}}]}]}"}, "x/b y/a", all},
		"In":                       {[]string{"{podSelector: {}, ingress: [{from: [{namespaceSelector: {}, podSelector: {matchExpressions: [{key: app, operator: In, values: [b, c]}]}}]}]}"}, "x/b z/c", all},
		"NotIn":                    {[]string{"{podSelector: {}, ingress: [{from: [{namespaceSelector: {matchExpressions: [{key: team, operator: NotIn, values: [one]}]}}]}]}"}, "y/a z/c", all},
		"Exists":                   {[]string{"{podSelector: {}, ingress: [{from: [{namespaceSelector: {}, podSelector: {matchExpressions: [{key: tier, operator: Exists}]}}]}]}"}, "y/a", all},
		"DoesNotExist":             {[]string{"{podSelector: {}, ingress: [{from: [{namespaceSelector: {matchExpressions: [{key: team, operator: DoesNotExist}]}}]}]}"}, "z/c", all},
		"union":                    {[]string{"podSelector: {}", "{podSelector: {matchLabels: {app: web}}, ingress: [{from: [{podSelector: {matchLabels: {app: a}}}]}]}", "{podSelector: {}, ingress: [{ports: [{port: 81}]}]}"}, "x/a x/b:81 y/a:81 z/c:81 outside:81", all},
		"port":                     {[]string{"{podSelector: {}, ingress: [{ports: [{port: 80}]}]}"}, "x/a:80 x/b:80 y/a:80 z/c:80 outside:80", all},
		"endPort":                  {[]string{"{podSelector: {}, egress: [{ports: [{port: 80, endPort: 81}], to: [{podSelector: {}}]}], policyTypes: [Egress]}"}, all, "x/a:80,81 x/b:80,81"},
		"a whole protocol":         {[]string{"{podSelector: {}, ingress: [{from: [{podSelector: {}}], ports: [{protocol: UDP}, {protocol: SCTP}]}]}"}, "x/a:u80,u53,s80 x/b:u80,u53,s80", all},
		"named ingress":            {[]string{"{podSelector: {}, ingress: [{from: [{podSelector: {}}], ports: [{port: http}, {port: dns, protocol: UDP}]}]}"}, "x/a:80,u53 x/b:80,u53", all},
		"named, of nobody":         {[]string{"{podSelector: {}, ingress: [{ports: [{port: nobody}]}]}"}, "", all},
		"named, another protocol":  {[]string{"{podSelector: {}, ingress: [{ports: [{port: dns}]}]}"}, "", all},
		"named egress":             {[]string{"{podSelector: {}, egress: [{to: [{namespaceSelector: {}}], ports: [{port: http}]}]}"}, "", "x/a:80 x/b:81"},
		"named egress, any peer":   {[]string{"{podSelector: {}, egress: [{ports: [{port: http}, {port: http, protocol: UDP}]}]}"}, "", "x/a:80 x/b:81 y/a:u80"},
		"named egress, in a block": {[]string{"{podSelector: {}, egress: [{to: [{ipBlock: {cidr: 10.0.0.0/8, except: [10.0.0.2/32]}}], ports: [{port: http}]}]}"}, "", "x/b:81|none"},
		"named and numbers":        {[]string{"{podSelector: {}, egress: [{to: [{podSelector: {}}], ports: [{port: http}, {port: 82}]}]}"}, "", "x/a:80,82 x/b:81,82"},
		"block":                    {[]string{"{podSelector: {}, ingress: [{from: [{ipBlock: {cidr: 10.0.0.0/29, except: [10.0.0.4/31]}}, {ipBlock: {cidr: '2001:db8::/32'}}]}]}"}, "x/a:all|none x/b:all|none outside:none|all", all},
		"an exception elsewhere":   {[]string{"{podSelector: {}, egress: [{to: [{ipBlock: {cidr: 0.0.0.0/0}}], ports: [{port: 53}]}, {to: [{ipBlock: {cidr: 0.0.0.0/0, except: [10.0.0.0/8]}}]}]}"}, "", "x/a:53|none x/b:53|none y/a:53|none z/c:53|none outside:all|none"},
		"all but itself":           {[]string{"{podSelector: {}, ingress: [{from: [{ipBlock: {cidr: 10.0.0.0/8, except: [10.0.0.0/8]}}]}]}"}, "", all},
		"host bits":                {[]string{"{podSelector: {}, ingress: [{from: [{ipBlock: {cidr: 10.0.0.3/31}}]}]}"}, "x/a:all|none x/b:all|none", all},
		"invalid peers":            {[]string{"{podSelector: {}, ingress: [{from: [{ipBlock: {cidr: nonsense}}, {ipBlock: {cidr: 10.0.0.0/8, except: [nonsense]}}, {}, {podSelector: {matchExpressions: [{key: app, operator: Near}]}}]}]}"}, "", all},
		"invalid ports":            {[]string{"{podSelector: {}, ingress: [{ports: [{port: 0}, {port: 70000}, {port: 80, endPort: 79}, {port: 80, protocol: ICMP}]}]}"}, "", all},
	} {
		t.Run(name, func(t *testing.T) {
			peers := peersOf()
			state := (&Compiler{Node: "this"}).Compile(clusterOf(t, peers, test.policies...))
			if got := admitted(state, ingress, peers); got != test.ingress {
				t.Errorf("ingress: got %q, want %q", got, test.ingress)
			}
			if got := admitted(state, egress, peers); got != test.egress {
				t.Errorf("egress: got %q, want %q", got, test.egress)
			}
			for _, set := range state.Pods["x/web"].Sets {
				if set != nil && !set.Host {
					t.Error("the own node is not admitted")
				}
			}
		})
	}
}

// TestPeersOfThePast has pods that are no peers: completed, without an address, of the host, or with an address that a newer pod has.
func TestPeersOfThePast(t *testing.T) {
	const anyPod = "{podSelector: {matchLabels: {app: web}}, ingress: [{from: [{namespaceSelector: {}, podSelector: {matchLabels: {app: a}}}]}]}"
	for name, change := range map[string]func(pods []*Pod) []*Pod{
		"completed":          func(pods []*Pod) []*Pod { pods[1].IsDone = true; return pods },
		"no address":         func(pods []*Pod) []*Pod { pods[1].Addresses = nil; return pods },
		"host network":       func(pods []*Pod) []*Pod { pods[1].HostNetwork = true; return pods },
		"reused by another":  func(pods []*Pod) []*Pod { pods[4].Addresses = pods[1].Addresses; return pods },
		"gone":               func(pods []*Pod) []*Pod { return slices.Delete(pods, 1, 2) },
		"namespace not seen": func(pods []*Pod) []*Pod { pods[1].Namespace = "later"; return pods },
		"relabeled":          func(pods []*Pod) []*Pod { pods[1].Labels = nil; return pods },
	} {
		t.Run(name, func(t *testing.T) {
			c, pods := &Compiler{Node: "this"}, peersOf()
			addr := pods[1].Addresses[0]
			before := c.Compile(clusterOf(t, pods, anyPod))
			state := c.Compile(clusterOf(t, change(peersOf()), anyPod))
			if before.Classes[addr] == 0 || state.Classes[addr] != 0 {
				t.Errorf("got class %d, and before %d", state.Classes[addr], before.Classes[addr])
			}
			if got := admitted(state, ingress, peersOf()); got != "y/a" {
				t.Errorf("admits %q, want y/a alone", got)
			}
		})
	}
}

// TestReusedAddress gives an address to the newest pod that lives, in whatever order they are listed.
func TestReusedAddress(t *testing.T) {
	const onlyC = "{podSelector: {matchLabels: {app: web}}, ingress: [{from: [{namespaceSelector: {}, podSelector: {matchLabels: {app: c}}}]}]}"
	pods := peersOf()
	addr := pods[1].Addresses[0]
	pods[4].Addresses = pods[1].Addresses
	for range 2 {
		slices.Reverse(pods)
		state := (&Compiler{Node: "this"}).Compile(clusterOf(t, pods, onlyC))
		got := ports(state.Pods["x/web"].Sets[ingress], maps.Peer{Addr: addr, Class: state.Classes[addr]})
		if uid, isOlders := state.Own[addr]; got != "all" || isOlders {
			t.Errorf("the newest pod is admitted to %s, and the address is %s's", got, uid)
		}
	}
}

// TestOwnPods has which pods get an entry, and what is needed for it.
func TestOwnPods(t *testing.T) {
	pods := peersOf()
	pods[1].HostNetwork = true
	pods = append(pods, &Pod{UID: "x/host", Namespace: "x", Name: "host", Node: "this", HostNetwork: true})
	for name, test := range map[string]struct {
		policies []string
		pods     string
		needs    bool
		warnings int
	}{
		"none":            {nil, "", false, 0},
		"not selected":    {[]string{"{podSelector: {matchLabels: {app: b}}, ingress: [{from: [{podSelector: {}}]}]}"}, "x/web", false, 0},
		"no peers":        {[]string{"{podSelector: {matchLabels: {app: web}}, ingress: [{from: [{ipBlock: {cidr: 10.0.0.0/8}}], ports: [{port: http}]}]}"}, "x/web", false, 0},
		"peers":           {[]string{"{podSelector: {matchLabels: {app: web}}, ingress: [{from: [{podSelector: {}}]}]}"}, "x/web", true, 0},
		"of no direction": {[]string{"{podSelector: {matchLabels: {app: web}}, policyTypes: [Egress], ingress: [{from: [{podSelector: {}}]}]}"}, "x/web", false, 0},
		"named egress":    {[]string{"{podSelector: {matchLabels: {app: web}}, egress: [{ports: [{port: http}]}]}"}, "x/web", true, 0},
		"host network":    {[]string{"podSelector: {}"}, "x/web", false, 1},
	} {
		state := (&Compiler{Node: "this"}).Compile(clusterOf(t, pods, test.policies...))
		var got []string
		for uid := range state.Pods {
			got = append(got, uid)
		}
		if strings.Join(got, " ") != test.pods || state.NeedsPeers != test.needs || len(state.Warnings) != test.warnings {
			t.Errorf("%s: got pods %v, needs peers %v, warnings %q", name, got, state.NeedsPeers, state.Warnings)
		}
		if len(test.policies) > 0 && (len(state.Namespaces) != 1 || state.Own[pods[0].Addresses[1]] != "x/web") {
			t.Errorf("%s: got namespaces %v, own addresses %v", name, state.Namespaces, state.Own)
		}
	}
}

// TestModes reports what the policies of a namespace do not admit, and lets it pass, while its annotation says so.
func TestModes(t *testing.T) {
	c, cluster := &Compiler{Node: "this"}, clusterOf(t, peersOf(), "podSelector: {}")
	for _, test := range []struct {
		mode     string
		isAudit  bool
		warnings int
	}{{"", false, 0}, {"audit", true, 0}, {"enforce", false, 0}, {"Audit", false, 1}, {"audit", true, 0}} {
		cluster.Modes = map[string]string{"x": test.mode, "y": "audit"}
		state := c.Compile(cluster)
		if set := state.Pods["x/web"].Sets[ingress]; set.Audit != test.isAudit || len(state.Warnings) != test.warnings {
			t.Errorf("mode %q: got audit %v, warnings %q", test.mode, set.Audit, state.Warnings)
		}
	}
}

// TestClassesAreStable changes no rule set when pods come and go, and keeps the number of a class that is still in use.
func TestClassesAreStable(t *testing.T) {
	const toA = "{podSelector: {matchLabels: {app: web}}, ingress: [{from: [{namespaceSelector: {}, podSelector: {matchLabels: {app: a}}}]}]}"
	const toFront = "{podSelector: {matchLabels: {app: web}}, ingress: [{from: [{namespaceSelector: {}, podSelector: {matchLabels: {tier: front}}}]}]}"
	c, pods := &Compiler{Node: "this"}, peersOf()
	first := c.Compile(clusterOf(t, pods, toA))
	rules := first.Pods["x/web"].Sets[ingress]
	more := append(slices.Clone(pods), &Pod{UID: "new", Namespace: "y", Name: "new", Labels: labels.Set{"app": "a", "hash": "unique"}, Addresses: []netip.Addr{netip.MustParseAddr("10.9.9.9")}})
	for _, pods := range [][]*Pod{more, pods[:1], pods} {
		if state := c.Compile(clusterOf(t, pods, toA)); !state.Pods["x/web"].Sets[ingress].Equal(rules) {
			t.Errorf("with %d pods, the rule set is another one", len(pods))
		}
	}
	second := c.Compile(clusterOf(t, pods, toA, toFront))
	a, front := pods[1].Addresses[0], pods[3].Addresses[0]
	if second.Classes[a] != first.Classes[a] || second.Classes[front] == first.Classes[front] {
		t.Errorf("got classes %v, before %v: want another one for y/a alone", second.Classes, first.Classes)
	}
	if _, ok := second.Pods["x/web"].Sets[ingress].Verdict(maps.Peer{Class: first.Classes[front]}, uint8(maps.TCP), 80); !ok {
		t.Error("the class that y/a still has in the datapath is not admitted")
	}
	other := (&Compiler{Node: "this"}).Compile(clusterOf(t, pods, toA, toFront))
	if other.Classes[front] != second.Classes[front] {
		t.Error("another run of the agent has another number")
	}
}

// TestManyClasses forgets classes that no address has any more.
func TestManyClasses(t *testing.T) {
	c := &Compiler{Node: "this"}
	for i := range 300 {
		pods := peersOf()
		pods[2].Ports = []NamedPort{{"http", maps.TCP, uint16(i + 1)}}
		c.Compile(clusterOf(t, pods, "{podSelector: {matchLabels: {app: web}}, egress: [{ports: [{port: http}]}]}"))
	}
	if n := len(c.classes.byContent); n > 100 {
		t.Errorf("the compiler keeps %d classes", n)
	}
}

// TestManyPorts has pods whose ports change. The rules of former pods are forgotten, and ports that no policy names make no others.
func TestManyPorts(t *testing.T) {
	c, pods := &Compiler{Node: "this"}, peersOf()
	cluster := clusterOf(t, pods, "{podSelector: {}, ingress: [{ports: [{port: http}]}]}")
	for i := range 300 {
		pods[0].Ports = []NamedPort{{"http", maps.TCP, uint16(i + 1)}, {fmt.Sprint("unused", i), maps.TCP, 80}}
		pods[1].Ports = []NamedPort{{"http", maps.UDP, 9}, {"http", maps.TCP, uint16(i + 1)}}
		state := c.Compile(cluster)
		if web, a := state.Pods["x/web"], state.Pods["x/a"]; web != a || len(c.rules) != 1 {
			t.Fatalf("round %d: the compiler keeps %d rules, equal ones: %t; want the same one for two pods", i, len(c.rules), web == a)
		}
	}
}

// TestTooMany closes a pod whose policies do not fit, and says so once.
func TestTooMany(t *testing.T) {
	var rules []string
	for i := range 200 {
		rules = append(rules, fmt.Sprintf("{from: [{ipBlock: {cidr: 0.0.0.0/0, except: [10.9.%d.0/24]}}], ports: [{port: 1, endPort: 65534}]}", i))
	}
	c, pods := &Compiler{Node: "this"}, peersOf()
	cluster := clusterOf(t, pods, "{podSelector: {}, ingress: ["+strings.Join(rules, ",")+"]}")
	c.Compile(cluster)
	state := c.Compile(cluster)
	if got := admitted(state, ingress, pods); got != "" || len(state.Warnings) != 2 {
		t.Errorf("admits %q, with the warnings %q", got, state.Warnings)
	}
}

// Anybody who may create pods may claim to mirror a static pod. That takes no other pod's rules, and gives it none.
func TestForgedMirror(t *testing.T) {
	claim := func(name, uid string, created int64) *Pod {
		pod := PodOf(&corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{
				UID: types.UID(name), Namespace: "x", Name: name, Annotations: map[string]string{mirrorOf: uid}, Labels: map[string]string{"app": "web"},
				CreationTimestamp: metav1.Unix(created, 0),
			},
			Spec: corev1.PodSpec{NodeName: "this"},
		})
		return pod
	}
	open := &Pod{UID: "open", Namespace: "y", Name: "open", Node: "this"}
	pods := append(peersOf(), open, claim("of-a", "x/a", 0), claim("of-open", "open", 0), claim("late", "static", 9), claim("static", "static", 8))
	const isolated = "{podSelector: {matchLabels: {app: a}}, ingress: []}"
	for range 20 { // in any order of a map
		state := (&Compiler{Node: "this"}).Compile(clusterOf(t, pods, isolated))
		if a := state.Pods["x/a"]; a == nil || a.Sets[ingress] == nil {
			t.Fatalf("the isolated pod has rules %+v, want its own", a)
		}
		if state.Pods["open"] != nil || state.Names["static"] != "x/static" {
			t.Fatalf("got rules %v of %q and %q, want none for a pod without policies, and those of the oldest mirror", state.Pods["open"], state.Names["open"], state.Names["static"])
		}
		if warnings := strings.Join(state.Warnings, "\n"); strings.Count(warnings, "mirrors a static pod") != 3 {
			t.Fatalf("got warnings %q, want one for each forged pod", warnings)
		}
	}
}
