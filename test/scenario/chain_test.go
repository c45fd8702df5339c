package scenario

import (
	"errors"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"

	cnitypes "github.com/containernetworking/cni/pkg/types"

	"github.com/ebpfnet/ebpfnet/plugin/admin"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// newChain makes a fresh node for a network of several plugins, and builds the reference plugins among
// them.
func newChain(t *testing.T, plugins ...string) *network {
	t.Helper()
	for _, reference := range []string{"main/bridge", "main/ptp", "main/macvlan", "main/loopback", "meta/tuning", "meta/portmap", "meta/firewall", "meta/bandwidth", "ipam/host-local"} {
		if strings.Contains(strings.Join(plugins, ""), `"`+filepath.Base(reference)+`"`) {
			testenv.Build(t, "github.com/containernetworking/plugins/plugins/"+reference)
		}
	}
	return newNetworkWith(t, conflistOf(plugins...))
}

const (
	referenceIPAM = `"ipam": {
		"type": "host-local",
		"ranges": [[{"subnet": "10.88.0.0/24"}], [{"subnet": "fd00:88::/64"}]],
		"routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]
	}`
	afterOthers = `{"type": "ebpfnet", "ipMasq": true, "capabilities": {"portMappings": true}}`
)

// firstPlugins are the interface plugins after which ebpfnet can be chained.
var firstPlugins = map[string]string{
	"bridge": `{"type": "bridge", "bridge": "cni0", "isGateway": true, "hairpinMode": true, ` + referenceIPAM + `}`,
	"ptp":    `{"type": "ptp", ` + referenceIPAM + `}`,
}

// Chained after a reference plugin, ebpfnet masquerades and opens host ports to every kind of client.
func TestChained(t *testing.T) {
	for name, first := range firstPlugins {
		t.Run(name, func(t *testing.T) {
			n := newChain(t, first, afterOthers)
			web := n.AddPod(t, "web", mapBoth(8080, 80))
			a := n.AddPod(t, "a", nil)
			wantCheck(t, web, a)
			wantListed(t, n, web)
			n.wantConnectivity(t, a, web)
			next := n.NewPod(t, "next")
			next.Conf.CapabilityArgs = mapBoth(8080, 80)
			if err := next.Add(testenv.Context(t)); err == nil || !strings.Contains(err.Error(), "web") {
				t.Errorf("ADD with a host port in use: got %v, want an error that names its pod", err)
			}
			del(t, next)
			if err := n.GC(testenv.Context(t), attachmentOf(web), attachmentOf(a)); err != nil {
				t.Errorf("GC: %v", err)
			}
			del(t, web)
			f := testenv.IPv4
			serve(t, n.node(), "tcp", at(f.Node, 8080))
			reachUntranslated(t, n.Outside, "tcp", at(f.Node, 8080), n.node())
		})
	}
}

// wantListed wants ebpfnetctl's list to show a chained pod with the other plugin's device.
func wantListed(t *testing.T, n *network, pod *testenv.Pod) {
	t.Helper()
	for _, info := range attachmentsOf(t, n) {
		if info.ContainerID != pod.Conf.ContainerID {
			continue
		}
		if !info.Chained || info.Dead || !strings.HasPrefix(info.Device, "veth") || len(info.Addresses) != 2 || len(info.HostPorts) != 4 {
			t.Errorf("attachment %s: got %+v, want it chained and alive, with 2 addresses and 4 host ports", pod.Name, info)
		}
		return
	}
	t.Errorf("attachment %s is missing from the list", pod.Name)
}

func attachmentsOf(t *testing.T, n *network) (all []*admin.Attachment) {
	t.Helper()
	err := n.node().Do(func() (err error) {
		all, err = admin.Attachments("")
		return err
	})
	testenv.Must(t, err)
	return all
}

func attachmentOf(pod *testenv.Pod) cnitypes.GCAttachment {
	return cnitypes.GCAttachment{ContainerID: pod.Conf.ContainerID, IfName: pod.Conf.IfName}
}

// A chained ebpfnet replaces the previous DNS by its configuration's, passes everything else on, and refuses
// a MAC address that the interface does not have.
func TestChainedKeys(t *testing.T) {
	n := newChain(t, firstPlugins["ptp"], strings.TrimSuffix(afterOthers, "}")+`, "dns": {"nameservers": ["192.0.2.53"]}}`)
	pod := n.AddPod(t, "a", nil)
	if got := pod.Result.DNS.Nameservers; len(got) != 1 || got[0] != "192.0.2.53" || len(pod.Result.IPs) != 2 {
		t.Errorf("result: got %v, want nameserver 192.0.2.53 and 2 addresses", pod.Result)
	}
	withMAC := n.NewPod(t, "b")
	withMAC.Conf.Args = [][2]string{{"IgnoreUnknown", "1"}, {"MAC", "02:00:00:00:00:77"}}
	err := withMAC.Add(testenv.Context(t))
	var coded *cnitypes.Error
	if !errors.As(err, &coded) || coded.Code != cnitypes.ErrUnsupportedField || !strings.Contains(coded.Msg, "02:00:00:00:00:77") {
		t.Errorf("ADD with MAC: got %v, want code %d that names it", err, cnitypes.ErrUnsupportedField)
	}
	del(t, withMAC)
}

// ebpfnet refuses a macvlan, whose packets pass none of the host's devices.
func TestChainedAfterMacvlan(t *testing.T) {
	n := newChain(t, `{"type": "macvlan", "master": "eth0", `+referenceIPAM+`}`, afterOthers)
	pod := n.NewPod(t, "a")
	err := pod.Add(testenv.Context(t))
	var coded *cnitypes.Error
	if !errors.As(err, &coded) || coded.Code != cnitypes.ErrUnsupportedField {
		t.Fatalf("ADD: got %v, want code %d", err, cnitypes.ErrUnsupportedField)
	}
	for _, word := range []string{"macvlan", testenv.PodIfName, "bridge", "ptp"} {
		if !strings.Contains(coded.Msg, word) {
			t.Errorf("error: got %q, want it to mention %q", coded.Msg, word)
		}
	}
	del(t, pod)
}

// runtimeWith returns a runtime that knows the network with these plugins only.
func runtimeWith(t *testing.T, n *network, plugins ...string) *testenv.Runtime {
	t.Helper()
	return testenv.NewRuntime(t, n.node(), []byte(conflistOf(plugins...)), filepath.Dir(testenv.Build(t, "./cmd/ebpfnet")))
}

// Plugins chained after ebpfnet find what they need in its result.
func TestFirstInChain(t *testing.T) {
	own := `{"type": "ebpfnet", "ipMasq": true, ` + referenceIPAM + `}`
	for _, tc := range []struct{ name, plugin string }{
		{"tuning", `{"type": "tuning", "mtu": 1400, "sysctl": {"net.core.somaxconn": "500"}}`},
		{"tuning's MAC", `{"type": "tuning", "mac": "02:00:00:00:00:77"}`},
		{"bandwidth", `{"type": "bandwidth", "ingressRate": 100000000, "ingressBurst": 10000000}`},
		{"portmap", `{"type": "portmap", "backend": "nftables", "capabilities": {"portMappings": true}}`},
		{"firewall", `{"type": "firewall", "backend": "iptables"}`},
	} {
		t.Run(tc.name, func(t *testing.T) {
			own := own
			if tc.name == "tuning's MAC" {
				own = strings.Replace(own, "{", `{"antiSpoof": false, `, 1)
			}
			n := newChain(t, own, tc.plugin)
			testenv.Must(t, n.SetNetwork([]byte(strings.Replace(conflistOf(own, tc.plugin), `"1.0.0"`, `"1.1.0"`, 1))))
			pod := n.AddPod(t, "a", map[string]any{"portMappings": []mapping{{HostPort: 8080, ContainerPort: 80, Protocol: "tcp"}}})
			f := testenv.IPv4
			ping(t, pod.Namespace, f.Outside)
			ping(t, n.node(), f.Pod(pod))
			other := n.AddPod(t, "b", nil)
			askRepeatedly(t, pod.Namespace, serve(t, n.Outside, "tcp", at(f.Outside, 0)), n.Outside)
			askRepeatedly(t, pod.Namespace, serve(t, other.Namespace, "tcp", at(f.Pod(other), 0)), other.Namespace)
			wantCheck(t, pod)
			if tc.name == "portmap" {
				serve(t, pod.Namespace, "tcp", at(f.Pod(pod), 80))
				reachUntranslated(t, n.Outside, "tcp", at(f.Node, 8080), pod.Namespace)
			}
		})
	}
}

// A later plugin that changes the MAC address makes antiSpoof drop everything: CHECK says so.
func TestLaterPluginChangesMAC(t *testing.T) {
	n := newChain(t, `{"type": "ebpfnet", "ipMasq": true, `+referenceIPAM+`}`, `{"type": "tuning", "mac": "02:00:00:00:00:77"}`)
	pod := n.AddPod(t, "a", nil)
	if err := pod.Check(testenv.Context(t)); err == nil || !strings.Contains(err.Error(), "antiSpoof drops all that the container sends: its MAC is 02:00:00:00:00:77") {
		t.Errorf("CHECK: got %v, want it to name antiSpoof and the MAC", err)
	}
}

// askRepeatedly sends several requests over one connection, so that most take the fast path.
func askRepeatedly(t *testing.T, from *testenv.Namespace, to netip.AddrPort, want *testenv.Namespace) {
	t.Helper()
	const requests = 10

	client := connect(t, from, "tcp", netip.AddrPort{}, to)
	defer client.Close()
	for range requests {
		ask(t, client, want)
	}
}
