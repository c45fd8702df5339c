package main

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader/rtnl"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// showMaps prints the number of entries of each map, and one of them.
func (d *demo) showMaps() error {
	for _, m := range []struct {
		name string
		list func() ([]string, error)
	}{
		{bpf.MapEndpoints, func() ([]string, error) { return inWords(maps.Endpoints(d.datapath)) }},
		{bpf.MapHostPorts, func() ([]string, error) { return inWords(maps.HostPorts(d.datapath)) }},
		{bpf.MapFlowTable, func() ([]string, error) { return inWords(maps.Flows(d.datapath)) }},
		{bpf.MapUplinks, func() ([]string, error) { return inWords(maps.Uplinks(d.datapath)) }},
	} {
		entries, err := m.list()
		if err != nil {
			return err
		}
		if len(entries) == 0 {
			return fmt.Errorf("map %s is empty", m.name)
		}
		pin := filepath.Join(d.datapath.Dir(), "maps", m.name)
		if _, err := os.Stat(pin); err != nil {
			return err
		}
		d.ok(m.name, "entries: %2d, e.g. %s", len(entries), entries[0])
	}
	return d.showDrops()
}

func inWords[T fmt.Stringer](entries []T, err error) ([]string, error) {
	var words []string
	for _, entry := range entries {
		words = append(words, entry.String())
	}
	slices.Sort(words)
	return words, err
}

func (d *demo) showDrops() error {
	totals, err := maps.DropTotals(d.datapath)
	if err != nil {
		return err
	}
	for _, total := range totals {
		if total.Packets > 0 {
			return fmt.Errorf("%d packets dropped: %s", total.Packets, total.Reason)
		}
	}
	d.ok(bpf.MapDropTotals, "no packet dropped for any of %d reasons", len(totals))
	d.ok("pins", "%s/{maps,progs,links}", d.datapath.Dir())
	return nil
}

// showNothingElse looks for what other plugins leave on a node.
func (d *demo) showNothingElse() error {
	links, err := rtnl.Links(d.topology.Node.Netlink())
	if err != nil {
		return err
	}
	for _, link := range links {
		if link.Type() == "bridge" {
			return fmt.Errorf("expected no bridge, found %s", link.Attrs().Name)
		}
	}
	d.ok("bridges", "none among the %d devices of the node", len(links))
	if err := d.checkNoRules(); err != nil {
		return err
	}
	// The demo is process 1 of its PID namespace, and the parent of every plugin.
	if others, err := filepath.Glob("/proc/[0-9]*"); err != nil || len(others) > 1 {
		return fmt.Errorf("expected no process but the demo, found %v, %w", others, err)
	}
	d.ok("processes", "none of the plugin's")
	return nil
}

// noRule matches what the tools print of a table without rules.
var noRule = regexp.MustCompile(`^(#.*|\*.*|:.*|COMMIT|)$`)

// checkNoRules asks the tools that are installed and have their part of the kernel.
func (d *demo) checkNoRules() error {
	var asked []string
	for _, command := range []string{"nft list ruleset", "iptables-save", "ip6tables-save"} {
		args := strings.Fields(command)
		out, err := d.topology.Node.Run(testenv.Context(d), args[0], args[1:]...)
		if err != nil {
			continue
		}
		for line := range strings.Lines(out) {
			if line = strings.TrimSpace(line); !noRule.MatchString(line) {
				return fmt.Errorf("expected no rule in %s, found %q", command, line)
			}
		}
		asked = append(asked, command)
	}
	if len(asked) == 0 {
		fmt.Fprintln(d.out, "  - rules                          not checked: neither nft nor iptables works here")
		return nil
	}
	d.ok("rules", "none according to %s", strings.Join(asked, ", "))
	return nil
}
