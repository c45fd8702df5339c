package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin"
)

// load loads the datapath, if it is not loaded.
func load(ctx context.Context, to io.Writer, _ options) error {
	datapath, err := loader.Open(ctx, loader.Options{})
	if err != nil {
		return err
	}
	defer datapath.Close()

	fmt.Fprintf(to, "loaded, pinned in %s\n", datapath.Dir())
	return nil
}

// upgrade prints what it has replaced.
func upgrade(ctx context.Context, to io.Writer, o options) error {
	done, err := loader.Upgrade(ctx, loader.Options{})
	if err != nil {
		return err
	}
	if o.json {
		return json.NewEncoder(to).Encode(done)
	}
	if done.FromBuild == done.ToBuild {
		fmt.Fprintf(to, "these programs are loaded already: %s\n", programsName(done.ToRevision, done.ToBuild))
		return nil
	}
	fmt.Fprintf(to, "%s in the place of %s; put on devices: %d\n",
		programsName(done.ToRevision, done.ToBuild), programsName(done.FromRevision, done.FromBuild), done.Programs)
	return nil
}

// repair prints what it has mended.
func repair(ctx context.Context, to io.Writer, o options) error {
	host, err := plugin.OpenHost(loader.OpenLoaded, o.dataDir)
	if err != nil {
		return err
	}
	defer host.Close()

	mended, err := host.Repair(ctx)
	if o.json {
		return errors.Join(err, json.NewEncoder(to).Encode(map[string][]string{"mended": append([]string{}, mended...)}))
	}
	for _, what := range mended {
		fmt.Fprintf(to, "put back: %s\n", what)
	}
	if err == nil && len(mended) == 0 {
		fmt.Fprintln(to, "nothing was missing")
	}
	return err
}

// set changes settings of containers that run.
func set(ctx context.Context, to io.Writer, o options) error {
	if len(o.words) < 2 {
		return wrongArguments{errors.New("set: expected NETWORK[/CONTAINER[/INTERFACE]], and then KEY=VALUE once or more")}
	}
	settings, err := plugin.ParseSettings(o.words[1:])
	if err != nil {
		return wrongArguments{err}
	}
	var of maps.Attachment
	names := strings.SplitN(o.words[0], "/", 3)
	for i, name := range []*string{&of.Network, &of.ContainerID, &of.IfName}[:len(names)] {
		*name = names[i]
	}
	host, err := plugin.OpenHost(loader.OpenLoaded, o.dataDir)
	if err != nil {
		return err
	}
	defer host.Close()

	changed, err := host.Set(ctx, of, settings)
	for _, who := range changed {
		fmt.Fprintf(to, "%s: %s\n", who, strings.Join(o.words[1:], " "))
	}
	return err
}

// unload says what it would break, or does it.
func unload(ctx context.Context, to io.Writer, o options) error {
	host, err := plugin.OpenHost(loader.OpenForRelease, o.dataDir)
	if err != nil {
		return err
	}
	defer host.Close()

	if o.yes {
		if err := host.Unload(ctx); err != nil {
			return err
		}
		fmt.Fprintln(to, "unloaded; the next ADD loads it again")
		return nil
	}
	usage, err := host.Usage()
	if err != nil {
		return err
	}
	return fmt.Errorf("nothing was done: unloading ends masquerading and host ports of %d containers (%s), "+
		"closes %d entries of host ports and %d flows, and leaves uplinks %s without programs; with --yes it is done",
		len(usage.Containers), strings.Join(usage.Containers, ", "), usage.HostPorts, usage.Flows, strings.Join(usage.Uplinks, ", "))
}
