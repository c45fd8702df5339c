package prog

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/rlimit"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// host is a node that forwards, with the datapath loaded but not attached: the tests run the
// programs themselves. The programs look up routes, so the routing tables are real.
type host struct {
	*testenv.Namespace
	programs *ebpf.Collection
	lo       *netlink.LinkAttrs
	uplink   *netlink.LinkAttrs
	veth     *netlink.LinkAttrs // host end of a pod's veth
	mac      testenv.MAC        // the uplink's current one: see l3_test.go

	marked   []uint32 // words of port_marks: see markPort
	wasReset time.Time
	tag      uint32 // tc_index of the packets: see tag_test.go
	policies uint32 // the generation of the policies
	ingress  uint32 // the device that has received the packets, 0: they are the host's own
}

const (
	uplinkName = "uplink"
	vethName   = "veth"
)

// Verdicts as the kernel returns them.
const (
	verdictNext     = 0xffffffff // -1
	verdictDrop     = 2
	verdictRedirect = 7
)

func newHost(t testing.TB) *host {
	t.Helper()
	programs, err := loaded()
	if err != nil {
		t.Fatalf("load the datapath: %v", err)
	}
	h := &host{Namespace: testenv.New(t, "node"), programs: programs}
	if err := errors.Join(h.clear(), h.emptyForwardingCache(), h.forget(), h.connect(), h.setMoved(longAhead)); err != nil {
		t.Fatalf("build the host: %v", err)
	}
	testenv.Eventually(t, "the node's addresses", h.ready)
	return h
}

// datapath is shared by all tests, or nil: loading it takes seconds on a slow machine, and only the
// contents of its maps belong to a network namespace. TestMain closes it.
var datapath *ebpf.Collection

func loaded() (*ebpf.Collection, error) {
	if datapath != nil {
		return datapath, nil
	}
	spec, err := newSpec()
	if err != nil {
		return nil, err
	}
	if err := rlimit.RemoveMemlock(); err != nil {
		return nil, err
	}
	datapath, err = ebpf.NewCollection(spec)
	return datapath, err
}

// clear removes entries of former tests. Tests that read arrays also write them.
func (h *host) clear() error {
	for name, m := range h.programs.Maps {
		if !slices.Contains([]ebpf.MapType{ebpf.Hash, ebpf.LRUHash, ebpf.LPMTrie}, m.Type()) {
			continue
		}
		var keys [][]byte
		for {
			var last any
			if len(keys) > 0 {
				last = keys[len(keys)-1]
			}
			key, err := m.NextKeyBytes(last)
			if err != nil {
				return fmt.Errorf("walk %s: %w", name, err)
			}
			if key == nil {
				break
			}
			keys = append(keys, key)
		}
		for _, key := range keys {
			if err := m.Delete(key); err != nil {
				return fmt.Errorf("delete from %s: %w", name, err)
			}
		}
	}
	return nil
}

// The masquerading range that the loader chooses with the default ip_local_port_range.
const masqFirst, masqLast = 1024, 29999

// newSpec returns the datapath with that range, and with a known secret.
func newSpec() (*ebpf.CollectionSpec, error) { return specOfSize(flowBuckets) }

// specOfSize is newSpec with that many buckets in flow_table.
func specOfSize(buckets uint32) (*ebpf.CollectionSpec, error) {
	spec, err := loader.Spec(loader.Options{MaxFlows: buckets * uint32(flowWays)})
	if err != nil {
		return nil, err
	}
	var config bpf.HostConfig
	if err := spec.Variables[bpf.VarConfig].Get(&config); err != nil {
		return nil, err
	}
	config.Secret = [2]uint64{secret, ^secret}
	clear(config.MasqPorts[:])
	config.MasqPorts[0] = bpf.PortRange{First: masqFirst, Count: masqLast - masqFirst + 1}
	config.CacheJiffies = 1 << 30 // decisions hold until a test voids them, however slow the machine is
	return spec, spec.Variables[bpf.VarConfig].Set(config)
}

