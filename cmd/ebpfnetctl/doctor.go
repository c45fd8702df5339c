package main

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/ebpfnet/ebpfnet/cmd/ebpfnetctl/doctor"
	"github.com/ebpfnet/ebpfnet/cmd/ebpfnetctl/output"
)

type doctorOptions struct {
	output.Flags
	doctor.Options
	dirs      directories
	fix, send bool
	to        []string
}

func newDoctor() *cobra.Command {
	var o doctorOptions
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "what keeps ebpfnet from working here, and what to do",
		Long: `Checks the host: rights, kernel, pins, programs, uplinks, forwarding, firewall,
MTU, addresses, maps, the network configuration that the runtime takes, and
whether containers still have what ADD gave them. One line reports what a check
has found and what to do. It changes nothing, and exits with 3 if something is
wrong.

--fix fixes what is safe to fix, prints what it did, and checks again: programs
that were detached, forwarding, and leftovers of containers that are gone.

--send connects a container of its own with the plugin, as the runtime would,
and tries connections out (to the default gateways, or --to), in, and to a host
port, for IPv4 and IPv6. It prints which rules of the firewall drop its packets,
and removes the container afterwards.

--peers probes every other node of the cluster, by the tunnel or directly:
whether it answers, and whether long packets get there. Nothing of ebpfnet has
to run there.`,
		Example: `  ebpfnetctl doctor
  ebpfnetctl doctor --fix
  ebpfnetctl doctor --send --to 192.0.2.7:443
  ebpfnetctl doctor --peers
  ebpfnetctl doctor -o json | jq -r '.[] | select(.state == "wrong") | .remedy'`,
		Args: noWords,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return examine(cmd, o)
		},
	}
	o.AddToRead(cmd.Flags())
	o.dirs.add(cmd)
	flags := cmd.Flags()
	flags.BoolVar(&o.fix, "fix", false, "fix what is safe to fix")
	flags.BoolVar(&o.send, "send", false, "prove with a container of its own that packets arrive")
	flags.BoolVar(&o.Peers, "peers", false, "probe every other node of the cluster")
	flags.StringSliceVar(&o.to, "to", nil, "with --send: connect to `ADDRESS:PORT` instead of the gateways")
	o.AddFlags(flags)
	return cmd
}

// examine prints the findings on stdout, and at the end what could not be fixed.
func examine(cmd *cobra.Command, o doctorOptions) error {
	o.DataDir, o.CacheDir = o.dirs.data, o.dirs.cache
	remotes, err := o.remotes()
	if err != nil {
		return err
	}
	findings := doctor.Run(cmd.Context(), o.Options)
	var errFix, errSend error
	if o.fix {
		findings, errFix = doctor.Fix(cmd.Context(), o.Options, findings)
	}
	if o.send {
		var sent []doctor.Finding
		sent, errSend = doctor.Send(cmd.Context(), o.Options, remotes)
		findings = append(findings, sent...)
	}
	err = findingTable.Print(output.New(cmd.OutOrStdout(), o.Flags), findings)
	if err := errors.Join(err, errFix, errSend); err != nil {
		return err
	}
	return verdictOf(findings)
}

func (o doctorOptions) remotes() (remotes []netip.AddrPort, err error) {
	for _, text := range o.to {
		remote, err := netip.ParseAddrPort(text)
		if err != nil {
			return nil, usageError{fmt.Errorf("doctor: --to %q: expected ADDRESS:PORT, such as 192.0.2.7:443 or [2001:db8::7]:443", text)}
		}
		remotes = append(remotes, remote)
	}
	if len(remotes) > 0 && !o.send {
		return nil, usageError{errors.New("doctor: --to: expected --send beside it")}
	}
	return remotes, nil
}

// verdictOf returns errFound if something is wrong, and another error if a check could not look.
func verdictOf(findings []doctor.Finding) error {
	has := func(state doctor.State) bool {
		return slices.ContainsFunc(findings, func(f doctor.Finding) bool { return f.State == state })
	}
	switch {
	case has(doctor.Wrong):
		return errFound
	case has(doctor.Unknown):
		return errors.New("not all checks could look")
	}
	return nil
}

var findingTable = output.Table[doctor.Finding]{
	Columns: []output.Column[doctor.Finding]{
		{Head: "CHECK", Text: func(f doctor.Finding) string { return f.Check }},
		{Head: "STATE", Text: func(f doctor.Finding) string { return string(f.State) }},
		{Head: "WHAT, AND WHAT TO DO", Text: sentenceOf},
	},
	Name: func(f doctor.Finding) string { return f.Check },
}

func sentenceOf(f doctor.Finding) string {
	if f.Remedy == "" {
		return f.What
	}
	return strings.TrimRight(f.What, ".?") + ". Do: " + f.Remedy
}
