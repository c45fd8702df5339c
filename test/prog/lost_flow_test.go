package prog

import (
	"errors"
	"io"
	"testing"
	"time"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

func isACK(p *testenv.Packet) { p.TCPFlags &= testenv.ACK; p.TCPFlags |= testenv.ACK }

// TestLostFlowReplies has replies from the target of a host port, with no flow. They leave from
// the host port.
func TestLostFlowReplies(t *testing.T) {
	for _, program := range []string{bpf.ProgToUplink, bpf.ProgToUplinkL3} {
		t.Run(program, func(t *testing.T) { runRows(t, program, lostReplies()) })
	}
}

func lostReplies() []row {
	const reply = "pod:80 > remote:5000"
	toAny := []hostPort{{host: "any:8080", to: "pod:80"}}
	asNode := []flow{dnat("remote:5000", "pod:80", "node:8080").with(replied | pickedUp)}
	masqueraded := []flow{snat("remote:5000", "node:*", "pod:80").provisional()}
	return []row{
		{
			name: "a host port on any address", on: withPorts, ports: toAny, in: reply, reply: true,
			out: "node:8080 > remote:5000", after: asNode,
		},
		{
			name: "a host port on an exact address", on: withPorts, ports: []hostPort{{host: "node2:8080", to: "pod:80"}}, in: reply, reply: true,
			out: "node2:8080 > remote:5000", after: []flow{dnat("remote:5000", "pod:80", "node2:8080").with(replied | pickedUp)},
		},
		{
			name: "two host ports", on: withPorts, ports: append(toAny, hostPort{host: "any:8081", to: "pod:80"}), in: reply, reply: true,
			out: "node:8080 > remote:5000", after: asNode,
		},
		{
			name: "a pod without ipMasq", on: withPorts, ports: []hostPort{{host: "any:8080", to: "plain:80"}}, in: "plain:80 > remote:5000", reply: true,
			out: "node:8080 > remote:5000", after: []flow{dnat("remote:5000", "plain:80", "node:8080").with(replied | pickedUp)},
		},
		{
			name: "a destination in nonMasqueradeCIDRs", on: withPorts, ports: toAny, in: reply, reply: true,
			nonMasq: []nonMasq{{pod: "pod", prefix: remotes}},
			out:     "node:8080 > remote:5000", after: asNode,
		},
		{
			name: "a FIN", on: []proto{tcp}, ports: toAny, in: reply,
			edit: func(p *testenv.Packet) { p.TCPFlags = testenv.FIN | testenv.ACK },
			out:  "node:8080 > remote:5000", after: asNode, // the remote's packets make it known
		},
		{
			name: "a host port on loopback, which the outside cannot use", on: withPorts,
			ports: []hostPort{{host: "loopback:8080", to: "pod:80"}}, in: reply, reply: true,
			out: "node:* > remote:5000", after: masqueraded,
		},
		{
			name: "a connection that the pod opens", on: []proto{tcp}, ports: toAny, in: reply,
			out: "node:* > remote:5000", after: []flow{snat("remote:5000", "node:*", "pod:80")},
		},
		{name: "a connection that a pod without ipMasq opens", on: []proto{tcp}, ports: []hostPort{{host: "any:8080", to: "plain:80"}}, in: "plain:80 > remote:5000"},
		{
			name: "another port of the pod", on: withPorts, ports: toAny, in: "pod:81 > remote:5000", reply: true,
			out: "node:* > remote:5000", after: []flow{snat("remote:5000", "node:*", "pod:81").provisional()},
		},
		{
			name: "a host port of the other protocol", on: []proto{tcp}, ports: []hostPort{{host: "any:8080", to: "pod:80", proto: udp}}, in: reply, reply: true,
			out: "node:* > remote:5000", after: masqueraded,
		},
		{name: "an echo reply", on: []proto{echo}, ports: toAny, in: reply, reply: true, drop: "no flow"},
		{name: "an echo reply of a pod without ipMasq", on: []proto{echo}, in: "plain:80 > remote:5000", reply: true},
	}
}

// TestConnectionFromTargetPort has a connection that a pod opens from the target port of a host
// port: it stays masqueraded.
func TestConnectionFromTargetPort(t *testing.T) {
	h := newHost(t)
	eachScene(t, []proto{tcp}, func(t *testing.T, s scene) {
		testenv.Must(t, errors.Join(h.reset(), h.fill(s, []hostPort{{host: "any:8080", to: "pod:80"}}, nil)))
		step := hop{program: bpf.ProgToUplink, out: "node:* > remote:5000"}
		p := s.packet("pod:80 > remote:5000", false)
		for _, flags := range []uint8{testenv.SYN, testenv.ACK, testenv.FIN | testenv.ACK} {
			p.TCPFlags = flags
			if _, err := h.hop(&s, p, false, step); err != nil {
				t.Errorf("flags %#x: %v", flags, err)
			}
		}
	})
}

// TestHostRST has the host refuse a segment of an unknown connection, which may be a masqueraded
// one whose flow was lost.
func TestHostRST(t *testing.T) {
	rst := func(p *testenv.Packet) { p.TCPFlags = testenv.RST }
	rows := []row{
		{name: "from a port of the masquerading range", in: "node:20000 > remote:80", edit: rst, drop: "no flow", after: []flow{held("remote:80", "node:20000")}},
		{name: "from the first port of the range", in: "node:1024 > remote:80", edit: rst, drop: "no flow", after: []flow{held("remote:80", "node:1024")}},
		{name: "from the last port of the range", in: "node:29999 > remote:80", edit: rst, drop: "no flow", after: []flow{held("remote:80", "node:29999")}},
		{name: "from below the range", in: "node:1023 > remote:80", edit: rst},
		{name: "from above the range", in: "node:30000 > remote:80", edit: rst},
		{
			name: "RST with ACK, which refuses a SYN", in: "node:20000 > remote:80",
			edit: func(p *testenv.Packet) { p.TCPFlags = testenv.RST | testenv.ACK },
		},
		{
			name: "for the second time", flows: []flow{held("remote:80", "node:20000").idleFor(time.Minute)},
			in: "node:20000 > remote:80", edit: rst, after: []flow{held("remote:80", "node:20000").idleFor(time.Minute)},
		},
		{
			name: "another remote was refused", flows: []flow{held("remote2:80", "node:20000")}, in: "node:20000 > remote:80", edit: rst, drop: "no flow",
			after: []flow{held("remote2:80", "node:20000"), held("remote:80", "node:20000")},
		},
		{name: "from the number of a host port", ports: []hostPort{{host: "any:20000", to: "pod:80"}}, in: "node:20000 > remote:80", edit: rst},
		{name: "to a client's port", in: "node:20000 > remote:32768", edit: rst},
		{
			name: "to the last port that is no client's", in: "node:20000 > remote:32767", edit: rst, drop: "no flow",
			after: []flow{held("remote:32767", "node:20000")},
		},
		{name: "no RST", in: "node:20000 > remote:80", edit: isACK, after: []flow{claim("remote:80", "node:20000").provisional()}},
		{name: "forwarded for another host", in: "onlink:20000 > remote:80", edit: rst},
		{name: "from a pod without ipMasq", in: "plain:20000 > remote:80", edit: rst},
		{
			name: "from a pod", in: "pod:20000 > remote:80", edit: rst, out: "node:* > remote:80",
			after: []flow{snat("remote:80", "node:*", "pod:20000").provisional()},
		},
	}
	for i := range rows {
		rows[i].on = []proto{tcp}
	}
	for _, program := range []string{bpf.ProgToUplink, bpf.ProgToUplinkL3} {
		t.Run(program, func(t *testing.T) { runRows(t, program, rows) })
	}
}

// TestHostRSTFromSocket has a socket on the port, so that the RST is meant.
func TestHostRSTFromSocket(t *testing.T) {
	h := newHost(t)
	for _, s := range (row{on: []proto{tcp}}).scenes() {
		for name, open := range map[string]func() (io.Closer, error){
			"a listener":                func() (io.Closer, error) { return h.listen(t, tcp, s.side("node:20000", true)), nil },
			"a listener on any address": func() (io.Closer, error) { return h.listen(t, tcp, s.side("any:20000", true)), nil },
			"a socket connected to the remote": func() (io.Closer, error) {
				return h.connectFrom(tcp, s.side("node:20000", true), s.side("remote:80", true))
			},
			"a socket connected to another remote": func() (io.Closer, error) {
				return h.connectFrom(tcp, s.side("node:20000", true), s.side("remote2:80", true))
			},
		} {
			t.Run(name+" "+s.name, func(t *testing.T) {
				socket, err := open()
				testenv.Must(t, err)
				defer socket.Close()
				r := row{in: "node:20000 > remote:80", edit: func(p *testenv.Packet) { p.TCPFlags = testenv.RST }}
				if name == "a socket connected to another remote" {
					r.drop, r.after = "no flow", []flow{held("remote:80", "node:20000")}
				}
				testenv.NoError(t, h.check(bpf.ProgToUplink, s, r))
			})
		}
	}
}
