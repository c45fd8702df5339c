package doctor

import (
	"context"
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/ebpfnet/ebpfnet/plugin/config"
	"github.com/ebpfnet/ebpfnet/plugin/refresh"
	"github.com/ebpfnet/ebpfnet/plugin/runtimes"
)

// lookConflist finds the list that each runtime will really take, and whether ADD can work with it.
func lookConflist(_ context.Context, h *host) (findings []Finding, err error) {
	for _, r := range h.runtimes {
		findings = append(findings, h.judgeRuntime(r)...)
	}
	findings = append(findings, h.sharedSubnets()...)
	others, err := h.overlaps()
	return append(findings, others...), errors.Join(h.errRuntimes, err)
}

// overlaps finds what has a subnet of ours without sharing its reservations: devices, other plugins' networks, and
// podman's. Docker has a bridge for each of its networks.
func (h *host) overlaps() (findings []Finding, err error) {
	var subnets []netip.Prefix
	names := map[string]bool{}
	for _, n := range h.ours() {
		subnets, names[n.file.List.Name] = append(subnets, n.subnets()...), true
	}
	found, err := refresh.Overlaps(h.rtnl, subnets)
	var all []string
	for _, o := range found {
		shared := false
		if h.datapath != nil {
			var errShared error
			shared, errShared = o.SharesReservations(h.datapath)
			err = errors.Join(err, errShared)
		}
		if !shared {
			all = append(all, o.String())
		}
	}
	for _, n := range h.networks {
		if n.file.List == nil || n.hasOurs || names[n.file.List.Name] {
			continue
		}
		for _, plugin := range n.file.List.Plugins {
			all = append(all, overlapping(plugin.Bytes, n.name(), subnets)...)
		}
	}
	files, _ := filepath.Glob(h.path("/etc/containers/networks/*.json")) // a valid pattern
	for _, file := range files {
		text, errFile := os.ReadFile(file)
		err = errors.Join(err, errFile)
		all = append(all, overlapping(text, "podman's network in "+file, subnets)...)
	}
	slices.Sort(all)
	for _, other := range slices.Compact(all) {
		findings = append(findings, warning("give each network its own subnet", "%s overlaps a network of ebpfnet: two containers may get one address", other))
	}
	return findings, err
}

var subnetKey = regexp.MustCompile(`"subnet"\s*:\s*"([^"]+)"`)

// overlapping returns the subnets in a configuration that overlap some of ours, with its name.
func overlapping(text []byte, name string, ours []netip.Prefix) (found []string) {
	for _, match := range subnetKey.FindAllSubmatch(text, -1) {
		subnet, err := netip.ParsePrefix(string(match[1]))
		if err == nil && slices.ContainsFunc(ours, subnet.Overlaps) {
			found = append(found, subnet.String()+" of "+name)
		}
	}
	return found
}

func (h *host) sharedSubnets() (findings []Finding) {
	ours := h.ours()
	for i, n := range ours {
		for _, other := range ours[:i] {
			if subnet, overlaps := overlap(n, other); overlaps && n.file.List.Name != other.file.List.Name {
				findings = append(findings, wrong("give each network its own subnet", "%s and %s both have %s: a container of one gets no address that another has", other.name(), n.name(), subnet))
			}
		}
	}
	return findings
}

func overlap(a, b *network) (subnet string, overlaps bool) {
	for _, one := range a.subnets() {
		if slices.ContainsFunc(b.subnets(), one.Overlaps) {
			return one.String(), true
		}
	}
	return "", false
}

// title names a runtime in a message.
func title(r runtimes.Runtime) string {
	switch {
	case r.Name == "" && r.Source != "":
		return "the runtime"
	case r.Name == "":
		return "no runtime is configured; the usual one"
	case r.Source == "":
		return r.Name
	default:
		return r.Name + " (" + r.Source + ")"
	}
}

func (h *host) judgeRuntime(r runtimes.Runtime) []Finding {
	var all []*network
	for _, n := range h.networks {
		if n.runtime.ConfDir == r.ConfDir && n.runtime.Name == r.Name {
			all = append(all, n)
		}
	}
	taken := slices.IndexFunc(all, func(n *network) bool { return n.isTaken })
	ours := slices.IndexFunc(all, func(n *network) bool { return n.hasOurs })
	if r.Name == "" && ours >= 0 {
		taken = ours // who calls a network by its name, as podman and Nomad do, takes no first one
	}
	switch {
	case len(all) == 0:
		return []Finding{wrong("copy cmd/ebpfnet/example.conflist to "+r.ConfDir, "%s finds no network configuration in %s: containers get no network", title(r), r.ConfDir)}
	case taken < 0:
		return []Finding{wrong("correct cni_default_network, or the name in the list", "%s wants the network %q, which no valid file in %s has", title(r), r.Network, r.ConfDir)}
	case all[taken].file.Err != nil:
		return []Finding{wrong("correct or remove the file", "%s takes %s first by name, which is not valid: %v", title(r), all[taken].file.Path, all[taken].file.Err)}
	case !all[taken].hasOurs && ours >= 0:
		return []Finding{wrong("rename the file of ebpfnet so that it is the first by name, or remove the other", "%s takes %s, and not ebpfnet's %s", title(r), all[taken].name(), all[ours].file.Path)}
	case !all[taken].hasOurs:
		return []Finding{wrong("copy cmd/ebpfnet/example.conflist to "+r.ConfDir+" under a name that comes first", "%s takes %s, which has no ebpfnet", title(r), all[taken].name())}
	case all[taken].config == nil:
		return []Finding{wrong("correct the key", "%s takes %s, and ADD refuses it: %v", title(r), all[taken].name(), all[taken].err)}
	}
	return orGood(missingBinaries(r, all[taken]), "%s takes %s, which is valid; its plugins are in %s", title(r), all[taken].name(), strings.Join(r.BinDirs, ", "))
}

// missingBinaries finds the plugins of a list that the runtime does not find.
func missingBinaries(r runtimes.Runtime, n *network) (findings []Finding) {
	var needed []string
	for _, plugin := range n.file.List.Plugins {
		needed = append(needed, plugin.Network.Type)
	}
	if n.config.Delegate != "" {
		needed = append(needed, n.config.Delegate)
	}
	if r.CallsLoopback && len(r.BinDirs) > 0 {
		needed = append(needed, "loopback")
	}
	for _, name := range needed {
		remedy := "install it there, such as by the package containernetworking-plugins"
		if name == config.PluginType && len(r.BinDirs) > 0 {
			remedy = "make install PREFIX=" + r.BinDirs[0]
		}
		if r.Binary(name) == "" {
			findings = append(findings, wrong(remedy, "%s looks for plugins in %s, and %q is not there: no container of %s starts", title(r), strings.Join(r.BinDirs, ", "), name, n.name()))
		}
	}
	return findings
}
