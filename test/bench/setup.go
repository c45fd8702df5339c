package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// setup is a variant at a scale, in namespaces of its own: a node, an outside, and pods.
type setup struct {
	variant
	scale
	topology *testenv.Topology
	runtime  *testenv.Runtime // nil without plugins
	client   *testenv.Pod     // the pod that asks others
	server   *testenv.Pod     // the pod that is asked, with a host port
	// attachments are for ADD and DEL; none where that is not measured.
	attachments []attachment
}

const (
	serverPort = 5000 // of every server
	hostPort   = 8080 // leads to the server's pod
	// The host ports of crowds and of attachments begin with these. No client chooses such a port.
	crowdPorts  = 10000
	attachPorts = 9000
)

func (s *setup) name() string { return scaledName(s.variant.name, s.scale) }

// newSetup makes the namespaces and attaches the pods. The one with the host port that is measured
// comes last: what looks at one after the other finds it after all others.
func newSetup(m *testenv.Machine, v variant, scale scale) (*setup, error) {
	s := &setup{variant: v, scale: scale, topology: testenv.NewTopology(m)}
	if len(v.plugins) == 0 {
		return s, s.finishBare(m)
	}
	conflist, err := v.conflist(m.TempDir())
	if err != nil {
		return nil, err
	}
	s.runtime = testenv.NewRuntime(m, s.topology.Node, conflist, v.pluginDir(m))
	if v.routed {
		s.topology.RouteTo(m, netip.MustParsePrefix(podSubnet4))
		s.topology.RouteTo(m, netip.MustParsePrefix(podSubnet6))
	}
	s.client = s.runtime.NewPod(m, "client")
	if err := attach(s.client); err != nil { // first, for variants that are refused
		return nil, err
	}
	if err := s.addCrowd(m); err != nil {
		return nil, err
	}
	s.server = s.runtime.NewPod(m, "server")
	if !v.routed {
		s.server.Conf.CapabilityArgs = mapPorts(hostPort, 1)
	}
	if err := attach(s.server); err != nil {
		return nil, err
	}
	if err := errors.Join(s.forgetSoon(), s.answers()); err != nil || v.routed {
		return s, err
	}
	s.attachments, err = s.newAttachments(m)
	return s, err
}

// pluginDir returns where the variant's plugins are.
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

// finishBare has pods that are the two ends of the veth which joins node and outside.
func (s *setup) finishBare(m *testenv.Machine) (err error) {
	if s.bigTCP {
		return s.raiseSizes()
	}
	s.attachments, err = s.newAttachments(m)
	return err
}

// answers waits until all paths carry traffic: a plugin may return before its devices do.
func (s *setup) answers() error {
	ctx, cancel := context.WithTimeout(context.Background(), testenv.Timeout)
	defer cancel()
	for _, t := range trafficOf(s) {
		if t.work.name != "tcp-rr" {
			continue
		}
		err := testenv.Wait(ctx, "an answer, "+t.path.title+", "+t.family.name, func() error {
			_, err := t.work.run(t.ends, time.Millisecond)
			return err
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// forgetSoon has conntrack, where it is at work, forget closed connections before so many are
// measured that its table is full.
func (s *setup) forgetSoon() error {
	for _, state := range []string{"time_wait", "close", "last_ack"} {
		name := "net/netfilter/nf_conntrack_tcp_timeout_" + state
		if err := s.topology.Node.SetSysctl(name, "5"); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	return nil
}

// addCrowd makes the host ports and pods that are only there.
func (s *setup) addCrowd(m *testenv.Machine) error {
	var crowd []*testenv.Pod
	for i := range s.Pods - smallest.Pods {
		crowd = append(crowd, s.runtime.NewPod(m, fmt.Sprintf("crowd-%d", i)))
	}
	if more := s.Ports - smallest.Ports; more > 0 {
		pod := s.runtime.NewPod(m, "ports")
		pod.Conf.CapabilityArgs = mapPorts(crowdPorts, more)
		crowd = append(crowd, pod)
	}
	_, err := atOnce(crowd, attach)
	return err
}

// mapping is an element of the portMappings capability.
type mapping struct {
	HostPort      int    `json:"hostPort"`
	ContainerPort int    `json:"containerPort"`
	Protocol      string `json:"protocol"`
}

// mapPorts maps so many host ports, each by TCP and UDP.
func mapPorts(first, count int) map[string]any {
	var mappings []mapping
	for i := range count {
		for _, protocol := range []string{"tcp", "udp"} {
			mappings = append(mappings, mapping{HostPort: first + i, ContainerPort: serverPort, Protocol: protocol})
		}
	}
	return map[string]any{"portMappings": mappings}
}

// raiseSizes gives a veth the sizes of BIG TCP that its driver and most senders go up to.
func (s *setup) raiseSizes() error {
	const size = 196608

	for _, ns := range []*testenv.Namespace{s.topology.Node, s.topology.Outside} {
		link, err := ns.Netlink().LinkByName(testenv.UplinkName)
		if err != nil {
			return err
		}
		for _, set := range []func(netlink.Link, int) error{
			ns.Netlink().LinkSetGSOMaxSize, ns.Netlink().LinkSetGROMaxSize,
			ns.Netlink().LinkSetGSOIPv4MaxSize, ns.Netlink().LinkSetGROIPv4MaxSize,
		} {
			if err := set(link, size); err != nil {
				return fmt.Errorf("raise sizes of %s: %w", testenv.UplinkName, err)
			}
		}
	}
	return nil
}

// gsoSize returns the largest packet that a pod's device takes.
func (s *setup) gsoSize() (int, error) {
	ns, device := s.topology.Node, testenv.UplinkName
	if s.runtime != nil {
		ns, device = s.client.Namespace, testenv.PodIfName
	}
	link, err := ns.Netlink().LinkByName(device)
	if err != nil {
		return 0, fmt.Errorf("find %s in %s: %w", device, ns.Name, err)
	}
	return int(link.Attrs().GSOMaxSize), nil
}
