package scenario

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	cnitypes "github.com/containernetworking/cni/pkg/types"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/loader/rtnl"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/cnierr"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// tap receives the frames of one of the node's devices that the tc programs have passed. It has one
// socket per EtherType, since the kernel delivers to those after the programs.
type tap struct {
	fds []int
}

// deliveredTypes are the EtherTypes of frames without their outer VLAN tag.
var deliveredTypes = []uint16{unix.ETH_P_IP, unix.ETH_P_IPV6, unix.ETH_P_ARP, unix.ETH_P_8021Q, 0x88cc}

func (n *network) tap(t *testing.T, ifindex int) *tap {
	t.Helper()
	tp := &tap{}
	t.Cleanup(func() {
		for _, fd := range tp.fds {
			unix.Close(fd)
		}
	})
	err := n.node().Do(func() error {
		for _, etherType := range deliveredTypes {
			protocol := binary.BigEndian.Uint16(binary.NativeEndian.AppendUint16(nil, etherType))
			fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, int(protocol))
			if err != nil {
				return err
			}
			tp.fds = append(tp.fds, fd)
			if err := unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: protocol, Ifindex: ifindex}); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		t.Fatalf("listen on device %d: %v", ifindex, err)
	}
	return tp
}

// passes reports whether the frame arrives within the time.
func (tp *tap) passes(frame []byte, wait time.Duration) (bool, error) {
	var polled []unix.PollFd
	for _, fd := range tp.fds {
		polled = append(polled, unix.PollFd{Fd: int32(fd), Events: unix.POLLIN})
	}
	buffer := make([]byte, 1<<16)
	for end := time.Now().Add(wait); ; {
		ready, err := unix.Poll(polled, max(int(time.Until(end).Milliseconds()), 0))
		if err != nil && !errors.Is(err, unix.EINTR) {
			return false, err
		}
		if ready == 0 && !time.Now().Before(end) {
			return false, nil
		}
		for _, p := range polled {
			length, _, err := unix.Recvfrom(int(p.Fd), buffer, unix.MSG_DONTWAIT)
			if err == nil && bytes.Equal(testenv.Untagged(buffer[:length]), testenv.Untagged(frame)) {
				return true, nil
			}
		}
	}
}

// hostDeviceOf returns the device by which the host's stack receives a pod's frames: the host's end
// of the veth, or its bridge.
func (n *network) hostDeviceOf(t *testing.T, pod *testenv.Pod) (ifindex int) {
	t.Helper()
	inside, err := pod.Netlink().LinkByName(testenv.PodIfName)
	testenv.Must(t, err)
	outside, err := n.node().Netlink().LinkByIndex(inside.Attrs().ParentIndex)
	testenv.Must(t, err)
	return cmp.Or(outside.Attrs().MasterIndex, outside.Attrs().Index)
}

// dropsOf counts the packets that the datapath has dropped for a pod, by reason.
func (n *network) dropsOf(t *testing.T, pod *testenv.Pod) map[maps.Reason]uint64 {
	t.Helper()
	owner := maps.Attachment{Network: n.Network(), ContainerID: pod.Conf.ContainerID, IfName: pod.Conf.IfName}.Owner()
	dropped := map[maps.Reason]uint64{}
	n.withDatapath(t, func(datapath *loader.Datapath) {
		for _, drop := range must(maps.Drops(datapath)) {
			if drop.Owner == owner {
				dropped[drop.Reason] = drop.Packets
			}
		}
	})
	return dropped
}

// awaitDrops sends packets, and waits until a number of them is dropped for the pod, with the reason.
func (n *network) awaitDrops(t *testing.T, what string, pod *testenv.Pod, reason maps.Reason, number uint64, send func()) {
	t.Helper()
	before := n.dropsOf(t, pod)[reason]
	send()
	testenv.Eventually(t, what+" to be dropped", func() error {
		if got := n.dropsOf(t, pod)[reason] - before; got < number {
			return fmt.Errorf("got %d drops for %q, want %d", got, reason, number)
		}
		return nil
	})
}

