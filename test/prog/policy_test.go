package prog

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// podPolicy is the index of the pod's policy.
const podPolicy = 1

// isolated is ingressPolicy isolated: the outside and the host may open connections.
var isolated = &maps.RuleSet{Host: true, Rules: []maps.Rule{{Kind: maps.OutsidePeer}}}

// allChecks is entry 0 of policies: packets get every check.
var allChecks = bpf.Policy{Checks: bpf.PolicyCheckAny | bpf.PolicyCheckHost}

// putPolicy gives the pod rule sets; nil: the direction is not isolated.
func (h *host) putPolicy(ingress, egress *maps.RuleSet) error {
	rules, blocks := h.programs.Maps[bpf.MapPolicyRules], h.programs.Maps[bpf.MapPolicyBlocks]
	err := errors.Join(empty[bpf.RuleKey, bpf.Rule](rules), empty[bpf.PrefixKey, uint32](blocks))
	h.policies++
	var refs [2]maps.RuleSetRef
	for i, set := range []*maps.RuleSet{ingress, egress} {
		if set != nil {
			id := uint32(i + 1)
			refs[i] = set.Ref(id)
			err = errors.Join(err, set.Write(id, rules, blocks))
		}
	}
	policies := h.programs.Maps[bpf.MapPolicies]
	policy := bpf.Policy{Owner: owners["pod"], RuleSets: uint64(refs[1])<<32 | uint64(refs[0]), Generation: h.policies}
	return errors.Join(err, policies.Put(uint32(0), allChecks), policies.Put(uint32(podPolicy), policy))
}

// TestIngressPolicyNeighbors admits neighbor discovery to an isolated pod only from its own link: a router
// decrements the hop limit.
func TestIngressPolicyNeighbors(t *testing.T) {
	testenv.Require(t, ingressDevice)
	const routerSolicitation, routerAdvertisement, solicitation, advertisement, echo = 133, 134, 135, 136, 128
	h := newHost(t)
	for _, tc := range []struct {
		typ, hopLimit uint8
		verdict       uint32
	}{
		{solicitation, 255, verdictNext},
		{advertisement, 255, verdictNext},
		{routerSolicitation, 255, verdictNext},
		{routerSolicitation, 254, verdictDrop},
		{routerAdvertisement, 255, verdictDrop},
		{solicitation, 254, verdictDrop},
		{advertisement, 254, verdictDrop},
		{advertisement, 0, verdictDrop},
		{echo, 255, verdictDrop},
	} {
		t.Run(fmt.Sprintf("type %d, hop limit %d", tc.typ, tc.hopLimit), func(t *testing.T) {
			target := v6.addr("pod").As16()
			frame := testenv.Packet{
				Src: v6.addr("pod2"), Dst: v6.addr("pod"), Proto: unix.IPPROTO_ICMPV6, TTL: tc.hopLimit, Type: tc.typ, Payload: string(target[:]),
			}.MustBuild()
			devices := h.programs.Maps[bpf.MapDevices]
			if err := errors.Join(h.reset(),
				devices.Put(uint32(h.veth.Index), bpf.Device{Owner: owners["pod"], Container: 7, Policy: podPolicy}), h.putPolicy(isolated, nil),
				devices.Put(uint32(h.uplink.Index), bpf.Device{Owner: owners["pod2"], Container: 8})); err != nil {
				t.Fatal(err)
			}
			h.ingress = uint32(h.uplink.Index)
			defer func() { h.ingress = 0 }()
			verdict, _, err := h.runInside(bpf.ProgToContainer, frame)
			testenv.NoError(t, errors.Join(err, checkVerdict(verdict, tc.verdict)))
		})
	}
}

// TestUnknownSenderCountsForHost drops a packet of an unknown container: no entry in drops, because no DEL would remove it.
func TestUnknownSenderCountsForHost(t *testing.T) {
	testenv.Require(t, ingressDevice)
	h := newHost(t)
	eachScene(t, []proto{tcp, udp}, func(t *testing.T, s scene) {
		p := s.packet("remote:80 > pod:4000", false)
		if err := errors.Join(h.reset(), h.putPolicy(isolated, nil)); err != nil {
			t.Fatal(err)
		}
		const loopback = 1 // has no ingress program
		h.ingress, h.tag = loopback, s.tag(p)|tagPending
		defer func() { h.ingress, h.tag = 0, 0 }()
		verdict, _, err := h.runInside(bpf.ProgToContainer, p.MustBuild())
		drops, errDrops := contents[bpf.DropKey, bpf.DropCount](h.programs.Maps[bpf.MapDrops])
		testenv.NoError(t, errors.Join(err, errDrops, checkVerdict(verdict, verdictDrop), h.checkCounters("egress policy", len(p.MustBuild()))))
		if len(drops) > 0 {
			t.Errorf("drops has %v, want none", drops)
		}
	})
}

