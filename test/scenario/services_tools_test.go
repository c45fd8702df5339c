package scenario

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// ebpfnetctl shows a connection to a service as one row, and traces it through the fast path.
func TestServicesAreVisible(t *testing.T) {
	testenv.Require(t, testenv.VisibleHooks)
	n := newEstablishedNetwork(t)
	a, web := n.AddPod(t, "a", nil), n.AddPod(t, "web", nil)
	if out := n.ctl(t, "status"); !strings.Contains(out, "\nservices     established connections are on the fast path\n") {
		t.Errorf("status does not say that services are on the fast path: %s", out)
	}
	forEachProtocol(t, func(t *testing.T, f testenv.Family, protocol string) {
		n.service(t, f, f.Pod(web))
		backend, service := at(f.Pod(web), 80), at(serviceAddrs[f.Name], 80)
		serve(t, web.Namespace, protocol, backend)
		client := connect(t, a.Namespace, protocol, netip.AddrPort{}, service)
		defer client.Close()
		n.eventuallyOffloads(t, f, client, web.Namespace)
		ask(t, client, web.Namespace)

		state := map[string]string{"tcp": "ESTABLISHED", "udp": "UDP_STREAM"}[protocol]
		for _, filter := range [][]string{
			{}, {"--port", "80"}, {"--peer", service.Addr().String()}, {"--peer", backend.Addr().String()}, {"--state", state},
		} {
			n.wantTranslatedByHost(t, append(filter, "a"), protocol, client.Local(), service, backend)
		}
		n.wantTraced(t, client, service, protocol,
			"delivered to web, as "+client.Local().String()+" > "+backend.String(),
			"translation: by the host's rules (DNAT to "+backend.String()+"), then on the fast path",
			"delivered to a, as "+service.String()+" > "+client.Local().String())
	})
}

// wantTraced wants ebpfnetctl to say what becomes of a connection's packets past the stack, and of their replies: UDP must have
// been there within seconds, so the client asks meanwhile.
func (n *network) wantTraced(t *testing.T, client *testenv.Client, service netip.AddrPort, protocol string, all ...string) {
	t.Helper()
	asking := testenv.Askers{client.KeepAsking(t, "the client", 10*time.Millisecond)}
	defer asking.Stop()
	testenv.Eventually(t, "the trace", func() error {
		out := n.ctl(t, "trace", client.Local().String(), service.String()+"/"+protocol, "--reply")
		for _, want := range append(all, "), then on the fast path") {
			if !strings.Contains(out, want) {
				return fmt.Errorf("it does not print %q: %s", want, out)
			}
		}
		return nil
	})
}

// wantTranslatedByHost wants ebpfnetctl to list one connection of the client's.
func (n *network) wantTranslatedByHost(t *testing.T, filter []string, protocol string, client, service, backend netip.AddrPort) {
	t.Helper()
	type flow struct {
		Protocol, Source, Destination, TranslatedDestination, Path, Offload string
		TranslatedByHost                                                    bool
	}
	out := n.ctl(t, append([]string{"flows", "-o", "json"}, filter...)...)
	var all []flow
	testenv.Must(t, json.Unmarshal([]byte(out), &all))
	others := func(f flow) bool { return f.Source != client.String() || f.Protocol != protocol }
	want := []flow{{protocol, client.String(), service.String(), backend.String(), "offload", "open", true}}
	if got := slices.DeleteFunc(all, others); !slices.Equal(got, want) {
		t.Errorf("flows %q: got %+v, want %+v", filter, got, want)
	}
}

