package main

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/ebpfnet/ebpfnet/cmd/ebpfnetctl/output"
	"github.com/ebpfnet/ebpfnet/plugin/operator"
)

func newAttachments() *cobra.Command {
	var flags output.Flags
	var dataDir string
	cmd := &cobra.Command{
		Use:   "attachments [CONTAINER]",
		Short: "containers: addresses, host ports, devices, settings",
		Long: `Lists the connected containers, or tells all about one: addresses, routes, host
ports, devices, settings, and the aliases, cgroup and labels from the runtime.

` + containerHelp,
		Example: `  ebpfnetctl attachments
  ebpfnetctl attachments web
  ebpfnetctl attachments -o json | jq -r '.[] | select(.dead) | .containerID'`,
		Args:              oneWord,
		ValidArgsFunction: completeContainers(&dataDir),
		RunE: func(cmd *cobra.Command, words []string) error {
			return printAttachments(output.New(cmd.OutOrStdout(), flags), words, dataDir)
		},
	}
	flags.AddToNoun(cmd.Flags())
	addDataDir(cmd, &dataDir)
	return cmd
}

// printAttachments prints the connected containers, or the page of one. What cannot be read is missing
// from the list, and in the error.
func printAttachments(p *output.Printer, words []string, dataDir string) error {
	attachments, err := attachmentsOf(words, dataDir)
	if attachments == nil {
		return err
	}
	if isPage := len(words) > 0 && (p.Format == output.Text || p.Format == output.Wide); !isPage {
		return errors.Join(err, attachmentNoun.Print(p, attachments))
	}
	for i, attachment := range attachments {
		if i > 0 {
			p.Printf("\n")
		}
		printAttachment(p, attachment)
	}
	return err
}

var attachmentNoun = output.Noun[*operator.Attachment]{
	Columns: []output.Column[*operator.Attachment]{
		{Head: "NETWORK", Text: func(a *operator.Attachment) string { return a.Network }},
		{Head: "CONTAINER", Text: func(a *operator.Attachment) string { return cmp.Or(a.ContainerID, a.Owner) }, Elastic: true},
		{Head: "INTERFACE", Text: func(a *operator.Attachment) string { return a.IfName }, Wide: true},
		{Head: "ADDRESSES", Text: addressesOf},
		{Head: "PORTS", Text: func(a *operator.Attachment) string { return strconv.Itoa(len(a.HostPorts)) }, Right: true},
		{Head: "POLICY", Text: func(a *operator.Attachment) string { return a.IngressPolicy }},
		{Head: "DEVICE", Text: deviceOf, Color: func(a *operator.Attachment) output.Color {
			if a.Dead {
				return output.Red
			}
			return output.Plain
		}},
		{Head: "MAC", Text: func(a *operator.Attachment) string { return a.MAC }, Wide: true},
		{Head: "ANTI-SPOOF", Text: antiSpoofOf, Wide: true},
		{Head: "INGRESS", Text: func(a *operator.Attachment) string { return rate(a.IngressRate) }, Wide: true, Right: true},
		{Head: "EGRESS", Text: func(a *operator.Attachment) string { return rate(a.EgressRate) }, Wide: true, Right: true},
		{Head: "ALIASES", Text: func(a *operator.Attachment) string { return strings.Join(a.Aliases, ",") }, Wide: true},
	},
	Name: containerName,
	None: "no container is connected",
}

func addressesOf(a *operator.Attachment) string {
	var addresses []string
	for _, address := range a.Addresses {
		addresses = append(addresses, address.Address.String())
	}
	return strings.Join(addresses, ",")
}

func deviceOf(a *operator.Attachment) string {
	if a.Dead {
		return "gone"
	}
	return a.Device
}

func antiSpoofOf(a *operator.Attachment) string {
	if a.AntiSpoof {
		return "on"
	}
	return "off"
}

func rate(bitsPerSecond uint64) string {
	if bitsPerSecond == 0 {
		return ""
	}
	return strconv.FormatUint(bitsPerSecond, 10)
}

func printAttachment(p *output.Printer, a *operator.Attachment) {
	name := strings.TrimSpace(strings.Join([]string{a.Network, a.ContainerID, a.IfName}, " "))
	p.Printf("%s\n", cmp.Or(name, "owner "+a.Owner))
	line := func(key, value string) {
		if value != "" {
			p.Printf("  %-11s %s\n", key, value)
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
	line("anti-spoof", antiSpoofOf(a))
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
