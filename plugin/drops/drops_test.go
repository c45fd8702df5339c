package drops

import (
	"encoding/binary"
	"testing"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader"
)

// Records of the tracepoint of three kernels.
const (
	format510 = `name: kfree_skb
format:
	field:unsigned short common_type;	offset:0;	size:2;	signed:0;

	field:void * skbaddr;	offset:8;	size:8;	signed:0;
	field:void * location;	offset:16;	size:8;	signed:0;
	field:unsigned short protocol;	offset:24;	size:2;	signed:0;

print fmt: "skbaddr=%p protocol=%u location=%p", REC->skbaddr, REC->protocol, REC->location
`
	format618 = `name: kfree_skb
format:
	field:void * skbaddr;	offset:8;	size:8;	signed:0;
	field:void * location;	offset:16;	size:8;	signed:0;
	field:void * rx_sk;	offset:24;	size:8;	signed:0;
	field:unsigned short protocol;	offset:32;	size:2;	signed:0;
	field:enum skb_drop_reason reason;	offset:36;	size:4;	signed:0;

print fmt: "skbaddr=%p reason: %s", REC->skbaddr, __print_symbolic(REC->reason, { 2, "NOT_SPECIFIED" }, { 12, "NETFILTER_DROP" })
`
)

func TestParseFormat(t *testing.T) {
	old, err := parseFormat(format510)
	if err != nil || old.HasReasons() || old.reasonName(7) != "" || old.offsets["location"] != 16 {
		t.Errorf("5.10: got %+v (%v), want no reasons", old, err)
	}
	s, err := parseFormat(format618)
	if err != nil || !s.HasReasons() || s.reasonName(12) != "NETFILTER_DROP" || s.reasonName(2) != "NOT_SPECIFIED" || s.reasonName(99) != "99" {
		t.Errorf("6.18: got %+v (%v)", s, err)
	}
	filter := StackFilter{s, "NETFILTER_DROP"}
	config, err := filter.config()
	if want := (loader.StackDrops{Packet: 8, Location: 16, Reason: 36, Wanted: 12, Netns: config.Netns}); err != nil || config != want || config.Netns == 0 {
		t.Errorf("configuration: got %+v (%v), want %+v", config, err, want)
	}
	filter.Reason = "NO_SUCH"
	if _, err := filter.config(); err == nil {
		t.Error("an unknown reason: got no error")
	}
	if _, err := parseFormat("name: kfree_skb\n"); err == nil {
		t.Error("another format: got no error")
	}
}

func TestFunction(t *testing.T) {
	s := &Stack{symbols: []symbol{{100, "first"}, {200, "second"}}}
	for address, want := range map[uint64]string{99: "", 100: "first", 199: "first", 200: "second", 1 << 60: "second"} {
		if got := s.function(address); got != want {
			t.Errorf("%d: got %q, want %q", address, got, want)
		}
	}
}

func TestParse(t *testing.T) {
	v4 := func(protocol byte, fragment uint16, rest ...byte) []byte {
		header := []byte{0x45, 0, 0, 40, 0, 0, 0, 0, 64, protocol, 0, 0, 10, 88, 0, 2, 192, 0, 2, 2}
		binary.BigEndian.PutUint16(header[6:], fragment)
		return append(header, rest...)
	}
	v6 := func(next byte, rest ...byte) []byte {
		header := append([]byte{0x60, 0, 0, 0, 0, 8, next, 64}, make([]byte, 32)...)
		header[8], header[23], header[24], header[39] = 0xfd, 2, 0xfd, 3
		return append(header, rest...)
	}
	ports := []byte{0x10, 0, 0, 80}
	options := []byte{17, 0, 1, 4, 0, 0, 0, 0}
	first, later := []byte{6, 0, 0, 1, 0, 0, 0, 7}, []byte{6, 0, 0, 9, 0, 0, 0, 7}
	for _, tc := range []struct {
		name          string
		etherType     uint16
		bytes         []byte
		protocol      string
		source, other string
	}{
		{"TCP", 0x0800, v4(6, 0, ports...), "tcp", "10.88.0.2:4096", "192.0.2.2:80"},
		{"cut behind the header", 0x0800, v4(6, 0), "tcp", "10.88.0.2", "192.0.2.2"},
		{"first fragment", 0x0800, v4(17, 0x2000, ports...), "udp", "10.88.0.2:4096", "192.0.2.2:80"},
		{"later fragment", 0x0800, v4(17, 0x2001, ports...), "udp", "10.88.0.2", "192.0.2.2"},
		{"ICMP", 0x0800, v4(1, 0, ports...), "icmp", "10.88.0.2", "192.0.2.2"},
		{"GRE", 0x0800, v4(47, 0, ports...), "protocol 47", "10.88.0.2", "192.0.2.2"},
		{"a header that is too short", 0x0800, []byte{0x4f, 0}, "ethertype 0x0800", "", ""},
		{"a length beyond the end", 0x0800, append([]byte{0x4f}, v4(6, 0, ports...)[1:]...), "tcp", "10.88.0.2", "192.0.2.2"},
		{"IPv6", 0x86dd, v6(17, ports...), "udp", "[fd00::2]:4096", "[fd00::3]:80"},
		{"options", 0x86dd, v6(0, append(options, ports...)...), "udp", "[fd00::2]:4096", "[fd00::3]:80"},
		{"IPv6, first fragment", 0x86dd, v6(44, append(first, ports...)...), "tcp", "[fd00::2]:4096", "[fd00::3]:80"},
		{"IPv6, later fragment", 0x86dd, v6(44, append(later, ports...)...), "tcp", "fd00::2", "fd00::3"},
		{"options beyond the end", 0x86dd, v6(0, 17, 200, 0, 0, 0, 0, 0, 0), "udp", "fd00::2", "fd00::3"},
		{"ARP", 0x0806, append(make([]byte, 14), 10, 88, 0, 2, 0, 0, 0, 0, 0, 0, 192, 0, 2, 2), "arp", "10.88.0.2", "192.0.2.2"},
		{"LLDP", 0x88cc, make([]byte, 60), "ethertype 0x88cc", "", ""},
		{"nothing", 0, nil, "ethertype 0x0000", "", ""},
	} {
		p := parse(tc.etherType, tc.bytes)
		if p.protocol != tc.protocol || p.side(p.src) != tc.source || p.side(p.dst) != tc.other {
			t.Errorf("%s: got %s %s > %s, want %s %s > %s", tc.name, p.protocol, p.side(p.src), p.side(p.dst), tc.protocol, tc.source, tc.other)
		}
	}
}

func TestHookOf(t *testing.T) {
	for _, tc := range []struct {
		on   device
		isIn bool // received by this device
		want string
	}{
		{device{isContainer: true}, true, bpf.ProgFromContainer},
		{device{isContainer: true}, false, bpf.ProgToContainer},
		{device{name: "lo"}, false, bpf.ProgToLoopback},
		{device{name: "eth0"}, true, bpf.ProgFromUplink},
		{device{name: "eth0"}, false, bpf.ProgToUplink},
	} {
		e := bpf.DropEvent{Ifindex: 7, IngressIfindex: map[bool]uint32{true: 7}[tc.isIn]}
		if got := hookOf(&e, tc.on); got != tc.want {
			t.Errorf("%+v, received there %v: got %s, want %s", tc.on, tc.isIn, got, tc.want)
		}
	}
}
