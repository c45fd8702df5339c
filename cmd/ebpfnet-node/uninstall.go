package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"time"

	"github.com/ebpfnet/ebpfnet/cmd/ebpfnet-node/binaries"
	"github.com/ebpfnet/ebpfnet/cmd/ebpfnet-node/desired"
	"github.com/ebpfnet/ebpfnet/cmd/ebpfnet-node/reconcile"
	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/plugin/admin"
	"github.com/ebpfnet/ebpfnet/plugin/nodestate"
	"github.com/ebpfnet/ebpfnet/plugin/record"
)

// errInUse is the error for a host with containers, which need what uninstall removes.
var errInUse = errors.New("only the conflist and the agent's state are removed: containers are connected")

// uninstall removes everything of ebpfnet from this host. With stay it waits until no container is left, and then until
// ctx is done, because a DaemonSet restarts a program that ends.
func (o *options) uninstall(ctx context.Context, log *slog.Logger, stay bool) error {
	const patience = 10 * time.Second

	for {
		err := o.remove(ctx)
		if err == nil {
			log.Info("uninstalled")
		}
		if !stay {
			return err
		}
		var again <-chan time.Time // never
		if err != nil {
			log.Error(err.Error())
			again = time.After(patience)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-again:
		}
	}
}

// remove first removes what ADD needs, and last what DEL needs. Without the file of policies, an ADD that is under way would take
// all namespaces to have none, so that goes when no container is connected.
func (o *options) remove(ctx context.Context) error {
	for _, file := range []string{o.conflist, o.state, nodestate.PeersOf(o.state), nodestate.RulesOf(o.state), nodestate.SocketOf(o.state)} {
		if err := os.Remove(file); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	if err := checkUnused(); err != nil {
		return err
	}
	if err := nodestate.RemovePolicies(o.state); err != nil {
		return err
	}
	if err := o.leaveCluster(); err != nil {
		return err
	}
	if err := loader.IfLoaded(loader.OpenForRelease, func(d *loader.Datapath) error { return d.Unload(ctx) }); err != nil {
		return err
	}
	if o.binDir == "" {
		return nil
	}
	return binaries.Remove(o.binDir)
}

// checkUnused fails if containers are connected. It finds them by their devices, and those of a chained ebpfnet by the
// datapath, because the agent's pod does not see the host's records.
func checkUnused() error {
	containers, err := admin.Connected(record.DefaultDir)
	if err == nil && len(containers) > 0 {
		err = fmt.Errorf("%w: %d, such as %s", errInUse, len(containers), containers[0])
	}
	return err
}

// leaveCluster removes the routes, the device, and the nodes from the datapath.
func (o *options) leaveCluster() error {
	host, err := reconcile.Open(datapath{onlyLoaded: true}, o.Device)
	if err != nil {
		return err
	}
	defer host.Close()
	_, have, err := host.Look()
	if err != nil {
		return err
	}
	nothing := &desired.State{}
	changes, err := reconcile.Difference(nothing, have)
	if err != nil {
		return err
	}
	_, err = host.Apply(changes, nothing, have)
	return err
}
