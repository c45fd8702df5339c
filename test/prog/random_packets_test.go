package prog

import (
	"errors"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

var rounds = flag.Int("rounds", 100_000, "random packets of TestRandomPackets for each program")

// TestRandomPackets runs all programs on random packets of pods, the node, and remotes or whoever spoofs them:
// no entry without its owner's packet, no two owners of a tuple, no reply to one who has not asked. Meanwhile
// entries expire or are replaced, and a pod is replaced by another with its address.
func TestRandomPackets(t *testing.T) { runRandomPackets(t, *rounds, 1<<14) }

// TestRandomPacketsFullTable has few places for the flows, and offloads take some of them. No assured flow loses its place.
func TestRandomPacketsFullTable(t *testing.T) { runRandomPackets(t, *rounds/10, fullTable) }

const fullTable = 64 // places

func runRandomPackets(t *testing.T, rounds int, maxFlows uint32) {
	t.Helper()
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	m := newMill(t, rand.New(rand.NewPCG(seed, 0)), maxFlows)
	begin := time.Now()
	err := m.Do(func() error {
		for round := range rounds {
			for _, program := range m.programNames() {
				if err := m.step(program); err != nil {
					return fmt.Errorf("round %d, %s: %w", round, program, err)
				}
			}
			if err := m.change(round); err != nil {
				return fmt.Errorf("round %d: %w", round, err)
			}
		}
		return nil
	})
	testenv.NoError(t, err)
	t.Logf("%d packets per program in %v; translated: %v", rounds, time.Since(begin), m.translated)
	for _, program := range m.programNames() {
		if program != bpf.ProgToContainer && m.translated[program] < rounds/1000 && err == nil {
			t.Errorf("%s has translated %d of %d packets, want at least one in a thousand", program, m.translated[program], rounds)
		}
	}
}

// mill is a host with few masquerading ports and short timeouts.
type mill struct {
	*host
	world
	random   *rand.Rand
	timeouts []uint32
	run      testRun
	in, out  []byte
	keys     []bpf.FlowKey // of the last look at the entries
	owners   uint64        // the latest owner

	translated map[string]int // packets, by program
}

func newMill(t *testing.T, random *rand.Rand, maxFlows uint32) *mill {
	t.Helper()
	testenv.Require(t, ingressDevice)
	spec, err := loader.Spec(loader.Options{MaxFlows: maxFlows})
	testenv.Must(t, err)
	var config bpf.HostConfig
	variable := spec.Variables[bpf.VarConfig]
	testenv.Must(t, variable.Get(&config))
	config.Secret = [2]uint64{secret, ^secret} // finds the places of flows
	clear(config.MasqPorts[:])
	config.MasqPorts[0] = bpf.PortRange{First: 20000, Count: 8}
	for state := range config.Timeout {
		config.Timeout[state] = 2 + uint32(state)%3
	}
	testenv.Must(t, variable.Set(config))
	programs, err := ebpf.NewCollection(spec)
	testenv.Must(t, err)
	t.Cleanup(programs.Close)
	m := &mill{
		host: newHost(t), random: random, timeouts: config.Timeout[:],
		in: make([]byte, 256), out: make([]byte, 512), owners: 0x2000, translated: map[string]int{},
	}
	m.host.programs = programs
	m.world = world{
		full:      maxFlows == fullTable,
		hostPorts: map[hostPortID]hostPortTarget{}, asked: map[claimant]bool{}, heard: map[tuple]bool{},
		speaker: map[tuple]speaker{}, spoke: map[tuple]uint32{}, held: map[tuple]holder{}, living: m.lookup,
	}
	testenv.Must(t, errors.Join(m.reset(), m.openPorts()))
	for _, pod := range []place{placePod, placePod2, placePlain} {
		m.owner[pod] = owners[placeNames[pod]]
	}
	return m
}

func (*mill) programNames() []string {
	return []string{bpf.ProgFromContainer, bpf.ProgToContainer, bpf.ProgToUplink, bpf.ProgFromUplink, bpf.ProgToLoopback}
}

// openPorts adds the host ports: two of one container, two of the masquerading range, one on a single address.
func (m *mill) openPorts() error {
	var errs []error
	for _, s := range (row{on: withPorts}).scenes() {
		errs = append(errs, m.fill(s, []hostPort{
			{host: "any:8080", to: "pod2:80"}, {host: "any:8081", to: "pod2:80"},
			{host: "any:20003", to: "pod:90"}, {host: "node:20005", to: "plain:80"},
		}, nil))
		for _, at := range []place{placePodGW, placeNode, placeNode2, placeLoopback} {
			m.hostPorts[hostPortID{s.number(), at, 8080}] = hostPortTarget{placePod2, 80}
			m.hostPorts[hostPortID{s.number(), at, 8081}] = hostPortTarget{placePod2, 80}
			m.hostPorts[hostPortID{s.number(), at, 20003}] = hostPortTarget{placePod, 90}
		}
		m.hostPorts[hostPortID{s.number(), placeNode, 20005}] = hostPortTarget{placePlain, 80}
	}
	return errors.Join(errs...)
}

var (
	podPlaces    = []place{placePod, placePod2, placePlain}
	remotePlaces = []place{placeRemote, placeRemote2, placeOnlink}
	nodePlaces   = []place{placeNode, placeNode, placeNode2, placePodGW}

	// Destinations and sources, by program.
	inboundPlaces   = slices.Concat(podPlaces, nodePlaces, nodePlaces)
	containerPlaces = slices.Concat(nodePlaces, podPlaces, []place{placeRemote})
	routedPlaces    = slices.Concat(podPlaces, remotePlaces)
	hostPlaces      = slices.Concat(nodePlaces, []place{placeLoopback})
)

// next returns a packet for a program, and the device that it has come by, 0 if the node itself sends it.
func (m *mill) next(program string) (p randomPacket, ingress uint32) {
	veth, uplink := uint32(m.veth.Index), uint32(m.uplink.Index)
	switch program {
	case bpf.ProgToUplink:
		if m.random.IntN(3) == 0 {
			return randomBetween(m.random, nodePlaces, remotePlaces, nodePlaces), pick(m.random, 0, veth)
		}
		return randomBetween(m.random, podPlaces, remotePlaces, podPlaces), veth
	case bpf.ProgFromUplink:
		return randomBetween(m.random, remotePlaces, inboundPlaces, remotePlaces), uplink
	case bpf.ProgFromContainer:
		p := randomBetween(m.random, podPlaces, containerPlaces, podPlaces)
		if p.dst.isNode() && m.random.IntN(4) == 0 {
			m.toHostPort(&p)
		}
		return p, 0
	case bpf.ProgToContainer:
		if m.random.IntN(2) == 0 {
			return randomBetween(m.random, nodePlaces, podPlaces, nodePlaces), pick(m.random, 0, uplink)
		}
		return randomBetween(m.random, routedPlaces, podPlaces, remotePlaces), uplink
	default:
		p := randomBetween(m.random, hostPlaces, hostPlaces, nil)
		m.toHostPort(&p)
		return p, 0
	}
}

// toHostPort has one of few clients send to a host port.
func (m *mill) toHostPort(p *randomPacket) {
	if !p.isError && (p.proto == unix.IPPROTO_TCP || p.proto == unix.IPPROTO_UDP) {
		p.sport, p.dport = pick(m.random, portsOf(p.src)[:2]...), pick[uint16](m.random, 8080, 8081, 20003, 20005)
		p.dst = placeNode
		if p.src == placeLoopback {
			p.dst = placeLoopback
		}
	}
}

func (m *mill) step(program string) error {
	p, ingress := m.next(program)
	device := m.device(program)
	frame := p.build(m.in, device.HardwareAddr)
	assured, err := m.assured()
	if err != nil {
		return err
	}
	verdict, result, err := m.run.run(m.host.programs.Programs[program], uint32(device.Index), ingress, frame, m.out)
	if err != nil {
		return fmt.Errorf("%s: %w", &p, err)
	}
	if out, _ := p.read(result); verdict != verdictDrop && out != p.tuple {
		m.translated[program]++
	}
	if err := m.keeps(assured); err != nil {
		return fmt.Errorf("%s: %w", &p, err)
	}
	return m.judgePacket(program, &p, verdict, result)
}

// assured returns the flows of a full table that no other may replace.
func (m *mill) assured() (map[bpf.FlowKey]bpf.Flow, error) {
	if !m.full {
		return nil, nil
	}
	all, err := m.flows().ofKind(func(bpf.FlowKind) bool { return true })
	now := ticks(0)
	maps.DeleteFunc(all, func(key bpf.FlowKey, value bpf.Flow) bool {
		f := m.flowOf(key, value, m.timeouts, now)
		return !f.isAssured()
	})
	return all, err
}

// keeps wants the places of the flows to be their owners' still.
func (m *mill) keeps(flows map[bpf.FlowKey]bpf.Flow) error {
	for key, before := range flows {
		var after bpf.Flow
		if err := m.flows().Lookup(key, &after); err != nil || after.Owner != before.Owner {
			return fmt.Errorf("assured flow %+v, %+v became %+v: %v", key, before, after, err)
		}
	}
	return nil
}

// lookup returns the owner of a tuple's entry, and whether the tuple is its alone.
func (m *mill) lookup(t tuple) (owner uint64, firm bool, err error) {
	proto := t.proto
	if t.v6 && proto == unix.IPPROTO_ICMP {
		proto = unix.IPPROTO_ICMPV6
	}
	f := addressings[family(t.v6)]
	key := bpf.FlowKey{
		Remote: f.wire(placeNames[t.src]), Local: f.wire(placeNames[t.dst]), RemotePort: t.sport, LocalPort: t.dport,
		Protocol: proto, Kind: bpf.FlowSNAT,
	}
	var value bpf.Flow
	err = m.flows().Lookup(key, &value)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return 0, false, nil
	}
	if err != nil {
		return 0, false, err
	}
	flow := m.flowOf(key, value, m.timeouts, ticks(0))
	return flow.Owner, flow.isFirm(), nil
}

