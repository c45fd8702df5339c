package main

import (
	"cmp"
	"errors"
	"net/netip"
	"slices"
	"strconv"

	"github.com/spf13/cobra"

	"github.com/ebpfnet/ebpfnet/cmd/ebpfnetctl/output"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/operator"
)

// hostPort is an element of `ebpfnetctl ports -o json`: schema/ports.json.
type hostPort struct {
	operator.HostPort
	maps.Attachment        // whose it is
	Owner           string `json:"owner"`
	Dead            bool   `json:"dead"` // the container is gone; DEL or GC removes the port

	name string
}

func newPorts() *cobra.Command {
	var flags output.Flags
	var dataDir string
	cmd := &cobra.Command{
		Use:   "ports [CONTAINER]",
		Short: "host ports, and where they lead to",
		Long: `Lists the host ports: address, port and protocol, the address and port that they
lead TO, and whose that is. * is any IPv4 address of the host, [*] any IPv6
address.

` + containerHelp,
		Example:           "  ebpfnetctl ports\n  ebpfnetctl ports web -o name",
		Args:              oneWord,
		ValidArgsFunction: completeContainers(&dataDir),
		RunE: func(cmd *cobra.Command, words []string) error {
			attachments, err := attachmentsOf(words, dataDir)
			if attachments == nil {
				return err
			}
			return errors.Join(err, portNoun.Print(output.New(cmd.OutOrStdout(), flags), portsOf(attachments)))
		},
	}
	flags.AddToNoun(cmd.Flags())
	addDataDir(cmd, &dataDir)
	return cmd
}

func portsOf(attachments []*operator.Attachment) (ports []hostPort) {
	for _, a := range attachments {
		for _, port := range a.HostPorts {
			ports = append(ports, hostPort{port, a.Attachment, a.Owner, a.Dead, containerName(a)})
		}
	}
	slices.SortFunc(ports, func(a, b hostPort) int {
		return cmp.Or(cmp.Compare(a.HostPort.HostPort, b.HostPort.HostPort), cmp.Compare(a.Protocol, b.Protocol), a.HostAddress.Compare(b.HostAddress))
	})
	return ports
}

var portNoun = output.Noun[hostPort]{
	Columns: []output.Column[hostPort]{
		{Head: "ADDRESS", Text: hostPort.address},
		{Head: "PORT", Text: func(p hostPort) string { return strconv.Itoa(int(p.HostPort.HostPort)) }, Right: true},
		{Head: "PROTOCOL", Text: func(p hostPort) string { return p.Protocol }},
		{Head: "TO", Text: func(p hostPort) string {
			return netip.AddrPortFrom(p.ContainerAddress, p.ContainerPort).String()
		}},
		{Head: "CONTAINER", Text: func(p hostPort) string { return p.name }, Elastic: true},
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

// address tells the families apart where it is any address.
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
