package scenario

import (
	"bytes"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	cnitypes "github.com/containernetworking/cni/pkg/types"

	"github.com/ebpfnet/ebpfnet/plugin/operator"
	"github.com/ebpfnet/ebpfnet/plugin/record"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// chainOf is a network of several plugins, of which the reference ones are built, too.
func chainOf(t *testing.T, plugins ...string) *network {
	t.Helper()
	for _, reference := range []string{"main/bridge", "main/ptp", "main/macvlan", "meta/tuning", "meta/portmap", "meta/firewall", "meta/bandwidth", "ipam/host-local"} {
		if strings.Contains(strings.Join(plugins, ""), `"`+filepath.Base(reference)+`"`) {
			testenv.Build(t, "github.com/containernetworking/plugins/plugins/"+reference)
		}
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(record.DefaultDir); err != nil {
			t.Error(err)
		}
	})
	return newNetworkOf(t, conflistOf(plugins...))
}

const (
	referenceIPAM = `"ipam": {
		"type": "host-local",
		"ranges": [[{"subnet": "10.88.0.0/24"}], [{"subnet": "fd00:88::/64"}]],
		"routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]
	}`
	afterOthers = `{"type": "ebpfnet", "ipMasq": true, "capabilities": {"portMappings": true}}`
)

// firstPlugins are those that ebpfnet can come after.
var firstPlugins = map[string]string{
	"bridge": `{"type": "bridge", "bridge": "cni0", "isGateway": true, "hairpinMode": true, ` + referenceIPAM + `}`,
	"ptp":    `{"type": "ptp", ` + referenceIPAM + `}`,
}

// After the reference plugins ebpfnet masquerades, and opens host ports to everyone.
func TestAfterOtherPlugin(t *testing.T) {
	for name, first := range firstPlugins {
		t.Run(name, func(t *testing.T) {
			n := chainOf(t, first, afterOthers)
			web := n.AddPod(t, "web", mapBoth(8080, 80))
			a := n.AddPod(t, "a", nil)
			for _, pod := range []*testenv.Pod{web, a} {
				if err := pod.Check(testenv.Context(t)); err != nil {
					t.Errorf("CHECK: %v", err)
				}
			}
			isListed(t, n, web)
			byEachProtocol(t, func(t *testing.T, f family, protocol string) {
				ping(t, a.Namespace, f.outside)
				outside := serve(t, n.Outside, protocol, at(f.outside, 0))
				reachAsNode(t, a.Namespace, protocol, outside, n.Outside, f.node)

				serve(t, web.Namespace, protocol, at(f.pod(web), 80))
				reachAsOneself(t, n.Outside, protocol, at(f.node, 8080), web.Namespace)
				reachAsOneself(t, a.Namespace, protocol, at(f.pod(web), 80), web.Namespace) // not masqueraded
				for _, loopback := range f.loopbacks() {
					reach(t, n.node(), protocol, at(loopback, 8080), web.Namespace)
				}
				reach(t, n.node(), protocol, at(f.node, 8080), web.Namespace)
				reach(t, a.Namespace, protocol, at(f.node, 8080), web.Namespace)
				reach(t, web.Namespace, protocol, at(f.node, 8080), web.Namespace)
			})
			next := n.NewPod(t, "next")
			next.Conf.CapabilityArgs = mapBoth(8080, 80)
			if err := next.Add(testenv.Context(t)); err == nil || !strings.Contains(err.Error(), "web") {
				t.Errorf("another pod with the same port: %v", err)
			}
			del(t, next)
			if err := n.GC(testenv.Context(t), attachmentOf(web), attachmentOf(a)); err != nil {
				t.Errorf("GC: %v", err)
			}
			del(t, web)
			f := families[0]
			serve(t, n.node(), "tcp", at(f.node, 8080))
			reachAsOneself(t, n.Outside, "tcp", at(f.node, 8080), n.node())
		})
	}
}

// isListed wants the operator's tool to know a pod by its own name and another plugin's device.
func isListed(t *testing.T, n *network, pod *testenv.Pod) {
	t.Helper()
	for _, info := range attachmentsOf(t, n) {
		if info.ContainerID != pod.Conf.ContainerID {
			continue
		}
		if !info.Chained || info.Dead || !strings.HasPrefix(info.Device, "veth") || len(info.Addresses) != 2 || len(info.HostPorts) != 4 {
			t.Errorf("%s is listed as %+v", pod.Name, info)
		}
		return
	}
	t.Errorf("%s is not listed", pod.Name)
}

