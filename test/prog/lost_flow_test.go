package prog

import (
	"errors"
	"io"
	"testing"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

func isACK(p *testenv.Packet) { p.TCPFlags &= testenv.ACK; p.TCPFlags |= testenv.ACK }

// TestLostAnswers come from a port of a container that a host port leads to, and
// nothing is known of the connection. They leave as the host port's.
func TestLostAnswers(t *testing.T) {
	for _, program := range []string{bpf.ProgToUplink, bpf.ProgToUplinkL3} {
		t.Run(program, func(t *testing.T) { runRows(t, program, lostAnswers()) })
	}
}

func lostAnswers() []row {
	const answer = "pod:80 > remote:5000"
	toAny := []port{{host: "any:8080", to: "pod:80"}}
	asNode := []flow{in("remote:5000", "pod:80", "node:8080").state(replied)}
	masqueraded := []flow{out("remote:5000", "node:*", "pod:80")}
	return []row{
		{
			name: "any address", on: ported, ports: toAny, in: answer, reply: true,
			out: "node:8080 > remote:5000", after: asNode,
		},
		{
			name: "an exact address", on: ported, ports: []port{{host: "node2:8080", to: "pod:80"}}, in: answer, reply: true,
			out: "node2:8080 > remote:5000", after: []flow{in("remote:5000", "pod:80", "node2:8080").state(replied)},
		},
		{
			name: "two host ports", on: ported, ports: append(toAny, port{host: "any:8081", to: "pod:80"}), in: answer, reply: true,
			out: "node:8080 > remote:5000", after: asNode,
		},
		{
			name: "a plain pod", on: ported, ports: []port{{host: "any:8080", to: "plain:80"}}, in: "plain:80 > remote:5000", reply: true,
			out: "node:8080 > remote:5000", after: []flow{in("remote:5000", "plain:80", "node:8080").state(replied)},
		},
		{
			name: "an exempt destination", on: ported, ports: toAny, in: answer, reply: true,
			exempts: []exempt{{of: "pod", prefix: remotes}},
			out:     "node:8080 > remote:5000", after: asNode,
		},
		{
			name: "the end of a connection", on: []proto{tcp}, ports: toAny, in: answer,
			edit: func(p *testenv.Packet) { p.TCPFlags = testenv.FIN | testenv.ACK },
			out:  "node:8080 > remote:5000", after: asNode,
		},
		{
			name: "loopback alone, which the outside cannot have asked", on: ported,
			ports: []port{{host: "loopback:8080", to: "pod:80"}}, in: answer, reply: true,
			out: "node:* > remote:5000", after: masqueraded,
		},
		{
			name: "a connection that the pod opens", on: []proto{tcp}, ports: toAny, in: answer,
			out: "node:* > remote:5000", after: masqueraded,
		},
		{name: "a connection that a plain pod opens", on: []proto{tcp}, ports: []port{{host: "any:8080", to: "plain:80"}}, in: "plain:80 > remote:5000"},
		{
			name: "another port of the pod", on: ported, ports: toAny, in: "pod:81 > remote:5000", reply: true,
			out: "node:* > remote:5000", after: []flow{out("remote:5000", "node:*", "pod:81")},
		},
		{
			name: "a host port of the other protocol", on: []proto{tcp}, ports: []port{{host: "any:8080", to: "pod:80", proto: udp}}, in: answer, reply: true,
			out: "node:* > remote:5000", after: masqueraded,
		},
		{name: "to an echo request", on: []proto{echo}, ports: toAny, in: answer, reply: true, drop: "no flow"},
		{name: "from a plain pod to an echo request", on: []proto{echo}, in: "plain:80 > remote:5000", reply: true},
	}
}

// TestConnectionFromMappedPort is one that a pod opens, from a port that a host port
// leads to: it stays masqueraded when it goes on.
func TestConnectionFromMappedPort(t *testing.T) {
	h := newHost(t)
	for _, s := range (row{on: []proto{tcp}}).scenes() {
		t.Run(s.name, func(t *testing.T) {
			if err := errors.Join(h.reset(), h.fill(s, []port{{host: "any:8080", to: "pod:80"}}, nil)); err != nil {
				t.Fatal(err)
			}
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
}

// TestRefusals have the host refuse a segment of a connection that it does not know, as it
// does with those of masqueraded connections whose entry was lost.
func TestRefusals(t *testing.T) {
	rst := func(p *testenv.Packet) { p.TCPFlags = testenv.RST }
	rows := []row{
		{name: "from a port for masquerading", in: "node:20000 > remote:80", edit: rst, drop: "no flow"},
		{name: "from the first one", in: "node:1024 > remote:80", edit: rst, drop: "no flow"},
		{name: "from the last one", in: "node:29999 > remote:80", edit: rst, drop: "no flow"},
		{name: "from one below", in: "node:1023 > remote:80", edit: rst},
		{name: "from one above", in: "node:30000 > remote:80", edit: rst},
		{
			name: "of a connection's first segment", in: "node:20000 > remote:80",
			edit: func(p *testenv.Packet) { p.TCPFlags = testenv.RST | testenv.ACK },
		},
		{name: "none", in: "node:20000 > remote:80", edit: isACK},
		{name: "of another host, which is routed through", in: "onlink:20000 > remote:80", edit: rst},
		{name: "of a plain pod", in: "plain:20000 > remote:80", edit: rst},
		{
			name: "of a pod", in: "pod:20000 > remote:80", edit: rst, out: "node:* > remote:80",
			after: []flow{out("remote:80", "node:*", "pod:20000")},
		},
	}
	for i := range rows {
		rows[i].on = []proto{tcp}
	}
	for _, program := range []string{bpf.ProgToUplink, bpf.ProgToUplinkL3} {
		t.Run(program, func(t *testing.T) { runRows(t, program, rows) })
	}
}

// TestRefusalsOfSockets are right: the host knows what it does.
func TestRefusalsOfSockets(t *testing.T) {
	h := newHost(t)
	for _, s := range (row{on: []proto{tcp}}).scenes() {
		for name, open := range map[string]func() (io.Closer, error){
			"a listener":        func() (io.Closer, error) { return h.listen(t, tcp, s.side("node:20000", true)), nil },
			"a listener of any": func() (io.Closer, error) { return h.listen(t, tcp, s.side("any:20000", true)), nil },
			"a connected one": func() (io.Closer, error) {
				return h.connectFrom(tcp, s.side("node:20000", true), s.side("remote:80", true))
			},
			"connected to another": func() (io.Closer, error) {
				return h.connectFrom(tcp, s.side("node:20000", true), s.side("remote2:80", true))
			},
		} {
			t.Run(name+" "+s.name, func(t *testing.T) {
				socket, err := open()
				if err != nil {
					t.Fatal(err)
				}
				defer socket.Close()
				r := row{in: "node:20000 > remote:80", edit: func(p *testenv.Packet) { p.TCPFlags = testenv.RST }}
				if name == "connected to another" {
					r.drop = "no flow"
				}
				if err := h.check(bpf.ProgToUplink, s, r); err != nil {
					t.Error(err)
				}
			})
		}
	}
}
