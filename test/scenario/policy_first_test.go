package scenario

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// An ADD under a policy, while the pod and a host outside, which have sent since before, do not stop. Between the pod and
// the address that its rules do not name, no packet passes in either direction. To and from the other one, the first SYN arrives.
func TestPolicyFromTheFirstPacket(t *testing.T) {
	var cidrs []string
	refused := map[string]netip.Addr{}
	for _, f := range testenv.Families {
		cidrs = append(cidrs, fmt.Sprintf(`{"cidr": "%s/%d"}`, f.Outside, f.Outside.BitLen()))
		refused[f.Name] = f.Outside.Next()
	}
	peers := strings.Join(cidrs, ", ")
	conflist := withKeys(`"policy": {"ingress": [{"from": [` + peers + `]}], "egress": [{"to": [` + peers + `]}]}`)
	n := newNetworkWith(t, strings.Replace(conflist, `"portMappings": true`, `"portMappings": true, "ips": true`, 1))
	uplink, err := n.Outside.Netlink().LinkByName(testenv.UplinkName)
	testenv.Must(t, err)
	for _, f := range testenv.Families {
		n.RouteTo(t, f.PodSubnet)
		addr := &netlink.Addr{IPNet: netlink.NewIPNet(refused[f.Name].AsSlice()), Flags: 2} // IFA_F_NODAD
		testenv.Must(t, n.Outside.Netlink().AddrAdd(uplink, addr))
		serve(t, n.Outside, "tcp", at(f.Outside, 80))
	}
	first := firstPackets{network: n, refused: refused,
		addrs: map[string]netip.Addr{"IPv4": testenv.IPv4.Gateway.Next().Next(), "IPv6": testenv.IPv6.Gateway.Next().Next()}}
	first.count(t, n.Outside, "daddr")
	for _, f := range testenv.Families {
		sendUntilEnd(t, n.Outside, at(refused[f.Name], 0), at(first.addrs[f.Name], 9))
	}
	for i := range workload(5, 40, 1000) {
		testenv.NoError(t, testenv.WithoutBacklogDrops(t, func(attempt int) error {
			return first.see(t, fmt.Sprintf("pod%d-%d", i, attempt))
		}))
	}
}

// firstPackets is a network with a host outside of which one address may talk to pods, and one is refused.
type firstPackets struct {
	*network
	addrs   map[string]netip.Addr // of each pod, by family
	refused map[string]netip.Addr
	before  seenPackets // by the host outside
}

// count counts SYNs and refused packets in a namespace. what says whether these have the host's address as source.
func (n *firstPackets) count(t *testing.T, ns *testenv.Namespace, what string) {
	t.Helper()
	const syn = "tcp flags & (syn | ack) == syn counter"
	_, err := ns.Run(testenv.Context(t), "nft", fmt.Sprintf(`add table inet seen; add chain inet seen in { type filter hook prerouting priority -300; };
		add chain inet seen out { type filter hook output priority -300; }; add rule inet seen out %s; add rule inet seen in %s;
		add rule inet seen in ip %s %s udp dport 9 counter; add rule inet seen in ip6 %s %s udp dport 9 counter`,
		syn, syn, what, n.refused["IPv4"], what, n.refused["IPv6"]))
	testenv.Must(t, err)
}

