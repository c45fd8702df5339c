package prog

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// sender returns "pod" as the sender, with "pod2" as its neighbor.
func (h *host) sender() testenv.Sender {
	return testenv.Sender{
		MAC: testenv.MAC{2, 0, 0, 0, 0, 1}, HostMAC: testenv.MAC(h.veth.HardwareAddr),
		Addr4: v4.addr("pod"), Addr6: v6.addr("pod"),
		Other4: v4.addr("pod2"), Other6: v6.addr("pod2"),
		Gateway4: v4.addr("podgw"), Gateway6: v6.addr("podgw"),
		Remote4: v4.addr("remote"), Remote6: v6.addr("remote"),
	}
}

// guard makes the veth the sender's device.
func (h *host) guard(s testenv.Sender, flags bpf.DeviceFlags) error {
	errs := []error{
		h.reset(),
		empty[bpf.DropKey, bpf.DropCount](h.programs.Maps[bpf.MapDrops]),
		h.programs.Maps[bpf.MapDevices].Put(uint32(h.veth.Index), bpf.Device{
			Owner: owners["pod"], Network: 1, Container: 7, Flags: flags, Mac: s.MAC,
			Addr4: wireOrZero(s.Addr4, flags), Addr6: wireOrZero(s.Addr6, flags),
			Gateway4: v4.wire("podgw"), Gateway6: v6.wire("podgw"),
		}),
	}
	for _, f := range addressings {
		endpoint := bpf.Endpoint{
			Owner: owners["pod"], Network: 1, Container: 7, Ifindex: uint32(h.veth.Index),
			Mac: s.MAC, Gateway: f.wire("podgw"), Flags: bpf.EndpointMasq,
		}
		other := endpoint
		other.Owner, other.Container, other.Mac = owners["pod2"], 8, [6]byte{2, 0, 0, 0, 0, 3}
		errs = append(errs,
			h.programs.Maps[bpf.MapEndpoints].Put(f.wire("pod"), endpoint),
			h.programs.Maps[bpf.MapEndpoints].Put(f.wire("pod2"), other))
	}
	return errors.Join(errs...)
}

// wireOrZero returns zero for a device without addresses of its own.
func wireOrZero(addr netip.Addr, flags bpf.DeviceFlags) bpf.Addr {
	if flags&bpf.DeviceAnyAddress != 0 {
		return bpf.Addr{}
	}
	return wire(addr)
}

const antiSpoof = bpf.DeviceAntiSpoof

// someLinkLocal is not derived from a MAC address.
var someLinkLocal = netip.MustParseAddr("fe80::1234:5678")

// judge runs from_container, and wants the frame unchanged, or dropped for its reason.
func (h *host) judge(s testenv.Sender, flags bpf.DeviceFlags, frame testenv.Frame, passes bool) error {
	if err := h.guard(s, flags); err != nil {
		return err
	}
	verdict, result, err := h.runInside(bpf.ProgFromContainer, frame.Bytes)
	if err != nil {
		return err
	}
	drops, err := contents[bpf.DropKey, bpf.DropCount](h.programs.Maps[bpf.MapDrops])
	if err != nil {
		return err
	}
	if passes {
		if !bytes.Equal(result, frame.Bytes) || len(drops) > 0 {
			err = fmt.Errorf("changed to %x, or counted: %v", result, drops)
		}
		return errors.Join(checkVerdict(verdict, verdictNext), err)
	}
	want := bpf.DropCount{Packets: 1, Bytes: uint64(len(frame.Bytes))}
	if got := drops[bpf.DropKey{Owner: owners["pod"], Reason: frame.Reason}]; got != want || len(drops) != 1 {
		err = fmt.Errorf("counted %v, want 1 for reason %d", drops, frame.Reason)
	}
	for name, number := range reasons {
		if number == frame.Reason {
			err = errors.Join(err, h.checkCounters(name, len(frame.Bytes)))
		}
	}
	return errors.Join(checkVerdict(verdict, verdictDrop), err)
}

