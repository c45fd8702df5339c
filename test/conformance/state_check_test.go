package conformance

import (
	"strings"
	"testing"
)

// TestStateSeesAll proves that what the other tests rely on sees each kind of thing that
// an ADD makes, by its name.
func TestStateSeesAll(t *testing.T) {
	h := newHost(t)
	p := h.pod(t, "c1", with(dual("1.0.0"), "runtimeConfig.portMappings", webPort))
	before := h.state(t, p.Namespace)
	result := p.add(t)
	after := h.state(t, p.Namespace)

	left, lost := before.compare(after)
	text := strings.Join(left, "\n")
	for _, thing := range []string{
		"node: link " + result.Interfaces[0].Name,
		"node: address 10.88.0.1/32 on ",
		"node: address fd00:88::1/128 on ",
		"node: route to 10.88.0.2/32 via ",
		"container pod-c1: link eth0",
		"container pod-c1: address 10.88.0.2/16 on eth0",
		"container pod-c1: route to 0.0.0.0/0 via 10.88.0.1 by eth0",
		`file /var/lib/cni/networks/pods/10.88.0.2: "c1\r\neth0"`,
		"endpoint 10.88.0.2",
		"endpoint fd00:88::2",
		"port tcp 0.0.0.0:8080 forwards to 10.88.0.2:80",
		"port tcp [::]:8080 forwards to [fd00:88::2]:80",
		"pinned link loopback-to_loopback",
	} {
		if !strings.Contains(text, thing) {
			t.Errorf("state does not see %q:\n%s", thing, text)
		}
	}
	if len(lost) != 0 {
		t.Errorf("ADD removed %v", lost)
	}
	if back, gone := after.compare(before); len(back) != 0 || len(gone) != len(left) {
		t.Errorf("the other way round: %v and %v", back, gone)
	}
}