// connect creates the devices, addresses and routes of names_test.go.
func (h *host) connect() error {
	for _, name := range []string{"net/ipv4/ip_forward", "net/ipv6/conf/all/forwarding"} {
		if err := h.SetSysctl(name, "1"); err != nil {
			return err
		}
	}
	lo, err := h.Netlink().LinkByName("lo")
	if err != nil {
		return err
	}
	h.lo = lo.Attrs()
	if h.uplink, err = h.addVeth(uplinkName); err != nil {
		return err
	}
	if h.veth, err = h.addVeth(vethName); err != nil {
		return err
	}
	h.mac = testenv.MAC(h.uplink.HardwareAddr)
	var errs []error
	for _, f := range addressings {
		for _, name := range nodeNames {
			errs = append(errs, h.addAddr(name, f.addr(name)))
		}
		gateway := f.addr("gateway")
		errs = append(errs,
			h.Netlink().NeighAdd(&netlink.Neigh{
				LinkIndex: h.uplink.Index, IP: gateway.AsSlice(), State: netlink.NUD_PERMANENT,
				HardwareAddr: net.HardwareAddr{2, 0, 0, 0, 0, 9},
			}),
			h.AddRoute(netip.PrefixFrom(f.addr("any"), 0), gateway),
			h.addRouteType(alone(f.addr("blackhole")), unix.RTN_BLACKHOLE),
			h.addRouteType(alone(f.addr("refused")), unix.RTN_UNREACHABLE),
			h.addRouteType(around(f.addr("podgw")), unix.RTN_UNREACHABLE),
		)
		for pod := range owners {
			errs = append(errs, h.Netlink().RouteAdd(&netlink.Route{
				Dst: alone(f.addr(pod)), LinkIndex: h.veth.Index, Scope: netlink.SCOPE_LINK,
			}))
		}
	}
	return errors.Join(errs...)
}

// ready returns an error until the kernel has set up the new addresses in the background.
func (h *host) ready() error {
	for _, f := range addressings {
		for _, name := range nodeNames {
			routes, err := h.Netlink().RouteGet(f.addr(name).AsSlice())
			if err != nil || len(routes) != 1 || routes[0].Type != unix.RTN_LOCAL {
				return fmt.Errorf("%s is not a local address: %v, %w", name, routes, err)
			}
		}
		for _, name := range []string{"onlink", "remote"} {
			routes, err := h.Netlink().RouteGet(f.addr(name).AsSlice())
			if err != nil || len(routes) != 1 || routes[0].LinkIndex != h.uplink.Index {
				return fmt.Errorf("%s is not behind the uplink: %v, %w", name, routes, err)
			}
		}
	}
	return nil
}

func (h *host) addVeth(name string) (*netlink.LinkAttrs, error) {
	veth := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: name}, PeerName: name + "-peer"}
	if err := h.Netlink().LinkAdd(veth); err != nil {
		return nil, fmt.Errorf("create veth %s: %w", name, err)
	}
	for _, name := range []string{name, name + "-peer"} {
		link, err := h.Netlink().LinkByName(name)
		if err != nil {
			return nil, err
		}
		if err := h.Netlink().LinkSetUp(link); err != nil {
			return nil, err
		}
	}
	link, err := h.Netlink().LinkByName(name)
	if err != nil {
		return nil, err
	}
	return link.Attrs(), nil
}

// addAddr adds the address "node" to the uplink, and others to the veth: as a source, the kernel
// prefers an address of the egress device.
func (h *host) addAddr(name string, addr netip.Addr) error {
	link, bits, flags := h.veth, addr.BitLen(), 0
	if name == "node" {
		link, bits = h.uplink, 24
	}
	if addr.Is6() {
		flags = unix.IFA_F_NODAD
	}
	if name == "node" && addr.Is6() {
		bits = 64
	}
	ipNet := &net.IPNet{IP: addr.AsSlice(), Mask: net.CIDRMask(bits, addr.BitLen())}
	return h.Netlink().AddrAdd(&netlink.Device{LinkAttrs: *link}, &netlink.Addr{IPNet: ipNet, Flags: flags})
}

func (h *host) addRouteType(dst *net.IPNet, kind int) error {
	return h.Netlink().RouteAdd(&netlink.Route{Dst: dst, Type: kind})
}

