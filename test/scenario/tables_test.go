package scenario

import (
	"os/exec"
	"strings"
	"testing"

	"github.com/ebpfnet/ebpfnet/loader/rtnl"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// The promise: no bridge, and no rule of a firewall.
func TestNoBridgeAndNoRules(t *testing.T) {
	n := newNetwork(t)
	n.AddPod(t, "web", mapBoth(8080, 80))
	pod := n.AddPod(t, "a", nil)
	ping(t, pod.Namespace, testenv.OutsideAddr4)

	for _, ns := range []*testenv.Namespace{n.node(), pod.Namespace} {
		links, err := rtnl.Links(ns.Netlink())
		if err != nil {
			t.Fatal(err)
		}
		for _, link := range links {
			if kind := link.Type(); kind != "veth" && kind != "device" { // lo is a device
				t.Errorf("%s has a %s, %s", ns.Name, kind, link.Attrs().Name)
			}
		}
		checkNoRules(t, ns)
	}
}

func checkNoRules(t *testing.T, ns *testenv.Namespace) {
	t.Helper()
	for _, lister := range []struct {
		debianPackage string
		command       []string
	}{
		{"nftables", []string{"nft", "list", "ruleset"}},
		{"iptables", []string{"iptables-save"}},
		{"iptables", []string{"ip6tables-save"}},
	} {
		requireTool(t, lister.command[0], lister.debianPackage)
		output, err := ns.Run(testenv.Context(t), lister.command[0], lister.command[1:]...)
		if err != nil {
			t.Fatal(err)
		}
		if strings.TrimSpace(output) != "" {
			t.Errorf("%s in %s shows:\n%s", strings.Join(lister.command, " "), ns.Name, output)
		}
	}
}

// requireTool fails the test where a command is missing: a skipped check would look
// like a passed one.
func requireTool(t *testing.T, command, debianPackage string) {
	t.Helper()
	if _, err := exec.LookPath(command); err != nil {
		t.Fatalf("%s is missing: apt-get install %s", command, debianPackage)
	}
}
