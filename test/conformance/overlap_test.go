package conformance

import (
	"slices"
	"strings"
	"testing"

	"github.com/ebpfnet/ebpfnet/plugin/cnierr"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// TestOverlap has another engine on the host, whose bridge has the network's subnets. Its container has the addresses
// that ours would get. ADD and STATUS name the bridge, and ADD assigns no address that answers there.
func TestOverlap(t *testing.T) {
	h := newHost(t)
	wantAddresses := func(p *pod, want ...string) {
		t.Helper()
		call := p.try(t, "ADD")
		for _, word := range []string{"10.88.0.0/16 of device other0", "fd00:88::/64 of device other0"} {
			if strings.Count(string(call.Stderr), word) == 0 {
				t.Errorf("stderr of ADD: got %s, want %q", call.Stderr, word)
			}
		}
		call.Stderr = nil
		wantSuccess(t, call, anything)
		p.result, _ = decode(t, call.Stdout).(object)
		var got []string
		for _, ip := range parseResult(t, call.Stdout).IPs {
			got = append(got, ip.Address.IP.String())
		}
		if !slices.Equal(got, want) {
			t.Errorf("addresses: got %v, want %v", got, want)
		}
	}
	first := h.pod(t, "first", dual("1.1.0"))
	wantSuccess(t, h.status(t, dual("1.1.0")), "")
	first.add(t)
	first.del(t)

	theirs := testenv.New(t, "theirs")
	for _, command := range []string{
		"link add other0 up type bridge", "addr add 10.88.0.1/16 dev other0", "addr add fd00:88::1/64 dev other0 nodad",
		"link add port0 up master other0 type veth peer name eth0 netns " + theirs.Path,
	} {
		h.ip(t, command)
	}
	for _, command := range []string{"link set eth0 up", "addr add 10.88.0.3/16 dev eth0", "addr add fd00:88::3/64 dev eth0 nodad"} {
		if _, err := theirs.Run(testenv.Context(t), "ip", strings.Fields(command)...); err != nil {
			t.Fatal(err)
		}
	}
	status := h.status(t, dual("1.1.0"))
	if !strings.Contains(string(status.Stderr), "fd00:88::/64 of device other0") {
		t.Errorf("stderr of STATUS: got %s, want the overlap", status.Stderr)
	}
	status.Stderr = nil
	wantSuccess(t, status, "")

	second := h.pod(t, "second", dual("1.1.0"))
	wantAddresses(second, "10.88.0.4", "fd00:88::4") // after .2, which the first one had, and .3, which answers
	for id, addr := range map[string]string{"third": "10.88.0.3", "fourth": "fd00:88::3"} {
		call := h.pod(t, id, with(dual("1.1.0"), "runtimeConfig.ips", list{addr})).try(t, "ADD")
		call.Stderr = nil
		wantError(t, call, cnierr.CodeAddressTaken, addr, "other0")
	}
	second.del(t)
}
