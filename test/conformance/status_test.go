package conformance

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// status asks as a runtime does: for a network, not a container.
func (h *host) status(t *testing.T, conf object) *testenv.Call {
	t.Helper()
	return h.call(t, map[string]string{"CNI_COMMAND": "STATUS", "CNI_PATH": "/opt/cni/bin"}, encode(t, conf))
}

// TestStatusReady is right on a machine where nothing has run yet, which is what a node
// that starts asks, and changes nothing for containers.
func TestStatusReady(t *testing.T) {
	h := newHost(t)
	before := h.state(t)
	wantSuccess(t, h.status(t, dual("1.1.0")), "")
	h.wantState(t, before)
	h.pod(t, "c1", dual("1.1.0")).add(t)
	wantSuccess(t, h.status(t, dual("1.1.0")), "")
}

// TestStatusExhausted fills ranges of one and of two addresses.
func TestStatusExhausted(t *testing.T) {
	h := newHost(t)
	conf := with(dual("1.1.0"), "ipam.ranges", list{
		list{object{"subnet": "10.88.0.0/24", "rangeStart": "10.88.0.2", "rangeEnd": "10.88.0.4"}},
		list{object{"subnet": "fd00:88::/64", "rangeStart": "fd00:88::2", "rangeEnd": "fd00:88::3"}},
	})
	p, other := h.pod(t, "c1", conf), h.pod(t, "c2", conf)
	before := h.state(t, p.Namespace, other.Namespace)
	p.add(t)
	wantSuccess(t, h.status(t, conf), "")
	other.add(t)
	wantError(t, h.status(t, conf), codeNotAvailable, "fd00:88::2-fd00:88::3", "/var/lib/cni/networks/pods")

	p.del(t)
	wantSuccess(t, h.status(t, conf), "")
	other.del(t)
	h.wantState(t, before, p.Namespace, other.Namespace)
}

// TestStatusUnusable has a file where the directory of the addresses should be. DEL of what is
// there must go on working.
func TestStatusUnusable(t *testing.T) {
	h := newHost(t)
	p := h.pod(t, "c1", dual("1.1.0"))
	before := h.state(t, p.Namespace)
	p.add(t)

	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	unusable := with(dual("1.1.0"), "ipam.dataDir", file)
	wantError(t, h.status(t, unusable), codeNotAvailable, file)
	p.del(t)
	h.wantState(t, before, p.Namespace)
}

func TestStatusVersions(t *testing.T) {
	h := newHost(t)
	for _, version := range []string{"0.4.0", "1.0.0"} {
		wantError(t, h.status(t, dual(version)), codeIncompatible, "STATUS")
	}
	wantError(t, h.status(t, with(dual("1.1.0"), "ipmask", true)), codeUnsupported, "ipmask")
}

// TestStatusLimited is a host that has stopped forwarding, and lets nobody turn it on again: those
// who are connected suffer. Where it can be turned on, STATUS does.
func TestStatusLimited(t *testing.T) {
	h := newHost(t)
	conf := dual("1.1.0")
	p := h.pod(t, "c1", conf)
	p.add(t)
	stop := func() {
		for _, name := range []string{"net/ipv4/ip_forward", "net/ipv6/conf/all/forwarding"} {
			p.setSysctl(t, h.Node, name, "0")
		}
	}
	stop()
	wantSuccess(t, h.status(t, conf), "")
	wantPing(t, p.Namespace, testenv.OutsideAddr4, testenv.OutsideAddr6)

	stop()
	t.Run("read-only", func(t *testing.T) {
		readOnly(t, "/proc/sys")
		wantError(t, h.status(t, conf), types.ErrLimitedConnectivity, "/proc/sys/net/ipv4/ip_forward", "connected containers")
	})
	wantSuccess(t, h.status(t, conf), "")
	wantSuccess(t, p.try(t, "CHECK"), "")
}
