package scenario

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// Pods with raw sockets fill the table of flows, with an accomplice outside who answers. Nobody loses a connection.

// attack is how pods open connections.
type attack struct {
	name, protocol string
	answered       bool
}

// The answered connections are assured: UDP when it is a stream.
var (
	answeredTCP = attack{"answered TCP", "tcp", true}
	answeredUDP = attack{"answered UDP", "udp", true}
	betweenThem = attack{"TCP between them", "tcp", true} // which counts against none of them alone
	attacks     = []attack{{"SYNs", "tcp", false}, {"UDP", "udp", false}, answeredUDP, answeredTCP, betweenThem}
)

// forAttacks has rules that drop invalid packets, but conntrack does not see the attackers' connections: its table is the
// whole machine's, and smaller.
const forAttacks = `table inet filter { chain forward { type filter hook forward priority 0; policy accept; ct state invalid drop }
	chain raw { type filter hook prerouting priority -300; policy accept; th dport 7000-7001 notrack; th sport 7000 notrack } }`

func TestFloodOfFlowTable(t *testing.T) {
	numbers, keys := []int{1, 8}, smallestTable
	if *long {
		numbers, keys = []int{1, 2, 4, 8}, `"ipMasq": true`
	}
	n := newNetworkWith(t, withKeys(keys))
	n.nft(t, forAttacks)
	a, web := n.AddPod(t, "a", nil), n.AddPod(t, "web", quietPorts())
	quiet, whole, attackers := n.openQuietPairs(t, a, web), t, 0
	n.answerAttackers(t)
	for _, number := range numbers {
		t.Run(fmt.Sprint(number, " attackers"), func(t *testing.T) {
			for _, attack := range attacks {
				t.Run(attack.name, func(t *testing.T) {
					wantWhole(t, whole)
					var pods []*testenv.Pod
					for i := range number {
						attackers++ // one with a former one's name would count its flows as its own
						pods = append(pods, n.newAttacker(t, attackers))
						defer del(t, pods[i])
					}
					for round := range workload(1, 1, 10) { // UDP streams must not expire meanwhile
						attack.run(t, pods, round)
						wantQuiet(t, quiet)
					}
					n.wantRoom(t, attack, pods)
				})
			}
		})
	}
}

// newAttacker adds a pod whose stack answers neither the accomplice nor other attackers.
func (n *network) newAttacker(t *testing.T, number int) *testenv.Pod {
	t.Helper()
	pod := n.AddPod(t, fmt.Sprint("bad", number), nil)
	nft(t, pod.Namespace, `table inet silent { chain input { type filter hook input priority 0; policy accept;
		th sport 7000 drop; th dport 7000 drop } }`)
	return pod
}

// run has the pods open connections at the same time: with -long, a million in ten rounds.
func (a attack) run(t *testing.T, pods []*testenv.Pod, round int) {
	t.Helper()
	if a == betweenThem {
		offloadBetween(t, pods, round)
		return
	}
	flows := workload(6_000, 6_000, 100_000) / len(pods)
	if a == answeredUDP {
		flows = workload(512, 512, 100_000) / len(pods) // so that the table has room for them until they are streams
	}
	errs := make([]error, len(pods))
	var all sync.WaitGroup
	for i, pod := range pods {
		w := wireOf(t, pod)
		all.Go(func() { errs[i] = a.from(pod, w, round*flows, flows, floodBatch/len(pods)) })
	}
	all.Wait()
	testenv.Must(t, errors.Join(errs...))
}

// offloadBetween has each two of the pods open connections to each other, until they are offloaded.
func offloadBetween(t *testing.T, pods []*testenv.Pod, round int) {
	t.Helper()
	const batch, packets = 50, 10 // more of a side than OFFLOAD_AFTER
	flows := workload(2_000, 2_000, 20_000) / max(1, len(pods)*(len(pods)-1)/2)
	for i := range pods {
		for _, other := range pods[:i] {
			ends := [2]*testenv.Pod{pods[i], other}
			for first := round * flows; first < (round+1)*flows; first += batch {
				for side, w := range [2]wire{wireOf(t, ends[0]), wireOf(t, ends[1])} {
					var sent []testenv.Packet
					for flow := first; flow < first+batch; flow++ {
						f := testenv.Families[flow%2]
						addrs := [2]netip.AddrPort{at(f.Pod(ends[0]), manyPort(flow/2)), at(f.Pod(ends[1]), remotePort)}
						data := testenv.TCPPacket(addrs[side], addrs[1-side], testenv.ACK, "")
						open := data
						open.TCPFlags = [2]uint8{testenv.SYN, testenv.SYN | testenv.ACK}[side]
						sent = append(append(sent, open), slices.Repeat([]testenv.Packet{data}, packets)...)
					}
					w.send(t, sent...)
				}
			}
		}
	}
}

