package policy

import (
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"strings"
	"testing"

	cnitypes "github.com/containernetworking/cni/pkg/types"

	"github.com/ebpfnet/ebpfnet/maps"
)

// TestRefused requires that what cannot be meant is refused, with its place.
func TestRefused(t *testing.T) {
	const one = "expected exactly one of cidr, sameNetwork, network"
	for text, want := range map[string]string{
		`null`:                        `policy null: expected an object`,
		`[]`:                          `policy []: expected an object`,
		`{"ingress": []} x`:           `policy: invalid character 'x' after top-level value`,
		`{"ingres": []}`:              `policy.ingres []: no such key; expected one of ingress, egress, internal, host`,
		`{"Ingress": []}`:             `policy.Ingress []: no such key; expected one of ingress, egress, internal, host`,
		`{"host": 0}`:                 `policy.host 0: expected true or false`,
		`{"internal": null}`:          `policy.internal null: expected true or false`,
		`{"ingress": {}}`:             `policy.ingress {}: expected a list`,
		`{"ingress": null}`:           `policy.ingress null: expected a list`,
		`{"ingress": [null]}`:         `policy.ingress[0] null: expected an object`,
		`{"egress": [{}, 7]}`:         `policy.egress[1] 7: expected an object`,
		`{"egress":[],"egress":[{}]}`: `policy.egress: the key is there twice`,
		`{"ingress": [{"to": []}]}`:   `policy.ingress[0].to []: no such key; expected one of from, ports`,
		`{"egress": [{"from": []}]}`:  `policy.egress[0].from []: no such key; expected one of to, ports`,
		`{"egress": [{"to": {}}]}`:    `policy.egress[0].to {}: expected a list`,
	} {
		wantError(t, text, want)
	}
	for peer, want := range map[string]string{
		`{}`:                                     ": " + one,
		`{"except": []}`:                         ": " + one,
		`{"cidr": "10.0.0.0/8", "network": "a"}`: ": " + one,
		`{"container": "db"}`:                    `.container "db": containers cannot be named yet; ` + one,
		`{"cidr": 10}`:                           `.cidr 10: expected a string`,
		`{"cidr": null}`:                         `.cidr null: expected a string`,
		`{"cidr": "ten"}`:                        `.cidr "ten": expected a network, like 10.0.0.0/8 or fd00::/8`,
		`{"cidr": "10.0.0.0/33"}`:                `.cidr "10.0.0.0/33": expected a network, like 10.0.0.0/8 or fd00::/8`,
		`{"cidr": "10.1.0.0/8"}`:                 `.cidr "10.1.0.0/8": expected 10.0.0.0/8`,
		`{"cidr": "fd00::1/64"}`:                 `.cidr "fd00::1/64": expected fd00::/64`,
		`{"cidr": "192.0.2.53"}`:                 `.cidr "192.0.2.53": expected 192.0.2.53/32`,
		`{"cidr": "fd00::53"}`:                   `.cidr "fd00::53": expected fd00::53/128`,
		`{"cidr": "::ffff:10.0.0.0/104"}`:        `.cidr "::ffff:10.0.0.0/104": expected a network, like 10.0.0.0/8 or fd00::/8`,
		`{"cidr": "::ffff:10.0.0.1"}`:            `.cidr "::ffff:10.0.0.1": expected 10.0.0.1/32`,
		`{"cidr": "10.0.0.0/8", "except": ["10.1.0.0/16", "11.0.0.0/16"]}`: `.except[1]: 11.0.0.0/16 is not a part of 10.0.0.0/8`,
		`{"cidr": "10.0.0.0/8", "except": ["fd00::/64"]}`:                  `.except[0]: fd00::/64 is not a part of 10.0.0.0/8`,
		`{"cidr": "10.0.0.0/8", "except": ["10.0.0.0/8"]}`:                 `.except[0]: 10.0.0.0/8 is not a part of 10.0.0.0/8`,
		`{"cidr": "10.0.0.0/8", "except": ["10.0.0.0/7"]}`:                 `.except[0]: 10.0.0.0/7 is not a part of 10.0.0.0/8`,
		`{"cidr": "10.0.0.0/8", "except": ["10.1.0.1/16"]}`:                `.except[0] "10.1.0.1/16": expected 10.1.0.0/16`,
		`{"sameNetwork": true, "except": []}`:                              `.except: there is no cidr`,
		`{"sameNetwork": false}`:                                           `.sameNetwork false: expected true`,
		`{"network": ""}`:                                                  `.network "": expected the name of a network`,
		`{"network": "a b"}`:                                               `.network "a b": expected the name of a network`,
	} {
		wantError(t, `{"egress": [{}, {"to": [{"sameNetwork": true}, `+peer+`]}]}`, "policy.egress[1].to[1]"+want)
	}
	for ports, want := range map[string]string{
		`{}`:                          `: expected protocol, port, or both`,
		`{"protocol": "icmp"}`:        `.protocol "icmp": expected "tcp", "udp" or "sctp"`,
		`{"protocol": 6}`:             `.protocol 6: expected a string`,
		`{"port": 0}`:                 `.port 0: expected a number from 1 to 65535`,
		`{"port": 65536}`:             `.port 65536: expected a number from 1 to 65535`,
		`{"port": -1}`:                `.port -1: expected a number from 1 to 65535`,
		`{"port": 80.5}`:              `.port 80.5: expected a number from 1 to 65535`,
		`{"port": "http"}`:            `.port "http": expected a number from 1 to 65535`,
		`{"port": null}`:              `.port null: expected a number from 1 to 65535`,
		`{"endPort": 90}`:             `.endPort: there is no port`,
		`{"port": 80, "endPort": 70}`: `.endPort: 70 is below port 80`,
		`{"port": 80, "endPort": 0}`:  `.endPort 0: expected a number from 1 to 65535`,
		`{"port": 80, "endport": 90}`: `.endport 90: no such key; expected one of protocol, port, endPort`,
	} {
		wantError(t, `{"egress": [{}, {"ports": [`+ports+`]}]}`, "policy.egress[1].ports[0]"+want)
	}
	for peer, want := range map[string]string{
		`{"cidr": "10.0.0.0/8"}`: `.cidr: with "internal", a peer can only be {"sameNetwork": true}`,
		`{"network": "pods"}`:    `.network: with "internal", a peer can only be {"sameNetwork": true}`,
	} {
		wantError(t, `{"internal": true, "ingress": [{"from": [`+peer+`]}]}`, "policy.ingress[0].from[0]"+want)
	}
}

