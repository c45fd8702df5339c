package main

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"testing"

	"github.com/ebpfnet/ebpfnet/test/policies"
)

var (
	caseCount = flag.Int("cases", 2000, "random cases to judge")
	seed      = flag.Uint64("seed", rand.Uint64(), "of the random cases")
)

var population = func() policies.Population {
	var all policies.Population
	for _, end := range []struct{ name, network, addr4, addr6 string }{
		{"web", "front", "10.4.0.2", "fd00:10:4::2"},
		{"cache", "front", "10.4.0.3", "fd00:10:4::3"},
		{"db", "back", "10.4.0.4", "fd00:10:4::4"},
		{"job", "batch", "10.5.0.5", "fd00:10:5::5"},
		{"near", "", "10.4.0.6", "fd00:10:4::6"},
		{"far", "", "192.0.2.53", "2001:db8::53"},
		{"nat64", "", "255.255.255.254", "64:ff9b::c000:235"},
	} {
		for _, addr := range []string{end.addr4, end.addr6} {
			all = append(all, policies.End{Name: end.name, Network: end.network, Addr: netip.MustParseAddr(addr)})
		}
	}
	return all
}()

// TestJudges has the judges agree on random cases. What they are known to get wrong must occur.
func TestJudges(t *testing.T) {
	random := rand.New(rand.NewPCG(*seed, 0))
	t.Logf("-seed %d", *seed)
	occurs := make([]int, len(mistakes))
	for range *caseCount {
		c := population.Random(random)
		verdicts, err := agreed(c)
		if err != nil {
			t.Fatal(err)
		}
		for i, mistake := range mistakes {
			for n, vote := range judges[mistake.judge](c) {
				if mistake.about(c.Policies[c.Connections[n].To.Name].Ingress) && vote.Ingress != verdicts[n].Ingress {
					occurs[i]++
				}
			}
		}
	}
	for i, mistake := range mistakes {
		if t.Logf("%s, %d times: %s", mistake.judge, occurs[i], mistake.reason); occurs[i] == 0 {
			t.Error("this mistake is listed, but does not occur")
		}
	}
}

// TestRun judges one connection as a process does.
func TestRun(t *testing.T) {
	c := policies.Case{
		Policies: map[string]policies.Policy{"web": {Egress: []policies.Rule{{To: []policies.Peer{{SameNetwork: true}}}}}},
		Connections: []policies.Connection{
			{From: population[0], To: population[2], Protocol: "icmp"},
			{From: population[0], To: population[4], Protocol: "tcp", Port: 80},
			{From: population[4], To: population[0], Protocol: "tcp", Port: 80},
		},
	}
	text, err := json.Marshal(c)
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	if err := run(bytes.NewReader(append(text, text...)), &out); err != nil {
		t.Fatal(err)
	}
	const line = `[{"egress":true,"ingress":true},{"egress":false,"ingress":true},{"egress":true,"ingress":true}]`
	if want := fmt.Sprintf("%s\n%s\n", line, line); out.String() != want {
		t.Errorf("got %s, want %s", &out, want)
	}
}
