package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// addIdle adds entries without measured traffic, up to the scale: host ports by one ADD,
// containers as entries in the maps.
func (s *setup) addIdle(m *testenv.Machine) error {
	if !s.ours || s.scale == smallest {
		return nil
	}
	others := s.newOthers(m)
	if more := s.Ports - smallest.Ports; more > 0 {
		others.Conf.CapabilityArgs = mapPorts(idlePorts, more)
	}
	return errors.Join(attach(others), s.addContainers(s.Pods-smallest.Pods))
}

// newOthers creates the pod that represents all others.
func (s *setup) newOthers(m *testenv.Machine) *testenv.Pod {
	s.others = s.runtime.NewPod(m, "others")
	return s.others
}

// addContainers writes the entries that ADD writes for a container.
func (s *setup) addContainers(count int) error {
	return s.topology.Node.WithDatapath(func(dp *loader.Datapath) error {
		return within(func(ctx context.Context) error {
			return maps.With(ctx, dp, func(store *maps.Store) error {
				for i := range count {
					if err := addContainer(store, i); err != nil {
						return err
					}
				}
				return nil
			})
		})
	})
}

func addContainer(store *maps.Store, i int) error {
	const firstIndex = 1 << 20 // no device has such an index

	attachment := maps.Attachment{Network: "pods", ContainerID: fmt.Sprintf("idle-%d", i), IfName: testenv.PodIfName}
	mac := net.HardwareAddr{2, 0, 0, 0, byte(i >> 8), byte(i)}
	addrs := []netip.Addr{
		netip.AddrFrom4([4]byte{10, 88, 128 + byte(i>>8), byte(i)}),
		netip.AddrFrom16([16]byte{0xfd, 0, 0, 0x88, 14: 128 + byte(i>>8), 15: byte(i)}),
	}
	gateways := []netip.Addr{testenv.IPv4.Gateway, testenv.IPv6.Gateway}
	for family, addr := range addrs {
		err := store.AddEndpoint(maps.Endpoint{
			Addr: addr, Owner: attachment.Owner(), Network: maps.NetworkToken("pods"), Container: maps.ContainerToken(attachment.ContainerID),
			IfIndex: firstIndex + i, MAC: mac, HostMAC: mac, Gateway: gateways[family], Masq: true, FastPath: maps.FastPathEstablished, MTU: 1500,
		})
		if err != nil {
			return err
		}
	}
	return store.PutDevice(maps.Device{
		IfIndex: firstIndex + i, Owner: attachment.Owner(), Network: maps.NetworkToken("pods"), Container: maps.ContainerToken(attachment.ContainerID),
		MAC: mac, Addr4: addrs[0], Addr6: addrs[1], Gateway4: gateways[0], Gateway6: gateways[1], AntiSpoof: true,
	})
}

const minFlows = 1 << 14

// openFlows has the others send to as many remotes as the scale has flows.
func (s *setup) openFlows() error {
	if s.Flows == smallest.Flows || !s.ours {
		return nil
	}
	err := onCPU(s.others.Namespace, otherCPU, func() error {
		o, err := newOpener()
		if err != nil {
			return err
		}
		defer o.close()
		for range s.Flows {
			if err := o.open(); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("open flows: %w", err)
	}
	return nil
}

// checkFlows checks that the datapath has the flows, but for a few whose bucket was full.
func (s *setup) checkFlows() error {
	if s.Flows == smallest.Flows || !s.ours {
		return nil
	}
	return s.topology.Node.WithDatapath(func(dp *loader.Datapath) error {
		flows, err := maps.Flows(dp)
		if err == nil && len(flows) < s.Flows*99/100 {
			err = fmt.Errorf("%d flows, expected %d", len(flows), s.Flows)
		}
		return err
	})
}

// opener opens connections: it sends packets to remotes that nobody has sent to.
type opener struct {
	fds  [2]int
	to   [2]*address
	data []byte
	next int
}

// The remotes. The outside host does not forward, so it drops their packets.
var remotes = [2]netip.Addr{netip.MustParseAddr("198.18.0.0"), netip.MustParseAddr("2001:db8:3::")}

func newOpener() (*opener, error) {
	o := &opener{fds: [2]int{-1, -1}, data: make([]byte, 1)}
	for i, remote := range remotes {
		var err error
		o.to[i] = addressOf(netip.AddrPortFrom(remote, 0))
		if o.fds[i], err = openSocket(o.to[i].family(), unix.SOCK_DGRAM); err != nil {
			o.close()
			return nil, err
		}
	}
	return o, nil
}

func (o *opener) close() {
	for _, fd := range o.fds {
		if fd >= 0 {
			closeSocket(fd)
		}
	}
}

// open sends to the next remote, in each family in turn.
func (o *opener) open() error {
	const (
		ports, firstPort = 1 << 14, 20_000 // of one address
		addresses        = 1 << 15
	)
	n, family := o.next/len(o.fds), o.next%len(o.fds)
	o.next++
	to, fd := o.to[family], o.fds[family]
	binary.BigEndian.PutUint16(to.raw[2:], uint16(firstPort+n%ports))
	last := 6 // the last two bytes of sin_addr, or of sin6_addr
	if family == 1 {
		last = 8 + 14
	}
	binary.BigEndian.PutUint16(to.raw[last:], uint16(n/ports%addresses))
	_, err := callTo(fd, o.data, to)
	return err
}

// callTo sends data to an address from an unconnected socket.
func callTo(fd int, data []byte, to *address) (int, error) {
	for {
		n, _, errno := unix.RawSyscall6(unix.SYS_SENDTO, uintptr(fd), uintptr(unsafe.Pointer(&data[0])), uintptr(len(data)), 0,
			uintptr(unsafe.Pointer(&to.raw)), uintptr(to.size))
		switch errno {
		case unix.EINTR:
		case 0:
			return int(n), nil
		default:
			return 0, errno
		}
	}
}
