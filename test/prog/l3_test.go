package prog

import (
	"net"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// Devices without Ethernet. A test run always takes the first 14 bytes for an
// Ethernet header, for any device: bytes 12 and 13 become skb->protocol, and a
// packet is for this host if the first 6 are the address of the device. So that
// packets without such a header pass for what they are,
//   - the source addresses of names_test.go have the EtherType there,
//   - the device gets the address that the packet begins with,
//   - IPv4 headers have 24 bytes, or 32: one of 20 begins with 0x45, a group's address.

func isL3(program string) bool {
	return program == bpf.ProgFromUplinkL3 || program == bpf.ProgToUplinkL3
}

// addressTo makes the packet one for this host, and the device what it was for
// programs that need no such thing.
func (h *host) addressTo(program string, packet []byte) error {
	mac := testenv.MAC(h.uplink.HardwareAddr)
	if program == bpf.ProgFromUplinkL3 && len(packet) >= len(mac) {
		mac = testenv.MAC(packet)
	}
	if mac == h.mac || mac[0]&1 != 0 || mac == (testenv.MAC{}) || h.device(program) != h.uplink {
		return nil
	}
	h.mac = mac
	return h.Netlink().LinkSetHardwareAddr(&netlink.Device{LinkAttrs: *h.uplink}, net.HardwareAddr(mac[:]))
}

// suit makes the packet one that the program can be tested with.
func suit(program string, p *testenv.Packet) {
	if isL3(program) && p.Src.Is4() && len(p.Options)/4%2 == 0 {
		p.Options += strings.Repeat("\x01", 4)
	}
}

// TestDevicesWithoutEthernet has the rows of the programs for Ethernet, as far as
// they are not about its header.
func TestDevicesWithoutEthernet(t *testing.T) {
	for _, tc := range []struct {
		name, program string
		rows          []row
	}{
		{"replies", bpf.ProgFromUplinkL3, fromUplinkReplies()},
		{"to endpoints", bpf.ProgFromUplinkL3, fromUplinkToEndpoints()},
		{"to host ports", bpf.ProgFromUplinkL3, hostPortFromUplink()},
		{"comes in and is left", bpf.ProgFromUplinkL3, fromUplinkLeaves()},
		{"masqueraded", bpf.ProgToUplinkL3, toUplinkMasquerades()},
		{"masqueraded by address", bpf.ProgToUplinkL3, toUplinkByAddress()},
		{"answers", bpf.ProgToUplinkL3, toUplinkAnswers()},
		{"goes out and is left", bpf.ProgToUplinkL3, toUplinkLeaves()},
		{"dropped", bpf.ProgToUplinkL3, toUplinkDrops()},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var rows []row
			for _, r := range tc.rows {
				if !r.ether {
					rows = append(rows, r)
				}
			}
			runRows(t, tc.program, rows)
		})
	}
}
