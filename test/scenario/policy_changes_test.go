package scenario

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	cnitypes "github.com/containernetworking/cni/pkg/types"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/cnierr"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// setPolicy gives a pod that runs a policy.
func (n *network) setPolicy(t *testing.T, pod *testenv.Pod, policy string) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "policy.json")
	testenv.Must(t, os.WriteFile(file, []byte(policy), 0o600))
	n.ctl(t, "set", n.Network()+"/"+pod.Conf.ContainerID, "policy="+file)
}

// A policy begins, changes and ends while connections of both directions run. Those that it admits live on, and the
// others end.
func TestPolicyChanges(t *testing.T) {
	forEachFastPath(t, `"ipMasq": true`, func(t *testing.T, conflist string) {
		n := newNetworkWith(t, conflist)
		pod, a := n.AddPod(t, "pod", mapBoth(8080, 80)), n.AddPod(t, "a", nil)
		clients := map[string]*testenv.Client{}
		for _, f := range testenv.Families {
			n.RouteTo(t, f.PodSubnet)
			for _, protocol := range []string{"tcp", "udp"} {
				serve(t, pod.Namespace, protocol, at(f.Pod(pod), 80))
				serve(t, a.Namespace, protocol, at(f.Pod(a), 80))
				serve(t, n.Outside, protocol, at(f.Outside, 80))
				for name, c := range map[string]struct {
					from *testenv.Namespace
					to   netip.AddrPort
				}{
					"opened to a": {pod.Namespace, at(f.Pod(a), 80)}, "opened to outside": {pod.Namespace, at(f.Outside, 80)},
					"accepted from a": {a.Namespace, at(f.Pod(pod), 80)}, "accepted from outside": {n.Outside, at(f.Pod(pod), 80)},
				} {
					client := connect(t, c.from, protocol, netip.AddrPort{}, c.to)
					t.Cleanup(func() { client.Close() })
					for range testenv.OffloadRequests {
						testenv.Must(t, askOnce(t, client))
					}
					clients[name+", "+f.Name+" "+protocol] = client
				}
			}
		}
		for _, step := range []struct {
			policy string
			ends   string // the beginning of the connections' names
			reason maps.Reason
		}{
			{`{"ingress": [{"from": [{"sameNetwork": true}, {"cidr": "192.0.2.0/24"}, {"cidr": "2001:db8:1::/64"}], "ports": [{"port": 80}, {"protocol": "udp", "port": 80}]}],
				"egress": [{"ports": [{"port": 80}, {"protocol": "udp", "port": 80}]}]}`, "", 0},
			{`{"ingress": [], "egress": [{}]}`, "accepted from", reasonPolicy},
			{`{"ingress": [], "egress": [{"to": [{"sameNetwork": true}]}]}`, "opened to outside", reasonPolicyEgress},
		} {
			acknowledged(t, pod.Namespace, a.Namespace, n.Outside)
			n.setPolicy(t, pod, step.policy)
			for name, client := range clients {
				if step.ends == "" || name[:min(len(name), len(step.ends))] != step.ends {
					if err := askOnce(t, client); err != nil {
						t.Errorf("%s: %s: %v", step.policy, name, err)
					}
					continue
				}
				delete(clients, name)
				n.wantEnded(t, name, client, pod, step.reason)
			}
		}
		n.ctl(t, "set", "pods/pod", "policy=none")
		for _, f := range testenv.Families {
			for _, protocol := range []string{"tcp", "udp"} {
				reach(t, a.Namespace, protocol, at(f.Pod(pod), 80), pod.Namespace)
				reach(t, pod.Namespace, protocol, at(f.Outside, 80), n.Outside)
			}
		}
		wantCheck(t, pod)
	})
}

func askOnce(t *testing.T, client *testenv.Client) error {
	_, err := client.Ask(testenv.Context(t), "hello")
	return err
}

