package scenario

import (
	"bytes"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// attackPayload is in every packet of an attack, legalPayload in the packet that shows that the attack has passed.
var attackPayload, legalPayload = strings.Repeat("attack", 8), "legal"

// Ports that the rules of the attacked and of the jailed pod admit to all: legal packets go there.
const legalPort = 7

// attackFrames are what a sender tries to get to a receiver.
type attackFrames struct {
	name   string
	frames [][]byte
}

// attacksOn returns packets from src, or a spoofed address, to dst. None may arrive.
func (w wire) attacksOn(t *testing.T, src, dst netip.Addr, spoofed map[string]netip.AddrPort) (all []attackFrames) {
	t.Helper()
	add := func(name string, packets ...testenv.Packet) {
		var frames [][]byte
		for _, p := range packets {
			frames = append(frames, w.frame(p))
		}
		all = append(all, attackFrames{name, frames})
	}
	from, to := at(src, 4000), at(dst, 80)
	udp := testenv.UDPPacket(from, to, attackPayload)
	add("UDP", udp)
	for name, flags := range map[string]uint8{
		"ACK": testenv.ACK, "RST": testenv.RST, "RST+ACK": testenv.RST | testenv.ACK, "SYN+ACK": testenv.SYN | testenv.ACK, "FIN": testenv.FIN | testenv.ACK, "SYN": testenv.SYN,
	} {
		add(name, testenv.TCPPacket(from, to, flags, attackPayload))
	}
	add("a ping", testenv.EchoPacket(src, dst, false, 9, 9, attackPayload))
	add("a ping like one of the receiver", testenv.EchoPacket(src, dst, false, 0, 9, attackPayload))
	add("a reply to no ping", testenv.EchoPacket(src, dst, true, 9, 9, attackPayload))
	add("another protocol", testenv.Packet{Src: src, Dst: dst, Proto: 253, TTL: 64, Payload: attackPayload})
	for _, port := range []uint16{67, 68, 546, 547} {
		add(fmt.Sprint("UDP to port ", port), testenv.UDPPacket(from, at(dst, port), attackPayload))
	}
	for name, other := range spoofed {
		add("UDP as "+name, testenv.UDPPacket(other, to, attackPayload))
		add("ACK as "+name, testenv.TCPPacket(other, to, testenv.ACK, attackPayload))
	}
	add("an ICMP error about no connection", w.icmpError(t, src, testenv.UDPPacket(to, from, attackPayload)))

	whole := w.frame(udp)
	fragments, err := testenv.Fragment(whole, 16, 77)
	testenv.Must(t, err)
	all = append(all, attackFrames{"fragments", fragments}, attackFrames{"later fragments", fragments[1:]},
		attackFrames{"fragments in disorder", [][]byte{fragments[1], fragments[0], fragments[2]}},
		attackFrames{"in a VLAN", [][]byte{testenv.Tagged(whole, 5)}}, attackFrames{"in VLAN 0", [][]byte{testenv.Tagged(whole, 0)}})
	if src.Is4() {
		udp.Options = "\x01\x01\x01\x01"
		add("IPv4 options", udp)
		add("IGMP", testenv.Packet{Src: src, Dst: dst, Proto: unix.IPPROTO_IGMP, TTL: 64, Payload: attackPayload})
		return all
	}
	for _, typ := range []uint8{135, 136} {
		add(fmt.Sprint("neighbor discovery ", typ), testenv.Packet{Src: src, Dst: dst, Proto: unix.IPPROTO_ICMPV6, Type: typ, TTL: 255, Payload: attackPayload})
	}
	return append(all, attackFrames{"fragments that are split anew", w.unequalFragments(t, udp, 78)}, attackFrames{"a hop-by-hop header", [][]byte{testenv.Extended(whole, unix.IPPROTO_HOPOPTS)}},
		attackFrames{"destination options", [][]byte{testenv.Extended(whole, unix.IPPROTO_DSTOPTS)}})
}

func (w wire) frame(p testenv.Packet) []byte {
	p.SrcMAC, p.DstMAC = w.mac, w.next
	return p.MustBuild()
}

// unequalFragments are those of an IPv6 packet with a longer payload. With the first one's header, the other is too long, so
// a kernel that has reassembled them splits the packet anew, without the device that it came by.
func (w wire) unequalFragments(t *testing.T, p testenv.Packet, id uint32) [][]byte {
	t.Helper()
	p.Payload = strings.Repeat(p.Payload, 1200/len(p.Payload))
	fragments, err := testenv.FragmentFrom(w.frame(p), 16, 1352, id)
	testenv.Must(t, err)
	fragments[0] = testenv.Extended(fragments[0], unix.IPPROTO_DSTOPTS)
	return fragments
}

// icmpError is an error of the host at src about a packet.
func (w wire) icmpError(t *testing.T, src netip.Addr, about testenv.Packet) testenv.Packet {
	t.Helper()
	typ := uint8(3)
	if src.Is6() {
		typ = 1
	}
	p, err := testenv.ICMPErrorPacket(src, about.MustBuild(), typ, 0, 0, 0)
	testenv.Must(t, err)
	return p
}

// target is where an attack must not arrive.
type target struct {
	*capture
	dst netip.Addr
}

// linkLocal4 is a link-local address that the node routes.
var linkLocal4 = netip.MustParseAddr("169.254.9.9")

// wantNoAttack sends each attack and then a legal packet, and wants that alone to arrive.
func (w wire) wantNoAttack(t *testing.T, attacks []attackFrames, legal testenv.Packet, c *capture) {
	t.Helper()
	for _, attack := range attacks {
		testenv.Must(t, w.ns.SendFrames(testenv.PodIfName, append(attack.frames, w.frame(legal))...))
		testenv.Eventually(t, "the legal packet after "+attack.name, func() error {
			var err error = errNothing
			for _, frame := range c.frames(t) {
				if bytes.Contains(frame, []byte("attack")) {
					t.Errorf("%s: passed", attack.name)
				}
				if bytes.Contains(frame, []byte(legalPayload)) {
					err = nil
				}
			}
			return err
		})
	}
	if legal.Src.Is6() {
		testenv.Must(t, w.ns.SendFrames(testenv.PodIfName, w.unequalFragments(t, legal, 79)...))
		testenv.Eventually(t, "legal fragments", func() error {
			if slices.ContainsFunc(c.frames(t), func(frame []byte) bool { return bytes.Contains(frame, []byte(legalPayload)) }) {
				return nil
			}
			return errNothing
		})
	}
}

// No packet gets to a container, or from one, that its rules do not admit, whatever it looks like and whoever it
// claims to be from.
func TestPolicyAttacks(t *testing.T) {
	for _, path := range []string{"established", "tracked", "always", "clsact"} {
		t.Run(path, func(t *testing.T) {
			keys := `"ipMasq": true, "antiSpoof": false`
			if path != "clsact" {
				keys += `, "fastPath": "` + strings.Replace(path, "tracked", "established", 1) + `"`
			}
			n := newNetworkWith(t, withKeys(keys))
			if path == "tracked" { // so the kernel reassembles fragments
				n.nft(t, "table inet tracked { chain c { type filter hook prerouting priority 0; ct state new accept; }; }")
			}
			if path == "clsact" {
				n.loadForClsact(t)
			}
			const legal = `"ports": [{"protocol": "udp", "port": 7}]`
			friend := n.AddPod(t, "friend", nil)
			second := n.secondNetwork(t)
			testenv.Must(t, second.SetNetwork([]byte(strings.NewReplacer(`"pods"`, `"second"`, "10.88.0.", "10.89.0.", "fd00:88:", "fd00:89:").Replace(withKeys(keys)))))
			stranger := second.AddPod(t, "stranger", nil)
			victim := n.addWith(t, "victim", keys+`, "policy": {"ingress": [{"from": [{"sameNetwork": true}], "ports": [{"port": 80}, {"protocol": "udp", "port": 80}]}, {`+legal+`}]}`, nil)
			jailed := n.addWith(t, "jailed", keys+`, "policy": {"ingress": [], "egress": [{"to": [{"sameNetwork": true}], "ports": [{"protocol": "udp", "port": 9}]}, {`+legal+`}]}`, nil)
			n.AddSecondUplink(t) // a device without our programs
			atVictim, atStranger, atFriend := openCapture(t, victim.Namespace, testenv.PodIfName), openCapture(t, stranger.Namespace, testenv.PodIfName), openCapture(t, friend.Namespace, testenv.PodIfName)
			atOutside, atLate := openCapture(t, n.Outside, testenv.UplinkName), openCapture(t, n.SecondOutside, testenv.UplinkName)
			forEachFamily(t, func(t *testing.T, f testenv.Family) {
				n.RouteTo(t, f.PodSubnet)
				unassigned := map[string]netip.Addr{"IPv4": netip.MustParseAddr("10.88.0.200"), "IPv6": netip.MustParseAddr("fd00:88::200")}[f.Name]
				server := serve(t, friend.Namespace, "tcp", at(f.Pod(friend), 80))
				client := connect(t, victim.Namespace, "tcp", netip.AddrPort{}, server)
				defer client.Close()
				ask(t, client, friend.Namespace)
				spoofed := map[string]netip.AddrPort{
					"a pod that is admitted": at(f.Pod(friend), 4000), "an address of the network": at(unassigned, 4000),
					"the host": at(f.Gateway, 4000), "the victim": at(f.Pod(victim), 4000),
				}
				for _, from := range []struct {
					wire
					src netip.Addr
				}{{wireOf(t, stranger), f.Pod(stranger)}, {n.outsideWire(t), f.Outside}} {
					wireOf(t, victim).send(t, testenv.EchoPacket(f.Pod(victim), from.src, false, 0, 9, ""))
					attacks := from.attacksOn(t, from.src, f.Pod(victim), spoofed)
					about := testenv.TCPPacket(client.Local(), server, testenv.ACK, attackPayload)
					if from.ns == stranger.Namespace {
						attacks = append(attacks, attackFrames{"an ICMP error about a connection of others", [][]byte{from.frame(from.icmpError(t, from.src, about))}},
							attackFrames{"a reply of others", [][]byte{from.frame(testenv.TCPPacket(server, client.Local(), testenv.ACK, attackPayload))}})
					}
					t.Run("from "+from.ns.Name, func(t *testing.T) {
						from.wantNoAttack(t, attacks, testenv.UDPPacket(at(from.src, 4000), at(f.Pod(victim), legalPort), legalPayload), atVictim)
					})
				}
				ask(t, client, friend.Namespace)
				spoofed = map[string]netip.AddrPort{
					"a free pod": at(f.Pod(friend), 4000), "a pod of the other network": at(f.Pod(stranger), 4000), "an address of the network": at(unassigned, 4000),
					"the host": at(f.Node, 4000),
				}
				jail := wireOf(t, jailed)
				targets := []target{{atOutside, f.Outside}, {atStranger, f.Pod(stranger)}, {atFriend, f.Pod(friend)}, {atLate, f.SecondOutside}}
				if f.Is4() {
					testenv.Must(t, n.node().AddRoute(netip.PrefixFrom(linkLocal4, 32), f.SecondOutside))
					targets = append(targets, target{atLate, linkLocal4})
				}
				for _, to := range targets {
					t.Run("to "+to.dst.String(), func(t *testing.T) {
						jail.wantNoAttack(t, jail.attacksOn(t, f.Pod(jailed), to.dst, spoofed), testenv.UDPPacket(at(f.Pod(jailed), 4000), at(to.dst, legalPort), legalPayload), to.capture)
					})
				}
			})
		})
	}
}
