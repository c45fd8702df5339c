package prog

import (
	"encoding/binary"
	"math/bits"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// Tags of tag.h.
const (
	tagBypass     = 0xeb
	tagTranslated = 0xed
	tagCTUpdate   = 0xec
	tagReentry    = 0xee
	tagAdmitted   = 0xef
	tagTuple      = 0x8000
	tagPending    = 0x4000
	tagObserve    = 0x2000
	tagJudged     = 0x1000
)

// hashMix is hash_mix of hash.h.
func hashMix(hash, word uint32) uint32 {
	const golden = 0x9e3779b1
	hash = (hash ^ word) * golden
	return hash ^ hash>>15
}

// words returns an address as the datapath loads it.
func words(addr netip.Addr) (w [4]uint32) {
	all := addr.As16()
	for i := range w {
		w[i] = binary.NativeEndian.Uint32(all[4*i:])
	}
	return w
}

// hairpinVia is hairpin_via of hairpin.h.
func hairpinVia(host netip.AddrPort) uint16 {
	dst := words(host.Addr())
	hash := hashMix(uint32(host.Port()), dst[3])
	if host.Addr().Is6() {
		hash = hashMix(hashMix(hashMix(hash, dst[0]), dst[1]), dst[2])
	}
	return uint16(hash >> 16)
}

// tag is tag_of of tag.h: the tag of a packet that the stack must not change.
func (s scene) tag(p testenv.Packet) uint32 { return tagTuple | s.id(p)>>1&(tagJudged-1) }

// id is id_of of tag.h.
func (s scene) id(p testenv.Packet) uint32 {
	src, dst := words(p.Src), words(p.Dst)
	sport, dport := p.SrcPort, p.DstPort
	if s.proto == echo {
		sport, dport = p.ID, 0
		if p.Type == 0 || p.Type == 129 { // a reply
			sport, dport = 0, p.ID
		}
	}
	hash := hashMix(uint32(secret&0xffffffff)^uint32(s.number()), uint32(sport)<<16|uint32(dport))
	hash = hashMix(hashMix(hash, src[3]), dst[3])
	if p.Src.Is6() {
		for i := range 3 {
			hash = hashMix(hashMix(hash, src[i]), dst[i])
		}
	}
	return hash | 1
}

// secret is the first half of the tests' config.secret.
const secret uint64 = 0x0123456789abcdef

// putRouted writes what from_uplink has noted of a packet that it has received and tagged.
func (h *host) putRouted(s scene, p testenv.Packet) error {
	sport, dport := p.SrcPort, p.DstPort
	if s.proto == echo {
		sport, dport = p.ID, 0
	}
	flag := map[bool]uint8{true: 1}
	tag := routedTag(s, p)
	routed := h.programs.Maps[bpf.MapRouted]
	return routed.Put(tag%routed.MaxEntries(), bpf.Routed{Tuple: bpf.FwdKey{
		Src: wire(p.Src), Dst: wire(p.Dst), Sport: sport, Dport: dport, Ifindex: uint32(h.uplink.Index), Protocol: s.number(),
		Ipv6: flag[p.Src.Is6()], HasPorts: flag[slices.Contains(protos, s.proto)],
	}, Id: s.id(p) &^ 1}) // no rules have admitted it
}

// routedTag is the tag of a packet to a pod's own address that has no flow.
func routedTag(s scene, p testenv.Packet) uint32 { return s.tag(p) | tagPending }

// TestToContainerRouted has packets from the outside that the stack has delivered: the pod will reply from its
// own address.
func TestToContainerRouted(t *testing.T) {
	const in = "remote:5000 > pod:80"
	direct := dnat("remote:5000", "pod:80", "pod:80")
	host := []hostPort{{host: "any:8080", to: "plain:80"}}
	rows := []row{
		{name: "a new flow", in: in, after: []flow{direct}},
		{name: "a protocol without ports", on: withoutPorts, in: "remote:0 > pod:0", after: []flow{dnat("remote:0", "pod:0", "pod:0")}},
		{name: "a segment of an unknown connection", on: []proto{tcp}, in: in, edit: isSegment, after: []flow{direct.provisional()}},
		{name: "a pod without ipMasq", on: withPorts, ports: host, in: "remote:5000 > plain:80", after: []flow{dnat("remote:5000", "plain:80", "plain:80")}},
		{name: "a known flow", flows: []flow{direct.established()}, in: in},
		{name: "a flow of the address's former owner", flows: []flow{direct.established().ownedBy(formerOwner)}, in: in, after: []flow{direct}},
		{
			name: "a flow by a host port has the entry", on: withPorts, flows: []flow{dnat("remote:5000", "pod:80", "node:8080").established()}, in: in,
		},
		{
			name: "without the tag's flag", in: in, after: []flow{},
			tag: func(s scene, p testenv.Packet) uint32 { return s.tag(p) },
		},
		{
			name: "with the source changed by the stack", on: withPorts, in: in, after: []flow{dnat("remote:5001", "pod:80", "pod:80")},
			received: func(_ scene, p *testenv.Packet) { p.SrcPort++ },
		},
		{
			name: "with the destination changed by the stack", in: in, after: []flow{},
			received: func(s scene, p *testenv.Packet) { p.Dst = s.addr("node") },
		},
		{
			name: "an ICMP error of the host", in: in, after: []flow{},
			tag: func(scene, testenv.Packet) uint32 { return tagTranslated },
		},
	}
	for i := range rows {
		if rows[i].tag == nil {
			rows[i].tag = routedTag
		}
		rows[i].forwarded = true
	}
	runRows(t, bpf.ProgToContainer, rows)
}

// TestToUplinkForgedReplies has segments of a pod's masqueraded connection, after somebody has sent a packet under the remote's address
// to the pod's own: they leave as before, and do not answer that packet. An entry that has expired answers nothing either.
func TestToUplinkForgedReplies(t *testing.T) {
	h := newHost(t)
	direct, ours := dnat("remote:80", "pod:4000", "pod:4000"), snat("remote:80", "node:*", "pod:4000").established()
	old := direct.established().idleFor(6 * 24 * time.Hour)
	for name, r := range map[string]row{
		"a live connection":    {flows: []flow{direct.provisional(), ours}, after: []flow{direct.provisional(), ours}},
		"an entry of long ago": {flows: []flow{old}, after: []flow{old, snat("remote:80", "node:*", "pod:4000").provisional()}},
	} {
		eachScene(t, []proto{tcp}, func(t *testing.T, s scene) {
			s.star = h.candidates(t, s, outgoing)[0]
			r.in, r.out, r.edit = outgoing, "node:* > remote:80", isSegment
			if err := h.check(bpf.ProgToUplink, s, r); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		})
	}
}

// TestForgedTags has packets with tags that a container of another engine can set: they change nothing.
func TestForgedTags(t *testing.T) {
	h := newHost(t)
	for name, tc := range map[string]struct {
		program string
		tag     uint32
		row     row
	}{
		"received again": {bpf.ProgFromUplink, tagReentry, row{
			ports: []hostPort{{host: "any:8080", to: "pod:80"}}, in: "remote:5000 > node:8080", out: "remote:5000 > pod:80",
			after: []flow{dnat("remote:5000", "pod:80", "node:8080")},
		}},
		"received again, and judged": {bpf.ProgFromUplink, tagReentry | 0x1000, row{
			ports: []hostPort{{host: "any:8080", to: "pod:80"}}, in: "remote:5000 > node:8080", out: "remote:5000 > pod:80",
			after: []flow{dnat("remote:5000", "pod:80", "node:8080")},
		}},
		"translated": {bpf.ProgToUplink, tagTranslated, row{
			in: outgoing, out: "node:* > remote:80", after: []flow{snat("remote:80", "node:*", "pod:4000")}, forwarded: true,
		}},
	} {
		eachScene(t, []proto{tcp, udp}, func(t *testing.T, s scene) {
			if tc.row.forwarded {
				testenv.Require(t, ingressDevice)
			}
			r := tc.row
			r.tag = func(scene, testenv.Packet) uint32 { return tc.tag }
			s.star = h.candidates(t, s, outgoing)[0]
			if err := h.check(tc.program, s, r); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		})
	}
}

// TestToContainerFromHost has packets of the host to a pod: its own, and others' that it has translated.
func TestToContainerFromHost(t *testing.T) {
	const sent = "node:5000 > pod:80"
	ours := claim("pod:80", "node:5000")
	ports := []hostPort{{host: "any:8080", to: "pod2:80"}}
	runRows(t, bpf.ProgToContainer, []row{
		{name: "from the masquerading range", in: sent, after: []flow{ours}},
		{name: "from a port above", on: withPorts, in: "node:40000 > pod:80"},
		{name: "from the number of a host port", on: withPorts, ports: []hostPort{{host: "any:40000", to: "pod2:80"}}, in: "node:40000 > pod:80", after: []flow{claim("pod:80", "node:40000")}},
		{name: "a protocol without ports", on: withoutPorts, in: "node:0 > pod:0", after: []flow{claim("pod:0", "node:0")}},
		{name: "from another pod", forwarded: true, in: "pod2:5000 > pod:80"},
		{name: "translated by the host, for the outside", forwarded: true, in: sent, after: []flow{ours}},
		{name: "translated by the host, and the tag matches by chance", forwarded: true, in: sent, tag: scene.tag, after: []flow{ours}},
		{
			name: "translated by the host, and the tag to be noted matches by chance", forwarded: true, in: sent, after: []flow{ours},
			tag: func(s scene, p testenv.Packet) uint32 { return s.tag(p) | tagObserve },
		},
		{name: "from the outside", forwarded: true, in: "remote:5000 > pod:80"},
		{
			name: "a hairpin client has the port", on: withPorts, ports: ports,
			flows: each(hairpin("pod:5000", "node:8080", "node:5000", "pod2:80"), isReplied),
			in:    "node:5000 > pod2:80", out: "node:* > pod2:80",
			after: append(each(hairpin("pod:5000", "node:8080", "node:5000", "pod2:80"), isReplied),
				snat("pod2:80", "node:*", "node:5000").ownedBy(0), dnat("pod2:80", "node:5000", "node:*").ownedBy(0).with(replied)),
		},
		{
			name: "a RST", on: []proto{tcp}, in: sent, edit: func(p *testenv.Packet) { p.TCPFlags = testenv.RST },
			drop: "no flow", after: []flow{held("pod:80", "node:5000")},
		},
	})
}

// hashSecret is hash_secret of hash.h: SipHash-1-3, with the tests' config.secret.
func hashSecret(a, b bpf.Addr, word uint64) uint64 {
	k0, k1 := secret, ^secret
	v := [4]uint64{k0 ^ 0x736f6d6570736575, k1 ^ 0x646f72616e646f6d, k0 ^ 0x6c7967656e657261, k1 ^ 0x7465646279746573}
	round := func() {
		v[0] += v[1]
		v[1] = bits.RotateLeft64(v[1], 13) ^ v[0]
		v[0] = bits.RotateLeft64(v[0], 32)
		v[2] += v[3]
		v[3] = bits.RotateLeft64(v[3], 16) ^ v[2]
		v[0] += v[3]
		v[3] = bits.RotateLeft64(v[3], 21) ^ v[0]
		v[2] += v[1]
		v[1] = bits.RotateLeft64(v[1], 17) ^ v[2]
		v[2] = bits.RotateLeft64(v[2], 32)
	}
	add := func(word uint64) {
		v[3] ^= word
		round()
		v[0] ^= word
	}
	first := 0
	if isMapped(a) && isMapped(b) {
		first = 3
	}
	for i := first; i < 4; i++ {
		x, y := binary.NativeEndian.Uint32(a.Bytes[4*i:]), binary.NativeEndian.Uint32(b.Bytes[4*i:])
		add(uint64(x)<<32 | uint64(y))
	}
	add(word)
	v[2] ^= 0xff
	round()
	round()
	round()
	return v[0] ^ v[1] ^ v[2] ^ v[3]
}

// isMapped reports whether the address is IPv4.
func isMapped(a bpf.Addr) bool { return [12]byte(a.Bytes[:12]) == [12]byte{10: 0xff, 11: 0xff} }