// A pod has 1,000 connections of both directions when it gets a policy, which admits half of them. These live on. Of the others,
// not a packet passes.
func TestPolicyOfManyConnections(t *testing.T) {
	const admitted, revoked = 80, 81
	forEachFastPath(t, `"ipMasq": true`, func(t *testing.T, conflist string) {
		n := newNetworkWith(t, conflist)
		pod, a := n.AddPod(t, "pod", nil), n.AddPod(t, "a", nil)
		var ways []path
		for _, f := range testenv.Families {
			n.RouteTo(t, f.PodSubnet)
			for _, port := range []uint16{admitted, revoked} {
				for ns, addr := range map[*testenv.Namespace]netip.Addr{pod.Namespace: f.Pod(pod), a.Namespace: f.Pod(a), n.Outside: f.Outside} {
					serve(t, ns, "tcp", at(addr, port))
				}
				for _, peer := range []*testenv.Namespace{a.Namespace, n.Outside} {
					addr := map[*testenv.Namespace]netip.Addr{a.Namespace: f.Pod(a), n.Outside: f.Outside}[peer]
					ways = append(ways, path{"opened", pod.Namespace, peer, netip.AddrPort{}, at(addr, port)},
						path{"accepted", peer, pod.Namespace, netip.AddrPort{}, at(f.Pod(pod), port)})
				}
			}
		}
		var live, ended []*testenv.Client
		for i := range workload(64, 1000, 1000) {
			way := ways[i%len(ways)]
			client := connect(t, way.client, "tcp", netip.AddrPort{}, way.dial)
			t.Cleanup(func() { client.Close() })
			for range testenv.OffloadRequests {
				testenv.Must(t, askOnce(t, client))
			}
			if way.dial.Port() == admitted {
				live = append(live, client)
			} else {
				ended = append(ended, client)
			}
		}
		n.setPolicy(t, pod, fmt.Sprintf(`{"ingress": [{"ports": [{"port": %d}]}], "egress": [{"ports": [{"port": %d}]}]}`, admitted, admitted))
		for _, ns := range []*testenv.Namespace{pod.Namespace, a.Namespace, n.Outside} {
			_, err := ns.Run(testenv.Context(t), "nft", fmt.Sprintf(`table inet seen { chain in { type filter hook prerouting priority -300;
				tcp flags & rst == 0 tcp dport %d counter; tcp flags & rst == 0 tcp sport %d counter; }; }`, revoked, revoked))
			testenv.Must(t, err)
		}
		ctx, stop := context.WithCancel(testenv.Context(t))
		defer stop()
		replies := make(chan error)
		for _, client := range ended {
			go func() { _, err := client.Ask(ctx, "still there?"); replies <- err }()
		}
		for _, client := range live {
			if err := askOnce(t, client); err != nil {
				t.Fatalf("a connection that the policy admits: %v", err)
			}
		}
		within(t, "a drop of each connection", func() error {
			if drops := n.dropsOf(t, pod); drops[reasonPolicy]+drops[reasonPolicyEgress] < uint64(len(ended)) {
				return fmt.Errorf("got %v, want %d", drops, len(ended))
			}
			return nil
		})
		stop()
		for range ended {
			if err := <-replies; err == nil {
				t.Error("a connection that the policy does not admit goes on")
			}
		}
		for _, ns := range []*testenv.Namespace{pod.Namespace, a.Namespace, n.Outside} {
			text, err := ns.Run(testenv.Context(t), "nft", "list", "table", "inet", "seen")
			testenv.Must(t, err)
			matches := counted.FindAllStringSubmatch(text, -1)
			if len(matches) != 2 {
				t.Fatalf("counters: %s", text)
			}
			for _, match := range matches {
				if match[1] != "0" {
					t.Errorf("%s has got packets of connections that the policy does not admit: %s", ns.Name, text)
				}
			}
		}
	})
}

// numbered is a stream of packets that have the number of the last completed change of a policy.
type numbered struct {
	change   atomic.Uint64
	late     atomic.Int64 // received packets that were sent after the last change
	received atomic.Int64
}

const numberedLen = 64

