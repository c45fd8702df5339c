package prog

import (
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/bpf"
)

// world is who has sent what to whom, from the packets alone, and which host ports there are. It judges what the
// programs do with the next packet, and their entries.
type world struct {
	full      bool             // flow_table: who was answered may lose the tuple
	held      map[tuple]holder // datagrams: by the tuple of a reply
	spoke     map[tuple]uint32 // when the speaker did, in ticks
	owner     [places]uint64   // of pods
	hostPorts map[hostPortID]hostPortTarget
	asked     map[claimant]bool                   // what a container, the host or a client of a host port has sent
	heard     map[tuple]bool                      // packets that have reached the host
	speaker   map[tuple]speaker                   // by the tuple of a reply: who has spoken last as its destination
	living    func(t tuple) (uint64, bool, error) // the SNAT entry of a reply's tuple that nobody else may use
}

// holder is a speaker who was answered, and so keeps the tuple for a time.
type holder struct {
	who   speaker
	until uint32 // in ticks
}

// yields says whether the other one may take the tuple over: a pod that runs out of ports takes those of its own
// questions by UDP that were answered.
func (s speaker) yields(other speaker, proto uint8) bool {
	isOwn := s.at == other.at && s.owner == other.owner && s.hostPort == 0 && other.hostPort == 0
	return s == other || isOwn && proto == unix.IPPROTO_UDP
}

// claimant is an owner's packet, before translation.
type claimant struct {
	owner uint64
	tuple
}

// speaker is who a tuple belongs to: the address and port before translation.
type speaker struct {
	owner uint64
	at    place
	port  uint16
	// A hairpin client's: the host port that it uses.
	host     place
	hostPort uint16
}

type hostPortID struct {
	proto uint8
	at    place
	port  uint16
}

type hostPortTarget struct {
	pod  place
	port uint16
}

// hostPort returns where a host port leads, if the tuple's destination is one.
func (w *world) hostPort(t tuple) (hostPortTarget, bool) {
	target, ok := w.hostPorts[hostPortID{t.proto, t.dst, t.dport}]
	return target, ok
}

// judgePacket notes what a program has made of a packet, and returns an error if it may not do so.
func (w *world) judgePacket(program string, p *randomPacket, verdict uint32, frame []byte) error {
	w.note(program, p)
	if verdict == verdictDrop {
		return nil
	}
	if verdict != verdictNext && verdict != verdictRedirect {
		return fmt.Errorf("verdict %d", int32(verdict))
	}
	out, outer := p.read(frame)
	if p.isError {
		return w.judgeError(program, p, out, outer)
	}
	switch program {
	case bpf.ProgToUplink, bpf.ProgToContainer:
		return w.speaks(p, out)
	case bpf.ProgFromUplink:
		return w.mayReceive(p, out)
	case bpf.ProgFromContainer, bpf.ProgToLoopback:
		if verdict == verdictRedirect {
			return w.hairpin(p, out)
		}
		return w.mayReceive(p, out)
	}
	return nil
}

// note remembers the packet, which may make entries even if it is dropped.
func (w *world) note(program string, p *randomPacket) {
	if p.isError {
		return
	}
	w.heard[p.tuple] = true
	w.asked[claimant{w.owner[p.src], p.tuple}] = true
	if target, ok := w.hostPort(p.tuple); ok && (program == bpf.ProgFromContainer || program == bpf.ProgToLoopback) {
		t := p.tuple
		t.dst, t.dport = target.pod, target.port
		w.asked[claimant{w.owner[target.pod], t}] = true
	}
}

// speaks is for a packet that leaves, perhaps with another source: replies are for its sender.
func (w *world) speaks(p *randomPacket, out tuple) error {
	if out.dst != p.dst {
		return fmt.Errorf("%s leaves for another address: %s", p, out)
	}
	if p.src.isNode() && p.refuses() { // refuses on behalf of nobody
		return nil
	}
	if !p.src.isPod() && !p.src.isNode() {
		return nil
	}
	reply, who := out.reverse(), speaker{owner: w.owner[p.src], at: p.src, port: p.sport}
	former, now := w.held[reply], ticks(0)
	if former.until >= now && !former.who.yields(who, p.proto) && w.owner[former.who.at] == former.who.owner {
		return fmt.Errorf("%s leaves as %s, which belongs to %+v", p, out, former.who)
	}
	if former.who != who {
		delete(w.held, reply)
	}
	w.speaker[reply], w.spoke[reply] = who, now
	return nil
}

