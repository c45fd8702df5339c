package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"strings"

	"github.com/ebpfnet/ebpfnet/plugin/operator"
)

// printAttachments prints the connected containers.
func printAttachments(_ context.Context, to io.Writer, o options) error {
	attachments, err := operator.Attachments(o.dataDir)
	if attachments == nil {
		return err
	}
	if o.json {
		return errors.Join(err, printJSON(to, attachments))
	}
	for i, attachment := range attachments {
		if i > 0 {
			printf(to, "\n")
		}
		printAttachment(to, attachment)
	}
	if err == nil && len(attachments) == 0 {
		printf(to, "no container is connected\n")
	}
	return err
}

func printAttachment(to io.Writer, a *operator.Attachment) {
	name := strings.TrimSpace(strings.Join([]string{a.Network, a.ContainerID, a.IfName}, " "))
	printf(to, "%s\n", cmp.Or(name, "owner "+a.Owner))
	line := func(key, value string) {
		if value != "" {
			printf(to, "  %-11s %s\n", key, value)
		}
	}
	if a.Dead {
		line("dead", "its device is gone; the runtime's DEL or GC removes the rest")
	}
	device := a.Device
	if a.Chained {
		device += " (made by another plugin)"
	}
	line("device", device)
	line("mac", a.MAC)
	for _, address := range a.Addresses {
		masqueraded := ""
		if address.Masqueraded {
			masqueraded = ", masqueraded"
		}
		line("address", fmt.Sprintf("%s via %s%s", address.Address, address.Gateway, masqueraded))
	}
	for _, route := range a.Routes {
		line("route", fmt.Sprintf("%s via %s", route.To, route.Gateway))
	}
	for _, port := range a.HostPorts {
		line("host port", fmt.Sprintf("%s %s forwards to %s", port.Protocol,
			netip.AddrPortFrom(port.HostAddress, port.HostPort), netip.AddrPortFrom(port.ContainerAddress, port.ContainerPort)))
	}
	if a.AntiSpoof {
		line("anti-spoof", "on")
	}
	line("policy", a.IngressPolicy)
	for _, limit := range []struct {
		key  string
		rate uint64
	}{{"ingress", a.IngressRate}, {"egress", a.EgressRate}} {
		if limit.rate != 0 {
			line(limit.key, fmt.Sprintf("limited to %d bits per second", limit.rate))
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
