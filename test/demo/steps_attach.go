package main

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// addPods attaches the pods, and shows the first result as the plugin printed it.
func (s *scene) addPods() error {
	r := s.report
	s.pods[len(s.pods)-1].Conf.CapabilityArgs = map[string]any{
		"portMappings": []map[string]any{{"hostPort": hostPort, "containerPort": podPort, "protocol": "tcp"}},
	}
	for i, p := range s.pods {
		if err := s.addPod(p); err != nil {
			return err
		}
		if i == 0 {
			if err := s.openDatapath(); err != nil {
				return err
			}
		}
		attached := false
		err := s.topology.Node.Do(func() (err error) {
			attached, err = s.datapath.EndpointAttached(s.deviceIndex(p.host))
			return err
		})
		if err != nil {
			return err
		}
		if !attached {
			return &mismatch{"programs on " + p.host, "from_container", "none"}
		}
	}
	way := "tcx links"
	if bpf.Attach(s.datapath.Config.Attach) == bpf.AttachClsact {
		way = "tc filters"
	}
	r.ok("programs", "on each ebpf… device by tc filters, on %s by %s", testenv.UplinkName, way)
	r.printf("\n%s\n", indent(s.picture()))
	return nil
}

func (s *scene) addPod(p *pod) error {
	s.Cleanup(func() {
		if p.Result != nil {
			_ = p.Del(context.Background()) // all goes with the process anyway
		}
	})
	ctx, cancel := context.WithTimeout(context.Background(), testenv.Timeout)
	defer cancel()
	start := time.Now()
	err := p.Add(ctx)
	took := time.Since(start)
	if err != nil {
		return &mismatch{"ADD " + p.title, "a result", "error: " + err.Error()}
	}
	call := s.runtime.LastCall(s)
	p.host = p.Result.Interfaces[0].Name
	if len(p.addrs()) == 0 {
		return &mismatch{"ADD " + p.title, "an address", string(call.Stdout)}
	}
	s.report.ok("ADD "+p.title, "%s in %.0f ms", andList(p.addrs()), milliseconds(took))
	s.report.data(call.Stdout)
	if p == s.pods[0] {
		s.report.note("The result, as the plugin printed it for the runtime:\n" + layOut(call.Stdout))
	}
	return nil
}

// openDatapath opens what the first ADD has loaded: it belongs to the node's namespace.
func (s *scene) openDatapath() error {
	err := s.topology.Node.Do(func() (err error) {
		s.datapath, err = loader.OpenLoaded()
		return err
	})
	if err == nil {
		s.Cleanup(s.datapath.Close)
	}
	return err
}

func (s *scene) deviceIndex(name string) int {
	link, err := s.topology.Node.Netlink().LinkByName(name)
	if err != nil {
		return 0
	}
	return link.Attrs().Index
}

func (s *scene) checkPods() error {
	ctx, cancel := context.WithTimeout(context.Background(), testenv.Timeout)
	defer cancel()
	for _, p := range s.pods {
		start := time.Now()
		if err := p.Check(ctx); err != nil {
			return &mismatch{"CHECK " + p.title, "nothing to complain of", "error: " + err.Error()}
		}
		s.report.ok("CHECK "+p.title, "as ADD left it (%.0f ms)", milliseconds(time.Since(start)))
	}
	return nil
}

// deletePods detaches the pods and looks at every place that an ADD writes to.
func (s *scene) deletePods() error {
	ctx, cancel := context.WithTimeout(context.Background(), testenv.Timeout)
	defer cancel()
	for _, p := range s.pods {
		start := time.Now()
		if err := p.Del(ctx); err != nil {
			return &mismatch{"DEL " + p.title, "success", "error: " + err.Error()}
		}
		s.report.ok("DEL "+p.title, "in %.0f ms", milliseconds(time.Since(start)))
	}
	for _, look := range []func() error{s.proveNoDevices, s.proveNoEntries, s.proveNoPins, s.proveNoAddresses, s.provePortClosed} {
		if err := look(); err != nil {
			return err
		}
	}
	s.report.note("What stays for the next ADD: the loaded programs and their maps, in\n" + s.datapath.Dir())
	return nil
}

// prove tells that a list is empty, or that it is not.
func (s *scene) prove(what, none string, left []string) error {
	if len(left) > 0 {
		return &mismatch{what, none, strings.Join(left, "; ")}
	}
	s.report.ok(what, "%s", none)
	return nil
}

func (s *scene) proveNoDevices() error {
	var left []string
	for _, ns := range []*testenv.Namespace{s.topology.Node, s.pods[0].Namespace, s.pods[1].Namespace, s.pods[2].Namespace} {
		devices, err := links(ns)
		if err != nil {
			return err
		}
		for _, device := range devices {
			if ns != s.topology.Node || !slices.Contains(s.linksBefore, device) {
				left = append(left, device+" of "+ns.Name)
			}
		}
	}
	return s.prove("devices", fmt.Sprintf("only lo and %s on the node, only lo in the pods", strings.Join(s.linksBefore, ", ")), left)
}

func (s *scene) proveNoEntries() error {
	endpoints, err := maps.Endpoints(s.datapath)
	if err != nil {
		return err
	}
	ports, err := maps.HostPorts(s.datapath)
	if err != nil {
		return err
	}
	left := slices.Concat(words(endpoints), words(ports))
	return s.prove("maps endpoints, ports", "no entry", left)
}

func (s *scene) proveNoPins() error {
	entries, err := os.ReadDir(filepath.Join(s.datapath.Dir(), "links"))
	if err != nil {
		return err
	}
	var left []string
	for _, entry := range entries {
		if !strings.HasPrefix(entry.Name(), "uplink-") {
			left = append(left, entry.Name())
		}
	}
	return s.prove("pinned links but the uplink's", "none", left)
}

func (s *scene) proveNoAddresses() error {
	entries, err := os.ReadDir(s.conflist.dataDir)
	if err != nil {
		return err
	}
	var left []string
	for _, entry := range entries {
		if _, err := netip.ParseAddr(entry.Name()); err == nil {
			left = append(left, entry.Name())
		}
	}
	return s.prove("addresses in "+s.conflist.dataDir, "no reservation", left)
}

func (s *scene) provePortClosed() error {
	if !s.conflist.ports {
		return nil
	}
	to := netip.AddrPortFrom(testenv.NodeAddr4, hostPort)
	what := "outside> GET http://" + to.String() + "/"
	answered, _, _, err := fetch(s.topology.Outside, to)
	if err == nil {
		return &mismatch{what, "no answer", "an answer of " + answered}
	}
	s.report.ok(what, "nobody answers any more")
	return nil
}
