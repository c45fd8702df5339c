package conformance

import (
	"testing"

	"github.com/ebpfnet/ebpfnet/plugin"
)

// TestAddressesTaken: the last address of a range is given, and one is asked for that another container
// has. STATUS knows of the first before an ADD does.
func TestAddressesTaken(t *testing.T) {
	h := newHost(t)
	conf := with(single("1.1.0"), "ipam.ranges", list{list{object{"subnet": "10.88.0.0/29", "rangeStart": "10.88.0.3", "rangeEnd": "10.88.0.4"}}})
	first, second := h.pod(t, "c1", conf), h.pod(t, "c2", conf)
	first.add(t)
	before := h.state(t, second.Namespace)
	second.conf = with(conf, "runtimeConfig.ips", list{"10.88.0.3"})
	wantError(t, second.try(t, "ADD"), plugin.CodeAddressTaken, "10.88.0.3", "c1")
	h.wantState(t, before, second.Namespace)

	second.conf = conf
	second.add(t)
	third := h.pod(t, "c3", conf)
	before = h.state(t, third.Namespace)
	wantError(t, third.try(t, "ADD"), plugin.CodeAddressesExhausted, "10.88.0.3-10.88.0.4")
	wantError(t, h.status(t, conf), codeNotAvailable, "10.88.0.3-10.88.0.4")
	h.wantState(t, before, third.Namespace)
}
