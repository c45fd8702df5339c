package conformance

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/drops"
	"github.com/ebpfnet/ebpfnet/plugin/nodestate"
	"github.com/ebpfnet/ebpfnet/plugin/policy"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// TestCtlPodPolicy names the NetworkPolicies of a pod, as the node agent writes them: what isolates it, why each rule does not
// admit a connection, and what has dropped a packet.
func TestCtlPodPolicy(t *testing.T) {
	s := newScript(t)
	t.Cleanup(func() { testenv.Must(t, os.RemoveAll(filepath.Dir(nodestate.Default))) })
	testenv.Must(t, nodestate.Write(nodestate.Default, nodestate.State{Policed: time.Now()}))
	testenv.Must(t, nodestate.WritePolicies(nodestate.Default, nodestate.Policies{Namespaces: []string{"shop"}, Until: time.Now().Add(time.Hour)}))
	s.setNetwork(strings.Replace(scriptConflist, `"ipMasq"`, fmt.Sprintf(`"cluster": %q, "ipMasq"`, nodestate.Default), 1))
	add := func(namespace, name string) *testenv.Pod {
		return s.runtime.AddPod(t, name, nil, [2]string{"IgnoreUnknown", "1"}, [2]string{"K8S_POD_NAMESPACE", namespace},
			[2]string{"K8S_POD_NAME", name}, [2]string{"K8S_POD_UID", "uid-" + name})
	}
	client := add("bar", "client")
	s.putObjects(t, client)
	web := add("shop", "web")

	s.wantTable(t, 0, []string{"policy", "shop/web"},
		"shop/web enforce ingress - any own node",
		"shop/web enforce ingress shop/deny any none",
		"shop/web enforce ingress shop/admit ingress[0] 80/tcp pods (app=client) of namespace shop",
		"shop/web enforce ingress shop/admit ingress[1] 443/tcp 192.0.2.0/24 except 192.0.2.64/26",
		"shop/web enforce ingress shop/admit ingress[2] 8080/tcp pods of namespaces (team=two)",
		"shop/web enforce egress - any any: not isolated")
	const refused = "isolated by shop/admit, shop/deny: shop/admit ingress[2] admits the peer, but not tcp 80"
	for _, f := range [][]string{nil, {"-6"}} {
		s.wantTable(t, 0, append([]string{"policy", "explain", "client", "web:8080"}, f...),
			"shop/web ingress shop/admit ingress[2] yes it admits the peer and tcp 8080")
		s.wantTable(t, 3, append([]string{"policy", "explain", "client", "web"}, f...),
			"bar/client egress - yes not isolated",
			"shop/web ingress shop/admit ingress[0] no namespace: bar, not shop",
			"shop/web ingress shop/admit ingress[1] no address: not in 192.0.2.0/24 except 192.0.2.64/26; port: not tcp 80",
			"shop/web ingress shop/admit ingress[2] no port: it admits the peer, but not tcp 80",
			"shop/web ingress - no "+refused)
		s.wantTable(t, 3, append([]string{"policy", "explain", "client", "web:25"}, f...),
			"shop/web ingress no-mail ingress[0] no it denies the peer and tcp 25",
			"shop/web ingress - no isolated by shop/admit, shop/deny: no-mail ingress[0] denies it")
		s.wantTable(t, 3, append([]string{"trace", "client", "web"}, f...),
			"verdict: drops it: the receiver's rules do not admit the sender (shop/web): "+refused)
	}
	s.wantTable(t, 3, []string{"policy", "explain", "10.9.9.9", "web:80"},
		"shop/web ingress shop/admit ingress[0] no namespace or label: not of pods (app=client) of namespace shop")
	s.wantTable(t, 0, []string{"policy", "explain", "192.0.2.9", "web:443"}, "shop/web ingress - yes shop/admit ingress[1] admits it")
	s.wantTable(t, 0, []string{"policy", "explain", "host", "web"}, "shop/web ingress - yes the own node is admitted")
	for _, args := range [][]string{{"policy"}, {"policy", "explain", "client", "web"}} {
		_, text, _ := s.host.ctl(t, append(args, "-o", "json")...)
		if err := s.validate("policy", text); err != nil || !strings.Contains(text, `"shop/deny"`) {
			t.Errorf("%v: got %v: %s", args, err, text)
		}
	}

	follow := s.host.follow(t)
	for _, f := range testenv.Families {
		ctx, cancel := context.WithCancel(testenv.Context(t))
		go func() { // until the drop is there
			if conn, err := client.Dial(ctx, "tcp", netip.AddrPortFrom(f.Pod(web), 80)); err == nil {
				conn.Close()
			}
		}()
		got := follow.want(t, f.Name, func(d drops.Drop) bool { return d.Destination == netip.AddrPortFrom(f.Pod(web), 80).String() })
		cancel()
		if got.Name != "shop/web" || !slices.Equal(got.Policies, []string{"shop/admit", "shop/deny"}) || got.Why != "shop/admit ingress[2] admits the peer, but not tcp 80" {
			t.Errorf("%s: got %+v", f.Name, got)
		}
	}
	line := follow.lines[false]
	follow.stop(t)
	if err := s.validate("drops", line); err != nil {
		t.Errorf("%v: %s", err, line)
	}
	_, text, _ := s.host.ctl(t, "drops", "web", "-o", "json")
	if err := s.validate("drops", text); err != nil || !strings.Contains(text, `"shop/deny"`) {
		t.Errorf("counters: got %s (%v), want the policies", text, err)
	}
	testenv.Must(t, errors.Join(client.Del(testenv.Context(t)), web.Del(testenv.Context(t))))
	s.host.freePodPolicies(t, 1)
}

