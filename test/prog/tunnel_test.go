package prog

import (
	"fmt"
	"net"
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// TestUDPTunnels has UDP to ports of tunnels, with and without a socket of the host there. (Other
// tunnels are among testenv's hostile and legal frames.)
func TestUDPTunnels(t *testing.T) {
	const other = 4788
	h := newHost(t)
	s := h.sender()
	ports := []uint16{4789, 4790, 8472, 6081, other}
	groups := map[string]string{"v4": "224.0.0.1", "v6": "ff02::1"}
	for _, f := range addressings {
		source := s.Addr4
		if f.name == "v6" {
			source = s.Addr6
		}
		packet := func(to string, port uint16, edit func(*testenv.Packet)) testenv.Frame {
			dst, err := netip.ParseAddr(to)
			if err != nil {
				dst = f.addr(to)
			}
			p := testenv.UDPPacket(netip.AddrPortFrom(source, 4000), netip.AddrPortFrom(dst, port), "\x08 and a frame")
			p.SrcMAC, p.DstMAC, p.TTL = s.MAC, s.HostMAC, 64
			edit(&p)
			return testenv.Frame{Name: fmt.Sprintf("%s port %d", dst, port), Bytes: p.MustBuild(), Reason: bpf.ReasonTunnel}
		}
		for edit, change := range map[string]func(*testenv.Packet){
			"plain":            func(*testenv.Packet) {},
			"a first fragment": func(p *testenv.Packet) { p.Fragmented, p.MoreFragments, p.IPID = true, true, 99 },
		} {
			for _, sockets := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s %s, sockets %t", f.name, edit, sockets), func(t *testing.T) {
					if sockets {
						h.listenUDP(t, f, ports)
					}
					for to, own := range map[string]bool{"node": true, "node2": true, "podgw": true, groups[f.name]: true, "remote": false, "pod2": false} {
						for _, port := range ports {
							frame := packet(to, port, change)
							if err := h.judge(s, antiSpoof, frame, !sockets || !own || port == other); err != nil {
								t.Errorf("%s: %v", frame.Name, err)
							}
							if err := h.judge(s, 0, frame, true); err != nil {
								t.Errorf("antiSpoof off, %s: %v", frame.Name, err)
							}
						}
					}
				})
			}
		}
	}
}

// By default a pod takes over no tunnel or routing protocol of its node's. With masqTunnels it does.
func TestTunnelsAreNotMasqueraded(t *testing.T) {
	h := newHost(t)
	for _, number := range []uint8{
		unix.IPPROTO_IPIP, unix.IPPROTO_IPV6, unix.IPPROTO_RSVP, unix.IPPROTO_GRE, unix.IPPROTO_ESP, unix.IPPROTO_AH, 89, // OSPF
		unix.IPPROTO_PIM, 112, unix.IPPROTO_L2TP, unix.IPPROTO_MPLS, // 112: VRRP
	} {
		for pod, drop := range map[string]string{"pod3": "protocol", "pod": ""} {
			r := row{name: fmt.Sprintf("%d from %s", number, pod), on: []proto{gre}, in: pod + ":0 > remote:0", edit: protocol(number), drop: drop, anyFlows: true}
			if drop == "" {
				r.out = "node:0 > remote:0"
			}
			h.runRow(t, bpf.ProgToUplink, r)
		}
	}
}

// listenUDP opens sockets on any address of the host, as the kernel does for tunnels.
func (h *host) listenUDP(t *testing.T, f addressing, ports []uint16) {
	t.Helper()
	for _, port := range ports {
		var socket *net.UDPConn
		err := h.Do(func() (err error) {
			socket, err = net.ListenUDP("udp"+f.name[1:], &net.UDPAddr{Port: int(port)})
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { socket.Close() })
	}
}
