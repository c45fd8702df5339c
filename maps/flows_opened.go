package maps

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader"
)

// Connection is a connection of a container, by TCP or UDP.
type Connection struct {
	Protocol      Protocol
	Local, Remote netip.AddrPort
}

// AdmitReplies creates the flows that admit replies to connections that an owner's container opened before
// it got an ingress policy; the programs create them only for later connections. It omits connections from
// addresses of other owners, whose policy applies to them. Set replace for a container whose policy is still
// open: an existing entry is of an earlier policy, and no packet has updated it since.
func (s *Store) AdmitReplies(owner loader.Owner, opened []Connection, replace bool) error {
	now, err := nowTicks()
	if err != nil {
		return err
	}
	flags := ebpf.UpdateNoExist
	if replace {
		flags = ebpf.UpdateAny
	}
	var errs []error
	for _, c := range opened {
		endpoint, found, err := GetEndpoint(s.dp, c.Local.Addr())
		if err != nil {
			return errors.Join(append(errs, err)...)
		}
		if found && endpoint.Owner != owner {
			continue
		}
		key, value := egressFlow(owner, c, now)
		if err := s.dp.Flows.Update(&key, &value, flags); err != nil && !errors.Is(err, ebpf.ErrKeyExist) {
			errs = append(errs, fmt.Errorf("create the flow of %s to %s: %w", c.Local, c.Remote, err))
		}
	}
	return errors.Join(errs...)
}

// egressFlow is the entry of a connection in which both sides have sent: bpf/policy.h.
func egressFlow(owner loader.Owner, c Connection, now uint32) (bpf.FlowKey, bpf.Flow) {
	key := bpf.FlowKey{
		Remote:     wireAddr(c.Remote.Addr()),
		Local:      wireAddr(c.Local.Addr()),
		RemotePort: c.Remote.Port(),
		LocalPort:  c.Local.Port(),
		Protocol:   uint8(c.Protocol),
		Kind:       bpf.FlowEgress,
	}
	value := bpf.Flow{
		Owner:    uint64(owner),
		LastSeen: now,
		Created:  uint16(now),
		State:    bpf.FlowEstablished,
		Flags:    bpf.FlowReplied,
	}
	if c.Protocol == UDP {
		value.State = bpf.FlowUDPStream
	}
	return key, value
}

// nowTicks is the time in maps: bpf/time.h.
func nowTicks() (uint32, error) {
	const tickShift = 30

	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		return 0, fmt.Errorf("read the clock: %w", err)
	}
	return uint32(now.Nano() >> tickShift), nil
}