func TestAntiSpoof(t *testing.T) {
	h := newHost(t)
	s := h.sender()
	for _, tc := range []struct {
		name   string
		flags  bpf.DeviceFlags
		frames []testenv.Frame
		passes bool
	}{
		{"hostile", antiSpoof, s.Hostile(), false},
		{"hostile, on a bridge", antiSpoof | bpf.DeviceBridged, s.Hostile(), false},
		{"hostile, antiSpoof off", 0, s.Hostile(), true},
		{"legal", antiSpoof, s.Legal(), true},
		{"legal, on a bridge", antiSpoof | bpf.DeviceBridged, s.Legal(), true},
		{"to bridges", antiSpoof, s.ToBridges(), true},
		{"to bridges, on a bridge", antiSpoof | bpf.DeviceBridged, s.ToBridges(), false},
		{"to bridges, on a bridge, antiSpoof off", bpf.DeviceBridged, s.ToBridges(), true},
		{"another link-local address", antiSpoof, s.LinkLocal(someLinkLocal), true},
		{"another link-local address, on a bridge", antiSpoof | bpf.DeviceBridged, s.LinkLocal(someLinkLocal), false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			for _, frame := range tc.frames {
				if err := h.judge(s, tc.flags, frame, tc.passes); err != nil {
					t.Errorf("%s: %v", frame.Name, err)
				}
			}
		})
	}
}

// TestLinkLocalAddresses has a container use its MAC's address and one other, the first that it uses or probes for: each
// takes a place in the kernel's table of neighbors.
func TestLinkLocalAddresses(t *testing.T) {
	h := newHost(t)
	s := h.sender()
	own, other, third := testenv.LinkLocalOf(s.MAC), someLinkLocal, netip.MustParseAddr("febf::1234:5679")
	for name, first := range map[string][]testenv.Frame{"used": s.LinkLocal(other)[:1], "probed": s.LinkLocal(other)[2:]} {
		t.Run(name, func(t *testing.T) {
			testenv.Must(t, h.guard(s, antiSpoof))
			for _, step := range []struct {
				frames []testenv.Frame
				passes bool
			}{{s.LinkLocal(own), true}, {first, true}, {s.LinkLocal(third), false}, {s.LinkLocal(other), true}, {s.LinkLocal(own), true}} {
				for _, frame := range step.frames {
					verdict, _, err := h.runInside(bpf.ProgFromContainer, frame.Bytes)
					if passes := verdict == verdictNext; err != nil || passes != step.passes {
						t.Errorf("%s: passes: %v (%v), want %v", frame.Name, passes, err, step.passes)
					}
				}
			}
		})
	}
}

// TestAntiSpoofWithoutAddresses has a container without addresses of its own: it may use any that
// neither the host nor another container has.
func TestAntiSpoofWithoutAddresses(t *testing.T) {
	h := newHost(t)
	s := h.sender()
	free := s
	free.Addr4, free.Addr6 = netip.MustParseAddr("8.0.99.1"), netip.MustParseAddr("fd00:99::1")
	hosts := s
	hosts.Addr4, hosts.Addr6 = v4.addr("node2"), v6.addr("node2")
	const flags = antiSpoof | bpf.DeviceAnyAddress
	for _, frame := range free.Legal() {
		if err := h.judge(s, flags, frame, true); err != nil {
			t.Errorf("%s: %v", frame.Name, err)
		}
	}
	for _, frame := range hosts.Legal() {
		frame.Reason = bpf.ReasonAddress
		if strings.HasPrefix(frame.Name, "ARP") {
			frame.Reason = bpf.ReasonARP
		} else if frame.Name == "address detection" {
			frame.Reason = bpf.ReasonNeighbor
		}
		if err := h.judge(s, flags, frame, sendsOwn(frame.Bytes, anyBut(s))); err != nil {
			t.Errorf("with the host's address, %s: %v", frame.Name, err)
		}
	}
	for _, frame := range free.Hostile() {
		claimsFree := frame.Reason == bpf.ReasonAddress && sendsOwn(frame.Bytes, anyBut(s))
		if err := h.judge(s, flags, frame, claimsFree); err != nil {
			t.Errorf("%s: %v", frame.Name, err)
		}
	}
}

// identity has the addresses that a container may send from.
type identity struct {
	mac  testenv.MAC
	owns func(netip.Addr) bool
}

func identityOf(s testenv.Sender) identity {
	return identity{s.MAC, func(a netip.Addr) bool {
		return a == s.Addr4 || a == s.Addr6 || a.IsLinkLocalUnicast() && a.Is6() && a != netip.MustParseAddr("fe80::1")
	}}
}

func anyBut(s testenv.Sender) identity {
	return identity{s.MAC, func(a netip.Addr) bool {
		taken := []netip.Addr{s.Other4, s.Other6, s.Gateway4, s.Gateway6, netip.MustParseAddr("fe80::1"), v4.addr("node2"), v6.addr("node2")}
		return a.IsValid() && !a.IsUnspecified() && !a.IsLoopback() && !a.Is4In6() && !slices.Contains(taken, a)
	}}
}

