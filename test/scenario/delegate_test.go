package scenario

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// delegatingTo is ebpfnet with addresses of another plugin.
func delegatingTo(ipam string) string {
	return `{"type": "ebpfnet", "ipMasq": true, "capabilities": {"portMappings": true, "ips": true}, "ipam": ` + ipam + `}`
}

// The reference plugin static gives the addresses, with a gateway and without, and routes.
func TestStaticIPAM(t *testing.T) {
	for name, gateways := range map[string][2]string{
		"with gateways":    {`, "gateway": "10.88.0.254"`, `, "gateway": "fd00:88::fe"`},
		"without gateways": {"", ""},
	} {
		t.Run(name, func(t *testing.T) {
			testenv.Build(t, "github.com/containernetworking/plugins/plugins/ipam/static")
			n := newNetworkOf(t, strings.Replace(conflistOf(delegatingTo(fmt.Sprintf(`{"type": "static",
				"addresses": [{"address": "10.88.0.7/24"%s}, {"address": "fd00:88::7/64"%s}],
				"routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]}`, gateways[0], gateways[1]))), "1.0.0", "1.1.0", 1))
			if err := n.Status(testenv.Context(t)); err != nil {
				t.Errorf("STATUS: %v", err)
			}
			pod := n.AddPod(t, "a", mapBoth(8080, 80))
			if pod.Addr4() != netip.MustParseAddr("10.88.0.7") || pod.Addr6() != netip.MustParseAddr("fd00:88::7") {
				t.Errorf("the pod has %s and %s", pod.Addr4(), pod.Addr6())
			}
			if err := pod.Check(testenv.Context(t)); err != nil {
				t.Errorf("CHECK: %v", err)
			}
			if err := n.GC(testenv.Context(t), attachmentOf(pod)); err != nil {
				t.Errorf("GC: %v", err)
			}
			byEachProtocol(t, func(t *testing.T, f family, protocol string) {
				ping(t, pod.Namespace, f.outside)
				outside := serve(t, n.Outside, protocol, at(f.outside, 0))
				reachAsNode(t, pod.Namespace, protocol, outside, n.Outside, f.node)
				serve(t, pod.Namespace, protocol, at(f.pod(pod), 80))
				reachAsOneself(t, n.Outside, protocol, at(f.node, 8080), pod.Namespace)
				reach(t, n.node(), protocol, at(f.loopbacks()[0], 8080), pod.Namespace)
				reach(t, pod.Namespace, protocol, at(f.node, 8080), pod.Namespace)
			})
		})
	}
}

// What another plugin has reserved is given back when ADD fails, by DEL and by GC, and its CHECK
// and STATUS count.
func TestDelegatedIPAM(t *testing.T) {
	testenv.Build(t, "./cmd/ebpfnet-ipam")
	n := newNetworkOf(t, strings.Replace(conflistOf(delegatingTo(
		`{"type": "ebpfnet-ipam", "ranges": [[{"subnet": "10.88.0.0/29"}]], "routes": [{"dst": "0.0.0.0/0"}]}`)), "1.0.0", "1.1.0", 1))
	a := n.AddPod(t, "a", mapBoth(8080, 80))
	if got := reservationsOf(t, "a"); !slices.Equal(got, []netip.Addr{a.Addr4()}) {
		t.Errorf("a has %v, and %s on disk", a.Addr4(), got)
	}
	if err := a.Check(testenv.Context(t)); err != nil {
		t.Errorf("CHECK: %v", err)
	}

	late := n.NewPod(t, "late")
	late.Conf.CapabilityArgs = mapBoth(8080, 80)
	if err := late.Add(testenv.Context(t)); err == nil {
		t.Error("two pods have one host port")
	}
	if got := reservationsOf(t, "late"); len(got) > 0 {
		t.Errorf("after a failed ADD, %s is reserved", got)
	}
	if err := n.Status(testenv.Context(t)); err != nil {
		t.Errorf("STATUS: %v", err)
	}
	for _, id := range []string{"b", "c", "d", "e"} {
		n.AddPod(t, id, nil)
	}
	if err := n.Status(testenv.Context(t)); err == nil || !strings.Contains(err.Error(), "10.88.0.1-10.88.0.6") {
		t.Errorf("STATUS of a full range: %v", err)
	}
	if err := n.GC(testenv.Context(t), attachmentOf(a)); err != nil {
		t.Errorf("GC: %v", err)
	}
	if got := reservationsOf(t, "b"); len(got) > 0 {
		t.Errorf("after GC, b has %v", got)
	}
	if got := reservationsOf(t, "a"); len(got) != 1 {
		t.Errorf("after GC, a has %v", got)
	}
	del(t, a)
	if got := reservationsOf(t, "a"); len(got) > 0 {
		t.Errorf("after DEL, a has %v", got)
	}
}

// An interface without addresses is a link, and nothing else.
func TestNoIPAM(t *testing.T) {
	n := newNetworkOf(t, conflistOf(`{"type": "ebpfnet"}`))
	pod := n.AddPod(t, "a", nil)
	if len(pod.Result.IPs) != 0 {
		t.Errorf("the result has %v", pod.Result.IPs)
	}
	link, err := pod.Netlink().LinkByName(testenv.PodIfName)
	if err != nil {
		t.Fatal(err)
	}
	if state := link.Attrs().OperState.String(); state != "up" {
		t.Errorf("the interface is %s", state)
	}
	if err := pod.Check(testenv.Context(t)); err != nil {
		t.Errorf("CHECK: %v", err)
	}
}
