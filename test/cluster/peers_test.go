package cluster

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// TestDoctorPeers has `ebpfnetctl doctor --peers` find what users of tunnels suffer, by name, and does what it recommends.
func TestDoctorPeers(t *testing.T) {
	c := newCluster(t)
	c.runCommands()
	c.examineFirewalls()
	c.examineSmallLink()
}

// runCommands runs those of the agent's README on a node. doctor finds no conflist where a runtime would look.
func (c *cluster) runCommands() {
	c.Helper()
	const fault = 3

	path := "PATH=" + filepath.Dir(testenv.Build(c, "./cmd/ebpfnetctl")) + ":" + os.Getenv("PATH")
	for _, block := range testenv.Commands(c, "../../cmd/ebpfnet-node/README.md") {
		for line := range strings.Lines(block) {
			cmd := c.nodes[0].Command(testenv.Context(c), "sh", "-c", line)
			cmd.Env = append(os.Environ(), path)
			output, err := cmd.CombinedOutput()
			if code := cmd.ProcessState.ExitCode(); len(output) == 0 || code != 0 && code != fault {
				c.Errorf("%s: got %v: %s", line, err, output)
			}
		}
	}
}

const opens = "let UDP port 4789 in, on both nodes"

const allWell = "peers good: node-2 (192.0.2.2) answers by the tunnel\npeers good: node-3 (198.51.100.3) answers by the tunnel"

// examineFirewalls has the tunnel's port closed in two ways, and a node that is off.
func (c *cluster) examineFirewalls() {
	c.Helper()
	first, third := c.nodes[0], c.nodes[2]
	first.wantPeers("all is well", allWell)
	absent := nodeObjectOf(4)
	absent.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "198.51.100.4"}}
	c.api.Put(absent)
	first.awaitRoute("a node that is off", 4, "dst 198.51.100.4 ")
	for i, fault := range []struct {
		at                *node
		chain, rule, want string
	}{
		{third, "input", "drop", "peers wrong: node-3 (198.51.100.3) answers, but not by the tunnel: a firewall drops UDP port 4789\n" +
			"peers wrong: node-4 (198.51.100.4) answers neither by the tunnel nor itself"},
		{third, "input", "reject", "peers wrong: node-3 (198.51.100.3) answers, but not by the tunnel"},
	} {
		what, cure := fault.chain+" of "+fault.at.Name+": "+fault.rule, "nft insert rule inet filter "+fault.chain+" udp dport 4789 accept"
		for _, command := range []string{
			"nft add table inet filter", fmt.Sprintf("nft 'add chain inet filter %s { type filter hook %[1]s priority 0; }'", fault.chain),
			fmt.Sprintf("nft add rule inet filter %s udp dport 4789 %s", fault.chain, fault.rule),
		} {
			c.run(fault.at.Namespace, command)
		}
		if remedy := first.wantPeers(what, fault.want); !strings.Contains(remedy, opens) {
			c.Errorf("%s: got remedy %q, want %q in it", what, remedy, opens)
		}
		c.run(fault.at.Namespace, cure)
		if err := testenv.Ping(testenv.Context(c), first.pod.Namespace, testenv.IPv4.Pod(third.pod)); err != nil {
			c.Errorf("%s, then accepted: %v", what, err)
		}
		c.run(fault.at.Namespace, "nft delete table inet filter")
		if i == 0 {
			c.api.Remove(absent.Name)
			first.awaitRoute("a node removed", 4, "")
		}
	}
	first.wantPeers("all is well again", allWell)
}

// examineSmallLink has a link in the middle that takes less, and nobody who says so.
func (c *cluster) examineSmallLink() {
	c.Helper()
	first := c.nodes[0]
	c.nft("add table inet silent", "add chain inet silent output { type filter hook output priority 0; }",
		"add rule inet silent output icmp type destination-unreachable drop", "add rule inet silent output icmpv6 type packet-too-big drop")
	for _, device := range []string{"link0", "link1"} {
		c.ip(c.router, "link", "set", device, "mtu", "1400")
	}
	first.wantPeers("a small link", "peers good: node-2 (192.0.2.2)\npeers warning: a link to node-3 (198.51.100.3) carries no packets of 1500 bytes, so those in the tunnel are divided")
	c.nft("add chain inet silent forward { type filter hook forward priority 0; }", "add rule inet silent forward oifname link1 ip length > 1400 drop")
	remedy := first.wantPeers("a small link, and nothing is divided",
		"peers good: node-2 (192.0.2.2)\npeers wrong: node-3 (198.51.100.3) answers short packets, but none of 1500 bytes: connections hang")
	if !strings.Contains(remedy, "tracepath 198.51.100.3") || !strings.Contains(remedy, "smaller --mtu") {
		c.Errorf("a small link: got remedy %q, want how to find the link", remedy)
	}
	c.restartAgents("--mtu", "1400")
	first.wantPeers("a small link, with its MTU", allWell)
}

// restartAgents starts all agents again, with further options.
func (c *cluster) restartAgents(options ...string) {
	c.Helper()
	for _, n := range c.nodes {
		n.agent.kill()
		n.options = append(n.options, options...)
		n.startAgent()
		n.awaitReady()
	}
}

// run runs a command line.
func (c *cluster) run(ns *testenv.Namespace, line string) {
	c.Helper()
	if _, err := ns.Run(testenv.Context(c), "sh", "-c", line); err != nil {
		c.Fatalf("%s: %v", line, err)
	}
}

// finding is one of `ebpfnetctl doctor`.
type finding struct{ Check, State, What, Remedy string }

// doctor runs `ebpfnetctl doctor` on a node.
func (n *node) doctor(what string, args ...string) (found []finding, code int) {
	n.t.Helper()
	var stdout, stderr bytes.Buffer
	args = append([]string{"doctor", "--conf-dir", n.dir, "--bin-dir", n.binDir(), "-o", "json"}, args...)
	cmd := n.Command(testenv.Context(n.t), testenv.Build(n.t, "./cmd/ebpfnetctl"), args...)
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err := cmd.Run()
	if json.Unmarshal(stdout.Bytes(), &found) != nil {
		n.t.Fatalf("%s: got %v, %s and %s, want findings", what, err, &stderr, &stdout)
	}
	return found, cmd.ProcessState.ExitCode()
}

// wantPeers wants `ebpfnetctl doctor --peers` to find lines that begin so, and no others that are wrong or warn. It returns
// what the first one of these says to do.
func (n *node) wantPeers(what, want string) (remedy string) {
	n.t.Helper()
	found, code := n.doctor(what, "--peers")
	var got []string
	for _, f := range found {
		if f.Check != "peers" {
			continue
		}
		got = append(got, fmt.Sprintf("%s %s: %s", f.Check, f.State, f.What))
		if remedy == "" {
			remedy = f.Remedy
		}
	}
	isWrong := false
	for line := range strings.Lines(want) {
		line = strings.TrimSpace(line)
		isWrong = isWrong || strings.HasPrefix(line, "peers wrong")
		if !slices.ContainsFunc(got, func(g string) bool { return strings.HasPrefix(g, line) }) {
			n.t.Errorf("%s: got\n%s\nwant %s", what, strings.Join(got, "\n"), line)
		}
	}
	for _, line := range got {
		if isFault := !strings.HasPrefix(line, "peers good"); isFault && !strings.Contains(want, line[:min(len(line), 30)]) {
			n.t.Errorf("%s: got also %s", what, line)
		}
	}
	if isWrong && code != 3 {
		n.t.Errorf("%s: got exit code %d, want 3", what, code)
	}
	return remedy
}