// Offloaded connections to services return to the stack, too, whichever side has the lower port.
func TestServicesReturn(t *testing.T) {
	testenv.Require(t, testenv.VisibleHooks)
	connectionsReturn(t, func(n *network, f testenv.Family, a, web *testenv.Pod, _ bool) (paths []path) {
		rule := strings.NewReplacer("IP", map[string]string{"IPv4": "ip", "IPv6": "ip6"}[f.Name], "SERVICE", serviceAddrs[f.Name].String())
		n.nft(t, rule.Replace("table IP kube { chain services { type nat hook prerouting priority -100; } }"))
		for _, port := range []uint16{80, 65000} {
			service, backend := at(serviceAddrs[f.Name], port), at(f.Pod(web), port)
			n.nft(t, rule.Replace(fmt.Sprintf("add rule IP kube services IP daddr SERVICE tcp dport %d dnat to %s", port, backend)))
			paths = append(paths, path{"service", a.Namespace, web.Namespace, backend, service})
		}
		return paths
	})
}

// A translated TCP connection keeps its flow's time, although the stack sees none of its packets.
func TestServicesKeepTheirFlows(t *testing.T) {
	testenv.Require(t, testenv.VisibleHooks)
	n := newEstablishedNetwork(t)
	a, web := n.AddPod(t, "a", nil), n.AddPod(t, "web", nil)
	forEachFamily(t, func(t *testing.T, f testenv.Family) {
		n.service(t, f, f.Pod(web))
		serve(t, web.Namespace, "tcp", at(f.Pod(web), 80))
		client := connect(t, a.Namespace, "tcp", netip.AddrPort{}, at(serviceAddrs[f.Name], 80))
		defer client.Close()
		n.eventuallyOffloads(t, f, client, web.Namespace)
		ofClient := func(e *bpf.FlowEntry) bool {
			return slices.Contains([]uint16{e.Key.RemotePort, e.Key.LocalPort}, client.Local().Port())
		}
		var aged, renewed []uint32
		n.changeFlows(t, bpf.FlowCTNAT, func(e *bpf.FlowEntry) {
			if ofClient(e) {
				e.Flow.LastSeen -= 3600
				aged = append(aged, e.Flow.LastSeen)
			}
		})
		n.newGeneration(t)
		ask(t, client, web.Namespace)
		n.changeFlows(t, bpf.FlowCTNAT, func(e *bpf.FlowEntry) {
			if ofClient(e) {
				renewed = append(renewed, e.Flow.LastSeen)
			}
		})
		if len(aged) != 1 || len(renewed) != 1 || int32(renewed[0]-aged[0]) < 3600 {
			t.Errorf("times of the connection's flow: got %v after %v, want one that is an hour later", renewed, aged)
		}
	})
}

// A connection to a service that finds a place for its offload, and none for its translation, stays with the stack, and counts for
// its client. With a place, it is offloaded.
func TestServicesWithoutPlace(t *testing.T) {
	testenv.Require(t, testenv.VisibleHooks)
	n := newNetworkWith(t, withKeys(smallestTable))
	a, web := n.AddPod(t, "a", nil), n.AddPod(t, "web", nil)
	counted := func() uint64 { return n.dropsOf(t, a)[maps.Reason(bpf.ReasonNoOffload)] }
	forEachProtocol(t, func(t *testing.T, f testenv.Family, protocol string) {
		n.service(t, f, f.Pod(web))
		serve(t, web.Namespace, protocol, at(f.Pod(web), 80))
		client := connect(t, a.Namespace, protocol, netip.AddrPort{}, at(serviceAddrs[f.Name], 80))
		n.eventuallyOffloads(t, f, client, web.Namespace)
		before := counted()
		testenv.Must(t, client.Reset())
		empty := n.fillTable(t, client.Local().Port())
		n.newGeneration(t)
		client = connect(t, a.Namespace, protocol, client.Local(), at(serviceAddrs[f.Name], 80))
		defer client.Close()
		askOften(t, client, web.Namespace)
		if n.forwardsOf(t, f, client, web.Namespace) == 0 || counted() == before {
			t.Errorf("the stack does not forward the connection, or of %d packets without a place none is counted", counted())
		}
		empty()
		n.eventuallyOffloads(t, f, client, web.Namespace)
	})
}

