package prog

import (
	"net"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// Devices without Ethernet. A test run takes the first 14 bytes for an Ethernet header on
// every device: bytes 12 and 13 become skb->protocol, and a packet is for this host if the
// first 6 bytes are the device's MAC address. To test packets without Ethernet header,
//   - the source addresses of names_test.go have the EtherType in these bytes,
//   - the device gets the first 6 bytes of the packet as its MAC address,
//   - IPv4 headers have 24 or 32 bytes: one of 20 begins with 0x45, a multicast address.

func isL3(program string) bool {
	return program == bpf.ProgFromUplinkL3 || program == bpf.ProgToUplinkL3
}

// addressTo gives the uplink the MAC address that makes the packet one for this host, or its
// own again for programs that do not need that.
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

// adapt adds IPv4 options where a test run of the program needs them.
func adapt(program string, p *testenv.Packet) {
	if isL3(program) && p.Src.Is4() && len(p.Options)/4%2 == 0 {
		p.Options += strings.Repeat("\x01", 4)
	}
}

// TestDevicesWithoutEthernet runs the rows of the Ethernet programs that do not need an
// Ethernet header.
func TestDevicesWithoutEthernet(t *testing.T) {
	for _, tc := range []struct {
		name, program string
		rows          []row
	}{
		{"inbound replies", bpf.ProgFromUplinkL3, fromUplinkReplies()},
		{"to endpoints", bpf.ProgFromUplinkL3, fromUplinkToEndpoints()},
		{"to host ports", bpf.ProgFromUplinkL3, hostPortFromUplink()},
		{"inbound, forged", bpf.ProgFromUplinkL3, fromUplinkForged()},
		{"inbound, ignored", bpf.ProgFromUplinkL3, fromUplinkIgnores()},
		{"masqueraded", bpf.ProgToUplinkL3, toUplinkMasquerades()},
		{"masqueraded by address", bpf.ProgToUplinkL3, toUplinkByAddress()},
		{"outbound replies", bpf.ProgToUplinkL3, toUplinkReplies()},
		{"outbound, ignored", bpf.ProgToUplinkL3, toUplinkIgnores()},
		{"outbound, dropped", bpf.ProgToUplinkL3, toUplinkDrops()},
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