// TestTooManyEntries wants a refusal where peers and ports multiply, and where exceptions do, in little time.
func TestTooManyEntries(t *testing.T) {
	const tooMany = "policy.ingress: more than 32768 combinations of a peer and a port, of which a range of ports can have 30"
	each := func(n int, format string) string {
		var all []string
		for i := range n {
			all = append(all, strings.NewReplacer("ADDR", fmt.Sprintf("10.9.%d.%d/32", i>>8, i&255), "PORT", fmt.Sprint(i+1)).Replace(format))
		}
		return strings.Join(all, ",")
	}
	const host, hole, port = `{"cidr": "ADDR"}`, `{"cidr": "0.0.0.0/0", "except": ["ADDR"]}`, `{"port": PORT}`
	for name, tc := range map[string]struct{ rules, want string }{
		"rules":               {each(17_000, `{"from": [{"cidr": "ADDR"}], "ports": [{"port": PORT}]}`), tooMany},
		"fewer rules":         {each(10_000, `{"from": [{"cidr": "ADDR"}], "ports": [{"port": PORT}]}`), ""},
		"rules of any peer":   {each(10_000, `{"ports": [{"port": PORT}]}`), ""},
		"peers":               {`{"from": [` + each(10_000, host) + `], "ports": [` + each(1_000, port) + `]}`, ""},
		"blocks":              {`{"from": [` + each(33_000, host) + `]}`, tooMany},
		"peers of each block": {each(200, `{"from": [`+hole+`]}`), tooMany},
		"holes":               {`{"from": [` + each(10_000, hole) + `]}`, tooMany},
	} {
		t.Run(name, func(t *testing.T) { wantError(t, `{"ingress": [`+tc.rules+`]}`, tc.want) })
	}
}

