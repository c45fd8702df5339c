package scenario

import (
	"fmt"
	"net/netip"
	"testing"

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