// putObjects writes what the node agent does: rules that name a client by its class, where they come from, and a policy
// without rules.
func (s *script) putObjects(t *testing.T, client *testenv.Pod) {
	t.Helper()
	const teamTwo, shopClient = 7, 8 // classes
	inBlock := policy.Peer{CIDR: netip.MustParsePrefix("192.0.2.0/24"), Except: []netip.Prefix{netip.MustParsePrefix("192.0.2.64/26")}}
	tcp := func(port uint16) []policy.Ports { return []policy.Ports{{Protocol: maps.TCP, First: port, Last: port}} }
	compiled := policy.Policy{Host: true}
	set, _ := compiled.CompileRules([]policy.Rule{
		{Peers: []policy.Peer{{Classes: []uint32{shopClient}}}, Ports: tcp(80)},
		{Peers: []policy.Peer{inBlock}, Ports: tcp(443)},
		{Peers: []policy.Peer{{Classes: []uint32{teamTwo}}}, Ports: tcp(8080)},
	}, "")
	two, app := nodestate.Selector{Namespaces: "team=two"}, nodestate.Selector{Namespace: "shop", Labels: "app=client"}
	testenv.Must(t, nodestate.WriteRules(nodestate.Default, nodestate.Rules{
		Rules: []nodestate.ObjectRule{
			{Name: "shop/admit ingress[0]", Pods: []nodestate.Selector{app}},
			{Name: "shop/admit ingress[1]", Blocks: []nodestate.Block{{CIDR: inBlock.CIDR, Except: inBlock.Except}}},
			{Name: "shop/admit ingress[2]", Pods: []nodestate.Selector{two}},
			{Name: "no-mail ingress[0]", Action: "deny", Pods: []nodestate.Selector{two}},
		},
		Lists: []nodestate.RuleList{{Policies: []string{"shop/admit", "shop/deny"}, Rules: []int{0, 1, 2, 3}, Denied: []maps.Rule{
			{Kind: maps.ClassPeer, Peer: teamTwo, Protocol: uint8(maps.TCP), First: 25, Last: 25, Number: 4},
		}}, {}},
		Pods:    map[string]nodestate.PodRules{maps.PodToken("uid-web").String(): {Name: "shop/web", Lists: [2]int{0, 1}}},
		Classes: map[uint32][]nodestate.Selector{teamTwo: {two}, shopClient: {app}},
	}))
	s.host.putPodPolicy(t, "uid-web", set)
	s.host.withDatapath(t, func(dp *loader.Datapath) error {
		return maps.With(testenv.Context(t), dp, func(store *maps.Store) error {
			return store.SetPeerClasses(map[netip.Addr]uint32{client.Addr4(): teamTwo, client.Addr6(): teamTwo})
		})
	})
}

// wantTable wants lines of a table, whose columns any number of spaces separate.
func (s *script) wantTable(t *testing.T, exit int, args []string, want ...string) {
	t.Helper()
	got, table, stderr := s.host.ctl(t, append(args, "--cache-dir", s.runtime.CacheDir)...)
	if got != exit {
		t.Errorf("%v: got exit code %d, want %d: %s", args, got, exit, stderr)
	}
	var lines []string
	for line := range strings.Lines(table) {
		lines = append(lines, strings.Join(strings.Fields(line), " "))
	}
	for _, line := range want {
		if !slices.Contains(lines, line) {
			t.Errorf("%v: want %q in:\n%s", args, line, table)
		}
	}
}
