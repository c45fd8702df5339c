package main

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/ebpfnet/ebpfnet/cmd/ebpfnetctl/migrate"
	"github.com/ebpfnet/ebpfnet/cmd/ebpfnetctl/output"
	"github.com/ebpfnet/ebpfnet/plugin/containers"
)

type migrateOptions struct {
	output.Flags
	migrate.Options
	plan, back bool
}

func newMigrate() *cobra.Command {
	var o migrateOptions
	cmd := &cobra.Command{
		Use:   "migrate [NETWORK]",
		Short: "migrate networks of other plugins to ebpfnet, or back",
		Long: `Migrates networks of the reference plugins (ptp, bridge, with host-local and
portmap) to ebpfnet: all, or one. Subnets and addresses stay. A list of ebpfnet
replaces the network's list, which is kept beside it. Running containers are
adopted: they go on, with their connections, and end as they
would have. Containers of bridges that have IPv6 have to be stopped before.

--plan prints what would happen to each network and container, changes nothing,
and exits with 3 if a network is blocked.

--back puts the old list back, and releases what was adopted. Containers that
ebpfnet made have to be stopped before.`,
		Example: `  ebpfnetctl migrate --plan
  ebpfnetctl migrate --plan -o json | jq '.[0].conflist'
  ebpfnetctl migrate podman
  ebpfnetctl migrate podman --back`,
		Args:              oneWord,
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, words []string) error {
			o.Network = strings.Join(words, "")
			return runMigrate(cmd, o)
		},
	}
	o.AddToWrite(cmd.Flags())
	flags := cmd.Flags()
	flags.BoolVar(&o.plan, "plan", false, "print what would be done, and do nothing")
	flags.BoolVar(&o.back, "back", false, "put the old lists back")
	o.AddFlags(flags)
	flags.StringVar(&o.CacheDir, "cache-dir", containers.DefaultCacheDir, "`DIR` is libcni's cache")
	return cmd
}

func runMigrate(cmd *cobra.Command, o migrateOptions) error {
	p := output.New(cmd.OutOrStdout(), o.Flags)
	switch {
	case o.plan && o.back:
		return usageError{errors.New("migrate: --back: expected no --plan beside it")}
	case o.plan:
		return planMigration(cmd, p, o.Options)
	}
	change := migrate.Migrate
	if o.back {
		change = migrate.Back
	}
	steps := []string{}
	err := change(cmd.Context(), o.Options, func(format string, args ...any) {
		step := fmt.Sprintf(format, args...)
		steps = append(steps, step)
		if !o.ForPrograms() { // at once, since it may take long
			p.Printf("%s\n", step)
		}
	})
	return errors.Join(err, p.Document(map[string][]string{"done": steps}, "", func() {
		if err == nil && len(steps) == 0 {
			p.Printf("nothing to do\n")
		}
	}))
}

func planMigration(cmd *cobra.Command, p *output.Printer, o migrate.Options) error {
	networks, err := migrate.Plan(cmd.Context(), o)
	networks = append([]*migrate.Network{}, networks...)
	errPrint := p.Document(networks, "", func() {
		if len(networks) == 0 && err == nil {
			p.Printf("no network to migrate\n")
		}
		for _, n := range networks {
			printNetwork(p, n)
		}
	})
	isBlocked := func(n *migrate.Network) bool { return len(n.Reasons) > 0 }
	if err = errors.Join(err, errPrint); err == nil && slices.ContainsFunc(networks, isBlocked) {
		return errFound
	}
	return err
}

func printNetwork(p *output.Printer, n *migrate.Network) {
	p.Printf("network %s (%s), made by %s: %s\n", n.Name, n.File, strings.Join(n.Plugins, ", "), string(n.State))
	for _, reason := range n.Reasons {
		p.Printf("  blocked: %s\n", reason)
	}
	for _, c := range n.Containers {
		p.Printf("  %s %s %s (%s, %s)\n", string(c.Action), c.Title(), c.IfName, c.Device, strings.Join(c.Addresses, ", "))
	}
	if n.State != migrate.Ready {
		return
	}
	p.Printf("  keep %s, and write in its place:\n", n.File)
	for line := range strings.Lines(string(n.Conflist)) {
		p.Printf("    %s\n", strings.TrimSuffix(line, "\n"))
	}
}