// alone returns the prefix of one address.
func alone(addr netip.Addr) *net.IPNet {
	return &net.IPNet{IP: addr.AsSlice(), Mask: net.CIDRMask(addr.BitLen(), addr.BitLen())}
}

// around returns a prefix with 256 addresses.
func around(addr netip.Addr) *net.IPNet {
	mask := net.CIDRMask(addr.BitLen()-8, addr.BitLen())
	return &net.IPNet{IP: net.IP(addr.AsSlice()).Mask(mask), Mask: mask}
}

// device returns the device to which a program would be attached.
func (h *host) device(program string) *netlink.LinkAttrs {
	switch program {
	case bpf.ProgFromUplink, bpf.ProgToUplink, bpf.ProgFromUplinkL3, bpf.ProgToUplinkL3:
		return h.uplink
	case bpf.ProgToLoopback:
		return h.lo
	default:
		return h.veth
	}
}

// other returns a device that could have received a packet of the program.
func (h *host) other(program string) *netlink.LinkAttrs {
	if h.device(program) == h.uplink {
		return h.veth
	}
	return h.uplink
}

// ingressDevice is that a test run may say which device has received the packet.
var ingressDevice = testenv.Feature{Name: "ingress device of a test run", Since: testenv.Version{Major: 6, Minor: 1}, Probe: probeIngressDevice}

func probeIngressDevice() error {
	program, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type: ebpf.SchedCLS, License: "GPL", Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 0), asm.Return()},
	})
	if err != nil {
		return err
	}
	defer program.Close()
	_, _, err = loader.TestRun(program, loader.Packet{Frame: make([]byte, 64), Ingress: 1})
	return err
}

// run runs a program on a frame, without the Ethernet header if its devices have none. The
// calling thread must be in the namespace.
func (h *host) run(program string, frame []byte) (verdict uint32, result []byte, err error) {
	header := frame[:0]
	if isL3(program) {
		header, frame = frame[:etherLen], frame[etherLen:]
	}
	if err := h.addressTo(program, frame); err != nil {
		return 0, nil, err
	}
	verdict, result, err = loader.TestRun(h.programs.Programs[program], h.packet(program, frame))
	return verdict, append(bytes.Clone(header), result...), err
}

// packet is a frame as the program's hook receives it.
func (h *host) packet(program string, frame []byte) loader.Packet {
	return loader.Packet{Frame: frame, Device: h.device(program).Index, Ingress: int(h.ingress), Tag: h.tag}
}

// runInside is run for any thread.
func (h *host) runInside(program string, frame []byte) (verdict uint32, result []byte, err error) {
	err = h.Do(func() error {
		verdict, result, err = h.run(program, frame)
		return err
	})
	return verdict, result, err
}

// reset empties the maps, and adds the entries with which all tests start.
func (h *host) reset() error {
	h.wasReset = time.Now()
	maps := h.programs.Maps
	errs := []error{
		h.flows().clear(),
		h.unmarkPorts(),
		ignoreMissing(maps[bpf.MapDevices].Delete(uint32(h.uplink.Index))),
		empty[bpf.HostPortKey, bpf.HostPort](maps[bpf.MapHostPorts]),
		empty[bpf.PrefixKey, bpf.Addr](maps[bpf.MapPrefixes]),
		empty[bpf.FragmentKey, bpf.Fragment](maps[bpf.MapFragments]),
		empty[bpf.FragQueueKey, bpf.QueuedFrag](maps[bpf.MapFragQueue]),
		maps[bpf.MapUplinks].Put(uint32(h.uplink.Index), bpf.Uplink{Addr4: v4.wire("node"), Addr6: v6.wire("node")}),
	}
	errs = append(errs, h.clearCounters(), h.clearStackNotes(), h.emptyForwardingCache())
	for _, f := range addressings {
		for pod := range owners {
			errs = append(errs, h.putEndpoint(f, pod, 0))
		}
	}
	return errors.Join(errs...)
}

var notePlaces = func() []uint32 {
	places := make([]uint32, 1024) // STACK_NOTES
	for i := range places {
		places[i] = uint32(i)
	}
	return places
}()

