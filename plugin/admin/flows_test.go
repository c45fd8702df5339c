package admin

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/maps"
)

// TestFlowsMerge has the entries of a connection make one Flow.
func TestFlowsMerge(t *testing.T) {
	const pod, pod2, remote, node, gateway = "10.84.0.2:4000", "10.84.0.3:80", "192.0.2.2:80", "192.0.2.1:20000", "10.84.0.1:1024"
	const serviceIP = "10.96.0.9:80"

	side := func(text string) (addr netip.AddrPort) {
		if text != "" {
			addr = netip.MustParseAddrPort(text)
		}
		return addr
	}
	flow := func(kind bpf.FlowKind, owner int, remote, local, nat string) maps.FlowEntry {
		e := maps.FlowEntry{Flow: maps.Flow{Kind: kind, Protocol: maps.TCP, Remote: side(remote), Local: side(local), NAT: side(nat)}}
		e.State, e.Owner, e.RemotePort = maps.FlowState(bpf.FlowEstablished), maps.Attachment{}.Owner(), e.Remote.Port()
		if owner == 0 {
			e.Owner = 0
		}
		return e
	}
	snat := func(owner int, remote, local, nat string) maps.FlowEntry {
		return flow(bpf.FlowSNAT, owner, remote, local, nat)
	}
	dnat := func(owner int, remote, local, nat string) maps.FlowEntry {
		return flow(bpf.FlowDNAT, owner, remote, local, nat)
	}
	egress := func(remote, local string, age time.Duration) maps.FlowEntry {
		e := flow(bpf.FlowPolicy, 1, remote, local, "")
		e.Age = age
		return e
	}
	otherPort := dnat(1, "192.0.2.2:5001", pod2, "192.0.2.1:8081")
	otherPort.RemotePort = 5000
	service := func(ct uint64, client, backend string) maps.FlowEntry {
		e := flow(bpf.FlowCTNAT, 1, serviceIP, client, backend)
		e.CT = ct
		return e
	}
	expired := snat(1, remote, node, pod)
	expired.Expired = true
	offload := func(first, second, state string) maps.OffloadEntry {
		return maps.OffloadEntry{Protocol: maps.TCP, Sides: [2]netip.AddrPort{side(first), side(second)}, State: state, FlowState: maps.FlowState(bpf.FlowEstablished)}
	}
	translated := func(ct uint64, first, second, state string) maps.OffloadEntry {
		e := offload(first, second, state)
		e.CT = ct
		return e
	}
	ofUDP := func(e maps.OffloadEntry) maps.OffloadEntry { e.Protocol = maps.UDP; return e }
	decision := func(src, dst, nat string, natSrc bool, state string, idle time.Duration) maps.CacheEntry {
		return maps.CacheEntry{Protocol: maps.TCP, Src: side(src), Dst: side(dst), NAT: side(nat), NATSrc: natSrc, State: state, Idle: idle}
	}
	for _, test := range []struct {
		name     string
		flows    []maps.FlowEntry
		offloads []maps.OffloadEntry
		cache    []maps.CacheEntry
		want     []string
	}{
		{
			name: "masqueraded, of a container with a policy", want: []string{pod + " > " + remote + ", " + node + " > , ESTABLISHED offload admitted"},
			flows:    []maps.FlowEntry{egress(remote, pod, 0), snat(1, remote, node, pod)},
			offloads: []maps.OffloadEntry{offload(remote, pod, "open")},
			cache:    []maps.CacheEntry{decision(pod, remote, node, true, "stack", 0), decision(remote, node, pod, false, "bypass", 0)},
		},
		{
			name: "not offloaded yet", want: []string{pod + " > " + remote + ", " + node + " > , ESTABLISHED stack"},
			flows:    []maps.FlowEntry{snat(1, remote, node, pod)},
			offloads: []maps.OffloadEntry{offload(remote, pod, "one way")},
			cache:    []maps.CacheEntry{decision(pod, remote, node, true, "stack", 0), decision(remote, node, pod, false, "bypass", 0)},
		},
		{
			name: "host port", want: []string{"192.0.2.2:5000 > 192.0.2.1:8080,  > 10.84.0.3:80, ESTABLISHED offload"},
			flows:    []maps.FlowEntry{dnat(1, "192.0.2.2:5000", pod2, "192.0.2.1:8080")},
			offloads: []maps.OffloadEntry{offload(pod2, "192.0.2.2:5000", "open")},
			cache:    []maps.CacheEntry{decision(pod2, "192.0.2.2:5000", "192.0.2.1:8080", true, "void", 0)},
		},
		{
			name: "another client port", flows: []maps.FlowEntry{otherPort},
			want: []string{"192.0.2.2:5000 > 192.0.2.1:8081, 192.0.2.2:5001 > 10.84.0.3:80, ESTABLISHED "},
		},
		{
			name: "a client on this host", want: []string{pod + " > 192.0.2.1:8080, " + gateway + " > " + pod2 + ", ESTABLISHED bypass admitted"},
			flows: []maps.FlowEntry{dnat(1, gateway, pod2, "192.0.2.1:8080"), snat(1, pod2, gateway, pod), egress("192.0.2.1:8080", pod, 0)},
		},
		{
			name: "the host, from a port of ours", flows: []maps.FlowEntry{snat(0, remote, node, node)},
			want: []string{node + " > " + remote + ",  > , ESTABLISHED "},
		},
		{
			name: "the host, moved to another port", want: []string{"192.0.2.1:5000 > " + remote + ", " + node + " > , ESTABLISHED "},
			flows: []maps.FlowEntry{dnat(0, remote, "192.0.2.1:5000", node), snat(0, remote, node, "192.0.2.1:5000")},
		},
		{
			name: "the host's own, beside a former host port's", flows: []maps.FlowEntry{snat(0, remote, node, node), dnat(1, remote, pod, node)},
			cache: []maps.CacheEntry{decision(remote, node, pod, false, "bypass", 0)},
			want:  []string{remote + " > " + node + ",  > " + pod + ", ESTABLISHED bypass", node + " > " + remote + ",  > , ESTABLISHED "},
		},
		{
			name: "to a remote and from it, with the same ports", flows: []maps.FlowEntry{dnat(1, remote, pod, pod), snat(1, remote, node, pod)},
			want: []string{pod + " > " + remote + ", " + node + " > , ESTABLISHED ", remote + " > " + pod + ",  > , ESTABLISHED "},
		},
		{
			name: "two sides with a policy", flows: []maps.FlowEntry{egress(pod, pod2, 0), egress(pod2, pod, time.Second)},
			offloads: []maps.OffloadEntry{offload(pod2, pod, "open")},
			want:     []string{pod + " > " + pod2 + ",  > , ESTABLISHED offload admitted"},
		},
		{
			name: "no flow", offloads: []maps.OffloadEntry{offload(pod2, pod, "closing")}, want: []string{pod + " > " + pod2 + ",  > , FIN_WAIT offload"},
		},
		{
			name: "decisions alone", want: []string{pod + " > " + pod2 + ",  > ,  bypass"},
			cache: []maps.CacheEntry{decision(pod2, pod, "", false, "void", 0), decision(pod, pod2, "", false, "bypass", 0)},
		},
		{name: "expired", flows: []maps.FlowEntry{expired}, cache: []maps.CacheEntry{decision(pod, remote, node, true, "stack", 0)}},
		{name: "an old decision", cache: []maps.CacheEntry{decision(pod, pod2, "", false, "stack", time.Hour)}},
		{
			name: "refused by the host", flows: []maps.FlowEntry{flow(bpf.FlowRSTHeld, 0, remote, node, "")},
			want: []string{remote + " > " + node + ",  > , RST_HELD "},
		},
		{
			name: "by the host's rules", want: []string{pod + " > " + serviceIP + ",  > " + pod2 + ", ESTABLISHED offload admitted by host"},
			flows:    []maps.FlowEntry{egress(pod2, pod, 0), service(7, pod, pod2)},
			offloads: []maps.OffloadEntry{translated(7, pod2, pod, "open")},
			cache:    []maps.CacheEntry{decision(pod, serviceIP, pod2, false, "bypass", 0), decision(pod2, pod, serviceIP, true, "stack", 0)},
		},
		{
			name: "by the host's rules, closing", want: []string{pod + " > " + serviceIP + ",  > " + pod2 + ", FIN_WAIT offload by host"},
			flows:    []maps.FlowEntry{service(7, pod, pod2)},
			offloads: []maps.OffloadEntry{translated(7, pod2, pod, "closing")},
		},
		{
			name: "by the host's rules, both sides, beside an ended one", want: []string{pod + " > " + serviceIP + ", " + gateway + " > " + pod2 + ", ESTABLISHED offload by host"},
			flows:    []maps.FlowEntry{service(8, pod, remote), service(7, pod, pod2)},
			offloads: []maps.OffloadEntry{translated(7, pod2, gateway, "open")},
		},
		{
			name: "by the host's rules, beside one that had conntrack's entry", want: []string{pod + " > " + serviceIP + ",  > " + pod2 + ", ESTABLISHED offload by host"},
			flows:    []maps.FlowEntry{service(7, "10.84.0.2:4001", pod2), service(7, pod, pod2)},
			offloads: []maps.OffloadEntry{translated(7, pod2, pod, "open")},
		},
		{
			name: "by the host's rules, both sides, beside a closing one that had conntrack's entry in the same tick",
			want: []string{
				pod + " > " + serviceIP + ", 10.84.0.1:4000 > " + pod2 + ", ESTABLISHED offload by host",
				"10.84.0.1:4001 > " + pod2 + ",  > , FIN_WAIT offload",
			},
			flows:    []maps.FlowEntry{service(7, pod, pod2)},
			offloads: []maps.OffloadEntry{translated(7, pod2, "10.84.0.1:4001", "closing"), translated(7, pod2, "10.84.0.1:4000", "open")},
		},
		{
			name: "by the host's rules, both sides, beside one of another protocol that had conntrack's entry",
			want: []string{
				pod + " > " + serviceIP + ", " + gateway + " > " + pod2 + ", ESTABLISHED offload by host",
				"10.84.0.1:4001 > " + pod2 + ",  > , ESTABLISHED offload",
			},
			flows:    []maps.FlowEntry{service(7, pod, pod2)},
			offloads: []maps.OffloadEntry{ofUDP(translated(7, pod2, "10.84.0.1:4001", "open")), translated(7, pod2, gateway, "open")},
		},
	} {
		var l flowList
		l.merge(test.flows, test.offloads, test.cache)
		var got []string
		for _, f := range l.connections {
			text := fmt.Sprintf("%s > %s, %s > %s, %s %s", f.Source, f.Destination, f.TranslatedSource, f.TranslatedDestination, f.State, f.Path)
			if f.Admitted {
				text += " admitted"
			}
			if f.TranslatedByHost {
				text += " by host"
			}
			got = append(got, text)
		}
		if !slices.Equal(got, test.want) {
			t.Errorf("%s: got\n%s\nwant\n%s", test.name, strings.Join(got, "\n"), strings.Join(test.want, "\n"))
		}
	}
}
