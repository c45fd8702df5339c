package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"strings"

	"github.com/ebpfnet/ebpfnet/plugin"
)

// printAttachments prints the containers that are connected.
func printAttachments(_ context.Context, to io.Writer, o options) error {
	attachments, err := plugin.Attachments(o.dataDir)
	if attachments == nil {
		return err
	}
	if o.json {
		encoder := json.NewEncoder(to)
		encoder.SetIndent("", "  ")
		return errors.Join(err, encoder.Encode(attachments))
	}
	for i, attachment := range attachments {
		if i > 0 {
			fmt.Fprintln(to)
		}
		printAttachment(to, attachment)
	}
	if err == nil && len(attachments) == 0 {
		fmt.Fprintln(to, "no container is connected")
	}
	return err
}

func printAttachment(to io.Writer, a *plugin.AttachmentInfo) {
	name := strings.TrimSpace(strings.Join([]string{a.Network, a.ContainerID, a.IfName}, " "))
	fmt.Fprintln(to, cmp.Or(name, "owner "+a.Owner))
	line := func(key, value string) {
		if value != "" {
			fmt.Fprintf(to, "  %-11s %s\n", key, value)
		}
	}
	if a.Dead {
		line("dead", "the device is gone; DEL or GC of the runtime removes the rest")
	}
	device := a.Device
	if a.Chained {
		device += " (of the plugin before)"
	}
	line("device", device)
	line("mac", a.MAC)
	for _, address := range a.Addresses {
		masqueraded := ""
		if address.Masqueraded {
			masqueraded = ", masqueraded"
		}
		line("address", fmt.Sprintf("%s by %s%s", address.Address, address.Gateway, masqueraded))
	}
	for _, port := range a.HostPorts {
		line("host port", fmt.Sprintf("%s %s leads to %s", port.Protocol,
			netip.AddrPortFrom(port.HostAddress, port.HostPort), netip.AddrPortFrom(port.Address, port.Port)))
	}
	if a.AntiSpoof {
		line("anti-spoof", "on")
	}
	line("policy", a.IngressPolicy)
	for _, limit := range []struct {
		to   string
		rate uint64
	}{{"it", a.IngressRate}, {"others", a.EgressRate}} {
		if limit.rate != 0 {
			line("limit", fmt.Sprintf("%d bits per second to %s", limit.rate, limit.to))
		}
	}
	line("aliases", strings.Join(a.Aliases, " "))
	line("cgroup", a.CgroupPath)
	var labels []string
	for _, label := range a.Labels {
		labels = append(labels, label.Key+"="+label.Value)
	}
	line("labels", strings.Join(labels, " "))
	line("before ours", strings.Join(a.ProgramsBefore, ", "))
}
