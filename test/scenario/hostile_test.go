package scenario

import (
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"slices"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// A hostile container has raw sockets and an accomplice outside. What it sends must not change, take or end
// what belongs to others.

// remotePort is the first port of the accomplice.
const remotePort = 7000

// wire sends packets as frames, past the stack of its namespace.
type wire struct {
	ns        *testenv.Namespace
	mac, next testenv.MAC
}

// wireOf is the wire from a pod to the node.
func wireOf(t *testing.T, pod *testenv.Pod) wire {
	t.Helper()
	return wire{pod.Namespace, pod.MACOf(t, testenv.PodIfName), pod.HostMAC(t)}
}

// outsideWire is the wire from the outside to the node.
func (n *network) outsideWire(t *testing.T) wire {
	t.Helper()
	return wire{n.Outside, n.Outside.MACOf(t, testenv.UplinkName), n.node().MACOf(t, testenv.UplinkName)}
}

func (w wire) send(t *testing.T, packets ...testenv.Packet) {
	t.Helper()
	frames := make([][]byte, len(packets))
	for i, p := range packets {
		p.SrcMAC, p.DstMAC = w.mac, w.next
		frames[i] = p.MustBuild()
	}
	testenv.Must(t, w.ns.SendFrames(testenv.PodIfName, frames...))
}

// opening returns the first packet of a connection.
func opening(protocol string, from, to netip.AddrPort) testenv.Packet {
	if protocol == "udp" {
		return testenv.UDPPacket(from, to, "open")
	}
	return testenv.TCPPacket(from, to, testenv.SYN, "")
}

// openings returns the first packets of connections from count ports, beginning with first.
func openings(protocol string, addr netip.Addr, first uint16, count int, to netip.AddrPort) []testenv.Packet {
	packets := make([]testenv.Packet, count)
	for i := range packets {
		packets[i] = opening(protocol, at(addr, first+uint16(i)), to)
	}
	return packets
}

// mute keeps the pod's own stack from resetting connections with a remote that its frames open.
func mute(t *testing.T, pod *testenv.Pod, remote netip.Addr, protocol string) {
	t.Helper()
	if protocol != "tcp" {
		return
	}
	dst := &net.IPNet{IP: remote.AsSlice(), Mask: net.CIDRMask(remote.BitLen(), remote.BitLen())}
	if err := pod.Netlink().RouteReplace(&netlink.Route{Dst: dst, Type: unix.RTN_BLACKHOLE}); err != nil {
		t.Fatalf("route of %s to %s: %v", pod.Name, remote, err)
	}
}

// loadWith loads the datapath before the plugin does.
func (n *network) loadWith(t *testing.T, options loader.Options) {
	t.Helper()
	testenv.Preload(t, n.node(), options)
	err := n.node().Do(func() error {
		datapath, err := loader.Open(testenv.Context(t), options)
		if err == nil {
			datapath.Close()
		}
		return err
	})
	if err != nil {
		t.Fatalf("load the datapath: %v", err)
	}
}

// capture reads what a device has received, after the programs.
type capture struct {
	fd int
	ns *testenv.Namespace
}

func openCapture(t *testing.T, ns *testenv.Namespace, device string) *capture {
	t.Helper()
	const allTypes, buffer = unix.ETH_P_ALL, 64 << 20
	c := &capture{ns: ns}
	link, err := ns.Netlink().LinkByName(device)
	testenv.Must(t, err)
	protocol := binary.BigEndian.Uint16(binary.NativeEndian.AppendUint16(nil, allTypes))
	err = ns.Do(func() (err error) {
		// Protocol 0 receives nothing until the socket is bound to the device.
		if c.fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0); err != nil {
			return err
		}
		return errors.Join(
			unix.SetsockoptInt(c.fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, buffer),
			unix.Bind(c.fd, &unix.SockaddrLinklayer{Protocol: protocol, Ifindex: link.Attrs().Index}),
		)
	})
	if err != nil {
		t.Fatalf("capture on %s of %s: %v", device, ns.Name, err)
	}
	t.Cleanup(func() { unix.Close(c.fd) })
	return c
}

// frames returns the frames since the last call, without those that the namespace has sent.
func (c *capture) frames(t *testing.T) (frames [][]byte) {
	t.Helper()
	buffer := make([]byte, 1<<17)
	for {
		length, from, err := unix.Recvfrom(c.fd, buffer, 0)
		if errors.Is(err, unix.EAGAIN) {
			return frames
		}
		if err != nil && !errors.Is(err, unix.EINTR) {
			t.Fatalf("capture in %s: %v", c.ns.Name, err)
		}
		if link, ok := from.(*unix.SockaddrLinklayer); ok && link.Pkttype != unix.PACKET_OUTGOING {
			frames = append(frames, slices.Clone(buffer[:length]))
		}
	}
}

// received returns those of the frames that are packets.
func (c *capture) received(t *testing.T) (packets []testenv.Packet) {
	t.Helper()
	for _, frame := range c.frames(t) {
		if p, err := testenv.Decode(frame); err == nil {
			packets = append(packets, p)
		}
	}
	return packets
}

// within is testenv.Eventually, but the test continues after a failure.
func within(t *testing.T, what string, cond func() error) {
	t.Helper()
	testenv.NoError(t, testenv.Wait(testenv.Context(t), what, cond))
}

// fewPorts leaves the minimum of ports for masquerading: the node's own sockets get the rest.
func (n *network) fewPorts(t *testing.T) {
	t.Helper()
	testenv.Must(t, n.node().SetSysctl("net/ipv4/ip_local_port_range", "1024 61439"))
}

// noPortDrops counts the packets that were dropped for lack of a port.
func (n *network) noPortDrops(t *testing.T) uint64 {
	t.Helper()
	return n.dropsFor(t, bpf.ReasonNoPort)
}

// dropsFor counts the packets that were dropped for a reason.
func (n *network) dropsFor(t *testing.T, reason bpf.Reason) (packets uint64) {
	t.Helper()
	n.withDatapath(t, func(datapath *loader.Datapath) {
		packets = must(maps.DropTotals(datapath))[reason].Packets
	})
	return packets
}
