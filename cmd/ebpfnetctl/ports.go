package main

import (
	"errors"
	"net/netip"
	"slices"
	"strconv"

	"github.com/spf13/cobra"

	"github.com/ebpfnet/ebpfnet/cmd/ebpfnetctl/output"
	"github.com/ebpfnet/ebpfnet/plugin/admin"
)

// hostPort is an element of `ebpfnetctl ports -o json`: schema/ports.json.
type hostPort struct {
	admin.HostPort
	admin.Named      // whose it is
	Dead        bool `json:"dead"` // the container is gone; DEL or GC removes the port
}

func newPorts() *cobra.Command {
	var o containerOptions
	return o.addTo(&cobra.Command{
		Use:   "ports [CONTAINER]",
		Short: "host ports, and where they forward to",
		Long: `Lists the host ports: address, port and protocol, the address and port that they
forward TO, and the container. * is any IPv4 address of the host, [*] any IPv6
address.`,
		Example: "  ebpfnetctl ports\n  ebpfnetctl ports web -o name",
	}, func(_ *cobra.Command, p *output.Printer) error {
		_, attachments, err := o.attachments()
		if attachments == nil {
			return err
		}
		return errors.Join(err, portTable.Print(p, portsOf(attachments)))
	})
}

func portsOf(attachments []*admin.Attachment) (ports []hostPort) {
	for _, a := range attachments {
		for _, port := range a.HostPorts {
			ports = append(ports, hostPort{port, a.Named, a.Dead})
		}
	}
	slices.SortFunc(ports, func(a, b hostPort) int { return admin.ComparePorts(a.HostPort, b.HostPort) })
	return ports
}

var portTable = output.Table[hostPort]{
	Columns: []output.Column[hostPort]{
		{Head: "ADDRESS", Text: hostPort.address},
		{Head: "PORT", Text: func(p hostPort) string { return strconv.Itoa(int(p.HostPort.HostPort)) }},
		{Head: "PROTOCOL", Text: func(p hostPort) string { return p.Protocol }},
		{Head: "TO", Text: func(p hostPort) string {
			return netip.AddrPortFrom(p.ContainerAddress, p.ContainerPort).String()
		}},
		{Head: "CONTAINER", Text: func(p hostPort) string { return p.Title() }},
		{Head: "STATE", Text: func(p hostPort) string {
			if p.Dead {
				return "dead"
			}
			return "open"
		}, Wide: true},
	},
	Name: func(p hostPort) string {
		return netip.AddrPortFrom(p.HostAddress, p.HostPort.HostPort).String() + "/" + p.Protocol
	},
	None: "no container has a host port",
}

// address returns * for any IPv4 address of the host, and [*] for any IPv6 address.
func (p hostPort) address() string {
	switch p.HostAddress {
	case netip.IPv4Unspecified():
		return "*"
	case netip.IPv6Unspecified():
		return "[*]"
	default:
		return p.HostAddress.String()
	}
}
