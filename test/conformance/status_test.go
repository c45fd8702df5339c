package conformance

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// status calls STATUS, as runtimes do for a network.
func (h *host) status(t *testing.T, conf object) *testenv.Call {
	t.Helper()
	return h.call(t, map[string]string{"CNI_COMMAND": "STATUS", "CNI_PATH": "/opt/cni/bin"}, encode(t, conf))
}

// TestStatusReady calls STATUS on a fresh machine, like a starting node, and with a container. It changes nothing for
// containers.
func TestStatusReady(t *testing.T) {
	h := newHost(t)
	before := h.snapshot(t)
	wantSuccess(t, h.status(t, dual("1.1.0")), "")
	h.wantUnchanged(t, before)
	h.pod(t, "c1", dual("1.1.0")).add(t)
	wantSuccess(t, h.status(t, dual("1.1.0")), "")
}

// TestStatusDataDirUnusable has a file at the path of the directory of reservations. DEL of a container in another
// directory still works.
func TestStatusDataDirUnusable(t *testing.T) {
	h := newHost(t)
	p := h.pod(t, "c1", dual("1.1.0"))
	before := h.snapshot(t, p.Namespace)
	p.add(t)

	file := filepath.Join(t.TempDir(), "file")
	testenv.Must(t, os.WriteFile(file, nil, 0o644))
	unusable := with(dual("1.1.0"), "ipam.dataDir", file)
	wantError(t, h.status(t, unusable), codeNotAvailable, file)
	p.del(t)
	h.wantUnchanged(t, before, p.Namespace)
}

func TestStatusVersions(t *testing.T) {
	h := newHost(t)
	for _, version := range []string{"0.4.0", "1.0.0"} {
		wantError(t, h.status(t, dual(version)), codeIncompatible, "STATUS")
	}
	wantError(t, h.status(t, with(dual("1.1.0"), "ipmask", true)), codeUnsupported, "ipmask")
}

// TestStatusLimitedConnectivity turns forwarding off. STATUS turns it on again, and reports limited connectivity if it
// cannot.
func TestStatusLimitedConnectivity(t *testing.T) {
	h := newHost(t)
	conf := dual("1.1.0")
	p := h.pod(t, "c1", conf)
	p.add(t)
	h.disableForwarding(t)
	wantSuccess(t, h.status(t, conf), "")
	wantPing(t, p.Namespace, testenv.OutsideAddr4, testenv.OutsideAddr6)

	h.disableForwarding(t)
	t.Run("read-only", func(t *testing.T) {
		readOnly(t, "/proc/sys")
		wantError(t, h.status(t, conf), types.ErrLimitedConnectivity, "/proc/sys/net/ipv4/ip_forward", "connected containers")
	})
	wantSuccess(t, h.status(t, conf), "")
	wantSuccess(t, p.try(t, "CHECK"), "")
}
