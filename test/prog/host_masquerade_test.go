package prog

import (
	"testing"
	"time"

	"github.com/ebpfnet/ebpfnet/bpf"
)

// TestHostSends has sockets of the host that send from ports of the masquerading range, where
// a pod may have the same port towards the same remote.
func TestHostSends(t *testing.T) {
	for _, program := range []string{bpf.ProgToUplink, bpf.ProgToUplinkL3} {
		t.Run(program, func(t *testing.T) { runRows(t, program, hostSends()) })
	}
}

func hostSends() []row {
	const sent = "node:5000 > remote:80"
	pods := out("remote:80", "node:5000", "pod:4000").unused(10 * time.Second)
	// The two entries of a connection of the host that leaves as port 20000.
	replies := out("remote:80", "node:20000", "node:5000").unused(10 * time.Second)
	used := out("remote:80", "node:20000", "node:5000")
	keeps := in("remote:80", "node:5000", "node:20000")

	beside := func(name string, f flow) row { return row{name: name, flows: []flow{f}, in: sent} }
	moved := func(name, in, out string, f flow, after ...flow) row {
		return row{name: name, on: ported, flows: []flow{f}, in: in, out: out, after: append(after, f)}
	}
	return []row{
		{name: "no pod has the port", in: sent},
		beside("a pod has it with another remote", out("remote2:80", "node:5000", "pod:4000")),
		beside("a pod has it with another address of ours", out("remote:80", "node2:5000", "pod:4000")),
		beside("a pod has another port", out("remote:80", "node:5001", "pod:5000")),
		beside("a pod is answered by that port of the remote", in("remote:80", "pod:5000", "node:5000")),
		{name: "a pod has it with another port of the remote", on: ported, flows: []flow{out("remote:81", "node:5000", "pod:4000")}, in: sent},

		moved("a pod has it", sent, "node:* > remote:80", pods,
			out("remote:80", "node:*", "node:5000"), in("remote:80", "node:5000", "node:*").state(replied)),
		moved("a pod has the first port of the range", "node:1024 > remote:80", "node:* > remote:80", out("remote:80", "node:1024", "pod:4000"),
			out("remote:80", "node:*", "node:1024"), in("remote:80", "node:1024", "node:*").state(replied)),
		moved("a pod has the last port of the range", "node:29999 > remote:80", "node:* > remote:80", out("remote:80", "node:29999", "pod:4000"),
			out("remote:80", "node:*", "node:29999"), in("remote:80", "node:29999", "node:*").state(replied)),
		{name: "below the range", flows: []flow{out("remote:80", "node:1023", "pod:4000")}, in: "node:1023 > remote:80"},
		{name: "above the range", flows: []flow{out("remote:80", "node:30000", "pod:4000")}, in: "node:30000 > remote:80"},

		{
			name: "a connection that was moved", on: ported, flows: []flow{pods, replies, keeps.unused(10 * time.Second)},
			in: sent, out: "node:20000 > remote:80", after: []flow{pods, used, keeps.state(replied)},
		},
		{
			name: "a connection that was moved, after the pod has gone", on: ported, flows: []flow{replies, keeps.unused(10 * time.Second)},
			in: sent, out: "node:20000 > remote:80", after: []flow{used, keeps.state(replied)},
		},
		{
			name: "another remote of the same socket", on: ported, flows: []flow{pods, replies, keeps},
			in: "node:5000 > remote2:80",
		},
	}
}

// TestHostReceives is the way back: the remote knows the host's connection by another port.
func TestHostReceives(t *testing.T) {
	moved := out("remote:80", "node:20000", "node:5000")
	pods := out("remote:80", "node:5000", "pod:4000")
	runRows(t, bpf.ProgFromUplink, []row{
		{
			name: "the host's reply", on: ported, flows: []flow{pods.unused(10 * time.Second), moved.unused(10 * time.Second)},
			in: "remote:80 > node:20000", reply: true, out: "remote:80 > node:5000",
			after: []flow{pods.unused(10 * time.Second), moved.state(replied)},
		},
		{
			name: "the pod's reply", on: ported, flows: []flow{pods.unused(10 * time.Second), moved.unused(10 * time.Second)},
			in: "remote:80 > node:5000", reply: true, out: "remote:80 > pod:4000",
			after: []flow{pods.state(replied), moved.unused(10 * time.Second)},
		},
		{name: "a reply to a connection that was not moved", in: "remote:80 > node:5000", reply: true},
	})
}
