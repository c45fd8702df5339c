package main

import (
	"context"
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// setup is a variant at a scale: a node, an outside host and pods, in their own namespaces.
type setup struct {
	plannedSetup
	topology *testenv.Topology
	runtime  *testenv.Runtime // nil without plugins
	client   *testenv.Pod     // sends requests
	server   *testenv.Pod     // replies, and has a host port
	others   *testenv.Pod     // has no part in what is measured; nil if nobody needs it
	// attachments are for ADD and DEL; nil if those are not measured.
	attachments []attachment
}

const (
	serverPort = 5000 // of every server
	hostPort   = 8080 // forwarded to the server's pod
	// servicePort is the port of services.
	servicePort = 80
	// The first host ports of idle pods and of attachments. No client chooses such a port.
	idlePorts   = 10000
	attachPorts = 9000
)

// newSetup makes the namespaces and attaches the pods. The server with the measured host port comes
// last, so that an implementation that searches linearly finds it after all others.
func newSetup(m *testenv.Machine, p plannedSetup) (*setup, error) {
	s := &setup{plannedSetup: p, topology: testenv.NewTopology(m)}
	if len(p.plugins) == 0 {
		return s, s.finishBare(m)
	}
	if p.uplink.before != nil {
		if err := p.uplink.before(s); err != nil {
			return nil, err
		}
	}
	if p.bigTCP {
		if err := s.raiseUplink(); err != nil {
			return nil, err
		}
	}
	attachPods := s.attachPods
	if p.join != nil {
		attachPods = s.attachToNodes
	}
	if err := attachPods(m); err != nil {
		return nil, err
	}
	if p.uplink.after != nil {
		if err := p.uplink.after(s); err != nil {
			return nil, err
		}
	}
	return s, errors.Join(s.addRules(), s.shortenTimeouts(), s.waitForTraffic(), s.openFlows(), s.checkFlows())
}

// attachPods attaches both pods to one node.
func (s *setup) attachPods(m *testenv.Machine) (err error) {
	if s.runtime, err = s.newRuntime(m, s.topology.Node, podSubnets); err != nil {
		return err
	}
	if s.routed {
		for _, subnet := range podSubnets {
			s.topology.RouteTo(m, subnet)
		}
	}
	s.client = s.runtime.NewPod(m, "client")
	if err := attach(s.client); err != nil { // first, because a variant may be refused
		return err
	}
	if err := s.addIdle(m); err != nil {
		return err
	}
	s.server = s.runtime.NewPod(m, "server")
	if !s.routed {
		s.server.Conf.CapabilityArgs = mapPorts(hostPort, 1)
	}
	return attach(s.server)
}

func (s *setup) newRuntime(m *testenv.Machine, node *testenv.Namespace, subnets [2]netip.Prefix) (*testenv.Runtime, error) {
	conflist, err := s.conflist(subnets, m.TempDir())
	if err != nil {
		return nil, err
	}
	return testenv.NewRuntime(m, node, conflist, s.pluginDir(m)), nil
}

// pluginDir builds the variant's plugins and returns their directory.
func (v variant) pluginDir(m *testenv.Machine) string {
	const references = "github.com/containernetworking/plugins/plugins/"

	packages := map[string]string{
		"ebpfnet": "./cmd/ebpfnet", "bridge": references + "main/bridge", "ptp": references + "main/ptp", "portmap": references + "meta/portmap",
	}
	dir := filepath.Dir(testenv.Build(m, references+"ipam/host-local"))
	for _, p := range v.plugins {
		testenv.Build(m, packages[p["type"].(string)])
	}
	return dir
}

func attach(pod *testenv.Pod) error { return within(pod.Add) }

// finishBare uses node and outside as pods: the two ends of a veth.
func (s *setup) finishBare(m *testenv.Machine) error {
	switch {
	case s.bigTCP:
		return s.raiseUplink()
	case s.redirect:
		return errors.Join(s.setUpRedirect(m), s.waitForTraffic())
	}
	return nil
}

// waitForTraffic waits until all paths carry traffic: a plugin may return before its devices do.
func (s *setup) waitForTraffic() error {
	ctx, cancel := context.WithTimeout(context.Background(), testenv.Timeout)
	defer cancel()
	for _, t := range new(selection).cells() {
		t, ok := t.between(s)
		if !ok || t.workload.name != "tcp-rr" {
			continue
		}
		err := testenv.Wait(ctx, "a reply, "+t.path.title+", "+t.family.Name, func() error {
			_, err := t.workload.run(t.ends, time.Millisecond)
			return err
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// shortenTimeouts makes conntrack, if it is loaded, drop closed connections before its table fills up.
func (s *setup) shortenTimeouts() error {
	for _, state := range []string{"time_wait", "close", "last_ack"} {
		name := "net/netfilter/nf_conntrack_tcp_timeout_" + state
		for _, ns := range []*testenv.Namespace{s.topology.Node, s.topology.Outside} { // both may be nodes
			if err := ns.SetSysctl(name, "5"); err != nil && !errors.Is(err, os.ErrNotExist) {
				return err
			}
		}
	}
	return nil
}

// mapping is an element of the portMappings capability.
type mapping struct {
	HostPort      int    `json:"hostPort"`
	ContainerPort int    `json:"containerPort"`
	Protocol      string `json:"protocol"`
}

// mapPorts maps count host ports from first on, each for TCP and UDP.
func mapPorts(first, count int) map[string]any {
	var mappings []mapping
	for i := range count {
		for _, protocol := range []string{"tcp", "udp"} {
			mappings = append(mappings, mapping{HostPort: first + i, ContainerPort: serverPort, Protocol: protocol})
		}
	}
	return map[string]any{"portMappings": mappings}
}
