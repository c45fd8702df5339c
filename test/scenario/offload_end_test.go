package scenario

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// Connections that have ended, after some of their packets bypassed the stack, leave no flow that others must not replace.
func TestEndedOffloadsAreReplaceable(t *testing.T) {
	n := newEstablishedNetwork(t)
	a, web := n.AddPod(t, "a", nil), n.AddPod(t, "web", mapBoth(8080, 80))
	for _, f := range testenv.Families {
		offloaded := 0 // connections to host ports are not
		for _, p := range n.routedPaths(t, f, a, web) {
			t.Run(f.Name+"/"+p.name, func(t *testing.T) {
				for range 4 {
					upload(mebibyte)(t, p.client, p.server, p.listen, p.dial)
					download(mebibyte)(t, p.client, p.server, p.listen, p.dial)
				}
				n.wantNoAssuredOffloads(t)
			})
			t.Run(f.Name+"/"+p.name+", reset", func(t *testing.T) {
				serve(t, p.server, "tcp", p.listen)
				client, server := connect(t, p.client, "tcp", netip.AddrPort{}, p.dial), p.server
				askOften(t, client, server)
				offloaded += len(n.assuredOffloads(t))
				testenv.Must(t, client.Reset())
				n.wantNoAssuredOffloads(t)
			})
		}
		if offloaded == 0 {
			t.Errorf("%s: no connection was offloaded", f.Name)
		}
	}
}

// assuredOffloads returns the offloaded connections that others must not replace.
func (n *network) assuredOffloads(t *testing.T) (assured []maps.OffloadEntry) {
	t.Helper()
	n.withDatapath(t, func(datapath *loader.Datapath) {
		for _, e := range must(maps.OffloadEntries(datapath)) {
			if e.FlowState == maps.FlowState(bpf.FlowEstablished) {
				assured = append(assured, e)
			}
		}
	})
	return assured
}

func (n *network) wantNoAssuredOffloads(t *testing.T) {
	t.Helper()
	within(t, "the flows to end", func() (err error) {
		if assured := n.assuredOffloads(t); len(assured) > 0 {
			err = fmt.Errorf("got %+v, want none that is assured", assured)
		}
		n.withDatapath(t, func(datapath *loader.Datapath) {
			for _, e := range must(maps.FlowEntries(datapath)) {
				if e.CT != 0 {
					err = fmt.Errorf("got %+v, want none", e)
				}
			}
		})
		return err
	})
}

// countInvalid counts TCP packets that conntrack does not know, but neither its updates nor resets: a late one harms nobody.
const countInvalid = `table inet invalid {}
	delete table inet invalid
	table inet invalid { counter missed { }
	chain pre { type filter hook prerouting priority 0; policy accept; tcp flags & rst == 0 @th,100,3 == 0 ct state invalid counter name missed } }`

// A connection that takes the port of an offloaded one, which was reset a moment before, begins in the stack on each CPU. Otherwise
// conntrack would miss data, and rules against invalid packets would end it.
func TestPortsAreReopenedAtOnce(t *testing.T) {
	n := newEstablishedNetwork(t)
	a, web := n.AddPod(t, "a", nil), n.AddPod(t, "web", mapBoth(8080, 80))
	forEachFamily(t, func(t *testing.T, f testenv.Family) {
		n.service(t, f, f.Pod(web))
		serve(t, web.Namespace, "tcp", at(f.Pod(web), 80))
		serve(t, n.Outside, "tcp", at(f.Outside, 80))
		paths := []path{
			{"service", a.Namespace, web.Namespace, at(f.Pod(web), 80), at(serviceAddrs[f.Name], 80)},
			{"node port", n.Outside, web.Namespace, at(f.Pod(web), 80), at(f.Node, nodePort)},
		}
		for _, p := range n.forwardedPaths(f, a, web) {
			paths = append(paths, p.path)
		}
		for _, masquerade := range []bool{false, true} { // all that web receives
			n.nodePort(t, f, web, masquerade)
			for _, p := range paths {
				t.Run(fmt.Sprintf("%s, masqueraded %v", p.name, masquerade), func(t *testing.T) { n.wantReopened(t, p) })
			}
		}
	})
}

// wantReopened opens one connection after the other from the same port, and resets each while CPUs forward it past the stack.
func (n *network) wantReopened(t *testing.T, p path) {
	t.Helper()
	n.nft(t, countInvalid)
	var local netip.AddrPort
	for range workload(5, 20, 20) {
		client := connect(t, p.client, "tcp", local, p.dial)
		asking := testenv.Askers{client.KeepAsking(t, "the client", time.Millisecond)}
		err := asking.More(uint64(testenv.OffloadRequests))
		asking.Stop()
		testenv.Must(t, errors.Join(err, client.Reset()))
		local = client.Local()
	}
	if out := nft(t, n.node(), "list counter inet invalid missed"); !strings.Contains(out, "packets 0 ") {
		t.Errorf("conntrack has missed packets: %s", out)
	}
}
