package desired

import (
	"errors"
	"net/netip"
	"strings"
	"testing"
)

// TestOwnNodeUnknown changes nothing while this node is not known, whatever the other nodes are.
func TestOwnNodeUnknown(t *testing.T) {
	other := node(2, "10.244.2.0/24", "192.0.2.2")
	for name, test := range map[string]struct {
		nodes []Node
		says  string
	}{
		"no nodes":    {nil, "the API has no node node-1"},
		"not in it":   {[]Node{other}, "the API has no node node-1"},
		"no podCIDR":  {[]Node{other, node(1, "192.0.2.1")}, "node node-1 has no podCIDR (it has no podCIDR (yet))"},
		"bad podCIDR": {[]Node{other, node(1, "0.0.0.0/0", "192.0.2.1")}, "(0.0.0.0/0: it is larger than a /8)"},
		"no address":  {[]Node{other, node(1, "10.244.1.0/24")}, "node node-1 has no usable internal address"},
		"bad address": {[]Node{other, node(1, "10.244.1.0/24", "127.0.0.1")}, "internal address (127.0.0.1: no node can be reached by it)"},
		"in the cluster's": {[]Node{other, node(1, "10.244.1.0/24", "10.245.0.1")},
			"internal address (10.245.0.1: it is in the cluster's prefixes for containers [10.244.0.0/15])"},
		"no device": {[]Node{other, node(1, "10.244.1.0/24", "192.0.2.1")}, "node node-1 has no device"},
	} {
		host := dualHost
		if name == "no device" {
			host = Host{}
		}
		limited := config
		limited.PodCIDRs = []netip.Prefix{prefix("10.244.0.0/15")}
		_, err := Of(test.nodes, "node-1", limited, host)
		if !errors.Is(err, ErrUnknown) || !strings.Contains(err.Error(), test.says) {
			t.Errorf("%s: got error %v, want one with %q that wraps ErrUnknown", name, err, test.says)
		}
	}
}

// TestProblems says what of this node hinders its containers.
func TestProblems(t *testing.T) {
	narrow := hostWith("192.0.2.1/24")
	narrow.Links[0].MTU = 1320
	for name, test := range map[string]struct {
		host Host
		node Node
		says string
	}{
		"good":              {hostWith("192.0.2.1/24"), node(1, "10.244.1.0/24", "192.0.2.1"), ""},
		"address elsewhere": {hostWith("192.0.2.9/24"), node(1, "10.244.1.0/24", "192.0.2.1"), "has this node's address 192.0.2.1"},
		"other one away":    {hostWith("192.0.2.1/24"), node(1, "10.244.1.0/24", "192.0.2.1", "2001:db8::1"), ""},
		"IPv4, narrow":      {narrow, node(1, "10.244.1.0/24", "192.0.2.1"), ""},
		"IPv6, narrow":      {narrow, node(1, "fd44:1::/64", "192.0.2.1"), "leaves containers 1270; IPv6 needs 1280"},
	} {
		got, err := Of([]Node{test.node}, "node-1", config, test.host)
		if err != nil {
			t.Fatal(err)
		}
		checkOnly(t, name, strings.Join(got.Problems, "\n"), test.says)
	}
}

// TestOtherAddressAway reports the nodes that would see another address than this node's object has.
func TestOtherAddressAway(t *testing.T) {
	got, err := Of([]Node{
		node(1, "10.244.1.0/24", "192.0.2.1", "2001:db8::1"), node(2, "10.244.2.0/24", "192.0.2.2"), node(3, "10.244.3.0/24", "2001:db8::3"),
	}, "node-1", config, hostWith("192.0.2.1/24"))
	if err != nil {
		t.Fatal(err)
	}
	if len(got.Nodes) != 2 || len(got.Problems) > 0 {
		t.Errorf("got peers %+v and problems %v, want two and none", got.Nodes, got.Problems)
	}
	checkOnly(t, "skipped", skippedText(got), "node-3 10.244.3.0/24: no device that is up has this node's address 2001:db8::1")
}