func attachmentsOf(t *testing.T, n *network) (all []*operator.Attachment) {
	t.Helper()
	err := n.node().Do(func() (err error) {
		all, err = operator.Attachments("")
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

func attachmentOf(pod *testenv.Pod) cnitypes.GCAttachment {
	return cnitypes.GCAttachment{ContainerID: pod.Conf.ContainerID, IfName: pod.Conf.IfName}
}

// A chained ebpfnet passes the result on as it was, in each version that has lists.
func TestChainedResult(t *testing.T) {
	for name, versions := range map[string][]string{"bridge": {"1.1.0"}, "ptp": {"0.3.0", "0.3.1", "0.4.0", "1.0.0"}} {
		first := firstPlugins[name]
		n := chainOf(t, first, afterOthers)
		for _, version := range versions {
			t.Run(name+" "+version, func(t *testing.T) {
				if err := n.SetNetwork([]byte(strings.Replace(conflistOf(first, afterOthers), `"1.0.0"`, `"`+version+`"`, 1))); err != nil {
					t.Fatal(err)
				}
				before := len(n.Calls())
				n.AddPod(t, "a", nil)
				calls := n.Calls()[before:]
				if len(calls) != 2 || !bytes.Equal(calls[0].Stdout, calls[1].Stdout) {
					t.Fatalf("results differ: %q and %q", calls[0].Stdout, calls[1].Stdout)
				}
				if !strings.Contains(string(calls[1].Stdout), `"cniVersion": "`+version+`"`) {
					t.Errorf("the result is not of %s: %s", version, calls[1].Stdout)
				}
			})
		}
	}
}

// DNS of its own configuration goes before that of the plugin before, and all the rest is passed on; a
// MAC address that the interface does not have is refused.
func TestChainedKeys(t *testing.T) {
	n := chainOf(t, firstPlugins["ptp"], strings.TrimSuffix(afterOthers, "}")+`, "dns": {"nameservers": ["192.0.2.53"]}}`)
	pod := n.AddPod(t, "a", nil)
	if got := pod.Result.DNS.Nameservers; len(got) != 1 || got[0] != "192.0.2.53" || len(pod.Result.IPs) != 2 {
		t.Errorf("the result is %v", pod.Result)
	}
	asked := n.NewPod(t, "b")
	asked.Conf.Args = [][2]string{{"IgnoreUnknown", "1"}, {"MAC", "02:00:00:00:00:77"}}
	err := asked.Add(testenv.Context(t))
	var coded *cnitypes.Error
	if !errors.As(err, &coded) || coded.Code != cnitypes.ErrUnsupportedField || !strings.Contains(coded.Msg, "02:00:00:00:00:77") {
		t.Errorf("ADD: %v", err)
	}
	del(t, asked)
}

// The packets of a macvlan pass no device of the host.
func TestAfterMacvlan(t *testing.T) {
	n := chainOf(t, `{"type": "macvlan", "master": "eth0", `+referenceIPAM+`}`, afterOthers)
	pod := n.NewPod(t, "a")
	err := pod.Add(testenv.Context(t))
	var coded *cnitypes.Error
	if !errors.As(err, &coded) || coded.Code != cnitypes.ErrUnsupportedField {
		t.Fatalf("ADD: %v", err)
	}
	for _, word := range []string{"macvlan", testenv.PodIfName, "bridge", "ptp"} {
		if !strings.Contains(coded.Msg, word) {
			t.Errorf("the error lacks %q: %s", word, coded.Msg)
		}
	}
	del(t, pod)
}

// What tuning changes of another plugin's interface is put back by DEL.
func TestChainedTuning(t *testing.T) {
	tuned := strings.TrimSuffix(afterOthers, "}") + `, "allmulti": true, "txQLen": 77, "promisc": true,
		"sysctl": {"net.ipv4.conf.IFNAME.arp_notify": "1", "net/core/somaxconn": "500"}}`
	n := chainOf(t, firstPlugins["ptp"], tuned)
	pod := n.AddPod(t, "a", nil)
	state := func() string {
		link, err := pod.Netlink().LinkByName(testenv.PodIfName)
		if err != nil {
			t.Fatal(err)
		}
		var sysctls []string
		for _, name := range []string{"net/ipv4/conf/eth0/arp_notify", "net/core/somaxconn"} {
			value, err := pod.Sysctl(name)
			if err != nil {
				t.Fatal(err)
			}
			sysctls = append(sysctls, value)
		}
		attrs := link.Attrs()
		return fmt.Sprint(attrs.Promisc, attrs.Allmulti, attrs.TxQLen, sysctls)
	}
	if got, want := state(), "1 1 77 [1 500]"; got != want {
		t.Errorf("the interface has %s, want %s", got, want)
	}
	if err := pod.Check(testenv.Context(t)); err != nil {
		t.Errorf("CHECK: %v", err)
	}
	if err := pod.SetSysctl("net/core/somaxconn", "501"); err != nil {
		t.Fatal(err)
	}
	if err := pod.Check(testenv.Context(t)); err == nil || !strings.Contains(err.Error(), "somaxconn is 501, expected 500") {
		t.Errorf("CHECK with another setting: %v", err)
	}

	// DEL of ebpfnet alone: the interface stays.
	alone := chainOf2(t, n, tuned)
	if err := alone.Del(testenv.Context(t), pod.Conf); err != nil {
		t.Fatal(err)
	}
	if got := state(); !strings.HasPrefix(got, "0 0 ") || strings.Contains(got, "77") || strings.HasPrefix(got, "[1") {
		t.Errorf("after DEL the interface has %s", got)
	}
}

// chainOf2 is the same network with fewer plugins.
func chainOf2(t *testing.T, n *network, plugins ...string) *testenv.Runtime {
	t.Helper()
	return testenv.NewRuntime(t, n.node(), []byte(conflistOf(plugins...)), filepath.Dir(testenv.Build(t, "./cmd/ebpfnet")))
}

// Others come after ebpfnet, and find in its result what they need.
func TestBeforeOtherPlugins(t *testing.T) {
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
			n := chainOf(t, own, tc.plugin)
			if err := n.SetNetwork([]byte(strings.Replace(conflistOf(own, tc.plugin), `"1.0.0"`, `"1.1.0"`, 1))); err != nil {
				t.Fatal(err)
			}
			pod := n.AddPod(t, "a", map[string]any{"portMappings": []mapping{{HostPort: 8080, ContainerPort: 80, Protocol: "tcp"}}})
			f := families[0]
			ping(t, pod.Namespace, f.outside)
			ping(t, n.node(), f.pod(pod))
			other := n.AddPod(t, "b", nil)
			askMuch(t, pod.Namespace, serve(t, n.Outside, "tcp", at(f.outside, 0)), n.Outside)
			askMuch(t, pod.Namespace, serve(t, other.Namespace, "tcp", at(f.pod(other), 0)), other.Namespace)
			if err := pod.Check(testenv.Context(t)); err != nil {
				t.Errorf("CHECK: %v", err)
			}
			if tc.name == "portmap" {
				serve(t, pod.Namespace, "tcp", at(f.pod(pod), 80))
				reachAsOneself(t, n.Outside, "tcp", at(f.node, 8080), pod.Namespace)
			}
		})
	}
}

