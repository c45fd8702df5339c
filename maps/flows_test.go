package maps

import (
	"net/netip"
	"testing"

	"github.com/ebpfnet/ebpfnet/bpf"
)

func TestFlowString(t *testing.T) {
	remote, local, nat := netip.MustParseAddrPort("192.0.2.1:80"), netip.MustParseAddrPort("198.51.100.1:2000"), netip.MustParseAddrPort("10.88.0.2:4000")
	base := Flow{Remote: remote, Local: local, NAT: nat, Protocol: TCP, Owner: 1}
	for _, test := range []struct {
		change func(*Flow)
		want   string
	}{
		{func(f *Flow) { f.Kind, f.State = bpf.FlowSNAT, FlowState(bpf.FlowEstablished) },
			"tcp 10.88.0.2:4000 to 192.0.2.1:80, SNAT to 198.51.100.1:2000, ESTABLISHED"},
		{func(f *Flow) { f.Kind, f.Owner = bpf.FlowSNAT, ownerHost },
			"tcp 198.51.100.1:2000 to 192.0.2.1:80, the host's own, SYN_SENT"},
		{func(f *Flow) { f.Kind, f.Protocol, f.State = bpf.FlowDNAT, UDP, FlowState(bpf.FlowUDPStream) },
			"udp 192.0.2.1:80 to 10.88.0.2:4000, DNAT to 198.51.100.1:2000, UDP_STREAM"},
		{func(f *Flow) { f.Kind, f.State = bpf.FlowRSTHeld, FlowState(bpf.FlowClose) },
			"tcp 192.0.2.1:80 to 198.51.100.1:2000, RST held back, CLOSE"},
		{func(f *Flow) { f.Kind, f.Protocol, f.State = bpf.FlowPolicy, 47, 77 },
			"protocol 47 198.51.100.1:2000 to 192.0.2.1:80, admitted by rules, state 77"},
		{func(f *Flow) { f.Kind, f.State = bpf.FlowCTNAT, FlowState(bpf.FlowEstablished) },
			"tcp 198.51.100.1:2000 to 192.0.2.1:80, DNAT to 10.88.0.2:4000 by the host's rules, ESTABLISHED"},
		{func(f *Flow) { f.Kind, f.NAT, f.State = bpf.FlowCTNAT, remote, FlowState(bpf.FlowEstablished) },
			"tcp 198.51.100.1:2000 to 192.0.2.1:80, SNAT by the host's rules, ESTABLISHED"},
	} {
		flow := base
		test.change(&flow)
		if got := flow.String(); got != test.want {
			t.Errorf("got %q, want %q", got, test.want)
		}
	}
}

// Every state and every reason has a name.
func TestNames(t *testing.T) {
	for state, name := range flowStates {
		if name == "" {
			t.Errorf("flow state %d has no name", state)
		}
	}
	for reason, known := range reasons {
		if got, ok := ParseReason(known.name); known.text == "" || !ok || got != Reason(reason) {
			t.Errorf("reason %d: got name %q, which is that of %d, and description %q", reason, known.name, got, known.text)
		}
	}
}
