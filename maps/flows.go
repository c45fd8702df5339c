package maps

import (
	"errors"
	"fmt"
	"iter"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader"
)

// Flow is a connection whose packets the programs translate, or whose replies they admit. The programs
// create flows; user space only reads them, and has the programs create those of connections that are
// older than a container's rules (AdmitReplies).
type Flow struct {
	// Kind is bpf.FlowSNAT: opened by a container and masqueraded, or the host's own;
	// bpf.FlowDNAT: opened to a container; bpf.FlowPolicy: admitted by a container's rules;
	// bpf.FlowRSTHeld: refused by the host; or bpf.FlowCTNAT: translated by the host's rules.
	Kind bpf.FlowKind
	// Remote is the other side. The port is 0 for echo requests to it.
	Remote netip.AddrPort
	// RemotePort is the remote's own port for DNAT: Remote has the one that the container sees.
	RemotePort uint16
	// Local is the masquerading address and port for SNAT, the opener's for CTNAT, else the container's.
	Local netip.AddrPort
	// NAT is the container's address and port for SNAT, the original destination for
	// DNAT, what the destination becomes for CTNAT, and unused for others.
	NAT      netip.AddrPort
	Protocol Protocol
	State    FlowState
	Owner    loader.Owner // 0: the host itself
	ByRemote bool         // bpf.FlowPolicy: the remote has opened it
}

// FlowState is the state of a flow, which determines its idle time.
type FlowState bpf.FlowState

// flowStates are netfilter's names of the states.
var flowStates = [bpf.FlowStates]string{
	bpf.FlowSYNSent:     "SYN_SENT",
	bpf.FlowSYNRecv:     "SYN_RECV",
	bpf.FlowEstablished: "ESTABLISHED",
	bpf.FlowFINWait:     "FIN_WAIT",
	bpf.FlowCloseWait:   "CLOSE_WAIT",
	bpf.FlowLastACK:     "LAST_ACK",
	bpf.FlowTimeWait:    "TIME_WAIT",
	bpf.FlowClose:       "CLOSE",
	bpf.FlowUDP:         "UDP",
	bpf.FlowUDPStream:   "UDP_STREAM",
	bpf.FlowICMP:        "ICMP",
	bpf.FlowOther:       "OTHER",
}

// FlowStateNames lists the names of all states.
func FlowStateNames() []string { return flowStates[:] }

// String returns the name of the state.
func (s FlowState) String() string {
	if int(s) < len(flowStates) {
		return flowStates[s]
	}
	return fmt.Sprintf("state %d", uint8(s))
}

// MarshalText implements [encoding.TextMarshaler].
func (s FlowState) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// String describes the flow for an operator, from the side that opened it.
func (f Flow) String() string {
	return fmt.Sprintf("%s %s, %s", f.Protocol, f.translation(), f.State)
}

func (f Flow) translation() string {
	remote, local, nat := AddrPortText(f.Remote), AddrPortText(f.Local), AddrPortText(f.NAT)
	switch {
	case f.Kind == bpf.FlowSNAT && f.Owner == ownerHost:
		return fmt.Sprintf("%s to %s, the host's own", local, remote)
	case f.Kind == bpf.FlowSNAT:
		return fmt.Sprintf("%s to %s, SNAT to %s", nat, remote, local)
	case f.Kind == bpf.FlowPolicy && f.ByRemote:
		return fmt.Sprintf("%s to %s, admitted by rules", remote, local)
	case f.Kind == bpf.FlowPolicy:
		return fmt.Sprintf("%s to %s, admitted by rules", local, remote)
	case f.Kind == bpf.FlowRSTHeld:
		return fmt.Sprintf("%s to %s, RST held back", remote, local)
	case f.Kind == bpf.FlowCTNAT:
		return fmt.Sprintf("%s to %s, %s by the host's rules", local, remote, f.ByHost())
	case f.Local == f.NAT:
		return fmt.Sprintf("%s to %s, no DNAT", remote, local)
	default:
		return fmt.Sprintf("%s to %s, DNAT to %s", remote, nat, local)
	}
}

// ByHost says what the host's rules do to a connection: bpf.FlowCTNAT.
func (f Flow) ByHost() string {
	if f.NAT == f.Remote {
		return "SNAT"
	}
	return "DNAT to " + AddrPortText(f.NAT)
}

// AddrPortText omits the port that an echo request does not have.
func AddrPortText(p netip.AddrPort) string {
	if p.Port() == 0 {
		return p.Addr().String()
	}
	return p.String()
}

// Flows lists the flows of all containers and of the host, in no particular order. There can be hundreds of
// thousands.
func Flows(dp *loader.Datapath) ([]Flow, error) {
	var list []Flow
	for entry, err := range flowEntries(dp, isNotOffload) {
		if err != nil {
			return nil, err
		}
		list = append(list, flowOf(entry.Key, entry.Flow))
	}
	return list, nil
}

func isOffload(key bpf.FlowKey) bool    { return key.Kind == bpf.FlowOffload }
func isNotOffload(key bpf.FlowKey) bool { return key.Kind != bpf.FlowOffload }