// send sends packets until ctx ends, as fast as it can.
func (s *numbered) send(ctx context.Context, conn net.Conn) {
	buffer := make([]byte, numberedLen)
	for ctx.Err() == nil {
		binary.BigEndian.PutUint64(buffer, s.change.Load())
		if conn.SetWriteDeadline(time.Now().Add(time.Second)) != nil {
			return
		}
		if _, err := conn.Write(buffer); err != nil && s.change.Load() > 0 {
			return
		}
	}
}

func (s *numbered) receive(conn net.Conn) {
	if conn.SetReadDeadline(time.Time{}) != nil { // with -long, the test takes longer
		return
	}
	buffer := make([]byte, numberedLen)
	for {
		if _, err := io.ReadFull(conn, buffer); err != nil {
			return
		}
		s.received.Add(1)
		if binary.BigEndian.Uint64(buffer) > 0 {
			s.late.Add(1)
		}
	}
}

// stream opens a connection, whose server keeps its listener, and sends on it until the test ends.
func startStream(t *testing.T, protocol string, from, to *testenv.Namespace, addr netip.AddrPort) *numbered {
	t.Helper()
	s := &numbered{}
	ctx, stop := context.WithCancel(t.Context())
	t.Cleanup(stop)
	client, server := net.Conn(nil), net.Conn(nil)
	if protocol == "udp" {
		client, server = connectUDPPair(t, path{"stream", from, to, addr, addr})
		_, err := server.Write([]byte("reply"))
		testenv.Must(t, err)
	} else {
		listener, err := to.Listen(ctx, addr)
		testenv.Must(t, err)
		t.Cleanup(func() { listener.Close() })
		client, err = from.Dial(ctx, "tcp", addr)
		testenv.Must(t, err)
		server, err = listener.Accept()
		testenv.Must(t, err)
		t.Cleanup(func() { client.Close(); server.Close() })
	}
	go s.receive(server)
	go s.send(ctx, client)
	s.await(t, 3000)
	return s
}

func (s *numbered) await(t *testing.T, packets int64) {
	t.Helper()
	testenv.Eventually(t, "the stream", func() error {
		if got := s.received.Load(); got < packets {
			return fmt.Errorf("got %d packets, want %d", got, packets)
		}
		return nil
	})
}

// A permission is revoked while streams use it, also by the forwarding cache. What is sent afterwards does not arrive.
func TestPolicyRevokedUnderLoad(t *testing.T) {
	forEachFastPath(t, `"ipMasq": true`, func(t *testing.T, conflist string) {
		n := newNetworkWith(t, conflist)
		number := 0
		for _, row := range []struct {
			before, after string
			accepts       bool
		}{
			{"", `{"egress": []}`, false},
			{`{"egress": [{}]}`, `{"egress": []}`, false},
			{"", `{"ingress": []}`, true},
			{`{"ingress": [{}]}`, `{"ingress": []}`, true},
			{`{"ingress": [{}], "egress": [{}]}`, `{"ingress": [], "egress": []}`, true},
		} {
			forEachProtocol(t, func(t *testing.T, f testenv.Family, protocol string) {
				number++
				pod, a := n.AddPod(t, fmt.Sprint("pod", number), nil), n.AddPod(t, fmt.Sprint("a", number), nil)
				from, to := pod, a
				if row.accepts {
					from, to = a, pod
				}
				if row.before != "" {
					n.setPolicy(t, pod, row.before)
				}
				s := startStream(t, protocol, from.Namespace, to.Namespace, at(f.Pod(to), 80))
				drops := func() uint64 { d := n.dropsOf(t, pod); return d[reasonPolicy] + d[reasonPolicyEgress] }
				before, more := drops(), uint64(1) // the first one of TCP becomes a RST
				n.setPolicy(t, pod, row.after)
				s.change.Store(1)
				if protocol == "udp" {
					more = 1000
				}
				within(t, "drops", func() error {
					if got := drops() - before; got < more {
						return fmt.Errorf("got %d drops, %d packets, %d of them after the change", got, s.received.Load(), s.late.Load())
					}
					return nil
				})
				if late := s.late.Load(); late > 1 {
					t.Errorf("from %q to %q: %d packets of %d passed that were sent after the change", row.before, row.after, late, s.received.Load())
				}
			})
		}
	})
}