// TestIngressPolicyOlderConnections admits replies to connections that the pod has opened before it got its policy. The
// first one moves the entry to flow_table, if that has a place.
func TestIngressPolicyOlderConnections(t *testing.T) {
	testenv.Require(t, ingressDevice)
	h := newHostWithOneBucket(t)
	older := h.programs.Maps[bpf.MapAdmittedFlows]
	for _, tc := range []struct {
		name, reply string
		owner       uint64
		edit        func(*testenv.Packet)
		idle        time.Duration // since the policy was set
		used        int           // places in flow_table
		admitted    bool
	}{
		{"a reply", back, owners["pod"], flags(testenv.ACK), time.Minute, 0, true},
		{"a reply, too late", back, owners["pod"], flags(testenv.ACK), 6 * day, 0, false},
		{"a reply, without a place", back, owners["pod"], flags(testenv.ACK), 0, flowWays, true},
		{"a reply to a former pod", back, formerOwner, flags(testenv.ACK), 0, 0, false},
		{"from another port", "pod2:81 > pod:4000", owners["pod"], flags(testenv.ACK), 0, 0, false},
		{"a SYN", back, owners["pod"], flags(syn), 0, 0, false},
	} {
		on := withPorts
		if tc.name == "a SYN" {
			on = []proto{tcp}
		}
		for _, s := range (row{on: on}).scenes() {
			t.Run(fmt.Sprintf("%s %s %s", tc.name, s.name, s.proto), func(t *testing.T) {
				var flows []flow
				for i := range tc.used {
					flows = append(flows, snat(fmt.Sprintf("remote:%d", 100+i), "node:2000", "pod2:5000").established().streaming())
				}
				key, devices := s.egress(forth), h.programs.Maps[bpf.MapDevices]
				testenv.Must(t, errors.Join(h.reset(), h.fill(s, nil, flows), older.Put(key, bpf.AdmittedFlow{Owner: tc.owner, LastSeen: ticks(tc.idle)}),
					devices.Put(uint32(h.veth.Index), bpf.Device{Owner: owners["pod"], Container: 7, Policy: podPolicy}), h.putPolicy(isolated, nil),
					devices.Put(uint32(h.uplink.Index), bpf.Device{Owner: owners["pod2"], Container: owners["pod2"]})))
				h.ingress = uint32(h.uplink.Index)
				defer func() { h.ingress = 0 }()
				p := s.packet(tc.reply, true)
				tc.edit(&p)
				verdict := map[bool]uint32{true: verdictNext, false: verdictDrop}[tc.admitted]
				for range 2 {
					got, _, err := h.runInside(bpf.ProgToContainer, p.MustBuild())
					testenv.NoError(t, errors.Join(err, checkVerdict(got, verdict)))
				}
				var entry bpf.AdmittedFlow
				all, err := h.flows().all()
				testenv.Must(t, err)
				_, moved := all[key]
				if stays := older.Lookup(key, &entry) == nil; moved == stays || moved != (tc.admitted && tc.used == 0) {
					t.Errorf("the flow is in flow_table: %v, in admitted_flows: %v", moved, stays)
				}
			})
		}
	}
}

// TestIngressPolicySCTP admits replies after an INIT of the pod alone, if it is not masqueraded: other packets may belong to an association that
// another pod has opened.
func TestIngressPolicySCTP(t *testing.T) {
	testenv.Require(t, ingressDevice)
	h := newHost(t)
	eachScene(t, []proto{sctp}, func(t *testing.T, s scene) {
		device := bpf.Device{Owner: owners["plain"], Container: 7, Policy: podPolicy}
		devices := h.programs.Maps[bpf.MapDevices]
		testenv.Must(t, errors.Join(h.reset(), h.putPolicy(isolated, nil), devices.Put(uint32(h.veth.Index), device)))
		const sent = "plain:4000 > remote:80"
		for i, edit := range []func(*testenv.Packet){isData, func(*testenv.Packet) {}} {
			p := s.packet(sent, false)
			edit(&p)
			var tag uint32
			var frame []byte
			err := h.Do(func() (err error) {
				_, tag, frame, err = loader.TestRunTagged(h.programs.Programs[bpf.ProgFromContainer], h.packet(bpf.ProgFromContainer, p.MustBuild()))
				return err
			})
			testenv.Must(t, err)
			h.tag, h.ingress = tag, uint32(h.veth.Index)
			_, _, err = h.runInside(bpf.ProgToUplink, frame)
			h.tag, h.ingress = 0, 0
			flows, errFlows := h.flows().all()
			if _, isKnown := flows[s.egress(sent)]; errors.Join(err, errFlows) != nil || len(flows) != i || isKnown != (i == 1) {
				t.Errorf("after packet %d: got flows %v (%v), want one after the INIT", i, flows, errors.Join(err, errFlows))
			}
		}
	})
}