// fillTable fills the table with established connections of the host, until the function that it returns is called. There is a place
// for the offload of the connection with the port, which has had one.
func (n *network) fillTable(t *testing.T, port uint16) (empty func()) {
	t.Helper()
	const id, ways, room = 1, len(bpf.FlowBucket{}.Id), 4
	established := bpf.FlowEntry{Flow: bpf.Flow{State: bpf.FlowEstablished, LastSeen: 1 << 30}} // a time to come does not expire
	change := func(ids func(table *ebpf.Map, first uint32, ids *[ways]uint32)) {
		n.withDatapath(t, func(datapath *loader.Datapath) {
			for number := range datapath.FlowBuckets.MaxEntries() {
				var bucket bpf.FlowBucket
				testenv.Must(t, datapath.FlowBuckets.Lookup(number, &bucket))
				ids(datapath.FlowTable, number*uint32(ways), &bucket.Id)
				testenv.Must(t, datapath.FlowBuckets.Put(number, bucket))
			}
		})
	}
	change(func(table *ebpf.Map, first uint32, ids *[ways]uint32) {
		used, offload := ways, -1
		for way := range ids {
			var entry bpf.FlowEntry
			testenv.Must(t, table.Lookup(first+uint32(way), &entry))
			if key := entry.Key; key.Kind == bpf.FlowOffload && (key.RemotePort == port || key.LocalPort == port) {
				used, offload = ways-room, way
			}
		}
		for way := range ids {
			switch {
			case way == offload:
			case way < used:
				ids[way] = id
				testenv.Must(t, table.Put(first+uint32(way), established))
			default:
				ids[way] = 0
			}
		}
	})
	return func() {
		change(func(_ *ebpf.Map, _ uint32, ids *[ways]uint32) {
			for way := range ids {
				if ids[way] == id {
					ids[way] = 0
				}
			}
		})
	}
}

// A rule against forwarding to a backend affects running connections alike, by a service or not: TCP continues, and UDP ends
// with the next packet that keeps its entry in conntrack.
func TestForwardRuleForServices(t *testing.T) {
	testenv.Require(t, testenv.VisibleHooks)
	n := newEstablishedNetwork(t)
	n.limitErrorsLess(t)
	a, web := n.AddPod(t, "a", nil), n.AddPod(t, "web", nil)
	clients := map[string][]*testenv.Client{}
	for _, f := range testenv.Families {
		n.service(t, f, f.Pod(web))
		for _, protocol := range []string{"tcp", "udp"} {
			serve(t, web.Namespace, protocol, at(f.Pod(web), 80))
			for _, dial := range []netip.Addr{f.Pod(web), serviceAddrs[f.Name]} {
				client := connect(t, a.Namespace, protocol, netip.AddrPort{}, at(dial, 80))
				defer client.Close()
				n.eventuallyOffloads(t, f, client, web.Namespace)
				clients[protocol] = append(clients[protocol], client)
			}
		}
	}
	n.nft(t, fmt.Sprintf(`table inet block { chain forward { type filter hook forward priority 10; policy accept;
		ip daddr %s reject with icmpx type admin-prohibited
		ip6 daddr %s reject with icmpx type admin-prohibited
	} }`, web.Addr4(), web.Addr6()))
	rejected := func(client *testenv.Client) error {
		ctx := testenv.Context(t)
		if _, err := client.Ask(ctx, "hello"); err == nil || ctx.Err() != nil {
			return fmt.Errorf("request of %s: got %v, want a rejection", client.Local(), err)
		}
		return nil
	}
	for _, client := range clients["udp"] {
		testenv.Eventually(t, "the rule's effect", func() error { return rejected(client) })
	}
	n.newGeneration(t) // the other CPU's cached decisions
	for range 3 {      // the kernel limits errors
		for _, client := range clients["udp"] {
			testenv.Must(t, rejected(client))
		}
		for _, client := range clients["tcp"] {
			ask(t, client, web.Namespace)
		}
	}
}
