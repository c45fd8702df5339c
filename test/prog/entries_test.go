package prog

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/bpf"
)

// flow is a flow in flow_table. Its numbers of TCP are those of a connection of packets
// as scene.packet makes them.
type flow struct {
	kind                      bpf.FlowKind
	remote, local, translated string
	owner                     uint64
	payer                     uint64 // 0: the owner, who has opened it, or whom the outside has called
	flags                     bpf.FlowFlags
	tcp                       bpf.FlowState // of TCP; other protocols have one state
	idle                      time.Duration // since the last packet
	clientPort                uint16        // of the host port's client, if the pod sees another one
	uplink                    uint32        // by which the remote was reached first
	hostPort                  string        // that a hairpin client uses
	stream                    bool          // UDP: both sides have sent, for more than two seconds
}

const (
	replied  = bpf.FlowReplied
	pickedUp = bpf.FlowPickedUp
)

// snat is a flow that pod opened to remote, masqueraded as local.
func snat(remote, local, pod string) flow {
	return flow{kind: bpf.FlowSNAT, remote: remote, local: local, translated: pod, owner: ownerOf(pod)}
}

// dnat is a flow that remote opened to pod at the address via.
func dnat(remote, pod, via string) flow {
	return flow{kind: bpf.FlowDNAT, remote: remote, local: pod, translated: via, owner: ownerOf(pod)}
}

func (f flow) ownedBy(owner uint64) flow       { f.owner = owner; return f }
func (f flow) paidBy(payer uint64) flow        { f.payer = payer; return f }
func (f flow) idleFor(idle time.Duration) flow { f.idle = idle; return f }
func (f flow) isSNAT() bool                    { return f.kind == bpf.FlowSNAT }

// with sets the flags.
func (f flow) with(flags bpf.FlowFlags) flow { f.flags = flags; return f }

// in sets the state of TCP.
func (f flow) in(state bpf.FlowState) flow { f.tcp = state; return f }

// established is a flow whose sides have both sent.
func (f flow) established() flow { return f.with(replied).in(bpf.FlowEstablished) }

// accepted is a flow whose other side has replied, with a SYN+ACK in TCP.
func (f flow) accepted() flow { return f.with(replied).in(bpf.FlowSYNRecv) }

// streaming is a flow that was old when its last packet came: UDP is in another state then.
func (f flow) streaming() flow { f.stream = true; return f }

// by sets the client's own port.
func (f flow) by(port uint16) flow { f.clientPort = port; return f }

// claim is the entry of what the host itself sends from local to remote.
func claim(remote, local string) flow { return snat(remote, local, local) }

// held is the entry of a RST from local to remote that was held back.
func held(remote, local string) flow {
	return flow{kind: bpf.FlowRSTHeld, remote: remote, local: local, translated: "any:0"}
}

// provisional is a flow that was opened by a packet in the middle of a connection.
func (f flow) provisional() flow { return f.with(pickedUp) }

// state returns the flow's state for a protocol.
func (f flow) state(p proto) bpf.FlowState {
	switch p {
	case tcp:
		return f.tcp
	case udp:
		if f.stream {
			return bpf.FlowUDPStream
		}
		return bpf.FlowUDP
	case echo:
		return bpf.FlowICMP
	default:
		return bpf.FlowOther
	}
}

func (f flow) wire(s scene) (bpf.FlowKey, bpf.Flow) {
	// The pod sends the echo requests of an SNAT flow, the remote those of a DNAT flow.
	remote, local, translated := s.side(f.remote, !f.isSNAT()), s.side(f.local, f.isSNAT()), s.side(f.translated, f.isSNAT())
	key := bpf.FlowKey{
		Remote: wire(remote.Addr()), RemotePort: remote.Port(),
		Local: wire(local.Addr()), LocalPort: local.Port(),
		Protocol: s.number(), Kind: f.kind,
	}
	value := bpf.Flow{
		Owner: f.owner, Payer: cmp.Or(f.payer, f.owner), NatAddr: wire(translated.Addr()), NatPort: translated.Port(),
		LastSeen: ticks(f.idle), Created: uint16(ticks(f.idle)), State: f.state(s.proto), Flags: f.flags,
		Ack: podACK, Expected: podSYN + 1, Uplink: f.uplink,
	}
	if s.proto != tcp {
		value.Flags &= replied | bpf.FlowContinues
		value.Ack, value.Expected = 0, 0
	}
	if f.kind == bpf.FlowRSTHeld {
		value = bpf.Flow{LastSeen: value.LastSeen, State: bpf.FlowOther}
	}
	if f.kind == bpf.FlowDNAT {
		value.RemotePort = remote.Port()
		value.Expected = 0
	}
	if f.clientPort != 0 {
		value.RemotePort = f.clientPort
	}
	if f.hostPort != "" {
		value.RemotePort = hairpinVia(s.side(f.hostPort, true))
	}
	return key, value
}

