package scenario

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// Floods of new flows against a table of the smallest size, while connections of other containers are quiet.
// Afterwards each side still gets what the other sends: first from the server, whose packets restore no entry.

// smallestTable holds as few flows as the plugin allows. The stack knows of all connections.
const smallestTable = `"ipMasq": true, "maxFlows": 1024, "fastPath": "established"`

// streamAge is when a UDP flow with packets both ways counts as a stream, with room for the clock of the maps.
const streamAge = 3500 * time.Millisecond

// openQuietPairs opens connections by every path, of each protocol, and settles them.
func (n *network) openQuietPairs(t *testing.T, a, web *testenv.Pod) (quiet pairs) {
	t.Helper()
	for _, f := range testenv.Families {
		for i, p := range slices.Repeat(n.allPaths(f, a, web), workload(1, 1, quietOfPath)) {
			// Each connection has ports of its own.
			p.name = f.Name + " " + p.name
			p.listen = at(p.listen.Addr(), p.listen.Port()+uint16(i))
			p.dial = at(p.dial.Addr(), p.dial.Port()+uint16(i))
			for _, protocol := range []string{"tcp", "udp"} {
				quiet = append(quiet, openPair(t, protocol, p))
			}
		}
	}
	quiet.settle(t)
	return quiet
}

// settle uses the connections until those of UDP are streams, and those between pods are offloaded.
func (all pairs) settle(t *testing.T) {
	t.Helper()
	ticker := time.NewTicker(50 * time.Millisecond)
	defer ticker.Stop()
	for start, i := time.Now(), 0; i < testenv.OffloadRequests || time.Since(start) < streamAge; i++ {
		all.exchange(t)
		<-ticker.C
	}
}

// quietOfPath is the number of quiet connections of each family and path with -long.
const quietOfPath = 25

// quietPorts leads host ports from 8080 to ports from 80, for openQuietPairs.
func quietPorts() map[string]any {
	var mappings []mapping
	for _, protocol := range []string{"tcp", "udp"} {
		for i := range uint16(5 * quietOfPath) {
			mappings = append(mappings, mapping{HostPort: 8080 + i, ContainerPort: 80 + i, Protocol: protocol})
		}
	}
	return portMappings(mappings...)
}

// stream is a flood: one packet for each of many flows, several times.
type stream struct {
	from     *testenv.Namespace
	device   string
	template testenv.Packet
	// vary sets the n-th flow's addresses and ports.
	vary func(p *testenv.Packet, flow int)
	// received counts packets at the flooded server, which are waited for; nil if nobody counts.
	received func() int64
	passes   int // floodPasses, if more
}

const (
	floodKinds  = 8   // of a test: with -long, a million flows in all
	floodPasses = 3   // so that each flow is in use, and not only new
	floodBatch  = 500 // flows whose packets are sent again before the next ones': fewer than a table holds
)

// run sends the flood and returns the number of flows.
func (s stream) run(t *testing.T) int {
	t.Helper()
	flows := workload(50_000, 50_000, 1_000_000) / floodKinds
	frames := make([][]byte, floodBatch)
	for first := 0; first < flows; first += floodBatch {
		for i := range frames {
			p := s.template
			s.vary(&p, first+i)
			frames[i] = p.MustBuild()
		}
		for range max(s.passes, floodPasses) {
			s.sendBatch(t, frames)
		}
	}
	return flows
}

// sendBatch sends frames, and gives the server time to reply to them. It may lose some.
func (s stream) sendBatch(t *testing.T, frames [][]byte) {
	t.Helper()
	var want int64
	if s.received != nil {
		want = s.received() + int64(len(frames))
	}
	testenv.Must(t, s.from.SendFrames(s.device, frames...))
	if s.received == nil {
		return
	}
	ticker := time.NewTicker(time.Millisecond)
	defer ticker.Stop()
	for range 20 {
		if s.received() >= want {
			return
		}
		<-ticker.C
	}
}

// manyPort numbers the ports of flows.
func manyPort(flow int) uint16 { return uint16(2000 + flow%60_000) }