// mayReceive is for a packet that the stack gets, perhaps with another destination.
func (w *world) mayReceive(p *randomPacket, out tuple) error {
	if out.dst == p.dst && out.dport == p.dport {
		return nil // the stack knows
	}
	who, asked := w.speaker[p.tuple]
	target, ok := w.hostPort(p.tuple)
	if ok && target.pod == out.dst && target.port == out.dport {
		// Whoever else speaks as the host port must have lost it.
		owner, lives, err := w.living(p.tuple)
		if err == nil && lives && owner != w.owner[out.dst] {
			err = fmt.Errorf("%s goes to a host port's container, but owner %x has asked", p, owner)
		}
		return err
	}
	switch {
	case !asked:
		return fmt.Errorf("%s was delivered as %s, but nobody has asked", p, out)
	case who.at != out.dst || who.port != out.dport || who.owner != w.owner[out.dst]:
		return fmt.Errorf("%s was delivered as %s, but %+v has asked", p, out, who)
	case out.src != p.src || out.sport != p.sport:
		return fmt.Errorf("%s, a reply, was delivered from another source: %s", p, out)
	case p.isSYN() || p.proto == unix.IPPROTO_SCTP && p.chunk == chunkINIT:
		return fmt.Errorf("%s opens a connection, and was delivered as a reply: %s", p, out)
	}
	isDatagram := p.proto == unix.IPPROTO_UDP || p.proto == unix.IPPROTO_ICMP
	if now := ticks(0); isDatagram && !w.full && w.spoke[p.tuple]+1 >= now { // no idle time is shorter
		w.held[p.tuple] = holder{who, now + 1}
	}
	return nil
}

// hairpin is for a packet that goes to a host port's container or, as a reply, to the client.
func (w *world) hairpin(p *randomPacket, out tuple) error {
	target, ok := w.hostPort(p.tuple)
	if ok && out.src == placePodGW && out.dst == target.pod && out.dport == target.port {
		w.speaker[out.reverse()] = speaker{w.owner[target.pod], p.src, p.sport, p.dst, p.dport}
		return nil
	}
	who, asked := w.speaker[p.tuple]
	if want := (speaker{w.owner[p.src], out.dst, out.dport, out.src, out.sport}); !asked || who != want {
		return fmt.Errorf("%s went to a client as %s, but %+v has asked (%v)", p, out, who, asked)
	}
	return nil
}

// judgeError is for an ICMP error: t is what it quotes, outer its own addresses.
func (w *world) judgeError(program string, p *randomPacket, t, outer tuple) error {
	if t == p.tuple && outer.src == p.sender && outer.dst == p.src {
		return nil
	}
	if program == bpf.ProgToUplink || program == bpf.ProgToContainer {
		// A container's error is about what it has received: by its own flow, or by its host port.
		who, asked := w.speaker[t]
		target, ok := w.hostPort(t)
		if p.sender.isPod() && p.sender != p.dst {
			return fmt.Errorf("%s, about another's packet, leaves as %s", p, t)
		}
		if asked && who.at == p.dst && who.port == p.dport || ok && target.pod == p.dst && target.port == p.dport {
			return nil
		}
		return fmt.Errorf("%s leaves as %s, of nobody's connection", p, t)
	}
	received := p.tuple.reverse() // by the host; the error is about the reply
	target, ok := w.hostPort(received)
	if ok && w.heard[received] && target.pod == outer.dst && target.pod == t.src && target.port == t.sport {
		return nil
	}
	who, asked := w.speaker[received]
	if !asked || who.at != outer.dst || who.at != t.src || who.port != t.sport || who.owner != w.owner[t.src] {
		return fmt.Errorf("%s was delivered as %s to %s, but %+v has asked (%v)", p, t, placeNames[outer.dst], who, asked)
	}
	return nil
}

// worldFlow is an entry of flows in the terms of the world.
type worldFlow struct {
	bpf.Flow
	kind          bpf.FlowKind
	reply         tuple // to the key's local side
	nat           place
	snat          bool
	expired, dead bool
}

