package cluster

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

var long = flag.Bool("long", false, "1,000 pods in TestPodsUnderPolicies, not a few")

// forbiddenPort is where pods and strangers send what no policy admits, all the time.
const forbiddenPort = 9

// policed has pods under a policy come and go on a node. They may talk with friends, but not with strangers.
type policed struct {
	*cluster
	node              *node
	friends, stranger []*testenv.Pod // the first of each is on the node
}

// TestPodsUnderPolicies has pods start under a policy, each of which talks at once to peers of its own node and of others.
// Nothing passes that the policy forbids, and no SYN between pods of the node is lost. With the agent killed again and again,
// still nothing passes.
func TestPodsUnderPolicies(t *testing.T) {
	p := &policed{cluster: newCluster(t, append([]string{"--network-policy"}, clusterCIDRs...)...)}
	p.node = p.nodes[0]
	for _, name := range []string{"shop", "bar"} {
		p.api.Set(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}})
	}
	for i, app := range []string{"client", "client", "other"} {
		p.putPod(p.nodes[i], p.nodes[i].pod, app)
	}
	policy := policyOf("client")
	policy.Spec.Egress = []networkingv1.NetworkPolicyEgressRule{{To: policy.Spec.Ingress[0].From}}
	p.api.Set(policy)
	near := p.node.runtime.AddPod(t, "stranger", nil)
	p.putPod(p.node, near, "other")
	p.friends, p.stranger = []*testenv.Pod{p.node.pod, p.nodes[1].pod}, []*testenv.Pod{near, p.nodes[2].pod}
	for _, peer := range slices.Concat(p.friends, p.stranger) {
		p.count(peer.Namespace)
	}
	for _, friend := range p.friends {
		for _, f := range testenv.Families {
			server := testenv.ServeTCP(t, friend.Namespace, netip.AddrPortFrom(f.Pod(friend), 80))
			t.Cleanup(func() { server.Close() })
		}
	}
	number := 4
	if *long {
		number = 500
	}
	var with, without []time.Duration
	for i := range number {
		with = append(with, p.addPod(fmt.Sprint("pod", i), true))
		without = append(without, p.addFree(fmt.Sprint("free", i)))
	}
	slices.Sort(with)
	slices.Sort(without)
	t.Logf("ADD takes %v with policies, %v without (medians)", with[number/2], without[number/2])
	for i := range number {
		p.node.agent.kill()
		if i%2 == 0 { // else ADD waits for an agent in vain, and the pod is closed until there is one
			p.node.startAgent()
		}
		p.addPod(fmt.Sprint("restart", i), false)
	}
	for _, peer := range p.stranger {
		if _, forbidden := p.counts(peer.Namespace); forbidden != 0 {
			t.Errorf("%s has got %d packets that policies forbid", peer.Name, forbidden)
		}
	}
}

// addPod starts a pod, and returns the time that ADD takes. isSteady says that the agent runs all the time.
func (p *policed) addPod(name string, isSteady bool) (took time.Duration) {
	p.Helper()
	p.api.Set(podObject(p.node, name, "shop", "web"))
	if isSteady {
		p.node.awaitPolicy("uid-" + name)
	}
	pod := p.node.runtime.NewPod(p, name)
	p.count(pod.Namespace)
	ctx, stop := context.WithCancel(testenv.Context(p))
	defer stop()
	for _, peer := range p.stranger {
		for _, f := range testenv.Families {
			send(ctx, p, pod.Namespace, netip.AddrPortFrom(f.Pod(peer), forbiddenPort))
		}
	}
	sent, _ := p.counts(p.friends[0].Namespace)
	took = p.add(pod, name, "shop")
	if !isSteady {
		p.node.agent.kill() // it may run or not
		p.node.startAgent()
	}
	object := podObject(p.node, name, "shop", "web") // as kubelet reports it
	object.Status.PodIPs = []corev1.PodIP{{IP: pod.Addr4().String()}, {IP: pod.Addr6().String()}}
	p.api.Set(object)
	for _, f := range testenv.Families {
		for _, peer := range p.stranger {
			send(ctx, p, peer.Namespace, netip.AddrPortFrom(f.Pod(pod), forbiddenPort))
		}
		server := testenv.ServeTCP(p, pod.Namespace, netip.AddrPortFrom(f.Pod(pod), 0))
		for _, friend := range p.friends {
			p.ask(pod, netip.AddrPortFrom(f.Pod(friend), 80), isSteady)
			p.ask(friend, server.Addr, isSteady)
		}
		server.Close()
	}
	stop()
	got, forbidden := p.counts(pod.Namespace)
	if now, _ := p.counts(p.friends[0].Namespace); isSteady && now-sent != syns {
		p.Errorf("%s: the friend on its node has sent and received %d SYNs, want %d", name, now-sent, syns)
	}
	if forbidden > 0 || got == 0 {
		p.Errorf("%s has got %d packets that policies forbid, and has sent and received %d SYNs", name, forbidden, got)
	}
	testenv.Must(p, pod.Del(testenv.Context(p)))
	p.api.Unset(object)
	testenv.Must(p, pod.Close())
	return took
}