// sendsOwn implements the promise of antiSpoof a second time: the frame, without its VLAN tags, has
// no sender but the container.
func sendsOwn(frame []byte, who identity) bool {
	frame = testenv.Untagged(frame)
	if testenv.MAC(frame[6:12]) != who.mac {
		return false
	}
	etherType, packet := uint16(frame[12])<<8|uint16(frame[13]), frame[etherLen:]
	switch {
	case etherType == unix.ETH_P_ARP && len(packet) >= 28:
		sender, _ := netip.AddrFromSlice(packet[14:18])
		if sender.IsUnspecified() {
			sender, _ = netip.AddrFromSlice(packet[24:28])
		}
		return testenv.MAC(packet[8:14]) == who.mac && who.owns(sender)
	case etherType == unix.ETH_P_IP && len(packet) >= 20:
		source, _ := netip.AddrFromSlice(packet[12:16])
		l4 := packet[min(int(packet[0]&15)*4, len(packet)):]
		dhcp := source.IsUnspecified() && packet[9] == unix.IPPROTO_UDP && len(l4) >= 4 && bytes.Equal(l4[:4], []byte{0, 68, 0, 67})
		return who.owns(source) || dhcp
	case etherType == unix.ETH_P_IPV6 && len(packet) >= 40:
		source, _ := netip.AddrFromSlice(packet[8:24])
		if packet[6] == unix.IPPROTO_ICMPV6 && len(packet) >= 64 {
			target, _ := netip.AddrFromSlice(packet[48:64])
			advertises := packet[40] == 136
			claims := packet[40] == 135 && source.IsUnspecified()
			if (advertises || claims) && !who.owns(target) {
				return false
			}
		}
		return who.owns(source) || source.IsUnspecified() && mayHaveNoSource(packet)
	}
	return true
}

// mayHaveNoSource accepts extension headers: the table in testenv covers what follows them.
func mayHaveNoSource(packet []byte) bool {
	switch packet[6] {
	case unix.IPPROTO_HOPOPTS, unix.IPPROTO_DSTOPTS, unix.IPPROTO_ROUTING, unix.IPPROTO_FRAGMENT:
		return true
	case unix.IPPROTO_ICMPV6:
		return len(packet) > 40 && slices.Contains([]byte{131, 132, 133, 135, 143}, packet[40])
	}
	return false
}

// FuzzAntiSpoof feeds arbitrary bytes as frames of a container: none passes with a foreign source.
func FuzzAntiSpoof(f *testing.F) {
	h := newHost(f)
	s := h.sender()
	testenv.Must(f, h.guard(s, antiSpoof))
	for _, frame := range append(s.Hostile(), s.Legal()...) {
		f.Add(frame.Bytes)
	}
	f.Fuzz(func(t *testing.T, frame []byte) {
		if err := h.Do(func() error { return h.feedSpoofed(s, frame) }); err != nil {
			t.Errorf("%x: %v", frame, err)
		}
	})
}

func (h *host) feedSpoofed(s testenv.Sender, frame []byte) error {
	const maxLen = 2000
	if len(frame) < etherLen || len(frame) > maxLen {
		return nil // the kernel delivers no such packets
	}
	verdict, _, err := h.run(bpf.ProgFromContainer, frame)
	if err != nil {
		if untestable(bpf.ProgFromContainer, frame) {
			return nil
		}
		return err
	}
	if verdict != verdictDrop && !sendsOwn(frame, identityOf(s)) {
		return fmt.Errorf("passes with verdict %d", int32(verdict))
	}
	return nil
}

// TestMutatedSpoofs is FuzzAntiSpoof with mutated frames, for every test run.
func TestMutatedSpoofs(t *testing.T) {
	const (
		seed   = 11
		rounds = 20000
	)
	h := newHost(t)
	s := h.sender()
	testenv.Must(t, h.guard(s, antiSpoof))
	random := rand.New(rand.NewPCG(seed, 0))
	corpus := slices.Concat(s.Hostile(), s.Legal(), s.ToBridges())
	addrs := [][]byte{s.Addr4.AsSlice(), s.Other4.AsSlice(), s.Addr6.AsSlice(), s.Other6.AsSlice(), s.Gateway4.AsSlice(), make([]byte, 16)}
	err := h.Do(func() error {
		for range rounds {
			frame := mutate(random, corpus[random.IntN(len(corpus))].Bytes)
			if at := 20 + random.IntN(60); random.IntN(4) == 0 && at < len(frame) {
				copy(frame[at:], addrs[random.IntN(len(addrs))])
			}
			if err := h.feedSpoofed(s, frame); err != nil {
				return fmt.Errorf("%x: %w", frame, err)
			}
		}
		return nil
	})
	testenv.NoError(t, err)
}
