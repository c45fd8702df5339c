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
	"github.com/ebpfnet/ebpfnet/plugin/operator"
	"github.com/ebpfnet/ebpfnet/plugin/reconcile"
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
	if h.datapath.Config.Build != bpf.Build() {
		return []Finding{warning("ebpfnetctl upgrade", "the loaded programs are not those of this ebpfnetctl: the next ADD of a newer plugin replaces them")}, h.errAttached
	}
	return []Finding{good("loaded, with the programs of this version")}, h.errAttached
}

func lookPrograms(_ context.Context, h *host) (findings []Finding, err error) {
	if h.operator == nil {
		return []Finding{good("no containers yet")}, nil
	}
	containers, _, err := h.operator.Detached()
	if err != nil {
		return nil, err
	}
	for _, container := range containers {
		findings = append(findings, wrong("ebpfnetctl repair, or doctor --fix", "another tool has detached the program of %s: its packets are not translated, and its policy is not in force", container).by(fixRepair))
	}
	return orGood(findings, "each container's device has its programs"), nil
}

func lookUplinks(_ context.Context, h *host) (findings []Finding, err error) {
	findings = h.missingPatterns()
	if h.operator == nil {
		return orGood(findings, "no uplink needs programs yet"), nil
	}
	_, detached, errDetached := h.operator.Detached()
	for _, what := range detached {
		findings = append(findings, wrong("ebpfnetctl repair, or doctor --fix", "another tool has detached the %s: nothing is translated there", what).by(fixRepair))
	}
	added, errNew := h.operator.NewUplinks()
	for _, name := range added {
		findings = append(findings, wrong("ebpfnetctl repair, or doctor --fix; a hook of udev does it at once (README)", "uplink %s is new and has no programs yet: nothing is translated there", name).by(fixRepair))
	}
	known, errKnown := h.operator.Uplinks()
	if err := errors.Join(errDetached, errNew, errKnown); err != nil {
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

// missingPatterns returns the values of uplinks keys that select no device.
func (h *host) missingPatterns() (findings []Finding) {
	for _, n := range h.ours() {
		for _, pattern := range n.config.Uplinks {
			if !slices.ContainsFunc(h.devices, reconcile.Matcher([]string{pattern})) {
				findings = append(findings, wrong("correct the key, or ignore this if the device comes later", "%s: uplinks %q selects no device", n.name(), pattern))
			}
		}
	}
	return findings
}

func lookForeignPrograms(_ context.Context, h *host) (findings []Finding, err error) {
	const remedy = "let it return TCX_NEXT or TC_ACT_UNSPEC for what it does not handle, or attach it after ours"

	for _, a := range h.attachments {
		if len(a.ProgramsBefore) > 0 {
			findings = append(findings, warning(remedy, "on %s of %s, %s of another tool sees packets first: ours sees only what it leaves", a.Device, containerOf(a), list(a.ProgramsBefore)))
		}
	}
	if h.operator == nil {
		return orGood(findings, "no programs of other tools before ours"), nil
	}
	uplinks, err := h.operator.Uplinks()
	for _, uplink := range uplinks {
		before, errUplink := h.operator.ProgramsBeforeUplink(uplink)
		if err = errors.Join(err, errUplink); len(before) > 0 {
			findings = append(findings, warning(remedy, "on uplink %s, %s of another tool sees packets first: ours sees only what it leaves", uplink.Attrs().Name, list(before)))
		}
	}
	if err != nil {
		return findings, err
	}
	return orGood(findings, "no programs of other tools before ours"), nil
}

func containerOf(a *operator.Attachment) string {
	return strings.Trim(a.Network+"/"+a.ContainerID, "/")
}

func lookPolicyRules(_ context.Context, h *host) ([]Finding, error) {
	if h.datapath == nil {
		return []Finding{good("no policy rules hinder fastPath always")}, nil
	}
	text, err := operator.RulesWarning(h.datapath)
	if err != nil {
		return nil, err
	}
	if text != "" {
		return []Finding{warning("none is needed: it costs speed alone", "%s", text)}, nil
	}
	return []Finding{good("no policy rules hinder fastPath always")}, nil
}

// lookMaps finds maps that are, or soon are, full. In an LRU map the kernel makes room by what was not used
// for long; that is bad only where it is in use, as live flows are.
func lookMaps(_ context.Context, h *host) (findings []Finding, err error) {
	if h.datapath == nil {
		return []Finding{good("no maps yet")}, nil
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
	flows, err := maps.CountFlows(h.datapath)
	if err != nil {
		return findings, err
	}
	live := 0
	for _, n := range flows {
		live += n
	}
	findings = append(findings, judgeMap("flows", live, int(h.datapath.Flows.MaxEntries()),
		"set a larger maxFlows, stop the containers, run `ebpfnetctl unload --yes`, and start them again")...)
	slices.SortFunc(findings, func(a, b Finding) int { return strings.Compare(a.What, b.What) })
	return orGood(findings, "each map has room"), nil
}

// judgeMap returns a finding if a map is almost full.
func judgeMap(name string, count, limit int, remedy string) []Finding {
	room := fmt.Sprintf("map %s has %d of %d entries", name, count, limit)
	switch {
	case count >= limit:
		return []Finding{wrong(remedy, "%s: it is full, and what is new is refused or ends something old", room)}
	case count*10 > limit*9:
		return []Finding{warning(remedy, "%s: it is almost full", room)}
	}
	return nil
}
