package maps

import (
	"errors"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader"
)

// Connection is a connection of a container, by TCP or UDP.
type Connection struct {
	Protocol      Protocol
	Local, Remote netip.AddrPort
}

// Opener is the side that has opened a connection.
type Opener bpf.FlowFlags

// The openers.
const (
	OpenedByContainer = Opener(0)
	OpenedByRemote    = Opener(bpf.FlowByRemote)
)

// AdmitReplies has the programs admit replies of connections that an owner's container had before it got
// rules, if those admit the connections; the programs know only later ones. It omits connections from
// addresses of other owners, whose rules apply to them.
func (s *Store) AdmitReplies(owner loader.Owner, opener Opener, connections []Connection) error {
	if err := s.dp.OpenOnDemand(bpf.MapAdmittedFlows); err != nil {
		return err
	}
	now, err := nowTicks()
	if err != nil {
		return err
	}
	var errs []error
	for _, c := range connections {
		endpoint, found, err := GetEndpoint(s.dp, c.Local.Addr())
		if err != nil {
			return errors.Join(append(errs, err)...)
		}
		if found && endpoint.Owner != owner {
			continue
		}
		key := bpf.FlowKey{
			Remote:     wireAddr(c.Remote.Addr()),
			Local:      wireAddr(c.Local.Addr()),
			RemotePort: c.Remote.Port(),
			LocalPort:  c.Local.Port(),
			Protocol:   uint8(c.Protocol),
			Kind:       bpf.FlowPolicy,
		}
		if err := s.dp.AdmittedFlows.Put(&key, bpf.AdmittedFlow{Owner: uint64(owner), LastSeen: now, Flags: bpf.FlowFlags(opener)}); err != nil {
			errs = append(errs, fmt.Errorf("admit replies of %s to %s: %w", c.Remote, c.Local, explainFull(s.dp.AdmittedFlows, err)))
		}
	}
	return errors.Join(errs...)
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
