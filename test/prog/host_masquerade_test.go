package prog

import (
	"testing"
	"time"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// TestHostMasquerade has the host send from ports of the masquerading range. A pod may have the
// same port towards the same remote.
func TestHostMasquerade(t *testing.T) {
	for _, program := range []string{bpf.ProgToUplink, bpf.ProgToUplinkL3} {
		t.Run(program, func(t *testing.T) { runRows(t, program, hostMasquerade()) })
	}
}

func hostMasquerade() []row {
	const sent = "node:5000 > remote:80"
	pods := snat("remote:80", "node:5000", "pod:4000").established().idleFor(10 * time.Second)
	ours := claim("remote:80", "node:5000")
	// The two flows of a host connection that was moved to port 20000.
	replies := snat("remote:80", "node:20000", "node:5000").accepted().idleFor(10 * time.Second)
	touched := snat("remote:80", "node:20000", "node:5000").established().streaming()
	keeps := dnat("remote:80", "node:5000", "node:20000")

	beside := func(name string, f flow) row {
		return row{name: name, flows: []flow{f}, in: sent, after: []flow{f, ours}}
	}
	loses := func(name string, on []proto, f flow) row {
		return row{name: name, on: on, flows: []flow{f}, in: sent, after: []flow{ours}}
	}
	moved := func(name, in, out string, f flow, after ...flow) row {
		return row{name: name, on: withPorts, flows: []flow{f}, in: in, out: out, after: append(after, f)}
	}
	return []row{
		{name: "no pod has the port", in: sent, after: []flow{ours}},
		{
			name: "translated by the host, for another host", forwarded: true, in: sent, after: []flow{ours},
		},
		{
			name: "the host's own flow", flows: []flow{ours.established().idleFor(10 * time.Second)}, edit: isSegment, in: sent,
			after: []flow{ours.established().streaming()},
		},
		{name: "a RST", on: []proto{tcp}, in: "node:5000 > remote:80", edit: func(p *testenv.Packet) { p.TCPFlags = testenv.RST | testenv.ACK }},
		{name: "to a multicast group", in: "node:5000 > multicast:80"},
		{name: "to a link-local destination", in: "node:5000 > linklocal:80"},
		{
			name: "from the number of a host port", on: withPorts, ports: []hostPort{{host: "node2:40000", to: "pod:80"}},
			in: "node:40000 > remote:80", after: []flow{claim("remote:80", "node:40000")},
		},
		{
			name: "a host port's client is connected", on: withPorts, ports: []hostPort{{host: "any:40000", to: "pod:80"}},
			flows: []flow{dnat("remote:80", "pod:80", "node:40000").established()},
			in:    "node:40000 > remote:80", out: "node:* > remote:80",
			after: []flow{
				dnat("remote:80", "pod:80", "node:40000").established(),
				snat("remote:80", "node:*", "node:40000"), dnat("remote:80", "node:40000", "node:*").with(replied),
			},
		},
		{
			name: "a host port's client has not been replied to", on: withPorts, ports: []hostPort{{host: "any:40000", to: "pod:80"}},
			flows: []flow{dnat("remote:80", "pod:80", "node:40000")},
			in:    "node:40000 > remote:80",
			after: []flow{claim("remote:80", "node:40000")},
		},
		loses("a pod's flow without reply", nil, snat("remote:80", "node:5000", "pod:4000")),
		loses("a pod's expired flow", nil, pods.idleFor(6*day)),
		loses("a pod's flow that has ended", []proto{tcp}, pods.with(replied).in(bpf.FlowClose)),
		loses("a flow of the address's former owner", nil, pods.ownedBy(formerOwner)),
		beside("a pod has the port towards another remote", snat("remote2:80", "node:5000", "pod:4000")),
		beside("a pod has the port on another masquerading address", snat("remote:80", "node2:5000", "pod:4000")),
		beside("a pod has another port", snat("remote:80", "node:5001", "pod:5000")),
		beside("a DNAT flow has the same port", dnat("remote:80", "pod:5000", "node:5000")),
		{
			name: "a pod has the port towards another port of the remote", on: withPorts, flows: []flow{snat("remote:81", "node:5000", "pod:4000")},
			in: sent, after: []flow{snat("remote:81", "node:5000", "pod:4000"), ours},
		},

		moved("a pod has the port", sent, "node:* > remote:80", pods,
			snat("remote:80", "node:*", "node:5000"), dnat("remote:80", "node:5000", "node:*").with(replied)),
		moved("a pod has the first port of the range", "node:1024 > remote:80", "node:* > remote:80", snat("remote:80", "node:1024", "pod:4000").established(),
			snat("remote:80", "node:*", "node:1024"), dnat("remote:80", "node:1024", "node:*").with(replied)),
		moved("a pod has the last port of the range", "node:29999 > remote:80", "node:* > remote:80", snat("remote:80", "node:29999", "pod:4000").established(),
			snat("remote:80", "node:*", "node:29999"), dnat("remote:80", "node:29999", "node:*").with(replied)),
		{name: "below the range", flows: []flow{snat("remote:80", "node:1023", "pod:4000")}, in: "node:1023 > remote:80"},
		{name: "above the range", flows: []flow{snat("remote:80", "node:30000", "pod:4000")}, in: "node:30000 > remote:80"},

		{
			name: "a connection that was moved", on: withPorts, flows: []flow{pods, replies, keeps.accepted().idleFor(10 * time.Second)},
			in: sent, edit: isSegment, out: "node:20000 > remote:80", after: []flow{pods, touched, keeps.established().streaming()},
		},
		{
			name: "a connection that was moved, with the pod's flow gone", on: withPorts, flows: []flow{replies, keeps.accepted().idleFor(10 * time.Second)},
			in: sent, edit: isSegment, out: "node:20000 > remote:80", after: []flow{touched, keeps.established().streaming()},
		},
		{
			name: "another remote of the same socket", on: withPorts, flows: []flow{pods, replies, keeps},
			in: "node:5000 > remote2:80", after: []flow{pods, replies, keeps, claim("remote2:80", "node:5000")},
		},
	}
}

// TestHostMasqueradeReplies has replies to a host connection that was moved to another port.
func TestHostMasqueradeReplies(t *testing.T) {
	moved := snat("remote:80", "node:20000", "node:5000")
	pods, ours := snat("remote:80", "node:5000", "pod:4000"), claim("remote:80", "node:5000")
	runRows(t, bpf.ProgFromUplink, []row{
		{
			name: "the host's reply", on: withPorts, flows: []flow{pods.idleFor(10 * time.Second), moved.idleFor(10 * time.Second)},
			in: "remote:80 > node:20000", reply: true, out: "remote:80 > node:5000",
			after: []flow{pods.idleFor(10 * time.Second), moved.accepted().streaming()},
		},
		{
			name: "the pod's reply", on: withPorts, flows: []flow{pods.idleFor(10 * time.Second), moved.idleFor(10 * time.Second)},
			in: "remote:80 > node:5000", reply: true, out: "remote:80 > pod:4000",
			after: []flow{pods.accepted().streaming(), moved.idleFor(10 * time.Second)},
		},
		{name: "a reply to a connection that was not moved", in: "remote:80 > node:5000", reply: true},
		{
			name: "a reply to the host's flow", flows: []flow{ours}, in: "remote:80 > node:5000", reply: true,
			after: []flow{ours.accepted()},
		},
		{name: "a reply to the host's expired flow", flows: []flow{ours.idleFor(6 * day)}, in: "remote:80 > node:5000", reply: true},
	})
}

// TestHostMasqueradeRecovery has a host connection that was moved to port 20000. One of its two
// flows is lost, or belongs to a pod now.
func TestHostMasqueradeRecovery(t *testing.T) {
	const sent = "node:5000 > remote:80"
	pods := snat("remote:80", "node:5000", "pod:4000").established().idleFor(10 * time.Second)
	theirs := snat("remote:80", "node:20000", "pod2:5000").established().idleFor(10 * time.Second)
	replies := snat("remote:80", "node:20000", "node:5000").established()
	keeps := dnat("remote:80", "node:5000", "node:20000").established()
	runRows(t, bpf.ProgToUplink, []row{
		{
			name: "another pod has got the port", on: withPorts, flows: []flow{pods, theirs, keeps}, in: sent, out: "node:* > remote:80",
			after: []flow{pods, theirs, snat("remote:80", "node:*", "node:5000"), dnat("remote:80", "node:5000", "node:*").with(replied)},
		},
		{
			name: "the flow for replies is lost", on: withPorts, flows: []flow{pods, keeps}, in: sent, edit: isSegment, out: "node:20000 > remote:80",
			after: []flow{pods, snat("remote:80", "node:20000", "node:5000").provisional(), keeps},
		},
		{
			name: "sending alone keeps the port", on: withPorts, flows: []flow{pods, replies.idleFor(10 * time.Second), keeps}, in: sent, edit: isSegment,
			out: "node:20000 > remote:80", after: []flow{pods, replies.streaming(), keeps},
		},
	})
}