// manyAddr returns one of many addresses that nobody has: of the networks for benchmarks and for documentation.
func manyAddr(f testenv.Family, flow int) netip.Addr {
	if f.Is4() {
		addr := [4]byte{198, 18}
		binary.BigEndian.PutUint16(addr[2:], uint16(flow%60_000+1))
		return netip.AddrFrom4(addr)
	}
	addr := netip.MustParseAddr("2001:db8:ffff::").As16()
	binary.BigEndian.PutUint32(addr[12:], uint32(flow+1))
	return netip.AddrFrom16(addr)
}

func newFloodPacket(protocol string, from, to netip.AddrPort) testenv.Packet {
	if protocol == "udp" {
		return testenv.UDPPacket(from, to, "x")
	}
	return testenv.TCPPacket(from, to, testenv.SYN, "")
}

// replyToAll replies to each datagram, and counts them.
func replyToAll(t *testing.T, ns *testenv.Namespace, addr netip.AddrPort) (received func() int64) {
	t.Helper()
	conn, err := ns.ListenPacket(testenv.Context(t), addr)
	testenv.Must(t, err)
	raw, err := conn.SyscallConn()
	testenv.Must(t, err)
	err = raw.Control(func(fd uintptr) {
		_ = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 8<<20)
	})
	testenv.Must(t, err)
	var count atomic.Int64
	done := make(chan struct{})
	t.Cleanup(func() { conn.Close(); <-done })
	go func() {
		defer close(done)
		buf := make([]byte, 100)
		for t.Context().Err() == nil {
			length, peer, err := conn.ReadFromUDPAddrPort(buf)
			if err != nil {
				continue // an ICMP error for an earlier reply, until the test ends
			}
			count.Add(1)
			_, _ = conn.WriteToUDPAddrPort(buf[:length], peer) // nobody waits for it
		}
	}()
	return count.Load
}

// Clients outside, one or many, flood a host port.
func TestFloodOfHostPort(t *testing.T) {
	n := newNetworkWith(t, withKeys(smallestTable))
	a, web := n.AddPod(t, "a", nil), n.AddPod(t, "web", quietPorts())
	target := n.AddPod(t, "target", mapBoth(9090, 90))
	quiet, whole := n.openQuietPairs(t, a, web), t
	forEachProtocol(t, func(t *testing.T, f testenv.Family, protocol string) {
		var received func() int64
		if protocol == "udp" {
			received = replyToAll(t, target.Namespace, at(f.Pod(target), 90))
		} else {
			serve(t, target.Namespace, "tcp", at(f.Pod(target), 90))
		}
		for _, sources := range []string{"one source", "many sources"} {
			t.Run(sources, func(t *testing.T) {
				wantWhole(t, whole)
				packet := newFloodPacket(protocol, at(sibling(f.Outside, 99), 1), at(f.Node, 9090))
				packet.SrcMAC, packet.DstMAC = n.Outside.MACOf(t, testenv.UplinkName), n.node().MACOf(t, testenv.UplinkName)
				s := stream{n.Outside, testenv.UplinkName, packet, func(p *testenv.Packet, flow int) {
					p.SrcPort = manyPort(flow)
					if sources == "many sources" {
						p.Src = manyAddr(f, flow)
					}
				}, received, 0}
				before := int64(0)
				if received != nil {
					before = received()
				}
				flows := s.run(t)
				if received != nil {
					within(t, "the flood to reach its server", func() error {
						if got := received() - before; got < int64(flows) {
							return fmt.Errorf("got %d packets, want at least as many as flows: %d", got, flows)
						}
						return nil
					})
				}
				wantQuiet(t, quiet)
			})
		}
	})
}

// wantQuiet wants quiet connections to work.
func wantQuiet(t *testing.T, quiet pairs) {
	t.Helper()
	testenv.DrainBacklog(t) // the rest of the flood
	quiet.fromServers(t)
	if !t.Failed() {
		quiet.fromClients(t)
	}
}

// wantWhole ends a test whose connections an earlier flood has broken.
func wantWhole(t *testing.T, whole *testing.T) {
	t.Helper()
	if whole.Failed() {
		t.Fatal("an earlier flood has broken connections")
	}
}
