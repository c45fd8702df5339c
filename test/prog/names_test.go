package prog

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// addressing gives the names in tables their addresses of one family, so that a row serves IPv4 and IPv6. A
// [testenv.Family] has the addresses of a topology instead.
type addressing struct {
	name  string
	addrs map[string]netip.Addr
}

// v4 and v6 have the same names. The node has the addresses of nodeNames. All sources are in
// 8.0.0.0/16, or have 86dd behind their first 32 bits: see l3_test.go.
var (
	v4 = newAddressing("v4", map[string]string{
		"pod":       "8.0.244.2",   // masqueraded, as are its tunnels
		"pod2":      "8.0.244.3",   // the same
		"plain":     "8.0.244.4",   // not masqueraded
		"pod3":      "8.0.244.5",   // masqueraded, but not its tunnels
		"podgw":     "8.0.244.1",   // the pods' gateway
		"podgw2":    "8.0.244.129", // another, with no pod near it
		"nopod":     "8.0.244.99",  // a pod's, in future
		"node":      "8.0.2.1",
		"node2":     "8.0.2.10",
		"vip":       "8.0.77.1", // without a subnet
		"crowded":   "8.0.2.17", // the next two differ from it by one bit
		"near1":     "8.0.2.16",
		"near2":     "8.0.2.19",
		"loopback":  "127.0.0.1",
		"loopback2": "127.0.0.53",
		"gateway":   "8.0.2.2",
		"onlink":    "8.0.2.77", // another host of the uplink's network
		"router":    "8.0.5.5",  // on the way to remotes
		"remote":    "8.0.113.9",
		"remote2":   "8.0.113.10",
		"blackhole": "8.0.113.66",
		"refused":   "8.0.113.98", // route type unreachable
		"linklocal": "169.254.169.254",
		"multicast": "224.0.0.251",
		"any":       "0.0.0.0",
	})
	v6 = newAddressing("v6", map[string]string{
		"pod":       "fd00:10:86dd::2",
		"pod2":      "fd00:10:86dd::3",
		"plain":     "fd00:10:86dd::4",
		"pod3":      "fd00:10:86dd::5",
		"podgw":     "fd00:10:86dd::1",
		"podgw2":    "fd00:10:86dd::81",
		"nopod":     "fd00:10:86dd::63",
		"node":      "2001:db8:86dd:1::1",
		"node2":     "2001:db8:86dd:1::10",
		"vip":       "2001:db8:86dd:77::1",
		"crowded":   "2001:db8:86dd:1::21",
		"near1":     "2001:db8:86dd:1::20",
		"near2":     "2001:db8:86dd:1::23",
		"loopback":  "::1",
		"loopback2": "::1", // the only one
		"gateway":   "2001:db8:86dd:1::2",
		"onlink":    "2001:db8:86dd:1::77",
		"router":    "2001:db8:86dd:5::5",
		"remote":    "2001:db8:86dd:9::9",
		"remote2":   "2001:db8:86dd:9::a",
		"blackhole": "2001:db8:86dd:9::66",
		"refused":   "2001:db8:86dd:9::98",
		"linklocal": "fe80::1234",
		"multicast": "ff02::fb",
		"any":       "::",
	})
	addressings = []addressing{v4, v6}

	nodeNames = []string{"node", "node2", "vip", "crowded", "near1", "near2", "podgw", "podgw2"}
	owners    = map[string]uint64{"pod": 0x1001, "pod2": 0x1002, "plain": 0x1003, "pod3": 0x1004}
)

func newAddressing(name string, texts map[string]string) addressing {
	f := addressing{name, map[string]netip.Addr{}}
	for name, text := range texts {
		f.addrs[name] = netip.MustParseAddr(text)
	}
	return f
}

// addr is the address of a name, or of a literal.
func (f addressing) addr(name string) netip.Addr {
	if addr, ok := f.addrs[name]; ok {
		return addr
	}
	return netip.MustParseAddr(name)
}

func (f addressing) wire(name string) bpf.Addr { return wire(f.addr(name)) }

func wire(addr netip.Addr) bpf.Addr   { return bpf.Addr{Bytes: addr.As16()} }
func addrOf(addr bpf.Addr) netip.Addr { return netip.AddrFrom16(addr.Bytes).Unmap() }

// proto is the protocol of a row's packets.
type proto string

const (
	tcp  proto = "tcp"
	udp  proto = "udp"
	echo proto = "echo"
	sctp proto = "sctp"
	gre  proto = "gre"
	esp  proto = "esp"
	dccp proto = "dccp"
	lite proto = "udp-lite"
)

var (
	protos       = []proto{tcp, udp, echo}
	withPorts    = []proto{tcp, udp} // may be forwarded as host ports
	withoutPorts = []proto{gre, esp} // masqueraded by address alone; port 0 in texts
)