// syns are those that the friend on the node sends and receives for each pod: one of each family and direction.
const syns = 4

// addFree starts a pod of a namespace without policies, and returns the time that ADD takes.
func (p *policed) addFree(name string) time.Duration {
	p.Helper()
	pod := p.node.runtime.NewPod(p, name)
	took := p.add(pod, name, "bar")
	testenv.Must(p, errors.Join(pod.Del(testenv.Context(p)), pod.Close()))
	return took
}

func (p *policed) add(pod *testenv.Pod, name, namespace string) time.Duration {
	p.Helper()
	pod.Conf.Args = [][2]string{{"IgnoreUnknown", "1"}, {"K8S_POD_NAMESPACE", namespace}, {"K8S_POD_NAME", name}, {"K8S_POD_UID", "uid-" + name}}
	start := time.Now()
	testenv.Must(p, pod.Add(testenv.Context(p)))
	return time.Since(start)
}

// ask wants an answer; without a steady agent, at last.
func (p *policed) ask(from *testenv.Pod, to netip.AddrPort, isSteady bool) {
	p.Helper()
	ask := func() error {
		ctx, stop := context.WithTimeout(testenv.Context(p), patience)
		defer stop()
		_, err := testenv.Ask(ctx, from.Namespace, "tcp", to, "hello")
		return err
	}
	if isSteady {
		_, err := testenv.Ask(testenv.Context(p), from.Namespace, "tcp", to, "hello")
		testenv.Must(p, err)
		return
	}
	eventually(p, fmt.Sprintf("%s to reach %s", from.Name, to), ask)
}

// awaitPolicy waits until the datapath has a pod's rules.
func (n *node) awaitPolicy(uid string) {
	n.t.Helper()
	eventually(n.t, "rules of "+uid, func() (err error) {
		n.withDatapath(func(dp *loader.Datapath) error {
			index, errLook := maps.PodPolicy(dp, uid)
			if index == 0 {
				err = errors.New("got none")
			}
			return errLook
		})
		return err
	})
}

// count counts SYNs, and what a namespace receives on the forbidden port.
func (p *policed) count(ns *testenv.Namespace) {
	p.Helper()
	_, err := ns.Run(testenv.Context(p), "nft", fmt.Sprintf(`table inet seen {
		chain in { type filter hook prerouting priority -300; tcp flags & (syn | ack) == syn counter; udp dport %d counter; };
		chain out { type filter hook output priority -300; tcp flags & (syn | ack) == syn counter; }; }`, forbiddenPort))
	testenv.Must(p, err)
}

var counters = regexp.MustCompile(`(tcp|udp).* counter packets (\d+)`)

func (p *policed) counts(ns *testenv.Namespace) (syns, forbidden int) {
	p.Helper()
	text, err := ns.Run(testenv.Context(p), "nft", "list", "table", "inet", "seen")
	testenv.Must(p, err)
	for _, match := range counters.FindAllStringSubmatch(text, -1) {
		packets, err := strconv.Atoi(match[2])
		testenv.Must(p, err)
		if match[1] == "udp" {
			forbidden += packets
		} else {
			syns += packets
		}
	}
	return syns, forbidden
}

// send sends datagrams until ctx ends, also while there is no route.
func send(ctx context.Context, tb testenv.TB, ns *testenv.Namespace, to netip.AddrPort) {
	tb.Helper()
	local := netip.AddrPortFrom(netip.IPv6Unspecified(), 0)
	if to.Addr().Is4() {
		local = netip.AddrPortFrom(netip.IPv4Unspecified(), 0)
	}
	conn, err := ns.ListenPacket(ctx, local)
	testenv.Must(tb, err)
	go func() {
		defer conn.Close()
		pace := time.NewTicker(time.Millisecond)
		defer pace.Stop()
		for ctx.Err() == nil {
			<-pace.C
			_, _ = conn.WriteToUDPAddrPort([]byte("forbidden"), to)
		}
	}()
}