func (w *world) flowOf(key bpf.FlowKey, value bpf.Flow, timeouts []uint32, now uint32) worldFlow {
	v6 := wireIs6(key.Remote)
	f := worldFlow{Flow: value, kind: key.Kind, snat: key.Kind == bpf.FlowSNAT}
	f.reply = tuple{v6: v6, proto: key.Protocol, src: placeOfWire(v6, key.Remote), dst: placeOfWire(v6, key.Local), sport: key.RemotePort, dport: key.LocalPort}
	if f.reply.proto == unix.IPPROTO_ICMPV6 {
		f.reply.proto = unix.IPPROTO_ICMP
	}
	f.nat = placeOfWire(v6, value.NatAddr)
	f.expired = now-value.LastSeen+1 >= timeouts[value.State] // a tick earlier, since time passes
	f.dead = value.Owner != 0 && w.owner[f.nat%places] != value.Owner && w.owner[f.reply.src] != value.Owner && w.owner[f.reply.dst] != value.Owner
	return f
}

func wireIs6(addr bpf.Addr) bool {
	return !addrOf(addr).Is4()
}

// isFirm reports whether the entry's tuple is its owner's alone: who has not been answered may lose it.
func (f *worldFlow) isFirm() bool {
	return !f.expired && !f.dead && f.State != bpf.FlowLastACK && f.State != bpf.FlowTimeWait && f.State != bpf.FlowClose &&
		(f.Owner == 0 || f.Flags&bpf.FlowReplied != 0)
}

// isAssured reports whether no other flow may have the entry's place.
func (f *worldFlow) isAssured() bool {
	return !f.expired && !f.dead && (f.State >= bpf.FlowEstablished && f.State <= bpf.FlowCloseWait || f.State == bpf.FlowUDPStream)
}

// judgeEntries wants each entry to have its owner's packet, and no tuple to have two owners.
func (w *world) judgeEntries(flows []worldFlow) error {
	firm := map[tuple]uint64{}
	for i := range flows {
		if err := w.judgeEntry(&flows[i]); err != nil {
			return err
		}
		if f := &flows[i]; f.snat && f.isFirm() {
			firm[f.reply] = f.Owner
		}
	}
	for i := range flows {
		f := &flows[i]
		if f.kind != bpf.FlowDNAT || f.Owner == 0 || !f.isFirm() { // the host's has no effect without its SNAT entry
			continue
		}
		t := f.clientTuple()
		if owner, ok := firm[t]; ok && owner != f.Owner {
			return fmt.Errorf("%s belongs to %x and, by a flow to %s:%d, to %x", t, owner, placeNames[f.reply.dst], f.reply.dport, f.Owner)
		}
	}
	return nil
}

// clientTuple is what the client of a DNAT flow sends.
func (f *worldFlow) clientTuple() tuple {
	t := f.reply
	t.dst, t.dport = f.nat, f.NatPort
	if t.proto == unix.IPPROTO_TCP || t.proto == unix.IPPROTO_UDP {
		t.sport = f.RemotePort
	}
	return t
}

func (w *world) judgeEntry(f *worldFlow) error {
	replied := f.Flags&bpf.FlowReplied != 0
	own := f.reply.reverse() // what the key's local side sends
	switch f.kind {
	case bpf.FlowSNAT:
		own.src, own.sport = f.nat, f.NatPort
		if !w.asked[claimant{f.Owner, own}] {
			return fmt.Errorf("SNAT entry of %x for %s, but it has not sent %s", f.Owner, f.reply, own)
		}
		if replied && !w.heard[f.reply] {
			return fmt.Errorf("SNAT entry for %s: has a reply, but there was none", f.reply)
		}
	case bpf.FlowDNAT:
		hasReplied := w.asked[claimant{f.Owner, own}]
		if f.Owner == 0 && !hasReplied {
			return fmt.Errorf("the host has not sent %s", own)
		}
		if _, isHairpin := w.speaker[own]; !hasReplied && !isHairpin && !w.heard[f.clientTuple()] {
			return fmt.Errorf("DNAT entry of %x for %s, but the client has not sent %s", f.Owner, f.reply, f.clientTuple())
		}
		if replied && !hasReplied {
			return fmt.Errorf("DNAT entry of %x: has a reply, but %s was not sent", f.Owner, own)
		}
	}
	return nil
}
