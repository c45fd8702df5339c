package main

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/ebpfnet/ebpfnet/loader/rtnl"
	"github.com/ebpfnet/ebpfnet/maps"
)

// tellMaps shows what stands in each map, in the words of package maps.
func (s *scene) tellMaps() error {
	r := s.report
	endpoints, err := maps.Endpoints(s.datapath)
	if err != nil {
		return err
	}
	want := 0
	for _, p := range s.pods {
		want += len(p.addrs())
	}
	if len(endpoints) != want {
		return &mismatch{"map endpoints", fmt.Sprintf("%d entries, one for each address", want), strings.Join(words(endpoints), "; ")}
	}
	slices.SortFunc(endpoints, func(a, b maps.Endpoint) int { return a.Addr.Compare(b.Addr) })
	for _, e := range endpoints {
		r.ok("endpoints", "%s (%s)", e, s.deviceName(e.IfIndex))
	}

	ports, err := maps.HostPorts(s.datapath)
	if err != nil {
		return err
	}
	for _, port := range words(ports) {
		r.ok("ports", "%s", port)
	}

	flows, err := maps.Flows(s.datapath)
	if err != nil {
		return err
	}
	for _, flow := range words(flows) {
		r.ok("flows", "%s", flow)
	}

	uplinks, err := maps.Uplinks(s.datapath)
	if err != nil {
		return err
	}
	for _, uplink := range uplinks {
		r.ok("uplinks", "%s (%s)", uplink, s.deviceName(uplink.IfIndex))
	}
	if err := s.tellCounters(); err != nil {
		return err
	}
	r.note("bpftool shows the same with the names of the fields; on a node of yours, too (or ports, flows, ...):\n" +
		"bpftool map dump pinned " + filepath.Join(s.datapath.Dir(), "maps", "endpoints"))
	return nil
}

// tellCounters shows what was dropped, which should be nothing.
func (s *scene) tellCounters() error {
	counters, err := maps.DropTotals(s.datapath)
	if err != nil {
		return err
	}
	var reasons []string
	for _, counter := range counters {
		if counter.Packets > 0 {
			return &mismatch{"counters", "no packet dropped", fmt.Sprintf("%d packets (%d bytes): %s", counter.Packets, counter.Bytes, counter.Reason)}
		}
		reasons = append(reasons, counter.Reason.String())
	}
	s.report.ok("counters", "0 packets dropped, for any of %d reasons:\n%s", len(reasons), breakUp(reasons, 2))
	return nil
}

// tellAbsent looks for what other plugins leave on a node.
func (s *scene) tellAbsent() error {
	list, err := rtnl.Links(s.topology.Node.Netlink())
	if err != nil {
		return err
	}
	var bridges []string
	for _, link := range list {
		if link.Type() == "bridge" {
			bridges = append(bridges, link.Attrs().Name)
		}
	}
	if err := s.prove("bridges", fmt.Sprintf("none among the %d devices of the node", len(list)), bridges); err != nil {
		return err
	}
	for _, tool := range []struct {
		what, name string
		args       []string
	}{
		{"nft list ruleset", "nft", []string{"list", "ruleset"}},
		{"iptables-save", "iptables-save", nil},
		{"ip6tables-save", "ip6tables-save", nil},
	} {
		if err := s.proveNoRules(tool.what, tool.name, tool.args...); err != nil {
			return err
		}
	}
	processes, err := otherProcesses()
	if err != nil {
		return err
	}
	return s.prove("processes", "none but the demo: the plugin is no daemon", processes)
}

// proveNoRules cannot fail for what this host lacks: a tool, or the kernel's part of it.
func (s *scene) proveNoRules(what, name string, args ...string) error {
	out, installed, err := s.output(name, args...)
	switch {
	case !installed:
		s.report.skip(what, name+" is not installed here, so it cannot be asked")
		return nil
	case err != nil:
		s.report.skip(what, "cannot tell: "+err.Error())
		return nil
	}
	var rules []string
	for line := range strings.Lines(out) {
		line = strings.TrimSpace(line)
		// What is listed of empty tables is no rule.
		if line != "" && !strings.HasPrefix(line, "#") && !strings.HasPrefix(line, "*") && !strings.HasPrefix(line, ":") && line != "COMMIT" {
			rules = append(rules, line)
		}
	}
	return s.prove(what, "no rule", rules)
}

// otherProcesses lists the namespace that the plugin ran in, of which the demo is the first.
func otherProcesses() ([]string, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	var others []string
	for _, entry := range entries {
		pid, err := strconv.Atoi(entry.Name())
		if err != nil || pid == os.Getpid() {
			continue
		}
		stat, err := os.ReadFile(filepath.Join("/proc", entry.Name(), "stat"))
		if err == nil && !strings.Contains(string(stat), ") Z ") { // ended meanwhile, or ended and not waited for
			others = append(others, strings.Fields(string(stat))[1])
		}
	}
	return others, nil
}