// ownerOf returns the owner of the pod in "name:port", or 0.
func ownerOf(side string) uint64 {
	for name, owner := range owners {
		if len(side) > len(name) && side[:len(name)+1] == name+":" {
			return owner
		}
	}
	return 0
}

// ticks returns the time some while ago, in the unit of the maps.
func ticks(ago time.Duration) uint32 {
	const shift = 30
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		panic(err)
	}
	return uint32((now.Nano() - ago.Nanoseconds()) >> shift)
}

// checkFlows compares flows with want, including the time since each entry was used.
func (h *host) checkFlows(s scene, want []flow) error {
	got, err := h.flows().all()
	if err != nil {
		return err
	}
	return h.checkEntries(got, s, want)
}

// checkEntries takes for now any time since the maps were reset: a slow machine needs seconds for a row.
func (h *host) checkEntries(got map[bpf.FlowKey]bpf.Flow, s scene, want []flow) error {
	tolerance := 1 + int32(time.Since(h.wasReset)/time.Second) // ticks, of more than a second

	for _, flow := range want {
		key, value := flow.wire(s)
		entry, ok := got[key]
		if !ok {
			return fmt.Errorf("no flow %+v among %+v", key, got)
		}
		delete(got, key)
		if diff := int32(value.LastSeen - entry.LastSeen); diff < -tolerance || diff > tolerance {
			return fmt.Errorf("flow %+v was last seen at tick %d, want %d", key, entry.LastSeen, value.LastSeen)
		}
		if entry = untimed(entry, value); entry != value {
			return fmt.Errorf("flow %+v is %+v, want %+v", key, entry, value)
		}
	}
	if len(got) > 0 {
		return fmt.Errorf("unexpected flows: %+v", got)
	}
	return nil
}

// untimed returns an entry with the times, sequence numbers, device, candidate and number of packets of another one.
func untimed(entry, other bpf.Flow) bpf.Flow {
	entry.LastSeen, entry.Created = other.LastSeen, other.Created
	entry.Ack, entry.Expected, entry.RemoteEnd = other.Ack, other.Expected, other.RemoteEnd
	entry.Uplink, entry.Probe = other.Uplink, other.Probe
	entry.Flags = entry.Flags&^bpf.FlowContinues | other.Flags&bpf.FlowContinues
	return entry
}

const day = 24 * time.Hour

// hostPort is an entry of host_ports. The zero proto means the row's.
type hostPort struct {
	host, to string
	proto    proto
}

func (p hostPort) wire(s scene) (bpf.HostPortKey, bpf.HostPort) {
	if s.proto == echo {
		s.proto = tcp
	}
	if p.proto != "" {
		s.proto = p.proto
	}
	host, to := s.side(p.host, true), s.side(p.to, true)
	return bpf.HostPortKey{Addr: wire(host.Addr()), Port: host.Port(), Protocol: s.number()},
		bpf.HostPort{Owner: ownerOf(p.to), TargetAddr: wire(to.Addr()), Network: 1, TargetPort: to.Port()}
}

// reverse returns the entry that restores connections whose flow was lost.
func (p hostPort) reverse(s scene) (bpf.HostPortKey, bpf.HostPort) {
	key, value := p.wire(s)
	key.Addr, value.TargetAddr = value.TargetAddr, key.Addr
	key.Port, value.TargetPort = value.TargetPort, key.Port
	key.Dir = bpf.HostPortReverse
	return key, value
}

// nonMasq is an entry of prefixes. Each pod has its own set; the empty name means set 0.
type nonMasq struct {
	pod    string
	prefix map[string]string // by family
}

