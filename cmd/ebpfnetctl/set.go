package main

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/ebpfnet/ebpfnet/cmd/ebpfnetctl/output"
	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/admin"
	"github.com/ebpfnet/ebpfnet/plugin/config"
	"github.com/ebpfnet/ebpfnet/plugin/containers"
)

func newSet() *cobra.Command {
	var dirs directories
	cmd := &cobra.Command{
		Use:   "set NETWORK[/CONTAINER[/INTERFACE]] KEY=VALUE...",
		Short: "change settings of running containers",
		Long: `Changes antiSpoof, ingressPolicy, policy, policyMode, ingressRate, ingressBurst,
egressRate or egressBurst of running containers: of all in a network, or of one.
The configuration still applies to new ones. The value of policy is a JSON file,
or "none".`,
		Example: `  ebpfnetctl set pods ingressPolicy=isolated
  ebpfnetctl set pods/web policy=web.json policyMode=audit
  ebpfnetctl set pods/web/eth0 egressRate=50000000 antiSpoof=true`,
		ValidArgsFunction: completeSettings(&dirs),
		RunE:              func(cmd *cobra.Command, words []string) error { return set(cmd, words, dirs) },
	}
	dirs.add(cmd)
	return cmd
}

func set(cmd *cobra.Command, words []string, dirs directories) error {
	if len(words) < 2 {
		return usageError{errors.New("set: expected NETWORK[/CONTAINER[/INTERFACE]] and at least one KEY=VALUE")}
	}
	settings, err := config.ParseSettings(words[1:])
	if err != nil {
		return usageError{fmt.Errorf("set: %w", err)}
	}
	var filter maps.Attachment
	names := strings.SplitN(words[0], "/", 3)
	if slices.Contains(names, "") { // a variable of a script that is not set
		return usageError{fmt.Errorf("set: %q: expected NETWORK[/CONTAINER[/INTERFACE]], and no empty name", words[0])}
	}
	for i, name := range []*string{&filter.Network, &filter.ContainerID, &filter.IfName}[:len(names)] {
		*name = names[i]
	}
	ctx, done := withLocks(cmd)
	defer done()
	if filter.ContainerID, err = idOf(filter, dirs); err != nil {
		return err
	}
	op, err := admin.Open(loader.OpenLoaded, dirs.data)
	if err != nil {
		return err
	}
	defer op.Close()

	changed, warnings, err := op.Set(ctx, filter, settings)
	for _, warning := range warnings {
		output.Printf(cmd.OutOrStdout(), "warning: %s\n", warning)
	}
	for _, alias := range changed {
		output.Printf(cmd.OutOrStdout(), "%s: %s\n", alias, strings.Join(words[1:], " "))
	}
	return err
}

// idOf returns the ID of the container that a filter means in its network. One that is not there keeps its word.
func idOf(filter maps.Attachment, dirs directories) (string, error) {
	if filter.ContainerID == "" {
		return "", nil
	}
	attachments, _ := containers.Attachments(dirs.data, dirs.cache) // what can be read
	attachments = slices.DeleteFunc(attachments, func(a *admin.Attachment) bool { return a.Network != filter.Network })
	found, err := findContainer(attachments, filter.ContainerID)
	if errors.Is(err, admin.ErrNoAttachment) {
		return filter.ContainerID, nil
	}
	if err != nil {
		return "", err
	}
	return found[0].ContainerID, nil
}

// completeSettings completes networks and containers, and then keys.
func completeSettings(dirs *directories) cobra.CompletionFunc {
	return func(_ *cobra.Command, words []string, begun string) ([]cobra.Completion, cobra.ShellCompDirective) {
		var names []string
		if len(words) > 0 {
			for _, key := range config.SettingKeys {
				names = append(names, key+"=")
			}
			return completionsOf(names, begun), cobra.ShellCompDirectiveNoFileComp | cobra.ShellCompDirectiveNoSpace
		}
		attachments, _ := containers.Attachments(dirs.data, dirs.cache) // what can be read
		for _, a := range attachments {
			names = append(names, a.Network, containerName(a.Named))
		}
		return completionsOf(names, begun), cobra.ShellCompDirectiveNoFileComp
	}
}