// wantError wants an error with that text, or none.
func wantError(t *testing.T, text, want string) {
	t.Helper()
	_, err := Parse([]byte(text))
	got := ""
	if err != nil {
		got = codedText(t, err)
	}
	if got != want {
		t.Errorf("%.200s: got %s, want %s", text, got, want)
	}
}

func codedText(t *testing.T, err error) string {
	t.Helper()
	coded, ok := errors.AsType[*cnitypes.Error](err)
	if !ok || coded.Code != cnitypes.ErrInvalidNetworkConfig && coded.Code != cnitypes.ErrUnsupportedField || coded.Msg == "" {
		t.Fatalf("refused by %#v", err)
	}
	return coded.Msg
}

// FuzzPolicy wants a policy to be refused with a code, or rule sets that the maps can hold.
func FuzzPolicy(f *testing.F) {
	for _, text := range []string{
		`{}`, `null`, `{"internal": true, "host": false}`, `{"ingress": [], "egress": [{}]}`,
		`{"ingress": [{"from": [{"cidr": "10.0.0.0/8", "except": ["10.1.0.0/16"]}, {"sameNetwork": true}], "ports": [{"port": 80, "endPort": 90}]}]}`,
		`{"egress": [{"to": [{"network": "backend"}]}, {"to": [{"cidr": "::/0"}], "ports": [{"protocol": "udp"}]}], "host": false}`,
		`{"egress": [{"to": [{"container": "db"}]}]}`, `{"a": 1, "a": `,
	} {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		p, err := Parse(text)
		if err != nil {
			codedText(t, err)
			return
		}
		ingress, egress := p.Compile("pods")
		for _, set := range []*maps.RuleSet{ingress, egress} {
			if set == nil && (p.Internal || !p.Host) {
				t.Error("a direction is not isolated")
			}
			if set != nil && len(set.Rules)+len(set.Blocks) > MaxEntries {
				t.Errorf("%d rules, %d blocks", len(set.Rules), len(set.Blocks))
			}
		}
	})
}

// TestFromIngressPolicy judges peers by the values of ingressPolicy.
func TestFromIngressPolicy(t *testing.T) {
	own, other := maps.Peer{Network: maps.NetworkToken("pods")}, maps.Peer{Network: maps.NetworkToken("others")}
	for policy, want := range map[IngressPolicy]string{
		Open: "[true true true true true]", SameNetwork: "[true true true true false]", Isolated: "[true true true false false]",
	} {
		set := FromIngressPolicy(policy, maps.NetworkToken("pods"))
		var got []bool
		for _, peer := range []maps.Peer{{}, {Host: true}, {Self: true, Network: own.Network}, own, other} {
			_, admitted := set.Verdict(peer, uint8(maps.ICMP), 0)
			got = append(got, admitted)
		}
		if fmt.Sprint(got) != want {
			t.Errorf("%v: outside, host, self, own and other network: got %v, want %s", policy, got, want)
		}
	}
}

// TestNumbers wants verdicts and misses to name rules of the policy.
func TestNumbers(t *testing.T) {
	p, err := Parse([]byte(`{"egress": [{"to": [{"network": "db"}], "ports": [{"port": 5432}]}, {"to": [{"cidr": "192.0.2.53/32"}], "ports": [{"protocol": "udp", "port": 53}]}]}`))
	if err != nil {
		t.Fatal(err)
	}
	ingress, egress := p.Compile("web")
	db, dns := maps.Peer{Network: maps.NetworkToken("db")}, maps.Peer{Addr: netip.MustParseAddr("192.0.2.53")}
	for _, test := range []struct {
		set      *maps.RuleSet
		peer     maps.Peer
		protocol maps.Protocol
		port     uint16
		want     string
	}{
		{ingress, dns, maps.TCP, 1, " true"},
		{egress, db, maps.TCP, 5432, "policy.egress[0] true"},
		{egress, dns, maps.UDP, 53, "policy.egress[1] true"},
		{egress, maps.Peer{Host: true}, maps.TCP, 1, " true"},
		{egress, db, maps.TCP, 22, " false policy.egress[0] port"},
		{egress, dns, maps.TCP, 53, " false policy.egress[1] port"},
		{egress, maps.Peer{}, maps.TCP, 5432, " false policy.egress[0] peer"},
		{egress, maps.Peer{}, maps.UDP, 53, " false policy.egress[1] peer"},
		{egress, maps.Peer{}, maps.ICMP, 0, " false  none"},
	} {
		rule, admitted := test.set.Verdict(test.peer, uint8(test.protocol), test.port)
		got := fmt.Sprint(Places(true).name(rule), " ", admitted)
		if !admitted {
			rule, miss := test.set.NearestMiss(test.peer, uint8(test.protocol), test.port)
			got += " " + Places(true).name(rule) + " " + [...]string{"none", "port", "peer"}[miss]
		}
		if got != test.want {
			t.Errorf("%+v %v %d: got %s, want %s", test.peer, test.protocol, test.port, got, test.want)
		}
	}
}