// scene is the family and protocol for which a row runs.
type scene struct {
	addressing
	proto
	star uint16 // the value of the port "*"
}

func (s scene) number() uint8 {
	switch {
	case s.proto == tcp:
		return unix.IPPROTO_TCP
	case s.proto == udp:
		return unix.IPPROTO_UDP
	case s.proto == sctp:
		return unix.IPPROTO_SCTP
	case s.proto == gre:
		return unix.IPPROTO_GRE
	case s.proto == esp:
		return unix.IPPROTO_ESP
	case s.proto == dccp:
		return unix.IPPROTO_DCCP
	case s.proto == lite:
		return unix.IPPROTO_UDPLITE
	case s.name == "v4":
		return unix.IPPROTO_ICMP
	default:
		return unix.IPPROTO_ICMPV6
	}
}

// side resolves "name:port". The name may be a literal address, the port may be "*". In ICMP
// echo only the requesting side has a port, the identifier.
func (s scene) side(text string, requests bool) netip.AddrPort {
	at := max(strings.LastIndex(text, ":"), 0)
	name, portText := text[:at], strings.TrimPrefix(text[at:], ":")
	port, err := strconv.ParseUint(portText, 10, 16)
	if portText == "*" {
		port, err = uint64(s.star), nil
	}
	if err != nil {
		panic(fmt.Sprintf("side %q is not name:port", text))
	}
	if s.proto == echo && !requests {
		port = 0
	}
	return netip.AddrPortFrom(s.addr(name), uint16(port))
}

// sides resolves "name:port > name:port". The source is the requesting side, or the
// destination of a reply.
func (s scene) sides(text string, reply bool) (src, dst netip.AddrPort) {
	from, to, ok := strings.Cut(text, " > ")
	if !ok {
		panic(fmt.Sprintf("packet %q has no arrow", text))
	}
	return s.side(from, !reply), s.side(to, reply)
}

// The sequence numbers of the first packets of TCP connections, and what the pod has acknowledged.
const (
	podSYN    = 1000
	remoteSYN = 5000
	podACK    = remoteSYN + 1
)

// packet makes a packet from text: the first one of a connection, or the reply to it.
func (s scene) packet(text string, reply bool) testenv.Packet {
	src, dst := s.sides(text, reply)
	switch s.proto {
	case tcp:
		flags := testenv.SYN
		if reply {
			flags |= testenv.ACK
		}
		p := testenv.TCPPacket(src, dst, flags, "payload")
		p.Seq, p.Ack = podSYN, 0
		if reply {
			p.Seq, p.Ack = remoteSYN, podSYN+1
		}
		return p
	case udp:
		return testenv.UDPPacket(src, dst, "payload")
	case echo:
		return testenv.EchoPacket(src.Addr(), dst.Addr(), reply, src.Port()|dst.Port(), 7, "payload")
	case sctp:
		p := testenv.UDPPacket(src, dst, "")
		protocol(unix.IPPROTO_SCTP)(&p)
		p.Payload = sctpHeader(src.Port(), dst.Port(), reply)
		return p
	default:
		p := testenv.UDPPacket(src, dst, "a header and more of it")
		protocol(s.number())(&p)
		return p
	}
}

// sctpHeader has a chunk INIT, without a tag, or DATA.
func sctpHeader(sport, dport uint16, isData bool) string {
	header := binary.BigEndian.AppendUint16(binary.BigEndian.AppendUint16(nil, sport), dport)
	if isData {
		return string(header) + "tag.sum.\x00\x03\x00\x14 and data"
	}
	return string(header) + "\x00\x00\x00\x00sum.\x01\x00\x00\x14 and an INIT"
}

// isData makes a packet of SCTP one in the middle of an association.
func isData(p *testenv.Packet) {
	p.Payload = sctpHeader(binary.BigEndian.Uint16([]byte(p.Payload)), binary.BigEndian.Uint16([]byte(p.Payload[2:])), true)
}

// readdress returns p with the addresses and ports of text.
func (s scene) readdress(p testenv.Packet, text string, reply bool) testenv.Packet {
	src, dst := s.sides(text, reply)
	p.Src, p.Dst = src.Addr(), dst.Addr()
	if s.proto == echo {
		p.ID = src.Port() | dst.Port()
		return p
	}
	if slices.Contains(withPorts, s.proto) {
		p.SrcPort, p.DstPort = src.Port(), dst.Port()
	}
	return p
}

// sourcePort returns the source port, or the identifier of an echo message.
func (s scene) sourcePort(p testenv.Packet) uint16 {
	if s.proto == echo {
		return p.ID
	}
	return p.SrcPort
}
