package scenario

import (
	"os/exec"
	"strings"
	"testing"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// ebpfnet creates no bridge and no netfilter rule.
func TestNoBridgeNoRules(t *testing.T) {
	n := newNetwork(t)
	n.AddPod(t, "web", mapBoth(8080, 80))
	pod := n.AddPod(t, "a", nil)
	ping(t, pod.Namespace, testenv.OutsideAddr4)

	for _, ns := range []*testenv.Namespace{n.node(), pod.Namespace} {
		links, err := ns.Netlink().LinkList()
		if err != nil {
			t.Fatal(err)
		}
		for _, link := range links {
			if kind := link.Type(); kind != "veth" && kind != "device" { // the type of lo
				t.Errorf("%s in %s: got a %s, want a veth", link.Attrs().Name, ns.Name, kind)
			}
		}
		wantNoRules(t, ns)
	}
}

func wantNoRules(t *testing.T, ns *testenv.Namespace) {
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
			t.Errorf("%s in %s: want nothing, got:\n%s", strings.Join(lister.command, " "), ns.Name, output)
		}
	}
}

// requireTool fails the test if a command is missing. A skip would hide that nothing was checked.
func requireTool(t *testing.T, command, debianPackage string) {
	t.Helper()
	if _, err := exec.LookPath(command); err != nil {
		t.Fatalf("%s is missing: apt-get install %s", command, debianPackage)
	}
}
