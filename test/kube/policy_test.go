package kube

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// TestNetworkPolicy runs kube-network-policies beside the agent: it judges the connections of pods on one node and on two.
func TestNetworkPolicy(t *testing.T) {
	const name = "kube-network-policies"
	manifest := testenv.ReadFile(t, binary(t, name+".yaml"))
	_, tag, _ := strings.Cut(string(manifest), "image: ")
	tag, _, _ = strings.Cut(tag, "\n")
	c := newCluster(t)
	c.startKubernetes(image{tag, nil, map[string]string{"bin/netpol": binary(t, name)}, nil})
	c.startAgents()
	c.must("apply", "--filename=manifests/web.yaml", "--filename="+binary(t, name+".yaml"))
	c.rollout("kube-system", name)
	for _, n := range c.nodes {
		n.queuePackets()
	}
	c.rollout("default", "web")
	c.must("apply", "--filename=manifests/policy.yaml")
	c.rollout("default", "client")
	clients, servers := c.podsOf("client"), c.web()
	c.wantConnections(clients, servers, false)
	c.must("label", "pods", "--selector=app=client", "client=yes")
	c.wantConnections(clients, servers, true)
	c.must("label", "pod", clients[0].name, "client-")
	c.wantConnections(clients[:1], servers, false)
	c.wantConnections(clients[1:], servers, true)
	c.must("delete", "networkpolicy", "web")
	c.wantConnections(clients, servers, true)
}

// queuePackets does what kube-network-policies cannot do on a kernel without nft_queue: it queues first packets with the
// target of iptables.
func (n *node) queuePackets() {
	n.t.Helper()
	rule := "add table inet probe; add chain inet probe c; add rule inet probe c queue num 98"
	if n.command(testenv.Context(n.t), "nft", "--check", rule).Run() == nil {
		return
	}
	n.t.Logf("%s: no nft_queue: packets are queued by iptables", n.Name)
	for program, icmp := range map[string]string{"iptables": "icmp", "ip6tables": "ipv6-icmp"} {
		n.run("sh", "-c", program+" --wait -t mangle -A POSTROUTING ! -p "+icmp+" -m conntrack --ctstate NEW "+
			"-m owner ! --socket-exists -j NFQUEUE --queue-num 98 --queue-bypass")
	}
}

// wantConnections wants each client to reach each server, or none.
func (c *cluster) wantConnections(clients, servers []pod, want bool) {
	c.t.Helper()
	for _, from := range clients {
		for _, to := range servers {
			for _, addr := range to.addrs {
				server := netip.AddrPortFrom(addr, podPort)
				c.eventually(fmt.Sprintf("connection of %s to %s of %s: %t", from.node.Name, server, to.node.Name, want), func() error {
					_, err := c.exec(from, "client", fmt.Sprintf("/agnhost connect --timeout=2s %s", server))
					if (err == nil) != want {
						return fmt.Errorf("got %v, want a connection: %t", err, want)
					}
					return nil
				})
			}
		}
	}
}

// TestClusterNetworkPolicy runs the conformance tests of ClusterNetworkPolicy, whose definition is installed while agents run.
// They are built without what asks for SCTP, which the kernel has not.
func TestClusterNetworkPolicy(t *testing.T) {
	c := newCluster(t)
	bash := filepath.Join(c.dir, "bash") // servers of SCTP do not start
	testenv.Must(t, os.WriteFile(bash, []byte("#!/bin/sh\ncase \"$2\" in *porter*) exec /agnhost pause ;; esac\nexec /bin/sh -c \"exec $2\"\n"), 0o755))
	files := map[string]string{"agnhost": binary(t, "agnhost"), "bin/sh": busybox, "bin/bash": bash}
	c.startKubernetes(image{"registry.k8s.io/e2e-test-images/agnhost:2.45", []string{"/agnhost"}, files, []string{"pause"}})
	c.startDNS()
	c.startAgents()
	c.must("apply", "--server-side", "--filename="+binary(t, "clusternetworkpolicies.yaml"))
	c.must("wait", "--for=condition=Established", "crd/clusternetworkpolicies.policy.networking.k8s.io")
	output, err := os.Create(filepath.Join(c.logs(), "conformance.txt"))
	testenv.Must(t, err)
	defer output.Close()
	cmd := c.ns.Command(context.Background(), binary(t, "clusternetworkpolicies.test"), "-test.v", "-test.run=^TestConformance$", "-test.skip=^TestConformance$/SCTP", "-all-features")
	cmd.Env = append(os.Environ(), "KUBECONFIG="+c.admin)
	cmd.Stdout, cmd.Stderr = output, output
	if err := cmd.Run(); err != nil {
		t.Errorf("%v: see %s", err, output.Name())
	}
	lines := testenv.ReadFile(t, output.Name())
	counts, table := map[string]int{}, "| test | result | time |\n|---|---|---|\n"
	for _, test := range regexp.MustCompile(`(?m)^ {4}--- ([A-Z]+): TestConformance/(\w+) \((.*)\)$`).FindAllStringSubmatch(string(lines), -1) {
		counts[test[1]]++
		table += fmt.Sprintf("| %s | %s | %s |\n", test[2], test[1], test[3])
	}
	testenv.Must(t, os.WriteFile(filepath.Join(c.logs(), "conformance.md"), []byte(table), 0o644))
	if t.Log(counts); counts["PASS"] == 0 {
		t.Error("no test has passed")
	}
}
