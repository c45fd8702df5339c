package doctor

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/cilium/ebpf"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/admin"
	"github.com/ebpfnet/ebpfnet/plugin/refresh"
)

func lookDatapath(_ context.Context, h *host) ([]Finding, error) {
	switch err := h.errDatapath; {
	case errors.Is(err, loader.ErrNotLoaded):
		return []Finding{good("not loaded yet: the first ADD loads it")}, nil
	case errors.Is(err, loader.ErrIncompatible):
		return []Finding{wrong("install the version that fits, or stop the containers and run `ebpfnetctl unload --yes`",
			"%v, with another map layout: new containers get no network", loader.ErrIncompatible)}, nil
	case errors.Is(err, loader.ErrNotSupported): // bpffs says why
		return nil, errors.New("the pins are not safe to open")
	case err != nil:
		return nil, err
	}
	findings, err := h.fullMaps()
	if err = errors.Join(err, h.errAttached); err != nil {
		return findings, err
	}
	if h.datapath.Config.Build != bpf.Build {
		return append(findings, warning("ebpfnetctl upgrade", "the loaded programs are not those of this ebpfnetctl: the next ADD of a newer plugin replaces them")), nil
	}
	services, _ := h.admin.ServicesPath()
	return append(orGood(findings, "loaded, with the programs of this version; no map is almost full"), good("services: %s", services)), nil
}

func lookPrograms(_ context.Context, h *host) (findings []Finding, err error) {
	if h.admin == nil {
		return []Finding{good("no containers yet")}, nil
	}
	containers, _, err := h.admin.Detached()
	if err != nil {
		return nil, err
	}
	for _, container := range containers {
		findings = append(findings, wrong("ebpfnetctl repair, or doctor --fix", "another tool has detached the program of %s: its packets are not translated, and its policy is not in force", container).by(&fixByRepair))
	}
	for _, a := range h.attachments {
		if len(a.ProgramsBefore) > 0 {
			findings = append(findings, foreign(a.Device+" of "+containerOf(a), a.ProgramsBefore))
		}
	}
	return orGood(findings, "each container's device has its programs"), nil
}

func lookUplinks(_ context.Context, h *host) (findings []Finding, err error) {
	findings = h.missingPatterns()
	if h.admin == nil {
		return orGood(findings, "no uplink needs programs yet"), nil
	}
	_, detached, errDetached := h.admin.Detached()
	for _, what := range detached {
		findings = append(findings, wrong("ebpfnetctl repair, or doctor --fix", "another tool has detached the %s: nothing is translated there", what).by(&fixByRepair))
	}
	added, errNew := h.admin.NewUplinks()
	for _, name := range added {
		findings = append(findings, wrong("ebpfnetctl repair, or doctor --fix; a hook of udev does it at once (README)", "uplink %s is new and has no programs yet: nothing is translated there", name).by(&fixByRepair))
	}
	known, errKnown := h.admin.Uplinks()
	for _, uplink := range known {
		before, err := h.admin.ProgramsBeforeUplink(uplink)
		if errKnown = errors.Join(errKnown, err); len(before) > 0 {
			findings = append(findings, foreign("uplink "+uplink.Attrs().Name, before))
		}
	}
	warnings, errWarnings := h.admin.Warnings()
	for _, text := range warnings {
		findings = append(findings, warning("", "%s", text))
	}
	advised, errDrops := h.advisedDrops()
	findings = append(findings, advised...)
	if err := errors.Join(errDetached, errNew, errKnown, errWarnings, errDrops); err != nil {
		return findings, err
	}
	if len(known) == 0 && h.hasContainers() && len(added) == 0 {
		findings = append(findings, warning("name it in the key uplinks, and see `ip route`", "the host has no uplink: containers do not reach the outside"))
	}
	var names []string
	for _, uplink := range known {
		names = append(names, uplink.Attrs().Name)
	}
	return orGood(findings, "programs are attached to %s", list(names)), nil
}

// advisedDrops finds drops whose cause is outside of the host.
func (h *host) advisedDrops() (findings []Finding, err error) {
	totals, err := maps.DropTotals(h.datapath)
	for _, t := range totals {
		if advice := t.Reason.Advice(); advice != "" && t.Packets > 0 {
			findings = append(findings, warning(advice, "%d packets were dropped: %s", t.Packets, t.Reason))
		}
	}
	return findings, err
}

// missingPatterns returns the values of uplinks keys that select no device.
func (h *host) missingPatterns() (findings []Finding) {
	for _, n := range h.ours() {
		for _, pattern := range n.config.Uplinks {
			if !slices.ContainsFunc(h.devices, refresh.Matcher([]string{pattern})) {
				findings = append(findings, wrong("correct the key, or ignore this if the device comes later", "%s: uplinks %q selects no device", n.name(), pattern))
			}
		}
	}
	return findings
}

// foreign is the warning about programs of other tools that see packets before ours.
func foreign(device string, programs []string) Finding {
	return warning("let it return TCX_NEXT or TC_ACT_UNSPEC for what it does not handle, or attach it after ours",
		"on %s, %s of another tool sees packets first: ours sees only what it leaves", device, list(programs))
}

func containerOf(a *admin.Attachment) string {
	return strings.Trim(a.Network+"/"+a.Title(), "/")
}

// fullMaps finds maps that are full or almost full. From a full LRU map the kernel removes what was not used for the
// longest time, and no such map has what others cannot restore.
func (h *host) fullMaps() (findings []Finding, err error) {
	if err := h.datapath.OpenOnDemand(bpf.MapPolicyRules, bpf.MapPolicyBlocks, bpf.MapRuleSets, bpf.MapPeerClasses); err != nil {
		return nil, err
	}
	counts, err := maps.Count(h.datapath)
	if err != nil {
		return nil, err
	}
	for name, m := range h.datapath.OpenMaps() {
		count, counted := counts[name]
		if !counted || m == nil || m.Type() == ebpf.LRUHash || m.Type() == ebpf.LRUCPUHash {
			continue
		}
		findings = append(findings, judgeMap(name, count, int(m.MaxEntries()), "remove containers that are gone (doctor --fix), or use another host")...)
	}
	used, err := maps.FlowTableUse(h.datapath)
	if err != nil {
		return findings, err
	}
	findings = append(findings, judgeFlowTable(used, h.datapath.MaxFlows())...)
	slices.SortFunc(findings, func(a, b Finding) int { return strings.Compare(a.What, b.What) })
	return findings, nil
}

// judgeFlowTable returns a finding if so many places have flows that are not replaced that a new flow may find none.
func judgeFlowTable(used float64, places int) []Finding {
	if used <= 0.6 {
		return nil
	}
	return []Finding{warning("find the container with most flows (ebpfnetctl top), or set a larger maxFlows, stop the containers, "+
		"run `ebpfnetctl unload --yes`, and start them again",
		"established connections have %.0f %% of %d places: new ones may be refused", 100*used, places)}
}

func judgeMap(name string, count, limit int, remedy string) []Finding {
	fill := fmt.Sprintf("map %s has %d of %d entries", name, count, limit)
	switch {
	case count >= limit:
		return []Finding{wrong(remedy, "%s: it is full, and what is new is refused or ends something old", fill)}
	case count*10 > limit*9:
		return []Finding{warning(remedy, "%s: it is almost full", fill)}
	}
	return nil
}