// Two rule sets replace each other under load. Each admits port 80, by rules of its own, and no port 81, which only a
// mixture of both would admit.
func TestPolicySwappedUnderLoad(t *testing.T) {
	n := newNetworkWith(t, withKeys(`"ipMasq": true, "fastPath": "always"`))
	pod, a := n.AddPod(t, "pod", nil), n.AddPod(t, "a", nil)
	owner := maps.Attachment{Network: n.Network(), ContainerID: "pod", IfName: testenv.PodIfName}.Owner()
	f := testenv.IPv4
	rule := func(block uint32, port uint16) maps.Rule {
		return maps.Rule{Kind: maps.BlockPeer, Peer: block, Protocol: uint8(maps.UDP), First: port, Last: port}
	}
	swap := func(times int) {
		n.withDatapath(t, func(datapath *loader.Datapath) {
			for i := range times {
				own, other := uint32(1+i%2), uint32(2-i%2)
				testenv.Must(t, maps.With(testenv.Context(t), datapath, func(store *maps.Store) error {
					_, err := store.PutPolicy(owner, &maps.RuleSet{
						Rules:  []maps.Rule{rule(own, 80), rule(other, 81)},
						Blocks: []maps.Block{{Prefix: netip.PrefixFrom(f.Pod(a), 32), Number: own}},
					}, nil)
					return err
				}))
			}
		})
	}
	n.setPolicy(t, pod, `{"ingress": [{"ports": [{"protocol": "udp", "port": 80}]}]}`)
	s := startStream(t, "udp", a.Namespace, pod.Namespace, at(f.Pod(pod), 80))
	swap(workload(100, 500, 5000))
	s.await(t, s.received.Load()+1000)
	if got := n.dropsOf(t, pod)[reasonPolicy]; got > 0 {
		t.Errorf("port 80: %d packets were dropped, want none", got)
	}
	server := listenPacket(t, pod.Namespace, at(f.Pod(pod), 81))
	client, err := a.Dial(testenv.Context(t), "udp", at(f.Pod(pod), 81))
	testenv.Must(t, err)
	t.Cleanup(func() { client.Close() })
	forbidden := &numbered{}
	go forbidden.receive(server)
	go forbidden.send(t.Context(), client)
	swap(workload(100, 500, 5000))
	within(t, "drops", func() error { // which shows that packets were sent
		if n.dropsOf(t, pod)[reasonPolicy] == 0 {
			return errNothing
		}
		return nil
	})
	if got := forbidden.received.Load(); got > 0 {
		t.Errorf("port 81: %d packets passed, %d were dropped", got, n.dropsOf(t, pod)[reasonPolicy])
	}
}

// A policy of many rules is replaced by as many system calls as one of few rules. None of the former rules stay.
func TestPolicyReplacementCost(t *testing.T) {
	testenv.Require(t, testenv.TrieBatches)
	n := newNetworkWith(t, withKeys(`"ipMasq": true`))
	pod := n.AddPod(t, "pod", nil)
	replace := func(rules int, port uint16) (calls int) {
		var list []map[string]any
		for i := range rules {
			from := map[string]any{"cidr": fmt.Sprintf("10.%d.%d.0/24", i>>8, i&0xff)}
			list = append(list, map[string]any{"from": []any{from}, "ports": []any{map[string]any{"port": port}}})
		}
		policy, err := json.Marshal(map[string]any{"ingress": list})
		testenv.Must(t, err)
		dir := t.TempDir()
		file, trace := filepath.Join(dir, "policy.json"), filepath.Join(dir, "trace")
		testenv.Must(t, os.WriteFile(file, policy, 0o600))
		cmd := exec.CommandContext(testenv.Context(t), "strace", "-f", "-qq", "-o", trace, "-e", "trace=bpf,membarrier", "-e", "signal=none",
			testenv.Build(t, "./cmd/ebpfnetctl"), "set", n.Network()+"/"+pod.Conf.ContainerID, "policy="+file)
		cmd.Stdout, cmd.Stderr = t.Output(), t.Output()
		testenv.Must(t, errors.Join(n.node().Do(cmd.Start), cmd.Wait()))
		return strings.Count(string(testenv.ReadFile(t, trace)), "\n")
	}
	const few, many, repeated = 10, 1000, 10 // calls that the kernel may want again
	costs := map[int]int{}
	for _, rules := range []int{few, many} {
		replace(rules, 80)
		costs[rules] = replace(rules, 81)
	}
	t.Logf("system calls by rules: %v", costs)
	if costs[many] > costs[few]+repeated {
		t.Errorf("replacing %d rules took %d system calls, %d rules %d; want as many", few, costs[few], many, costs[many])
	}
	n.withDatapath(t, func(datapath *loader.Datapath) {
		testenv.Must(t, datapath.OpenOnDemand(bpf.MapRuleSets, bpf.MapPolicyRules, bpf.MapPolicyBlocks))
		got, err := maps.Count(datapath, bpf.MapRuleSets, bpf.MapPolicyRules, bpf.MapPolicyBlocks)
		testenv.Must(t, err)
		if want := (map[string]int{bpf.MapRuleSets: 1, bpf.MapPolicyRules: many, bpf.MapPolicyBlocks: many}); !reflect.DeepEqual(got, want) {
			t.Errorf("got %v entries, want those of the last policy: %v", got, want)
		}
	})
}

