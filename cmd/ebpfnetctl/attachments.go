package main

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/ebpfnet/ebpfnet/cmd/ebpfnetctl/output"
	"github.com/ebpfnet/ebpfnet/plugin/admin"
)

func newAttachments() *cobra.Command {
	var o containerOptions
	return o.addTo(&cobra.Command{
		Use:   "attachments [CONTAINER]",
		Short: "containers: addresses, host ports, devices, settings",
		Long: `Lists the connected containers, or prints all that is known of one as YAML:
addresses, routes, host ports, devices, settings, and the aliases, cgroup and
labels from the runtime.`,
		Example: `  ebpfnetctl attachments
  ebpfnetctl attachments web
  ebpfnetctl attachments -o json | jq -r '.[] | select(.dead) | .containerID'`,
	}, func(_ *cobra.Command, p *output.Printer) error { return printAttachments(p, &o) })
}

// printAttachments prints the connected containers, or all of one as YAML. What cannot be read is missing from the list,
// and in the error.
func printAttachments(p *output.Printer, o *containerOptions) error {
	_, attachments, err := o.attachments()
	if attachments == nil {
		return err
	}
	if len(o.words) > 0 && p.Format == output.Text {
		p.Format = output.YAML
	}
	return errors.Join(err, attachmentTable.Print(p, attachments))
}

var attachmentTable = output.Table[*admin.Attachment]{
	Columns: []output.Column[*admin.Attachment]{
		{Head: "NETWORK", Text: func(a *admin.Attachment) string { return a.Network }},
		{Head: "CONTAINER", Text: func(a *admin.Attachment) string { return a.Title() }},
		{Head: "INTERFACE", Text: func(a *admin.Attachment) string { return a.IfName }, Wide: true},
		{Head: "ADDRESSES", Text: addressesOf},
		// A port that any address of both families has is there once.
		{Head: "PORTS", Text: func(a *admin.Attachment) string {
			return strings.Join(slices.Compact(texts(a.HostPorts, portText)), ",")
		}},
		{Head: "POLICY", Text: policyText},
		{Head: "DEVICE", Text: deviceOf},
		{Head: "MAC", Text: func(a *admin.Attachment) string { return a.MAC }, Wide: true},
		{Head: "ANTI-SPOOF", Text: func(a *admin.Attachment) string { return map[bool]string{true: "on", false: "off"}[a.AntiSpoof] }, Wide: true},
		{Head: "INGRESS", Text: func(a *admin.Attachment) string { return number(a.IngressRate) }, Wide: true},
		{Head: "EGRESS", Text: func(a *admin.Attachment) string { return number(a.EgressRate) }, Wide: true},
		{Head: "ALIASES", Text: func(a *admin.Attachment) string { return strings.Join(a.Aliases, ",") }, Wide: true},
	},
	Name: func(a *admin.Attachment) string { return containerName(a.Named) },
	None: "no container is connected",
}

func texts[T any](items []T, text func(T) string) (all []string) {
	for _, item := range items {
		all = append(all, text(item))
	}
	return all
}

// policyText is the short form of what isolates a container, such as rules,audit.
func policyText(a *admin.Attachment) string {
	if a.PolicyMode == "" {
		return a.IngressPolicy
	}
	return a.IngressPolicy + "," + a.PolicyMode
}

func addressesOf(a *admin.Attachment) string {
	return strings.Join(texts(a.Addresses, func(a admin.Address) string { return a.Address.String() }), ",")
}

// portText is the short form of a host port, such as 8080->80/tcp, or 192.0.2.1:8080->80/tcp of one address.
func portText(p admin.HostPort) string {
	port := strconv.Itoa(int(p.HostPort))
	if !p.HostAddress.IsUnspecified() {
		port = netip.AddrPortFrom(p.HostAddress, p.HostPort).String()
	}
	return fmt.Sprintf("%s->%d/%s", port, p.ContainerPort, p.Protocol)
}

func deviceOf(a *admin.Attachment) string {
	if a.Dead {
		return "gone"
	}
	return a.Device
}

// number leaves 0 out.
func number[T int | uint64](n T) string {
	if n == 0 {
		return ""
	}
	return fmt.Sprint(n)
}
