package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/ebpfnet/ebpfnet/cmd/ebpfnetctl/doctor"
	"github.com/ebpfnet/ebpfnet/cmd/ebpfnetctl/output"
	"github.com/ebpfnet/ebpfnet/cmd/ebpfnetctl/wanted"
)

// doctorOptions are the flags of doctor.
type doctorOptions struct {
	output.Flags
	doctor.Options
	fix, send, peers bool
	to               []string
}

func newDoctor() *cobra.Command {
	var o doctorOptions
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "what keeps ebpfnet from working here, and what to do",
		Long: `Checks the host: rights, kernel, pins, programs, uplinks, forwarding, firewall,
other tools, MTU, addresses, maps, clock, and the network configuration that
the runtime will really take. One line tells what each check has found and what
to do. It changes nothing, and exits with 3 if something is wrong.

--fix mends what is safe to mend, tells what it did, and looks again: programs
that were detached, forwarding, and what containers have left that are gone.

--send connects a container of its own by the plugin, as the runtime would, and
tries connections out (to the default gateways, or --to), in, and by a host
port, for IPv4 and IPv6. It removes the container afterwards.

--peers probes every other node of the cluster, by the tunnel or directly:
whether it answers, whether long packets get there, and whether a network card
spoils their checksums. Nothing of ebpfnet has to run there.`,
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
	o.AddToNoun(cmd.Flags())
	addDataDir(cmd, &o.DataDir)
	flags := cmd.Flags()
	flags.BoolVar(&o.fix, "fix", false, "mend what is safe to mend")
	flags.BoolVar(&o.send, "send", false, "prove by a container of its own that packets arrive")
	flags.BoolVar(&o.peers, "peers", false, "probe every other node of the cluster")
	flags.StringSliceVar(&o.to, "to", nil, "with --send: connect to `ADDRESS:PORT` instead of the gateways")
	flags.StringVar(&o.Root, "root", "/", "`DIR` is where the host's files are, for a container that has them mounted")
	flags.StringVar(&o.ConfDir, "conf-dir", "", "`DIR` is the runtime's directory of networks, if it is not containerd or CRI-O")
	flags.StringSliceVar(&o.BinDirs, "bin-dir", nil, "`DIR` is the runtime's directory of plugins")
	flags.StringVar(&o.CacheDir, "cache-dir", wanted.DefaultCacheDir, "`DIR` is libcni's cache")
	return cmd
}

// examine prints what was found on stdout, and in the end what could not be mended.
func examine(cmd *cobra.Command, o doctorOptions) error {
	remotes, err := o.remotes()
	if err != nil {
		return err
	}
	arrived := output.Waiting(cmd.ErrOrStderr(), "checks, which may wait for other calls of ebpfnet and for tools of the firewall")
	findings := doctor.Run(cmd.Context(), o.Options)
	var errFix error
	if o.fix {
		findings, errFix = doctor.Fix(cmd.Context(), o.Options, findings)
	}
	arrived()
	var errSend, errPeers error
	if o.send {
		var sent []doctor.Finding
		sent, errSend = o.prove(cmd, remotes)
		findings = append(findings, sent...)
	}
	if o.peers {
		var probed []doctor.Finding
		probed, errPeers = o.probe(cmd)
		findings = append(findings, probed...)
	}
	err = findingNoun.Print(output.New(cmd.OutOrStdout(), o.Flags), findings)
	if err := errors.Join(err, errFix, errSend, errPeers); err != nil {
		return err
	}
	return verdictOf(findings)
}

// remotes reads --to.
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

// prove sends, and tells on a terminal what it waits for.
func (o doctorOptions) prove(cmd *cobra.Command, remotes []netip.AddrPort) ([]doctor.Finding, error) {
	ctx, cancel := context.WithTimeout(cmd.Context(), doctor.SendTimeout)
	defer cancel()
	arrived := output.Waiting(cmd.ErrOrStderr(), "answers to the container's packets, at most "+doctor.SendTimeout.String())
	defer arrived()
	return doctor.Send(ctx, o.Options, remotes)
}

// probe probes other nodes, and tells on a terminal what it waits for.
func (o doctorOptions) probe(cmd *cobra.Command) ([]doctor.Finding, error) {
	arrived := output.Waiting(cmd.ErrOrStderr(), "answers of other nodes")
	defer arrived()
	return doctor.Peers(cmd.Context(), o.Options)
}

// verdictOf is errFound where something is wrong, and another error where a check could not look.
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

var findingNoun = output.Noun[doctor.Finding]{
	Columns: []output.Column[doctor.Finding]{
		{Head: "CHECK", Text: func(f doctor.Finding) string { return f.Check }},
		{Head: "STATE", Text: func(f doctor.Finding) string { return string(f.State) }, Color: func(f doctor.Finding) output.Color {
			return map[doctor.State]output.Color{
				doctor.Good: output.Green, doctor.Fixed: output.Green, doctor.Warning: output.Yellow, doctor.Wrong: output.Red, doctor.Unknown: output.Yellow,
			}[f.State]
		}},
		{Head: "WHAT, AND WHAT TO DO", Text: sentenceOf, Wraps: true},
	},
	Name: func(f doctor.Finding) string { return f.Check },
}

func sentenceOf(f doctor.Finding) string {
	if f.Remedy == "" {
		return f.What
	}
	return strings.TrimRight(f.What, ".?") + ". Do: " + f.Remedy
}