// prefixKey returns the key of a prefix in a set of a trie.
func prefixKey(set uint32, prefix netip.Prefix) bpf.PrefixKey {
	const setBits, mappedBits = 32, 96
	key := bpf.PrefixKey{Prefixlen: uint32(setBits + prefix.Bits()), Set: set, Addr: wire(prefix.Addr())}
	if prefix.Addr().Is4() {
		key.Prefixlen += mappedBits
	}
	return key
}

// fillNonMasq adds the entries, and their sets to the pods' endpoints.
func (h *host) fillNonMasq(s scene, entries []nonMasq) error {
	var errs []error
	for _, e := range entries {
		key := prefixKey(uint32(owners[e.pod]), netip.MustParsePrefix(e.prefix[s.name]))
		errs = append(errs, h.programs.Maps[bpf.MapPrefixes].Put(&key, bpf.Addr{}))
		if owners[e.pod] != 0 {
			errs = append(errs, h.putEndpoint(s.addressing, e.pod, key.Set))
		}
	}
	return errors.Join(errs...)
}

// reasons maps the words of the tables to the datapath's drop reasons.
var reasons = map[string]bpf.Reason{
	"no source":     bpf.ReasonNoSource,
	"no port":       bpf.ReasonNoPort,
	"fragment":      bpf.ReasonFragment,
	"protocol":      bpf.ReasonProtocol,
	"truncated":     bpf.ReasonTruncated,
	"no flow":       bpf.ReasonNoFlow,
	"rewrite":       bpf.ReasonRewrite,
	"MAC":           bpf.ReasonMAC,
	"address":       bpf.ReasonAddress,
	"gateway":       bpf.ReasonGateway,
	"ARP":           bpf.ReasonARP,
	"neighbor":      bpf.ReasonNeighbor,
	"router":        bpf.ReasonRouter,
	"DHCP server":   bpf.ReasonDHCPServer,
	"headers":       bpf.ReasonHeaders,
	"policy":        bpf.ReasonPolicyIngress,
	"egress policy": bpf.ReasonPolicyEgress,
	"audit":         bpf.ReasonPolicyAudit,
	"source range":  bpf.ReasonSrcRange,
	"ICMP error":    bpf.ReasonICMPError,
	"next hop":      bpf.ReasonNextHop,
	"tunnel":        bpf.ReasonTunnel,
	"bridge":        bpf.ReasonBridge,
	"node":          bpf.ReasonNode,
	"no endpoint":   bpf.ReasonNoEndpoint,
	"own source":    bpf.ReasonOwnSource,
	"no offload":    bpf.ReasonNoOffload,
}

// dropped returns the counters of a reason in drop_totals, of all CPUs.
func (h *host) dropped(reason bpf.Reason) (sum bpf.DropCount, err error) {
	var perCPU []bpf.DropCount
	err = h.programs.Maps[bpf.MapDropTotals].Lookup(uint32(reason), &perCPU)
	for _, count := range perCPU {
		sum.Packets += count.Packets
		sum.Bytes += count.Bytes
	}
	return sum, err
}

// checkCounters wants drop_totals to count one packet of size bytes under reason, or none for "".
func (h *host) checkCounters(reason string, size int) error {
	for name, number := range reasons {
		got, err := h.dropped(number)
		if err != nil {
			return err
		}
		var want bpf.DropCount
		if name == reason {
			want = bpf.DropCount{Packets: 1, Bytes: uint64(size)}
		}
		if got != want {
			return fmt.Errorf("counter %q is %+v, want %+v", name, got, want)
		}
	}
	return nil
}

// contents reads a whole map.
func contents[K comparable, V any](m *ebpf.Map) (map[K]V, error) {
	all := map[K]V{}
	var (
		key   K
		value V
	)
	entries := m.Iterate()
	for entries.Next(&key, &value) {
		all[key] = value
	}
	return all, entries.Err()
}

// empty removes all entries of a map.
func empty[K comparable, V any](m *ebpf.Map) error {
	all, err := contents[K, V](m)
	for key := range all {
		if err := m.Delete(&key); err != nil {
			return err
		}
	}
	return err
}

// generation is that of the plugin's maps, in the datapath that the tests share.
var generation uint64

// emptyForwardingCache voids all decisions in the forwarding cache, as a change of the plugin's maps does.
func (h *host) emptyForwardingCache() error {
	generation++
	return h.setGeneration(generation)
}

func (h *host) setGeneration(number uint64) error {
	return h.programs.Maps[bpf.MapGeneration].Put(uint32(0), number)
}