// TestVerdicts compares compiled rule sets with the meaning of the policy's JSON, for random policies and packets.
func TestVerdicts(t *testing.T) {
	const policies, packets = 2000, 100
	seed := rand.Uint64()
	r := random{rand.New(rand.NewPCG(seed, 0))}
	admitted := 0
	for range policies {
		written := r.policy()
		text, err := json.Marshal(written)
		if err != nil {
			t.Fatal(err)
		}
		p, err := Parse(text)
		if err != nil {
			t.Fatalf("%s: %v", text, err)
		}
		ingress, egress := p.Compile("pods")
		for range packets {
			peer, protocol, port := r.packet()
			for key, set := range map[string]*maps.RuleSet{"ingress": ingress, "egress": egress} {
				_, got := set.Verdict(peer, uint8(protocol), port)
				if want := admits(written, key, peer, protocol, port); got != want {
					t.Fatalf("seed %d, %s of %s: %+v %v %d: got %v, want %v (rule set: %+v)", seed, key, text, peer, protocol, port, got, want, set)
				}
				if got {
					admitted++
				}
				if set == nil {
					continue
				}
				if shown := decompiled(set, key); admits(shown, key, peer, protocol, port) != got {
					t.Fatalf("seed %d, %s of %s, decompiled: %+v: %+v %v %d: want %v", seed, key, text, shown, peer, protocol, port, got)
				}
			}
		}
	}
	if share := float64(admitted) / (2 * policies * packets); share < 0.2 || share > 0.8 {
		t.Errorf("%.2f of the packets are admitted: the cases are not balanced", share)
	}
}

// values are an object of JSON.
type values = map[string]any

// fromOrTo is the key of a rule's peers, by the direction.
var fromOrTo = map[string]string{"ingress": "from", "egress": "to"}

// admits says what a policy means, by its JSON.
func admits(policy values, key string, peer maps.Peer, protocol maps.Protocol, port uint16) bool {
	internal, hostIsAdmitted := policy["internal"] == true, policy["host"] != false
	rules, isIsolated := policy[key].([]values)
	switch {
	case peer.Self, peer.Host && hostIsAdmitted:
		return true
	case !isIsolated && internal:
		return peer.Network == maps.NetworkToken("pods")
	case !isIsolated:
		return !peer.Host
	}
	for _, rule := range rules {
		peers, _ := rule[fromOrTo[key]].([]values)
		isPeer := len(peers) == 0 && (internal && peer.Network == maps.NetworkToken("pods") || !internal && !peer.Host)
		for _, p := range peers {
			isPeer = isPeer || isPeerOf(p, peer)
		}
		ports, _ := rule["ports"].([]values)
		isPort := len(ports) == 0
		for _, p := range ports {
			isPort = isPort || isPortOf(p, protocol, int(port))
		}
		if isPeer && isPort {
			return true
		}
	}
	return false
}

