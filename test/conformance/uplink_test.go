package conformance

import (
	"fmt"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"

	"github.com/ebpfnet/ebpfnet/plugin/cnierr"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// TestUplinkReattached detaches a program from the uplink. CHECK must report it, and the next ADD or STATUS must
// attach it again.
func TestUplinkReattached(t *testing.T) {
	testenv.Require(t, testenv.TCX)
	const rounds = 5 // the kernel detaches programs asynchronously
	h := newHost(t)
	p := h.pod(t, "c1", dual("1.0.0"))
	p.add(t)
	for round := range rounds {
		removePin("uplink-*-to_uplink")(t, p, nil)
		wantError(t, p.try(t, "CHECK"), cnierr.CodeDiffers, testenv.UplinkName, "programs")
		testenv.Eventually(t, "the program to be detached", func() error { return h.wantPrograms(ebpf.AttachTCXEgress, 0) })

		other := h.pod(t, "c2", dual("1.0.0"))
		if round%2 == 0 {
			other.add(t)
		} else {
			wantSuccess(t, h.status(t, dual("1.1.0")), "")
		}
		for _, place := range []ebpf.AttachType{ebpf.AttachTCXIngress, ebpf.AttachTCXEgress} {
			testenv.Eventually(t, "the uplink's programs", func() error { return h.wantPrograms(place, 1) })
		}
		wantSuccess(t, p.try(t, "CHECK"), "")
		wantPing(t, p.Namespace, testenv.OutsideAddr4, testenv.OutsideAddr6)
		other.del(t)
	}
}

// wantPrograms compares the number of programs on the node's uplink.
func (h *host) wantPrograms(place ebpf.AttachType, want int) error {
	device, err := h.Node.Netlink().LinkByName(testenv.UplinkName)
	if err != nil {
		return err
	}
	return h.Node.Do(func() error {
		attached, err := link.QueryPrograms(link.QueryOptions{Target: device.Attrs().Index, Attach: place})
		if err == nil && len(attached.Programs) != want {
			err = fmt.Errorf("programs on %s: got %d, want %d", place, len(attached.Programs), want)
		}
		return err
	})
}

// TestLoopbackReattached is the same for the program on lo, which serves the host's own access to host ports.
func TestLoopbackReattached(t *testing.T) {
	testenv.Require(t, testenv.TCX)
	h := newHost(t)
	p := h.pod(t, "c1", withPort(dual("1.1.0"), 8080))
	result := p.add(t)
	removePin("loopback-to_loopback")(t, p, nil)
	wantError(t, p.try(t, "CHECK"), cnierr.CodeDiffers, "loopback", "program")
	wantSuccess(t, h.status(t, dual("1.1.0")), "")
	wantSuccess(t, p.try(t, "CHECK"), "")
	wantFetch(t, h, p.Namespace, result)
	p.del(t)
}