// flowEntries walks those flows in flow_table whose keys are wanted. It leaves out flows of removed owners,
// which stay until others replace them. Of those that the host's rules translate, the opener becomes the local side.
func flowEntries(dp *loader.Datapath, wanted func(bpf.FlowKey) bool) iter.Seq2[bpf.FlowEntry, error] {
	return func(yield func(bpf.FlowEntry, error) bool) {
		living, err := livingOwners(dp)
		if err == nil && dp.FlowTable != nil {
			err = usedPlaces(dp, func(place bpf.FlowEntry) bool {
				if !wanted(place.Key) || !living[loader.Owner(place.Flow.Owner)] {
					return true
				}
				if place.Key.Kind == bpf.FlowCTNAT && isOpenedByRemote(dp, place) {
					k := &place.Key
					k.Remote, k.RemotePort, k.Local, k.LocalPort = k.Local, k.LocalPort, k.Remote, k.RemotePort
				}
				return yield(place, nil)
			})
		}
		if err != nil {
			yield(bpf.FlowEntry{}, err)
		}
	}
}

// isOpenedByRemote reports whether the remote side has opened a connection that the host's rules translate. The key does not
// say so: it is the owner's side, unless that is the server, too; then the one with the higher port, as usual.
func isOpenedByRemote(dp *loader.Datapath, place bpf.FlowEntry) bool {
	var e bpf.Endpoint
	err := dp.Endpoints.Lookup(&place.Key.Remote, &e)
	return err == nil && e.Owner == place.Flow.Owner && place.Key.Remote != place.Flow.NatAddr
}

// usedPlaces passes the used places of flow_table to use, until that returns false. The programs may change them
// meanwhile: it leaves out a place whose flow was replaced while it was read.
func usedPlaces(dp *loader.Datapath, use func(bpf.FlowEntry) bool) error {
	before, err := flowIDs(dp)
	if err != nil || len(before) == 0 {
		return err
	}
	type usedPlace struct {
		number uint32
		flow   bpf.FlowEntry
	}
	var used []usedPlace
	size := min(batchSize, int(dp.FlowTable.MaxEntries()))
	keys, values := make([]uint32, size), make([]bpf.FlowEntry, size)
	err = batches(dp.FlowTable, keys, values, func(n int) bool {
		for i, number := range keys[:n] {
			if before[number] != 0 {
				used = append(used, usedPlace{number, values[i]})
			}
		}
		return true
	})
	if err != nil {
		return err
	}
	after, err := flowIDs(dp)
	if err != nil {
		return err
	}
	for _, place := range used {
		if before[place.number] == after[place.number] && !use(place.flow) {
			return nil
		}
	}
	return nil
}

// flowIDs returns the ids of all places of flow_table; 0: free.
func flowIDs(dp *loader.Datapath) (ids []uint32, err error) {
	ids = make([]uint32, 0, dp.MaxFlows())
	size := min(batchSize, int(dp.FlowBuckets.MaxEntries()))
	keys, values := make([]uint32, size), make([]bpf.FlowBucket, size)
	err = batches(dp.FlowBuckets, keys, values, func(n int) bool {
		for _, bucket := range values[:n] {
			ids = append(ids, bucket.Id[:]...)
		}
		return true
	})
	return ids, err
}

func flowOf(key bpf.FlowKey, value bpf.Flow) Flow {
	if key.Kind == bpf.FlowPair { // its key has two containers: Local is either
		key.Kind = bpf.FlowPolicy
	}
	return Flow{
		Kind:       key.Kind,
		Remote:     netip.AddrPortFrom(addrOf(key.Remote), key.RemotePort),
		RemotePort: value.RemotePort,
		Local:      netip.AddrPortFrom(addrOf(key.Local), key.LocalPort),
		NAT:        netip.AddrPortFrom(addrOf(value.NatAddr), value.NatPort),
		Protocol:   Protocol(key.Protocol),
		State:      FlowState(value.State),
		Owner:      loader.Owner(value.Owner),
		ByRemote:   value.Flags&bpf.FlowByRemote != 0,
	}
}

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

// VoidOffloads has the packets of offloaded connections pass the stack until it has forwarded some of both sides again.
func (s *Store) VoidOffloads() error {
	now, err := nowTicks()
	if err = errors.Join(err, s.dp.OpenOnDemand(bpf.MapStackNotes)); err != nil {
		return err
	}
	s.changed = true
	for place := range s.dp.StackNotes.MaxEntries() {
		if err := s.dp.StackNotes.Put(place, &bpf.StackNote{Bypassed: now}); err != nil {
			return fmt.Errorf("void offloaded connections: %w", err)
		}
	}
	return nil
}

// nowTicks is the time in maps: bpf/packet.h.
func nowTicks() (uint32, error) {
	const tickShift = 30

	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		return 0, fmt.Errorf("read the clock: %w", err)
	}
	return uint32(now.Nano() >> tickShift), nil
}
