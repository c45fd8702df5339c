package testenv

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
)

var (
	testAddr4 = [2]netip.AddrPort{netip.MustParseAddrPort("10.1.2.3:1234"), netip.MustParseAddrPort("192.0.2.9:53")}
	testAddr6 = [2]netip.AddrPort{netip.MustParseAddrPort("[fd00::1]:1234"), netip.MustParseAddrPort("[2001:db8::9]:53")}
)

func testPackets(t *testing.T) map[string]Packet {
	t.Helper()
	packets := make(map[string]Packet)
	for family, a := range map[string][2]netip.AddrPort{"4": testAddr4, "6": testAddr6} {
		src, dst := a[0], a[1]
		packets["tcp"+family] = TCPPacket(src, dst, SYN|ACK, "odd")
		packets["udp"+family] = UDPPacket(src, dst, "even")
		packets["echo"+family] = EchoPacket(src.Addr(), dst.Addr(), false, 7, 8, "ping")
		packets["reply"+family] = EchoPacket(src.Addr(), dst.Addr(), true, 7, 8, "")
		other := UDPPacket(src, dst, "payload of protocol 99")
		other.Proto, other.SrcPort, other.DstPort = 99, 0, 0
		packets["other"+family] = other
		later := other
		later.Fragmented, later.FragOffset, later.IPID = true, 1480, 77
		packets["later fragment"+family] = later
		later.MoreFragments, later.TOS = true, 0x2e
		packets["middle fragment"+family] = later
		for _, limit := range []int{0, 28, 48} {
			quote, err := ICMPErrorPacket(dst.Addr(), packets["udp"+family].MustBuild(), 3, 0, 1400, limit)
			Must(t, err)
			packets[fmt.Sprintf("error%s quoting %d", family, limit)] = quote
		}
	}
	p := packets["udp4"]
	p.NoChecksum, p.DontFragment, p.IPID, p.Options = true, true, 9, "\x94\x04\x00\x00"
	packets["udp4 without checksum, with router alert"] = p
	p = packets["tcp4"]
	p.Options = "\x07\xff\x00\x00" // a record route option longer than the header
	packets["tcp4 with broken options"] = p
	p = packets["tcp6"]
	p.FlowLabel, p.TOS, p.Fragmented, p.IPID = 0xabcde, 0xff, true, 0xdeadbeef
	packets["tcp6 with atomic fragment header"] = p
	return packets
}

func TestPacketRoundTrip(t *testing.T) {
	for name, want := range testPackets(t) {
		t.Run(name, func(t *testing.T) {
			frame, err := want.Build()
			Must(t, err)
			got, err := Decode(frame)
			if strings.Contains(name, "broken") {
				if err == nil {
					t.Errorf("decoded malformed options: %s", got)
				}
			} else if err != nil {
				t.Fatal(err)
			} else if got != want {
				t.Error(Diff(got, want))
			}
			if err := VerifyChecksums(frame); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestVerifyChecksumsSeesChanges flips every bit that a checksum covers; every flip must cause an error.
func TestVerifyChecksumsSeesChanges(t *testing.T) {
	for _, name := range []string{"tcp4", "tcp6", "udp4", "udp6", "echo4", "echo6", "error4 quoting 0", "error6 quoting 0"} {
		p := testPackets(t)[name]
		frame := p.MustBuild()
		for i := etherLen; i < len(frame); i++ {
			// Of an IPv6 header, checksums cover only addresses, payload length and
			// next header.
			if p.Src.Is6() && i < etherLen+8 {
				continue
			}
			for bit := range 8 {
				frame[i] ^= 1 << bit
				if err := VerifyChecksums(frame); err == nil {
					t.Fatalf("%s: no error after bit %d of byte %d was flipped", name, bit, i)
				}
				frame[i] ^= 1 << bit
			}
		}
	}
}

// TestVerifyChecksumsOfQuote changes a quoted packet and corrects only the outer checksum, as a
// translator that forgets the inner one.
func TestVerifyChecksumsOfQuote(t *testing.T) {
	for name, change := range map[string]int{"error4 quoting 0": etherLen + ipv4Len + icmpLen + 12, "error6 quoting 0": etherLen + ipv6Len + icmpLen + 8} {
		p := testPackets(t)[name]
		payload := []byte(p.Payload)
		header := etherLen + ipv4Len + icmpLen
		if p.Src.Is6() {
			header = etherLen + ipv6Len + icmpLen
		}
		payload[change-header]++
		p.Payload = string(payload)
		err := VerifyChecksums(p.MustBuild())
		if err == nil || !strings.Contains(err.Error(), "quoted") {
			t.Errorf("%s: %v", name, err)
		}
	}
}
