package scenario

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
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
		n.Outside.SendUntil(t.Context(), t, at(refused[f.Name], 0), at(first.addrs[f.Name], testenv.ForbiddenPort), sendPace)
	}
	for i := range workload(5, 40, 1000) {
		testenv.NoError(t, testenv.WithoutBacklogDrops(t, func(attempt int) error {
			return first.see(t, fmt.Sprintf("pod%d-%d", i, attempt))
		}))
	}
}

// sendPace is that of forbidden datagrams.
const sendPace = 200 * time.Microsecond

// firstPackets is a network with a host outside of which one address may talk to pods, and one is refused.
type firstPackets struct {
	*network
	addrs   map[string]netip.Addr // of each pod, by family
	refused map[string]netip.Addr
	before  testenv.SeenPackets // by the host outside
}

// count begins to count. The forbidden packets of a namespace have the refused address at one side: the node sends back those
// to the pod while there is none.
func (n *firstPackets) count(t *testing.T, ns *testenv.Namespace, side string) {
	t.Helper()
	ns.CountPackets(t, fmt.Sprintf("ip %s %s", side, n.refused["IPv4"]), fmt.Sprintf("ip6 %s %s", side, n.refused["IPv6"]))
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
		pod.SendUntil(ctx, t, netip.AddrPort{}, at(n.refused[f.Name], testenv.ForbiddenPort), sendPace)
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
	testenv.DrainBacklog(t) // a SYN may be on its way although its like has arrived
	inside, all := pod.Seen(t), n.Outside.Seen(t)
	outside := all.Minus(n.before)
	if inside.Sent == 0 || inside.Received == 0 || inside.Forbidden+outside.Forbidden > 0 {
		t.Errorf("%s: the pod has seen %+v, the host outside %+v", name, inside, outside)
	}
	n.before = all
	testenv.Must(t, pod.Del(ctx))
	stop()
	testenv.Must(t, errors.Join(listener.Close(), pod.Close()))
	if outside.Sent != inside.Received || inside.Sent != outside.Received {
		return fmt.Errorf("lost SYNs: %s has got %d of %d, and the host outside %d of %d", name, inside.Received, outside.Sent, outside.Received, inside.Sent)
	}
	return nil
}