// wantDropped sends frames from the pod. Each must be dropped before the host's stack, and counted once.
func (n *network) wantDropped(t *testing.T, pod *testenv.Pod, s testenv.Sender, frames []testenv.Frame) {
	t.Helper()
	tp := n.tap(t, n.hostDeviceOf(t, pod))
	// Not just any legal frame: some are dropped later, and counted.
	marker := framesNamed(s.Legal(), "UDP, IPv4")
	for i, frame := range frames {
		reason := maps.Reason(frame.Reason)
		before := n.dropsOf(t, pod)[reason]
		if err := pod.SendFrames(testenv.PodIfName, frame.Bytes); err != nil {
			t.Fatalf("%s: %v", frame.Name, err)
		}
		testenv.Eventually(t, frame.Name+" to be counted", func() error {
			if now := n.dropsOf(t, pod)[reason]; now != before+1 {
				return fmt.Errorf("counter %q: got %d, want %d, of %v", reason, now, before+1, n.dropsOf(t, pod))
			}
			return nil
		})
		if passes, err := tp.passes(frame.Bytes, 0); err != nil || passes {
			t.Errorf("%s: passed %v (%v), want a drop", frame.Name, passes, err)
		}
		if i == 0 { // proves that the tap works
			n.wantPassing(t, pod, marker)
		}
	}
}

func (n *network) wantPassing(t *testing.T, pod *testenv.Pod, frames []testenv.Frame) {
	t.Helper()
	tp := n.tap(t, n.hostDeviceOf(t, pod))
	for _, frame := range frames {
		if err := pod.SendFrames(testenv.PodIfName, frame.Bytes); err != nil {
			t.Fatalf("%s: %v", frame.Name, err)
		}
		if passes, err := tp.passes(frame.Bytes, testenv.Timeout); err != nil || !passes {
			t.Errorf("%s: passed %v (%v), want true", frame.Name, passes, err)
		}
	}
}

// hostileFrames stand for all hostile frames, which the packet tables of package prog judge one by one.
var hostileFrames = []string{"another container's IPv4 address", "another container's IPv6 address", "another MAC, IPv4", "ARP reply as the gateway"}

func framesNamed(frames []testenv.Frame, names ...string) []testenv.Frame {
	return slices.DeleteFunc(frames, func(f testenv.Frame) bool { return !slices.Contains(names, f.Name) })
}

// A pod sends only with its own addresses, whichever device it has and whichever plugin made that.
func TestAntiSpoof(t *testing.T) {
	for name, start := range map[string]func(t *testing.T) *network{
		"alone":         newEstablishedNetwork, // whose packets the tap sees
		"behind bridge": func(t *testing.T) *network { return newChain(t, firstPlugins["bridge"], afterOthers) },
		"behind ptp":    func(t *testing.T) *network { return newChain(t, firstPlugins["ptp"], afterOthers) },
		"netkit": func(t *testing.T) *network {
			testenv.Require(t, testenv.Netkit)
			return newNetworkWith(t, withKeys(`"ipMasq": true, "fastPath": "established", "device": "netkit"`))
		},
		"clsact": func(t *testing.T) *network {
			n := newEstablishedNetwork(t)
			n.loadForClsact(t)
			return n
		},
	} {
		t.Run(name, func(t *testing.T) {
			n := start(t)
			pod, other := n.AddPod(t, "a", nil), n.AddPod(t, "web", mapBoth(8080, 80))
			s := pod.Sender(t, other)
			if name == "behind bridge" { // until then the host has no gateway that a tunnel could lead to
				testenv.Must(t, n.node().WaitUp("cni0"))
			}
			n.wantDropped(t, pod, s, framesNamed(s.Hostile(), hostileFrames...))
			if name == "behind bridge" {
				n.wantDropped(t, pod, s, s.LinkLocal(someLinkLocal))
			} else {
				n.wantPassing(t, pod, s.LinkLocal(someLinkLocal))
			}
			if dropped := n.dropsOf(t, other); len(dropped) > 0 {
				t.Errorf("drops of the other pod: got %v, want none", dropped)
			}
			if name != "behind bridge" && name != "behind ptp" {
				n.wantConnectivity(t, pod, other)
			}
			wantCheck(t, pod)
		})
	}
}

// someLinkLocal is not derived from a MAC address.
var someLinkLocal = netip.MustParseAddr("fe80::1234:5678")