// DEL and GC remove a container's rules, CHECK misses each of them, and an upgrade keeps them.
func TestPolicyEntries(t *testing.T) {
	policy := `"ipMasq": true, "policy": {"ingress": [{"from": [{"cidr": "10.88.0.0/24"}, {"sameNetwork": true}], "ports": [{"port": 80}]}], "egress": []}`
	n := newNetworkWith(t, allVerbs(withKeys(policy)))
	counts := func() (counts [4]int) {
		n.withDatapath(t, func(datapath *loader.Datapath) {
			counts[0] = len(must(maps.Policies(datapath)))
			testenv.Must(t, datapath.OpenOnDemand(bpf.MapRuleSets, bpf.MapPolicyRules, bpf.MapPolicyBlocks))
			for i, m := range []*ebpf.Map{datapath.RuleSets, datapath.PolicyRules, datapath.PolicyBlocks} {
				key, err := m.NextKeyBytes(nil)
				for ; key != nil; key, err = m.NextKeyBytes(key) {
					counts[i+1]++
				}
				testenv.Must(t, err)
			}
		})
		return counts
	}
	want := func(when string, want [4]int) {
		t.Helper()
		if got := counts(); got != want {
			t.Errorf("%s: got %v policies, rule sets, rules and blocks, want %v", when, got, want)
		}
	}
	one, other := n.AddPod(t, "one", nil), n.AddPod(t, "other", nil)
	want("two containers of equal rules", [4]int{2, 2, 2, 1})
	f := testenv.IPv4
	serve(t, other.Namespace, "tcp", at(f.Pod(other), 80))
	if _, err := n.upgrade(t, release(1, 7)); err != nil {
		t.Fatal(err)
	}
	n.wantProbe(t, "tcp80", one.Namespace, other.Namespace, f.Pod(other), one, false, reasonPolicyEgress)
	n.wantProbe(t, "tcp80", n.node(), other.Namespace, f.Pod(other), other, true, reasonPolicy)
	wantCheck(t, one)

	del(t, one)
	want("DEL", [4]int{1, 2, 2, 1})
	testenv.Must(t, n.GC(testenv.Context(t)))
	want("GC", [4]int{})

	one = n.AddPod(t, "one", nil)
	n.withDatapath(t, func(datapath *loader.Datapath) {
		testenv.Must(t, datapath.OpenOnDemand(bpf.MapPolicyRules))
		key, err := datapath.PolicyRules.NextKeyBytes(nil)
		testenv.Must(t, err)
		testenv.Must(t, datapath.PolicyRules.Delete(key))
	})
	var coded *cnitypes.Error
	if err := one.Check(testenv.Context(t)); !errors.As(err, &coded) || coded.Code != cnierr.CodeDiffers {
		t.Errorf("CHECK without a rule: got %v, want code %d", err, cnierr.CodeDiffers)
	}
}