// A container comes back whose old namespace is gone without DEL: what was kept of it is replaced.
// While it lives, a second ADD is refused.
func TestChainedRestart(t *testing.T) {
	testenv.Build(t, "github.com/containernetworking/plugins/plugins/ipam/static")
	n := chainOf(t, `{"type": "bridge", "bridge": "cni0", "isGateway": true,
		"ipam": {"type": "static", "addresses": [{"address": "10.88.0.7/24", "gateway": "10.88.0.1"}], "routes": [{"dst": "0.0.0.0/0"}]}}`,
		strings.TrimSuffix(afterOthers, "}")+`, "allmulti": true}`)
	old := n.AddPod(t, "old", mapBoth(8080, 80))
	next := n.NewPod(t, "next")
	next.Conf.ContainerID, next.Conf.CapabilityArgs = old.Conf.ContainerID, old.Conf.CapabilityArgs
	if err := old.Close(); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, "the old device to go", func() error {
		if infos := attachmentsOf(t, n); len(infos) != 1 || !infos[0].Dead {
			return fmt.Errorf("attachments are %+v", infos)
		}
		return nil
	})
	if err := next.Add(testenv.Context(t)); err != nil {
		t.Fatal(err)
	}
	if err := next.Check(testenv.Context(t)); err != nil {
		t.Errorf("CHECK: %v", err)
	}
	f := families[0]
	serve(t, next.Namespace, "tcp", at(f.pod(next), 80))
	reachAsOneself(t, n.Outside, "tcp", at(f.node, 8080), next.Namespace)
	del(t, next)
}

// A plugin that changes the MAC address after ebpfnet ends what antiSpoof lets pass: CHECK says so.
func TestMACOfLaterPlugin(t *testing.T) {
	n := chainOf(t, `{"type": "ebpfnet", "ipMasq": true, `+referenceIPAM+`}`, `{"type": "tuning", "mac": "02:00:00:00:00:77"}`)
	pod := n.AddPod(t, "a", nil)
	if err := pod.Check(testenv.Context(t)); err == nil || !strings.Contains(err.Error(), "antiSpoof stops all that the container sends: its MAC is 02:00:00:00:00:77") {
		t.Errorf("CHECK: %v", err)
	}
}

// askMuch asks over one connection, so that most packets are not the first.
func askMuch(t *testing.T, from *testenv.Namespace, to netip.AddrPort, want *testenv.Namespace) {
	t.Helper()
	const questions = 10

	client := connect(t, from, "tcp", netip.AddrPort{}, to)
	defer client.Close()
	for range questions {
		ask(t, client, want)
	}
}