func isPeerOf(written values, peer maps.Peer) bool {
	if written["sameNetwork"] == true {
		return peer.Network == maps.NetworkToken("pods")
	}
	if name, ok := written["network"].(string); ok {
		return peer.Network == maps.NetworkToken(name)
	}
	for _, except := range written["except"].([]string) {
		if netip.MustParsePrefix(except).Contains(peer.Addr) {
			return false
		}
	}
	return netip.MustParsePrefix(written["cidr"].(string)).Contains(peer.Addr)
}

func isPortOf(written values, protocol maps.Protocol, port int) bool {
	name, ok := written["protocol"].(string)
	if !ok {
		name = "tcp"
	}
	first, ok := written["port"].(int)
	last, isRange := written["endPort"].(int)
	if !isRange {
		last = first
	}
	return strings.ToLower(name) == protocol.String() && (!ok || first <= port && port <= last)
}

// random generates policies whose parts overlap.
type random struct{ *rand.Rand }

func (r random) policy() values {
	policy := values{}
	if r.IntN(4) == 0 {
		policy["internal"] = true
	}
	if r.IntN(3) == 0 {
		policy["host"] = r.IntN(4) == 0
	}
	for _, key := range []string{"ingress", "egress"} { // in one order, so that a seed repeats a run
		if r.IntN(5) == 0 {
			continue
		}
		rules := []values{}
		for range r.IntN(4) {
			rule := values{}
			if r.IntN(6) > 0 {
				rule[fromOrTo[key]] = some(r, 4, func() values { return r.peer(policy["internal"] == true) })
			}
			if r.IntN(3) > 0 {
				rule["ports"] = some(r, 3, r.ports)
			}
			rules = append(rules, rule)
		}
		policy[key] = rules
	}
	return policy
}

func some[T any](r random, most int, one func() T) []T {
	all := make([]T, r.IntN(most))
	for i := range all {
		all[i] = one()
	}
	return all
}

func (r random) peer(internal bool) values {
	switch kind := r.IntN(6); {
	case kind == 0 || internal:
		return values{"sameNetwork": true}
	case kind == 1:
		return values{"network": []string{"pods", "backend"}[r.IntN(2)]}
	}
	cidr, excepts := r.prefix(), []string{}
	for range 10 {
		if except := r.prefix(); contains(cidr, except) && cidr != except {
			excepts = append(excepts, except.String())
		}
	}
	return values{"cidr": cidr.String(), "except": excepts}
}

// prefix returns a prefix that is short, or differs from others in the last bits.
func (r random) prefix() netip.Prefix {
	for {
		addr := r.addr()
		bits := []int{0, 8, 95, 96, addr.BitLen() - 4, addr.BitLen() - 3, addr.BitLen() - 2, addr.BitLen() - 1, addr.BitLen()}[r.IntN(9)]
		if prefix, err := addr.Prefix(bits); err == nil {
			return prefix
		}
	}
}

func (r random) addr() netip.Addr {
	addr := netip.AddrFrom4([4]byte{10, 0, 0, byte(r.IntN(16))})
	if r.IntN(2) == 0 {
		addr = netip.AddrFrom16([16]byte{15: byte(r.IntN(16))})
	}
	return addr
}

func (r random) ports() values {
	ports := values{"protocol": []string{"tcp", "UDP", "sctp"}[r.IntN(3)]}
	if r.IntN(4) == 0 {
		return ports
	}
	first := 1 + r.IntN(40)
	ports["port"] = first
	if r.IntN(2) == 0 {
		ports["endPort"] = first + r.IntN(30)
	}
	if r.IntN(3) == 0 {
		delete(ports, "protocol")
	}
	return ports
}

func (r random) packet() (peer maps.Peer, protocol maps.Protocol, port uint16) {
	peer.Addr = r.addr()
	switch r.IntN(8) {
	case 0:
		peer.Host = true
	case 1:
		peer.Self, peer.Network = true, maps.NetworkToken("pods")
	case 2, 3:
		peer.Network = maps.NetworkToken("pods")
	case 4:
		peer.Network = maps.NetworkToken("backend")
	}
	protocol = []maps.Protocol{maps.TCP, maps.UDP, maps.SCTP, maps.ICMP}[r.IntN(4)]
	if protocol != maps.ICMP {
		port = uint16(r.IntN(80))
	}
	return peer, protocol, port
}
