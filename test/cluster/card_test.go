package cluster

import (
	"encoding/binary"
	"fmt"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// Where the segments are whose checksums a broken card leaves as the kernel has prepared them: all, or those inside of a
// tunnel (over IPv4; over IPv6 they are still further behind).
const (
	anywhere       = 0
	insideOfTunnel = 14 + 20 + 8 + 8 + 14
)

// brokenCard puts a network card between a node and its link that computes the checksums left to it, but those of
// segments that begin there or further behind.
func (c *cluster) brokenCard(n *node, bridge string, spoiled uint16) {
	c.Helper()
	card := testenv.New(c, "card")
	c.ip(c.router, "link", "set", n.Name, "netns", card.Path)
	c.ip(c.router, "link", "add", "card", "master", bridge, "up", "type", "veth", "peer", "name", "wire", "netns", card.Path)
	for _, device := range []string{n.Name, "wire"} {
		c.ip(card, "link", "set", device, "up", "addrgenmode", "none")
	}
	if err := n.SetOffloads("eth0", false, "tso", "gso"); err != nil { // it segments nothing
		c.Fatal(err)
	}
	inside, outside := c.openFrames(card, n.Name), c.openFrames(card, "wire")
	var both sync.WaitGroup
	both.Go(func() { forward(inside, outside, func(frame []byte) { compute(frame, spoiled) }) })
	both.Go(func() { forward(outside, inside, func([]byte) {}) })
	c.Cleanup(func() {
		inside.Close()
		outside.Close()
		both.Wait()
	})
	for device, ns := range map[string]*testenv.Namespace{"card": c.router, "wire": card, n.Name: card, "eth0": n.Namespace} {
		if err := ns.WaitUp(device); err != nil { // until then the bridge drops what arrives
			c.Fatal(err)
		}
	}
}

// vnetHeader is the size of struct virtio_net_hdr, which is before each frame and says what is left to the device.
const vnetHeader = 10

// openFrames opens a socket for what a device receives, and for what it is to send.
func (c *cluster) openFrames(ns *testenv.Namespace, device string) *os.File {
	c.Helper()
	var file *os.File
	err := ns.Do(func() error {
		fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
		if err != nil {
			return err
		}
		file = os.NewFile(uintptr(fd), device)
		for _, option := range []int{unix.PACKET_VNET_HDR, unix.PACKET_IGNORE_OUTGOING} {
			if err := unix.SetsockoptInt(fd, unix.SOL_PACKET, option, 1); err != nil {
				return fmt.Errorf("set option %d: %w", option, err)
			}
		}
		var index uint32
		request, err := unix.NewIfreq(device)
		if err == nil {
			err = unix.IoctlIfreq(fd, unix.SIOCGIFINDEX, request)
			index = request.Uint32()
		}
		if err != nil {
			return err
		}
		everything := binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, unix.ETH_P_ALL))
		return unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: everything, Ifindex: int(index)})
	})
	if err != nil {
		c.Fatalf("open frames of %s: %v", device, err)
	}
	return file
}

// forward moves frames until the sockets are closed.
func forward(from, to *os.File, change func(frame []byte)) {
	for buffer := make([]byte, 1<<17); ; {
		n, err := from.Read(buffer)
		if err != nil {
			return
		}
		change(buffer[:n])
		_, _ = to.Write(buffer[:n]) // or it is lost, as on a wire
	}
}

// compute does what the header asks for, and says in the header that nothing is left to do.
func compute(frame []byte, spoiled uint16) {
	const needsChecksum = 1

	flags, start, offset := frame[0], binary.NativeEndian.Uint16(frame[6:]), binary.NativeEndian.Uint16(frame[8:])
	clear(frame[:vnetHeader])
	if flags&needsChecksum == 0 || start >= spoiled {
		return
	}
	segment := frame[vnetHeader+int(start):]
	binary.BigEndian.PutUint16(segment[offset:], ^sum(segment))
}

func sum(data []byte) uint16 {
	total := uint32(0)
	for i, b := range data {
		total += uint32(b) << (8 * (1 - i%2))
		total = total>>16 + total&0xffff
	}
	return uint16(total)
}
