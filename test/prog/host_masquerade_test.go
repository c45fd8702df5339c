package prog

import (
	"testing"
	"time"

	"github.com/ebpfnet/ebpfnet/bpf"
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
	pods := snat("remote:80", "node:5000", "pod:4000").idleFor(10 * time.Second)
	// The two flows of a host connection that was moved to port 20000.
	replies := snat("remote:80", "node:20000", "node:5000").idleFor(10 * time.Second)
	touched := snat("remote:80", "node:20000", "node:5000")
	keeps := dnat("remote:80", "node:5000", "node:20000")

	beside := func(name string, f flow) row { return row{name: name, flows: []flow{f}, in: sent} }
	moved := func(name, in, out string, f flow, after ...flow) row {
		return row{name: name, on: withPorts, flows: []flow{f}, in: in, out: out, after: append(after, f)}
	}
	return []row{
		{name: "no pod has the port", in: sent},
		beside("a pod has the port towards another remote", snat("remote2:80", "node:5000", "pod:4000")),
		beside("a pod has the port on another masquerading address", snat("remote:80", "node2:5000", "pod:4000")),
		beside("a pod has another port", snat("remote:80", "node:5001", "pod:5000")),
		beside("a DNAT flow has the same port", dnat("remote:80", "pod:5000", "node:5000")),
		{name: "a pod has the port towards another port of the remote", on: withPorts, flows: []flow{snat("remote:81", "node:5000", "pod:4000")}, in: sent},

		moved("a pod has the port", sent, "node:* > remote:80", pods,
			snat("remote:80", "node:*", "node:5000"), dnat("remote:80", "node:5000", "node:*").established()),
		moved("a pod has the first port of the range", "node:1024 > remote:80", "node:* > remote:80", snat("remote:80", "node:1024", "pod:4000"),
			snat("remote:80", "node:*", "node:1024"), dnat("remote:80", "node:1024", "node:*").established()),
		moved("a pod has the last port of the range", "node:29999 > remote:80", "node:* > remote:80", snat("remote:80", "node:29999", "pod:4000"),
			snat("remote:80", "node:*", "node:29999"), dnat("remote:80", "node:29999", "node:*").established()),
		{name: "below the range", flows: []flow{snat("remote:80", "node:1023", "pod:4000")}, in: "node:1023 > remote:80"},
		{name: "above the range", flows: []flow{snat("remote:80", "node:30000", "pod:4000")}, in: "node:30000 > remote:80"},

		{
			name: "a connection that was moved", on: withPorts, flows: []flow{pods, replies, keeps.idleFor(10 * time.Second)},
			in: sent, out: "node:20000 > remote:80", after: []flow{pods, touched, keeps.established()},
		},
		{
			name: "a connection that was moved, with the pod's flow gone", on: withPorts, flows: []flow{replies, keeps.idleFor(10 * time.Second)},
			in: sent, out: "node:20000 > remote:80", after: []flow{touched, keeps.established()},
		},
		{
			name: "another remote of the same socket", on: withPorts, flows: []flow{pods, replies, keeps},
			in: "node:5000 > remote2:80",
		},
	}
}

// TestHostMasqueradeReplies has replies to a host connection that was moved to another port.
func TestHostMasqueradeReplies(t *testing.T) {
	moved := snat("remote:80", "node:20000", "node:5000")
	pods := snat("remote:80", "node:5000", "pod:4000")
	runRows(t, bpf.ProgFromUplink, []row{
		{
			name: "the host's reply", on: withPorts, flows: []flow{pods.idleFor(10 * time.Second), moved.idleFor(10 * time.Second)},
			in: "remote:80 > node:20000", reply: true, out: "remote:80 > node:5000",
			after: []flow{pods.idleFor(10 * time.Second), moved.established()},
		},
		{
			name: "the pod's reply", on: withPorts, flows: []flow{pods.idleFor(10 * time.Second), moved.idleFor(10 * time.Second)},
			in: "remote:80 > node:5000", reply: true, out: "remote:80 > pod:4000",
			after: []flow{pods.established(), moved.idleFor(10 * time.Second)},
		},
		{name: "a reply to a connection that was not moved", in: "remote:80 > node:5000", reply: true},
	})
}

// TestHostMasqueradeRecovery has a host connection that was moved to port 20000. One of its two
// flows is lost, or belongs to a pod now.
func TestHostMasqueradeRecovery(t *testing.T) {
	const sent = "node:5000 > remote:80"
	pods := snat("remote:80", "node:5000", "pod:4000").idleFor(10 * time.Second)
	theirs := snat("remote:80", "node:20000", "pod2:5000").idleFor(10 * time.Second)
	replies := snat("remote:80", "node:20000", "node:5000")
	keeps := dnat("remote:80", "node:5000", "node:20000")
	runRows(t, bpf.ProgToUplink, []row{
		{
			name: "another pod has got the port", on: withPorts, flows: []flow{pods, theirs, keeps}, in: sent, out: "node:* > remote:80",
			after: []flow{pods, theirs, snat("remote:80", "node:*", "node:5000"), dnat("remote:80", "node:5000", "node:*").established()},
		},
		{
			name: "the flow for replies is lost", on: withPorts, flows: []flow{pods, keeps}, in: sent, out: "node:20000 > remote:80",
			after: []flow{pods, replies, keeps.established()},
		},
		{
			name: "sending alone keeps the port", on: withPorts, flows: []flow{pods, replies.idleFor(10 * time.Second), keeps}, in: sent, out: "node:20000 > remote:80",
			after: []flow{pods, replies, keeps.established()},
		},
	})
}
