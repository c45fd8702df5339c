package prog

import (
	"cmp"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"net"
	"os/exec"
	"slices"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/policy"
	"github.com/ebpfnet/ebpfnet/test/policies"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

var (
	caseCount = flag.Int("cases", 2000, "random cases of TestJudgedPolicies")
	caseSeed  = flag.Uint64("seed", rand.Uint64(), "of these cases")
)

// TestJudgedPolicies opens connections under random policies. The programs admit those that two evaluators of
// NetworkPolicy admit, which others wrote (../judges), and the replies of these. Then the policies change, and the
// same connections go on.
func TestJudgedPolicies(t *testing.T) {
	testenv.Require(t, ingressDevice)
	t.Logf("-seed %d", *caseSeed)
	random, judge, j := rand.New(rand.NewPCG(*caseSeed, 0)), startJudges(t), newJudged(t)
	var former []policies.Connection
	err := j.Do(func() error {
		for round := range *caseCount {
			c := j.population.Random(random)
			opened := c.Connections
			j.tagged = random.IntN(8) == 0
			c.Connections = slices.Concat(former, opened)
			verdicts, err := judge(c)
			if err == nil && round%100 == 0 { // flow_table has room for the connections of so many
				err = j.flows().clear()
			}
			if err == nil {
				err = j.prepare(c, pick(random, bpf.FastPathNever, bpf.FastPathEstablished, bpf.FastPathAlways))
			}
			for i := 0; i < len(c.Connections) && err == nil; i++ {
				j.serial = uint16(round*len(opened) + i - len(former))
				j.fragmented = random.IntN(4) == 0
				err = j.open(c.Connections[i], verdicts[i])
			}
			if err != nil {
				text, _ := json.Marshal(c.Policies)
				return fmt.Errorf("round %d: %w\nthe policies are %s", round, err, text)
			}
			former = opened
		}
		return nil
	})
	testenv.Must(t, err)
	t.Logf("connections by verdict: %v; %d packets have bypassed the stack, and %d replies have arrived; flows by kind: %v", j.opened, j.bypassed, j.replied, j.paid)
	for _, verdict := range []policies.Verdict{{}, {Egress: true}, {Ingress: true}, {Egress: true, Ingress: true}} {
		if j.opened[verdict] < *caseCount/50 {
			t.Errorf("only %d connections have the verdict %+v", j.opened[verdict], verdict)
		}
	}
	if j.paid[bpf.FlowPolicy] < *caseCount/10 || j.paid[bpf.FlowPair] < *caseCount/10 {
		t.Errorf("too few flows to check who pays: %v", j.paid)
	}
	if j.bypassed < *caseCount/10 || j.replied < *caseCount/50 {
		t.Error("too few packets have bypassed the stack, or too few replies have arrived")
	}
}

// startJudges starts the judges, and returns a function that asks them about a case.
func startJudges(t *testing.T) func(policies.Case) ([]policies.Verdict, error) {
	t.Helper()
	cmd := exec.Command(testenv.Build(t, "./test/judges"))
	stdin, errIn := cmd.StdinPipe()
	stdout, errOut := cmd.StdoutPipe()
	cmd.Stderr = t.Output()
	testenv.Must(t, errors.Join(errIn, errOut, cmd.Start()))
	t.Cleanup(func() {
		if err := errors.Join(stdin.Close(), cmd.Wait()); err != nil {
			t.Errorf("judges: %v", err)
		}
	})
	asked, answered := json.NewEncoder(stdin), json.NewDecoder(stdout)
	return func(c policies.Case) (verdicts []policies.Verdict, err error) {
		err = errors.Join(asked.Encode(c), answered.Decode(&verdicts))
		return verdicts, err
	}
}

// judged is a host whose containers have a veth each.
type judged struct {
	*host
	population policies.Population
	veths      map[string]*netlink.LinkAttrs
	ruleSets   map[string][2]*maps.RuleSet // of containers: ingress and egress
	generation uint32                      // of the policies
	serial     uint16                      // of the connection
	fragmented bool                        // its packets are fragments
	tagged     bool                        // its packets keep their tags, which takes longer, and it has a reply

	opened            map[policies.Verdict]int
	bypassed, replied int
	paid              map[bpf.FlowKind]int
}

// networksOf are the containers' networks.
var networksOf = map[string]string{"pod": "front", "pod2": "front", "plain": "back", "pod3": "batch"}

func newJudged(t *testing.T) *judged {
	t.Helper()
	j := &judged{host: newHost(t), veths: map[string]*netlink.LinkAttrs{}, opened: map[policies.Verdict]int{}, paid: map[bpf.FlowKind]int{}}
	testenv.Must(t, j.reset())
	for _, pod := range []string{"pod", "pod2", "plain", "pod3"} {
		veth, err := j.addVeth("veth-" + pod)
		testenv.Must(t, err)
		j.veths[pod] = veth
		for _, f := range addressings {
			j.population = append(j.population, policies.End{Name: pod, Network: networksOf[pod], Addr: f.addr(pod)})
			testenv.Must(t, j.Netlink().RouteReplace(&netlink.Route{
				Dst: alone(f.addr(pod)), LinkIndex: veth.Index, Scope: netlink.SCOPE_LINK,
			}))
		}
		testenv.Must(t, j.programs.Maps[bpf.MapDevices].Put(uint32(veth.Index), bpf.Device{
			Owner: owners[pod], Network: token(networksOf[pod]), Container: owners[pod], Policy: j.index(pod),
			Addr4: v4.wire(pod), Addr6: v6.wire(pod),
		}))
	}
	for _, outside := range []string{"remote", "remote2", "router"} {
		for _, f := range addressings {
			j.population = append(j.population, policies.End{Name: outside, Addr: f.addr(outside)})
		}
	}
	return j
}

func token(network string) uint32 { return uint32(maps.NetworkToken(network)) }

// index is that of a container's policy. All containers have one.
func (j *judged) index(pod string) uint16 { return uint16(owners[pod] & 0xff) }

// prepare gives the containers their policies and the fast path. What former policies have admitted is void.
func (j *judged) prepare(c policies.Case, path bpf.FastPath) error {
	all, rules, blocks := j.programs.Maps[bpf.MapPolicies], j.programs.Maps[bpf.MapPolicyRules], j.programs.Maps[bpf.MapPolicyBlocks]
	errs := []error{
		empty[bpf.RuleKey, bpf.Rule](rules), empty[bpf.PrefixKey, uint32](blocks),
		all.Put(uint32(0), allChecks),
	}
	j.generation++
	j.ruleSets = map[string][2]*maps.RuleSet{}
	for pod := range owners {
		if chosen, ok := c.Policies[pod]; ok {
			text, err := json.Marshal(chosen)
			parsed, errParse := policy.Parse(text)
			if err := errors.Join(err, errParse); err != nil {
				return err
			}
			ingress, egress := parsed.Compile(networksOf[pod])
			j.ruleSets[pod] = [2]*maps.RuleSet{ingress, egress}
		}
		var refs [2]maps.RuleSetRef
		for i, set := range j.ruleSets[pod] {
			if set != nil {
				id := 2*uint32(j.index(pod)) + uint32(i)
				refs[i] = set.Ref(id)
				errs = append(errs, set.Write(id, rules, blocks))
			}
		}
		errs = append(errs, all.Put(uint32(j.index(pod)), bpf.Policy{
			Owner: owners[pod], RuleSets: uint64(refs[1])<<32 | uint64(refs[0]), Generation: j.generation,
		}))
		for _, f := range addressings {
			errs = append(errs, j.programs.Maps[bpf.MapEndpoints].Put(f.wire(pod), bpf.Endpoint{
				Owner: owners[pod], Network: token(networksOf[pod]), Container: owners[pod], Ifindex: uint32(j.veths[pod].Index),
				Gateway: f.wire("podgw"), Mac: podMAC, HostMac: hostMAC, Mtu: podMTU, FastPath: path,
			}))
		}
	}
	return errors.Join(errs...)
}

// open sends the first packet of a connection twice, and the reply if it arrives.
func (j *judged) open(c policies.Connection, want policies.Verdict) error {
	j.opened[want]++
	s := scene{addressing: v4, proto: map[string]proto{"tcp": tcp, "udp": udp, "sctp": sctp, "icmp": echo}[c.Protocol]}
	if c.From.Addr.Is6() {
		s.addressing = v6
	}
	_, egress := j.ruleSets[c.From.Name][1].Verdict(peer(c.To), s.number(), c.Port)
	_, ingress := j.ruleSets[c.To.Name][0].Verdict(peer(c.From), s.number(), c.Port)
	if explained := (policies.Verdict{Egress: egress, Ingress: ingress}); explained != want {
		return fmt.Errorf("%+v: the rule sets admit %+v, the judges %+v", c, explained, want)
	}
	from, to := fmt.Sprintf("%s:%d", c.From.Name, 10000+j.serial%10000), fmt.Sprintf("%s:%d", c.To.Name, c.Port)
	packet := s.packet(from+" > "+to, false)
	for range 2 {
		if err := j.send(c.From, c.To, packet, want); err != nil {
			return fmt.Errorf("%+v: %w", c, err)
		}
	}
	if err := j.checkPayer(cmp.Or(owners[c.From.Name], owners[c.To.Name]), s.egress(from+" > "+to), s.egress(to+" > "+from)); err != nil {
		return fmt.Errorf("%+v: %w", c, err)
	}
	if !j.tagged || !want.Egress || !want.Ingress {
		return nil
	}
	j.replied++
	if err := j.send(c.To, c.From, replyTo(packet), want); err != nil {
		return fmt.Errorf("the reply of %+v: %w", c, err)
	}
	return nil
}

// checkPayer wants the flows of a connection's sides, and of both, to count against the container that has opened it, or whom the
// outside has called.
func (j *judged) checkPayer(payer uint64, sides ...bpf.FlowKey) error {
	for _, key := range sides {
		for _, key.Kind = range []bpf.FlowKind{bpf.FlowPolicy, bpf.FlowPair} {
			var flow bpf.Flow
			err := j.flows().Lookup(key, &flow)
			if err == nil && flow.Payer != payer {
				return fmt.Errorf("flow %+v counts against %x, want %x", key, flow.Payer, payer)
			}
			if err == nil {
				j.paid[key.Kind]++
			}
		}
	}
	return nil
}

func peer(end policies.End) maps.Peer {
	peer := maps.Peer{Addr: end.Addr}
	if end.Network != "" {
		peer.Network = maps.NetworkToken(end.Network)
	}
	return peer
}

// send sends a packet, and compares its fate.
func (j *judged) send(from, to policies.End, packet testenv.Packet, want policies.Verdict) (err error) {
	frames := [][]byte{packet.MustBuild()}
	if j.fragmented {
		packet.Payload += fmt.Sprintf("%70d", j.serial)
		if frames, err = testenv.Fragment(packet.MustBuild(), fragmentSize, uint32(j.serial)); err != nil {
			return err
		}
	}
	for i, frame := range frames {
		before, errBefore := j.refused()
		arrives, err := j.travel(from, to, frame)
		after, errAfter := j.refused()
		if err := errors.Join(errBefore, err, errAfter); err != nil {
			return err
		}
		got := policies.Verdict{Egress: after.egress == before.egress, Ingress: after.ingress == before.ingress}
		if !want.Egress {
			got.Ingress = want.Ingress // what does not leave is not judged there
		}
		// A later fragment of a refused packet may have no known ports, which is another reason.
		if arrives != (want.Egress && want.Ingress) || got != want && i == 0 {
			return fmt.Errorf("frame %d of %d arrives: %t; the programs admit %+v, the judges %+v", i, len(frames), arrives, got, want)
		}
	}
	return nil
}

// refused are packets dropped by policies.
type refused struct{ egress, ingress uint64 }

func (j *judged) refused() (r refused, err error) {
	egress, errEgress := j.dropped(bpf.ReasonPolicyEgress)
	ingress, errIngress := j.dropped(bpf.ReasonPolicyIngress)
	return refused{egress.Packets, ingress.Packets}, errors.Join(errEgress, errIngress)
}

// travel runs the programs on the way of a frame, and reports whether it arrives.
func (j *judged) travel(from, to policies.End, frame []byte) (arrives bool, err error) {
	first, last, in, out := bpf.ProgFromUplink, bpf.ProgToUplink, j.uplink, j.uplink
	if from.Network != "" {
		first, in = bpf.ProgFromContainer, j.veths[from.Name]
	}
	if to.Network != "" {
		last, out = bpf.ProgToContainer, j.veths[to.Name]
	}
	verdict, tag, frame, err := j.hook(first, loader.Packet{Frame: frame, Device: in.Index}, in.HardwareAddr)
	if err != nil || verdict == verdictDrop {
		return false, err
	}
	if verdict == verdictRedirect {
		j.bypassed++
		if to.Network != "" {
			return true, nil // past the device's programs
		}
	}
	verdict, _, _, err = j.hook(last, loader.Packet{Frame: frame, Device: out.Index, Ingress: in.Index, Tag: tag}, out.HardwareAddr)
	return verdict != verdictDrop, err
}

// hook runs a program on a packet for the address. It returns the tag only if packets keep theirs.
func (j *judged) hook(program string, p loader.Packet, mac net.HardwareAddr) (verdict, tag uint32, frame []byte, err error) {
	copy(p.Frame, mac)
	if j.tagged {
		verdict, tag, frame, err = loader.TestRunTagged(j.programs.Programs[program], p)
	} else {
		verdict, frame, err = loader.TestRun(j.programs.Programs[program], p)
	}
	if err != nil {
		err = fmt.Errorf("%s: %w", program, err)
	}
	return verdict, tag, frame, err
}
