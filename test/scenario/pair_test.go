package scenario

import (
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// pair is a connection with both ends in hand, so that either can send first.
type pair struct {
	name           string
	client, server net.Conn
	sent           int
}

// silence is how long an end of a pair waits for what the other has sent, and patience how long it waits if
// another end has waited in vain: many silent ones take no longer than one.
const silence, patience = testenv.Timeout, 100 * time.Millisecond

// openPair opens a connection and sends a packet each way. The end of the test closes it.
func openPair(t *testing.T, protocol string, p path) *pair {
	t.Helper()
	opened := &pair{name: p.name + " by " + protocol}
	if protocol == "tcp" {
		opened.client, opened.server = connectPair(t, p)
	} else {
		opened.client, opened.server = connectUDPPair(t, p)
	}
	pairs{opened}.exchange(t)
	return opened
}

// connectUDPPair is connectPair for UDP. The server's end takes packets of that client alone.
func connectUDPPair(t *testing.T, p path) (client, server net.Conn) {
	t.Helper()
	socket := listenPacket(t, p.server, p.listen)
	client, err := p.client.Dial(testenv.Context(t), "udp", p.dial)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { client.Close() })
	if _, err := client.Write([]byte("open")); err != nil {
		t.Fatal(err)
	}
	_, peer := receiveFrom(t, socket)
	return client, udpEnd{socket, peer}
}

// udpEnd is an unconnected socket that sends to one peer.
type udpEnd struct {
	*net.UDPConn
	peer netip.AddrPort
}

func (e udpEnd) Write(payload []byte) (int, error) { return e.WriteToUDPAddrPort(payload, e.peer) }

func (e udpEnd) Read(buf []byte) (int, error) {
	n, from, err := e.ReadFromUDPAddrPort(buf)
	if from = at(from.Addr().Unmap(), from.Port()); err == nil && from != e.peer {
		err = fmt.Errorf("got %q from %s, want packets of %s only", buf[:n], from, e.peer)
	}
	return n, err
}

func (e udpEnd) RemoteAddr() net.Addr { return net.UDPAddrFromAddrPort(e.peer) }

// pairs are connections that are used together.
type pairs []*pair

// fromServers sends from each server, whose packets cannot restore an entry, and wants each client to get
// exactly that.
func (all pairs) fromServers(t *testing.T) {
	t.Helper()
	all.send(t, "server to client", func(p *pair) (from, to net.Conn) { return p.server, p.client })
}

func (all pairs) fromClients(t *testing.T) {
	t.Helper()
	all.send(t, "client to server", func(p *pair) (from, to net.Conn) { return p.client, p.server })
}

// exchange sends both ways, the servers first.
func (all pairs) exchange(t *testing.T) {
	t.Helper()
	all.fromServers(t)
	all.fromClients(t)
}

func (all pairs) send(t *testing.T, direction string, ends func(*pair) (from, to net.Conn)) {
	t.Helper()
	payloads := make([]string, len(all))
	for i, p := range all {
		p.sent++
		payloads[i] = fmt.Sprintf("%08d", p.sent)
		from, _ := ends(p)
		if err := from.SetWriteDeadline(time.Now().Add(silence)); err != nil {
			t.Error(err)
		}
		if _, err := from.Write([]byte(payloads[i])); err != nil {
			t.Errorf("%s, %s: send: %v", p.name, direction, err)
		}
	}
	deadline := time.Now().Add(silence) // of all
	for i, p := range all {
		_, to := ends(p)
		if soon := time.Now().Add(patience); soon.After(deadline) {
			deadline = soon
		}
		if err := wantNext(to, payloads[i], deadline); err != nil {
			t.Errorf("%s, %s: %v", p.name, direction, err)
		}
	}
}

// wantNext wants this payload next.
func wantNext(conn net.Conn, payload string, deadline time.Time) error {
	if err := conn.SetReadDeadline(deadline); err != nil {
		return err
	}
	buf := make([]byte, 100)
	n, err := conn.Read(buf)
	if err != nil {
		return fmt.Errorf("receive %q: %w", payload, err)
	}
	if got := string(buf[:n]); got != payload {
		return fmt.Errorf("got %q, want %q", got, payload)
	}
	return nil
}
