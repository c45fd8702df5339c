package cluster

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

var long = flag.Bool("long", false, "1,000 pods in TestPodsUnderPolicies, twice, not a few")

// policed has pods under a policy come and go on a node. They may talk with friends, but not with strangers.
type policed struct {
	*cluster
	node              *node
	friends, stranger []*testenv.Pod // the first of each is on the node
}

// TestPodsUnderPolicies has pods start under a policy, each of which talks at once to peers of its own node and of others.
// Nothing passes that the policy forbids, and no SYN is lost. With the agent killed again and again, still nothing passes.
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
		peer.CountPackets(p, "")
	}
	for _, friend := range p.friends {
		for _, f := range testenv.Families {
			server := testenv.ServeTCP(t, friend.Namespace, netip.AddrPortFrom(f.Pod(friend), 80))
			t.Cleanup(func() { server.Close() })
		}
	}
	number := batch
	if *long {
		number = 1000
	}
	if *long { // they want nothing
		p.measureADD(number)
		p.measurePeer(number)
	}
	p.addPods("steady", number)
	p.addPods("restarted", max(number, 2*batch))
	for _, peer := range p.stranger {
		if seen := peer.Seen(p); seen.Forbidden != 0 {
			t.Errorf("%s has got %d packets that policies forbid", peer.Name, seen.Forbidden)
		}
	}
}

// batch is how many pods start at a time.
const batch = 10

// addPods starts pods while the agent is steady, or is restarted for each batch: every other time it is missing until one pod
// has started, and each time it is killed once more then.
func (p *policed) addPods(agent string, number int) {
	p.Helper()
	isSteady := agent == "steady"
	for first := 0; first < number; first += batch {
		if !isSteady {
			p.node.agent.kill()
		}
		if !isSteady && first/batch%2 == 0 { // else ADD waits for an agent in vain, and pods are closed until there is one
			p.node.startAgent()
		}
		testenv.NoError(p, testenv.WithoutBacklogDrops(p, func(attempt int) error { return p.addBatch(agent, first, attempt) }))
	}
}

// addBatch starts pods at once. While the agent is steady, it returns which SYNs are lost between them and their friends: these
// are sent again.
func (p *policed) addBatch(agent string, first, attempt int) error {
	p.Helper()
	before := p.seenByFriends()
	var seen [batch]testenv.SeenPackets
	var all sync.WaitGroup
	for i := range batch {
		all.Go(func() { seen[i] = p.addPod(agent, first+i, attempt) })
	}
	all.Wait()
	var pods testenv.SeenPackets
	for _, s := range seen {
		pods.Sent, pods.Received = pods.Sent+s.Sent, pods.Received+s.Received
	}
	friends := p.seenByFriends().Minus(before)
	if agent == "steady" && (friends.Received != pods.Sent || pods.Received != friends.Sent) {
		return fmt.Errorf("lost SYNs: friends have got %d of %d, and pods %d of %d", friends.Received, pods.Sent, pods.Received, friends.Sent)
	}
	return nil
}

// seenByFriends returns what both friends have seen.
func (p *policed) seenByFriends() (seen testenv.SeenPackets) {
	p.Helper()
	for _, friend := range p.friends {
		one := friend.Seen(p)
		seen.Sent, seen.Received = seen.Sent+one.Sent, seen.Received+one.Received
	}
	return seen
}

// addPod starts a pod, and returns what it has seen. Every other one sends from before its ADD on. The first one of a batch
// restarts the agent.
func (p *policed) addPod(agent string, number, attempt int) testenv.SeenPackets {
	p.Helper()
	name, isSteady := fmt.Sprintf("%s%d-%d", agent, number, attempt), agent == "steady"
	p.api.Set(podObject(p.node, name, "shop", "web"))
	if isSteady {
		p.node.awaitPolicy("uid-" + name)
	}
	pod := p.node.runtime.NewPod(p, name)
	pod.CountPackets(p, "")
	ctx, stop := context.WithCancel(testenv.Context(p))
	defer stop()
	sendAll := func() {
		for _, peer := range p.stranger {
			for _, f := range testenv.Families {
				pod.SendUntil(ctx, p, netip.AddrPort{}, netip.AddrPortFrom(f.Pod(peer), testenv.ForbiddenPort), time.Millisecond)
			}
		}
	}
	if number%2 == 1 {
		sendAll()
	}
	p.add(pod, name, "shop")
	if number%2 == 0 {
		sendAll()
	}
	if !isSteady && number%batch == 0 {
		p.node.agent.kill() // it may run or not
		p.node.startAgent()
	}
	object := podObject(p.node, name, "shop", "web") // as kubelet reports it
	object.Status.PodIPs = []corev1.PodIP{{IP: pod.Addr4().String()}, {IP: pod.Addr6().String()}}
	p.api.Set(object)
	for _, f := range testenv.Families {
		for _, peer := range p.stranger {
			peer.SendUntil(ctx, p, netip.AddrPort{}, netip.AddrPortFrom(f.Pod(pod), testenv.ForbiddenPort), time.Millisecond)
		}
		server := testenv.ServeTCP(p, pod.Namespace, netip.AddrPortFrom(f.Pod(pod), 0))
		for _, friend := range p.friends {
			p.ask(pod, netip.AddrPortFrom(f.Pod(friend), 80), isSteady)
			p.ask(friend, server.Addr, isSteady)
		}
		server.Close()
	}
	p.awaitDenied(pod)
	stop()
	testenv.DrainBacklog(p) // a SYN may be on its way although its like has arrived
	seen := pod.Seen(p)
	if seen.Forbidden > 0 {
		p.Errorf("%s has got %d packets that policies forbid", name, seen.Forbidden)
	}
	testenv.Must(p, pod.Del(testenv.Context(p)))
	p.api.Unset(object)
	testenv.Must(p, pod.Close())
	return seen
}