// see adds a pod, opens connections to and from it, and compares what both sides have sent and received. It returns which SYNs
// are lost.
func (n *firstPackets) see(t *testing.T, name string) error {
	t.Helper()
	pod := n.NewPod(t, name)
	pod.Conf.CapabilityArgs = map[string]any{"ips": []string{n.addrs["IPv4"].String() + "/24", n.addrs["IPv6"].String() + "/64"}}
	n.count(t, pod.Namespace, "saddr")
	ctx, stop := context.WithCancel(testenv.Context(t))
	defer stop()
	for _, f := range testenv.Families {
		sendUntil(ctx, t, pod.Namespace, netip.AddrPort{}, at(n.refused[f.Name], 9))
	}
	listener, err := pod.Listen(ctx, netip.MustParseAddrPort("[::]:80"))
	testenv.Must(t, err)
	testenv.Must(t, pod.Add(ctx))
	for _, f := range testenv.Families {
		for from, to := range map[*testenv.Namespace]netip.AddrPort{pod.Namespace: at(f.Outside, 80), n.Outside: at(n.addrs[f.Name], 80)} {
			local := netip.AddrPort{}
			if from == n.Outside {
				local = at(f.Outside, 0)
			}
			conn, err := from.DialFrom(ctx, "tcp", local, to)
			testenv.Must(t, err)
			conn.Close()
		}
	}
	testenv.Eventually(t, "the pod's rules to drop packets of both directions", func() error {
		if drops := n.dropsOf(t, pod); drops[reasonPolicy] == 0 || drops[reasonPolicyEgress] == 0 {
			return fmt.Errorf("got %v", drops)
		}
		return nil
	})
	inside, outside := seen(t, pod.Namespace), seen(t, n.Outside)
	sentTo, received := outside.sent-n.before.sent, outside.received-n.before.received
	if inside.sent == 0 || inside.received == 0 || inside.refused+outside.refused > 0 {
		t.Errorf("%s: the pod has seen %+v, the host outside %+v", name, inside, outside)
	}
	n.before = outside
	testenv.Must(t, pod.Del(ctx))
	stop()
	testenv.Must(t, errors.Join(listener.Close(), pod.Close()))
	if sentTo != inside.received || inside.sent != received {
		return fmt.Errorf("lost SYNs: %s has got %d of %d, and the host outside %d of %d", name, inside.received, sentTo, received, inside.sent)
	}
	return nil
}

// seenPackets are what a namespace's rules have counted.
type seenPackets struct {
	sent, received int // SYNs
	refused        int // packets against the rules of the pod
}

var counted = regexp.MustCompile(`counter packets (\d+)`)

func seen(t *testing.T, ns *testenv.Namespace) (p seenPackets) {
	t.Helper()
	for chain, counters := range map[string][]*int{"out": {&p.sent}, "in": {&p.received, &p.refused, &p.refused}} {
		out, err := ns.Run(testenv.Context(t), "nft", "list", "chain", "inet", "seen", chain)
		testenv.Must(t, err)
		found := counted.FindAllStringSubmatch(out, -1)
		if len(found) != len(counters) {
			t.Fatalf("counters: %s", out)
		}
		for i, match := range found {
			n, err := strconv.Atoi(match[1])
			testenv.Must(t, err)
			*counters[i] += n
		}
	}
	return p
}

// sendUntilEnd sends datagrams until the test ends.
func sendUntilEnd(t *testing.T, ns *testenv.Namespace, local, remote netip.AddrPort) {
	t.Helper()
	ctx, stop := context.WithCancel(t.Context())
	t.Cleanup(stop)
	sendUntil(ctx, t, ns, local, remote)
}

// sendUntil sends some thousand datagrams per second until ctx ends, also while there is no route. More would fill the
// queues of the host's CPUs, also for tests beside this one.
func sendUntil(ctx context.Context, t *testing.T, ns *testenv.Namespace, local, remote netip.AddrPort) {
	t.Helper()
	if !local.IsValid() {
		local = at(testenv.Unspecified(remote.Addr()), 0)
	}
	conn, err := ns.ListenPacket(ctx, local)
	testenv.Must(t, err)
	go func() {
		defer conn.Close()
		pace := time.NewTicker(200 * time.Microsecond)
		defer pace.Stop()
		for ctx.Err() == nil {
			<-pace.C
			if _, err := conn.WriteToUDPAddrPort([]byte("forbidden"), remote); errors.Is(err, net.ErrClosed) {
				return
			}
		}
	}()
}