// A pod cannot fill the kernel's table of neighbors, which all share, with link-local addresses.
func TestNeighborTable(t *testing.T) {
	const addresses, most = 200, 3 // the MAC's, another one, and the pod's own address
	n := newNetwork(t)
	pod, other := n.AddPod(t, "a", nil), n.AddPod(t, "b", nil)
	s := pod.Sender(t, other)
	var frames [][]byte
	for i := range addresses {
		raw := someLinkLocal.As16()
		raw[9] = byte(i)
		for _, frame := range s.LinkLocal(netip.AddrFrom16(raw)) {
			frames = append(frames, frame.Bytes)
		}
	}
	own := testenv.LinkLocalOf(s.MAC)
	for _, frame := range s.LinkLocal(own) { // the last
		frames = append(frames, frame.Bytes)
	}
	testenv.Must(t, pod.SendFrames(testenv.PodIfName, frames...))
	var neighbors []netlink.Neigh
	testenv.Eventually(t, "the last neighbor", func() error {
		var err error
		neighbors, err = rtnl.Neighbors(n.node().Netlink(), n.hostDeviceOf(t, pod), unix.AF_INET6)
		if err == nil && !slices.ContainsFunc(neighbors, func(n netlink.Neigh) bool { return n.IP.Equal(own.AsSlice()) }) {
			err = fmt.Errorf("got neighbors %v, want %s among them", neighbors, own)
		}
		return err
	})
	neighbors = slices.DeleteFunc(neighbors, func(n netlink.Neigh) bool { return n.IP.IsMulticast() }) // the host's groups
	if len(neighbors) > most {
		t.Errorf("got neighbors %v, want %d at most", neighbors, most)
	}
}

// With antiSpoof off, what it would drop passes. CHECK compares the setting.
func TestAntiSpoofOff(t *testing.T) {
	n := newNetworkWith(t, withKeys(`"ipMasq": true, "fastPath": "established", "antiSpoof": false`))
	pod, other := n.AddPod(t, "a", nil), n.AddPod(t, "web", mapBoth(8080, 80))
	n.wantPassing(t, pod, framesNamed(pod.Sender(t, other).Hostile(), hostileFrames...))
	testenv.Must(t, n.SetNetwork([]byte(withKeys(`"ipMasq": true`))))
	var coded *cnitypes.Error
	if err := pod.Check(testenv.Context(t)); !errors.As(err, &coded) || coded.Code != cnierr.CodeDiffers {
		t.Errorf("CHECK with antiSpoof on: got %v, want code %d", err, cnierr.CodeDiffers)
	}
	testenv.Must(t, n.SetNetwork([]byte(withKeys(`"ipMasq": true, "fastPath": "established", "antiSpoof": false`))))
}

// A pod whose interface goes down and up repeats duplicate address detection, and keeps working.
func TestAntiSpoofAfterLinkDown(t *testing.T) {
	n := newNetwork(t)
	pod := n.AddPod(t, "a", nil)
	ctx := testenv.Context(t)
	for _, args := range [][]string{
		{"link", "set", testenv.PodIfName, "down"},
		{"link", "set", testenv.PodIfName, "up"},
		{"address", "replace", pod.Addr6().String() + "/64", "dev", testenv.PodIfName, "noprefixroute"},
		{"route", "replace", testenv.IPv4.Gateway.String(), "dev", testenv.PodIfName, "scope", "link"},
		{"route", "replace", "default", "via", testenv.IPv4.Gateway.String()},
		{"-6", "route", "replace", testenv.IPv6.Gateway.String(), "dev", testenv.PodIfName},
		{"-6", "route", "replace", "default", "via", testenv.IPv6.Gateway.String()},
	} {
		if out, err := pod.Run(ctx, "ip", args...); err != nil {
			t.Fatalf("ip %v: %v: %s", args, err, out)
		}
	}
	testenv.Eventually(t, "the end of duplicate address detection", func() error {
		out, err := pod.Run(ctx, "ip", "-6", "address", "show", "dev", testenv.PodIfName, "tentative")
		if err == nil && out != "" {
			err = errors.New(out)
		}
		return err
	})
	forEachFamily(t, func(t *testing.T, f testenv.Family) { ping(t, pod.Namespace, f.Outside) })
	if dropped := n.dropsOf(t, pod); len(dropped) > 0 {
		t.Errorf("drops: got %v, want none", dropped)
	}
}
