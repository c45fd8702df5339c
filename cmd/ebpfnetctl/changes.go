package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/config"
	"github.com/ebpfnet/ebpfnet/plugin/operator"
)

// load loads the datapath if it is not loaded.
func load(ctx context.Context, to io.Writer, _ options) error {
	datapath, err := loader.Open(ctx, loader.Options{})
	if err != nil {
		return err
	}
	defer datapath.Close()

	printf(to, "loaded, pinned in %s\n", datapath.Dir())
	return nil
}

// upgrade prints what it has replaced.
func upgrade(ctx context.Context, to io.Writer, o options) error {
	done, err := loader.Upgrade(ctx, loader.Options{})
	if err != nil {
		return err
	}
	if o.json {
		return printJSON(to, done)
	}
	if done.FromBuild == done.ToBuild {
		printf(to, "already loaded: %s\n", programVersion(done.ToRevision, done.ToBuild))
		return nil
	}
	printf(to, "replaced %s with %s; programs replaced on devices: %d\n",
		programVersion(done.FromRevision, done.FromBuild), programVersion(done.ToRevision, done.ToBuild), done.Programs)
	return nil
}

// repair prints what it has repaired. For a hook it only follows changes of the host, unless there is
// nothing loaded, or another hook is about to do the same.
func repair(ctx context.Context, to io.Writer, o options) error {
	what := (*operator.Operator).Repair
	if o.hook {
		turn, err := loader.TakeTurn(ctx)
		if turn == nil || err != nil {
			return ignoreNotLoaded(err)
		}
		defer turn.Release()
		what = (*operator.Operator).Follow
	}
	op, err := operator.Open(loader.OpenLoaded, o.dataDir)
	if err != nil {
		return err
	}
	defer op.Close()

	repaired, err := what(op, ctx)
	if o.json {
		return errors.Join(err, printJSON(to, map[string][]string{"repaired": append([]string{}, repaired...)}))
	}
	for _, thing := range repaired {
		printf(to, "repaired: %s\n", thing)
	}
	if err == nil && len(repaired) == 0 {
		printf(to, "nothing to repair\n")
	}
	return err
}

func ignoreNotLoaded(err error) error {
	if errors.Is(err, loader.ErrNotLoaded) {
		return nil
	}
	return err
}

// set changes settings of containers that run.
func set(ctx context.Context, to io.Writer, o options) error {
	if len(o.words) < 2 {
		return argumentError{errors.New("set: expected NETWORK[/CONTAINER[/INTERFACE]] and at least one KEY=VALUE")}
	}
	settings, err := config.ParseSettings(o.words[1:])
	if err != nil {
		return argumentError{fmt.Errorf("set: %w", err)}
	}
	var filter maps.Attachment
	names := strings.SplitN(o.words[0], "/", 3)
	for i, name := range []*string{&filter.Network, &filter.ContainerID, &filter.IfName}[:len(names)] {
		*name = names[i]
	}
	op, err := operator.Open(loader.OpenLoaded, o.dataDir)
	if err != nil {
		return err
	}
	defer op.Close()

	changed, warnings, err := op.Set(ctx, filter, settings)
	for _, warning := range warnings {
		printf(to, "warning: %s\n", warning)
	}
	for _, alias := range changed {
		printf(to, "%s: %s\n", alias, strings.Join(o.words[1:], " "))
	}
	return err
}

// unload prints what it would break, or unloads.
func unload(ctx context.Context, to io.Writer, o options) error {
	op, err := operator.Open(loader.OpenForRelease, o.dataDir)
	if err != nil {
		return err
	}
	defer op.Close()

	if o.yes {
		if err := op.Unload(ctx); err != nil {
			return err
		}
		printf(to, "unloaded; the next ADD loads it again\n")
		return nil
	}
	usage, err := op.Usage()
	if err != nil {
		return err
	}
	return fmt.Errorf("nothing was done: unloading would remove %d host port entries and %d flows, detach the programs from "+
		"uplinks %s, and end masquerading and host ports for %d containers; use --yes to unload (the containers: %s)",
		usage.HostPorts, usage.Flows, strings.Join(usage.Uplinks, ", "), len(usage.Containers), strings.Join(usage.Containers, ", "))
}