// clearStackNotes has no connection have bypassed the stack without an entry, which would void what is recorded of it.
func (h *host) clearStackNotes() error {
	_, err := h.programs.Maps[bpf.MapStackNotes].BatchUpdate(notePlaces, make([]bpf.StackNote, len(notePlaces)), nil)
	return err
}

// unmarkPorts removes the marks that markPort has set.
func (h *host) unmarkPorts() error {
	var errs []error
	for _, word := range h.marked {
		errs = append(errs, h.programs.Maps[bpf.MapPortMarks].Put(word, uint64(0)))
	}
	h.marked = nil
	return errors.Join(errs...)
}

// markPort sets a mark of a port until the next reset.
func (h *host) markPort(mark uint32, protocol uint8, port uint16) error {
	if protocol == unix.IPPROTO_UDP {
		mark++
	}
	word := mark*wordsPerMark + uint32(port/8)
	h.marked = append(h.marked, word)
	marks := h.programs.Maps[bpf.MapPortMarks]
	var bytes [8]byte
	err := marks.Lookup(word, &bytes)
	bytes[port%8] = 1
	return errors.Join(err, marks.Put(word, bytes))
}

// wordsPerMark is PORT_MARK_WORDS.
const wordsPerMark = 1 << 16 / 8

// markNumber marks a host port's number, as package maps does.
func (h *host) markNumber(key bpf.HostPortKey) error {
	err := h.markPort(bpf.PortForwarded, key.Protocol, key.Port)
	if key.Addr != wire(netip.IPv4Unspecified()) && key.Addr != wire(netip.IPv6Unspecified()) {
		err = errors.Join(err, h.markPort(bpf.PortForwardedExact, key.Protocol, key.Port))
	}
	return err
}

// Times in moved_flows.
const (
	epoch     = 1 << 30 // MOVED_EPOCH
	longAhead = 1<<32 - 1
)

// setMoved sets the time at which flows of any tuple have been seen at all candidates; 0: never. Tests put
// flows on any candidate, so newHost makes programs look at all of them.
func (h *host) setMoved(seen uint32) error { return h.setMovedTo(bpf.Moved{Seen: seen, SeenFar: seen}) }

func (h *host) setMovedTo(value bpf.Moved) error {
	moved := h.programs.Maps[bpf.MapMovedFlows]
	keys, values := make([]uint32, moved.MaxEntries()), make([]bpf.Moved, moved.MaxEntries())
	for i := range keys {
		keys[i], values[i] = uint32(i), value
	}
	_, err := moved.BatchUpdate(keys, values, nil)
	return err
}

// putEndpoint writes the endpoint of a pod. The set of prefixes may be 0, which means none.
func (h *host) putEndpoint(f addressing, pod string, nonMasqSet uint32) error {
	endpoint := bpf.Endpoint{
		Owner: owners[pod], Network: 1, Container: owners[pod], Ifindex: uint32(h.veth.Index),
		Gateway: f.wire("podgw"), NonmasqSet: nonMasqSet, Mtu: podMTU,
	}
	switch pod {
	case "plain":
	case "pod3":
		endpoint.Flags = bpf.EndpointMasq
	default:
		endpoint.Flags = bpf.EndpointMasq | bpf.EndpointMasqTunnels
	}
	return h.programs.Maps[bpf.MapEndpoints].Put(f.wire(pod), endpoint)
}

// putDevice says which pod is behind the veth; "": none.
func (h *host) putDevice(pod string) error {
	devices, key := h.programs.Maps[bpf.MapDevices], uint32(h.veth.Index)
	if pod == "" {
		return ignoreMissing(devices.Delete(key))
	}
	return devices.Put(key, bpf.Device{Owner: owners[pod], Network: 1, Container: owners[pod]})
}

func (h *host) clearCounters() error {
	var errs []error
	for _, reason := range reasons {
		none := make([]bpf.DropCount, ebpf.MustPossibleCPU())
		errs = append(errs, h.programs.Maps[bpf.MapDropTotals].Put(uint32(reason), none))
	}
	return errors.Join(errs...)
}

// ignoreMissing returns nil if err says that there was no entry.
func ignoreMissing(err error) error {
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return nil
	}
	return err
}