// awaitDenied waits until packets of both directions have been dropped by a pod's rules: what is forbidden has come as far.
func (p *policed) awaitDenied(pod *testenv.Pod) {
	p.Helper()
	owner := maps.Attachment{Network: p.node.runtime.Network(), ContainerID: pod.Conf.ContainerID, IfName: pod.Conf.IfName}.Owner()
	eventually(p, "drops by the rules of "+pod.Name, func() (err error) {
		dropped := map[maps.Reason]uint64{}
		p.node.withDatapath(func(dp *loader.Datapath) error {
			all, errDrops := maps.Drops(dp)
			for _, drop := range all {
				if drop.Owner == owner {
					dropped[drop.Reason] += drop.Packets
				}
			}
			return errDrops
		})
		for _, reason := range []bpf.Reason{bpf.ReasonPolicyIngress, bpf.ReasonPolicyEgress} {
			if dropped[maps.Reason(reason)] == 0 {
				err = fmt.Errorf("got %v, want some for %v", dropped, maps.Reason(reason))
			}
		}
		return err
	})
}

// measureADD starts pods that say nothing, one after the other, in a namespace with policies and in one without.
func (p *policed) measureADD(number int) {
	p.Helper()
	took := map[string][]time.Duration{}
	for i := range number {
		for _, namespace := range []string{"shop", "bar"} {
			name := fmt.Sprint(namespace, i)
			object := podObject(p.node, name, namespace, "web")
			p.api.Set(object)
			if namespace == "shop" {
				p.node.awaitPolicy("uid-" + name)
			}
			pod := p.node.runtime.NewPod(p, name)
			took[namespace] = append(took[namespace], p.add(pod, name, namespace))
			testenv.Must(p, errors.Join(pod.Del(testenv.Context(p)), pod.Close()))
			p.api.Unset(object)
		}
	}
	for _, times := range took {
		slices.Sort(times)
	}
	p.Logf("ADD takes %v with policies, %v without (medians)", took["shop"][number/2], took["bar"][number/2])
}

// measurePeer starts pods that talk to a peer of another node, whose policy admits them: once that node's agent has learned
// their address.
func (p *policed) measurePeer(number int) {
	p.Helper()
	peer, guard := p.friends[1], policyOf("web")
	guard.Name, guard.Spec.PodSelector = "guard", metav1.LabelSelector{MatchLabels: map[string]string{"app": "client"}}
	guard.Spec.PolicyTypes = guard.Spec.PolicyTypes[:1] // ingress
	p.api.Set(guard)
	defer p.api.Unset(guard)
	p.nodes[1].awaitPolicy("uid-" + peer.Conf.ContainerID)
	server := testenv.ServeUDP(p, peer.Namespace, netip.AddrPortFrom(peer.Addr4(), 80))
	defer server.Close()
	var took []time.Duration
	for i := range number {
		name := fmt.Sprint("guest", i)
		object := podObject(p.node, name, "shop", "web")
		p.api.Set(object)
		p.node.awaitPolicy("uid-" + name)
		pod := p.node.runtime.NewPod(p, name)
		p.add(pod, name, "shop")
		start := time.Now()
		object.Status.PodIPs = []corev1.PodIP{{IP: pod.Addr4().String()}, {IP: pod.Addr6().String()}}
		p.api.Set(object)
		attempt := time.Duration(0)
		eventually(p, name+" to reach a peer of another node", func() error {
			attempt = min(attempt+2*time.Millisecond, patience) // a busy machine takes longer for an answer
			ctx, stop := context.WithTimeout(testenv.Context(p), attempt)
			defer stop()
			_, err := testenv.Ask(ctx, pod.Namespace, "udp", server.Addr, "hello")
			return err
		})
		took = append(took, time.Since(start))
		testenv.Must(p, errors.Join(pod.Del(testenv.Context(p)), pod.Close()))
		p.api.Unset(object)
	}
	slices.Sort(took)
	p.Logf("the first packet reaches a peer of another node %v after the pod's address is reported (median; at most %v)", took[number/2], took[number-1])
}

// add returns the time that ADD takes.
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