// change removes an entry now and then, looks at all entries, and replaces a pod.
func (m *mill) change(round int) error {
	if round%500 == 0 && len(m.keys) > 0 {
		key := pick(m.random, m.keys...)
		clear(m.held) // may be the entry of one
		if err := m.flows().Delete(key); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return err
		}
	}
	if round%2000 == 0 {
		all, err := m.flows().all()
		if err != nil {
			return err
		}
		m.keys = slices.Collect(maps.Keys(all))
		m.offload(all)
		now := ticks(0)
		var flows []worldFlow
		for key, value := range all {
			flows = append(flows, m.flowOf(key, value, m.timeouts, now))
		}
		if err := m.judgeEntries(flows); err != nil {
			return err
		}
	}
	if round%10000 == 9999 {
		return m.replace(pick(m.random, podPlaces...))
	}
	return nil
}

// offload adds offloads with the tuples of some flows to a full table. No connection has their payer, so they are unused.
func (m *mill) offload(flows map[bpf.FlowKey]bpf.Flow) {
	for key, flow := range flows {
		if m.full && m.random.IntN(4) == 0 {
			key.Kind, flow.State, flow.Payer = bpf.FlowOffload, bpf.FlowUDPStream, 1
			_ = m.flows().Put(key, flow) // unless the bucket is full
		}
	}
}

// replace gives a pod's address and host ports to another owner.
func (m *mill) replace(pod place) error {
	m.owners++
	m.owner[pod] = m.owners
	for _, f := range addressings {
		var endpoint bpf.Endpoint
		key := f.wire(placeNames[pod])
		if err := m.host.programs.Maps[bpf.MapEndpoints].Lookup(&key, &endpoint); err != nil {
			return err
		}
		endpoint.Owner = m.owners
		if err := m.host.programs.Maps[bpf.MapEndpoints].Put(&key, &endpoint); err != nil {
			return err
		}
	}
	ports, err := contents[bpf.HostPortKey, bpf.HostPort](m.host.programs.Maps[bpf.MapHostPorts])
	if err != nil {
		return err
	}
	for key, port := range ports {
		target := key.Addr
		if key.Dir == bpf.HostPortForward {
			target = port.TargetAddr
		}
		if placeOfWire(wireIs6(target), target) != pod {
			continue
		}
		port.Owner = m.owners
		if err := m.host.programs.Maps[bpf.MapHostPorts].Put(&key, &port); err != nil {
			return err
		}
	}
	return m.host.emptyForwardingCache()
}
