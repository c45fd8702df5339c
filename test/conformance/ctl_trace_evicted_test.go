package conformance

import (
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// TestTraceEvicted has a container with many connections, of which flows_backup alone has one: trace knows this one,
// as the programs do.
func TestTraceEvicted(t *testing.T) {
	const connections = 4

	h := newHost(t)
	small := strings.Replace(scriptConflist, `"ipMasq"`, `"maxFlows": 1024, "ipMasq"`, 1)
	runtime := testenv.NewRuntime(t, h.Node, []byte(small), filepath.Dir(h.plugin))
	client := runtime.AddPod(t, "client", nil)
	remote := netip.AddrPortFrom(testenv.OutsideAddr6, 7001)
	testenv.ServeTCP(t, h.Outside, remote)
	peers := map[uint16]netip.AddrPort{}
	for range connections {
		conn, err := testenv.NewClient(testenv.Context(t), client.Namespace, "tcp", netip.AddrPort{}, remote)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		got, err := conn.Ask(testenv.Context(t), "hello")
		if err != nil {
			t.Fatal(err)
		}
		peers[conn.Local().Port()] = got.Peer
	}
	evicted := h.evict(t, connections)
	local := netip.AddrPortFrom(client.Addr6(), evicted.Flow.NatPort)
	exit, stdout, stderr := h.ctl(t, "trace", local.String(), remote.String())
	if exit != 0 || strings.Contains(stdout, "flow: new: ") || !strings.Contains(stdout, "as "+peers[local.Port()].String()+" > ") {
		t.Errorf("got exit code %d, want the known flow of %v, which is %v outside: %s%s", exit, local, peers[local.Port()], stdout, stderr)
	}
}

// evict waits until flows_backup has n flows, and removes the last one of them from flows, as a flood would do.
func (h *host) evict(t *testing.T, n int) (last bpf.FlowBackup) {
	t.Helper()
	testenv.Eventually(t, "flows_backup to have the connections", func() error {
		found := 0
		h.withDatapath(t, func(datapath *loader.Datapath) (err error) {
			for i := range datapath.FlowsBackup.MaxEntries() {
				var place bpf.FlowBackup
				err = errors.Join(err, datapath.FlowsBackup.Lookup(i, &place))
				if place.Used != 0 {
					found, last = found+1, place
				}
			}
			return err
		})
		if found < n {
			return fmt.Errorf("got %d, want %d", found, n)
		}
		return nil
	})
	h.withDatapath(t, func(datapath *loader.Datapath) error { return datapath.Flows.Delete(&last.Key) })
	return last
}