// from opens connections of one pod, in batches, so that the table has room for one until it is answered. Those of UDP are
// all used until they are streams, by few packets: each offloaded one would have two places.
func (a attack) from(pod *testenv.Pod, w wire, first, flows, batch int) error {
	const steps = 3

	window, passes := batch, 1
	switch {
	case a == answeredUDP:
		window, passes = flows, steps+1
	case a.answered:
		passes = 2
	}
	ticker := time.NewTicker(streamAge / steps)
	defer ticker.Stop()
	for end := first + flows; first < end; first += window {
		for pass := range passes {
			if pass > 0 && a == answeredUDP {
				<-ticker.C
			}
			for i := first; i < min(first+window, end); i += batch {
				if err := a.sendBatch(pod, w, i, batch, pass); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// sendBatch sends a packet of each connection, and gives the accomplice time to answer.
func (a attack) sendBatch(pod *testenv.Pod, w wire, first, count, pass int) error {
	var frames [][]byte
	for i := range count {
		p := a.packet(pod, first+i, pass)
		p.SrcMAC, p.DstMAC = w.mac, w.next
		frames = append(frames, p.MustBuild())
	}
	before, err := received(pod)
	err = errors.Join(err, w.ns.SendFrames(testenv.PodIfName, frames...))
	if err != nil || !a.answered || a == answeredTCP && pass > 0 {
		return err
	}
	ticker := time.NewTicker(time.Millisecond)
	defer ticker.Stop()
	for range 20 {
		if now, err := received(pod); err != nil || now-before >= uint64(count) {
			return err
		}
		<-ticker.C
	}
	return nil
}

// received counts the packets that the pod has received.
func received(pod *testenv.Pod) (uint64, error) {
	link, err := pod.Netlink().LinkByName(testenv.PodIfName)
	if err != nil {
		return 0, err
	}
	return link.Attrs().Statistics.RxPackets, nil
}

// packet returns the first or a later packet of a connection.
func (a attack) packet(pod *testenv.Pod, flow, pass int) testenv.Packet {
	f := testenv.Families[flow%2]
	from, to := at(f.Pod(pod), manyPort(flow/2)), at(manyAddr(f, flow/4096), remotePort)
	if !a.answered {
		to = at(to.Addr(), remotePort+1)
	}
	if a.protocol == "udp" {
		return testenv.UDPPacket(from, to, "x")
	}
	p := testenv.TCPPacket(from, to, testenv.SYN, "")
	if pass > 0 { // the accomplice begins with the same number
		p.TCPFlags, p.Seq, p.Ack = testenv.ACK, p.Seq+1, p.Seq+1
	}
	return p
}

// answerAttackers has the outside answer SYNs and datagrams to the attackers' port of any address.
func (n *network) answerAttackers(t *testing.T) {
	t.Helper()
	c := openCapture(t, n.Outside, testenv.UplinkName)
	link, err := n.Outside.Netlink().LinkByName(testenv.UplinkName)
	testenv.Must(t, err)
	to, done := &unix.SockaddrLinklayer{Ifindex: link.Attrs().Index}, make(chan struct{})
	t.Cleanup(func() { <-done })
	go func() {
		defer close(done)
		for t.Context().Err() == nil {
			for _, p := range c.received(t) {
				if p.DstPort != remotePort || p.TCPFlags&^testenv.SYN != 0 {
					continue
				}
				answer := p
				answer.SrcMAC, answer.Src, answer.SrcPort = p.DstMAC, p.Dst, p.DstPort
				answer.DstMAC, answer.Dst, answer.DstPort = p.SrcMAC, p.Src, p.SrcPort
				answer.TCPFlags, answer.Ack = p.TCPFlags|testenv.ACK, p.Seq+1
				_ = unix.Sendto(c.fd, answer.MustBuild(), 0, to) // the attacker does not rely on it
			}
			_, _ = unix.Poll([]unix.PollFd{{Fd: int32(c.fd), Events: unix.POLLIN}}, 100)
		}
	}()
}

// wantRoom wants connections of a new pod, and for a busy pod alone at least half of the table, but not more than its share.
func (n *network) wantRoom(t *testing.T, a attack, pods []*testenv.Pod) {
	t.Helper()
	held, places := n.heldBy(t, pods)
	t.Logf("the attackers have %d of %d places", held, places)
	if a == answeredTCP && len(pods) == 1 && held < places/2 {
		t.Errorf("one pod has %d of %d places, want half", held, places)
	}
	if share := places * 12 / 16; len(pods) == 1 && held > share {
		t.Errorf("one pod has %d of %d places, want %d at most", held, places, share)
	}
	newcomer := n.AddPod(t, "newcomer", nil)
	defer del(t, newcomer)
	var clients []*testenv.Client
	for i := range workload(32, 32, 400) { // fewer than the table has buckets
		f := testenv.Families[i%2]
		if i < 2 {
			serve(t, n.Outside, "tcp", at(f.Outside, remotePort+2))
		}
		clients = append(clients, connect(t, newcomer.Namespace, "tcp", netip.AddrPort{}, at(f.Outside, remotePort+2)))
		defer clients[i].Close()
	}
	for _, client := range clients {
		ask(t, client, n.Outside)
	}
}

// heldBy counts the places of the pods' connections, and those of the table.
func (n *network) heldBy(t *testing.T, pods []*testenv.Pod) (held, places int) {
	t.Helper()
	n.withDatapath(t, func(datapath *loader.Datapath) {
		places = datapath.MaxFlows()
		theirs := map[netip.Addr]bool{}
		for _, pod := range pods {
			theirs[pod.Addr4()], theirs[pod.Addr6()] = true, true
		}
		for _, e := range must(maps.FlowEntries(datapath)) {
			if !e.Expired && theirs[e.NAT.Addr()] {
				held++
			}
		}
		for _, e := range must(maps.OffloadEntries(datapath)) {
			if !e.Expired && theirs[e.Sides[0].Addr()] && theirs[e.Sides[1].Addr()] {
				held++
			}
		}
	})
	return held, places
}
