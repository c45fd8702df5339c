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
	"github.com/ebpfnet/ebpfnet/cmd/ebpfnet-node/reconcile"
	"github.com/ebpfnet/ebpfnet/cmd/ebpfnet-node/wanted"
	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/plugin/nodestate"
	"github.com/ebpfnet/ebpfnet/plugin/operator"
	"github.com/ebpfnet/ebpfnet/plugin/record"
)

// errInUse is for a host with containers, which need what is to be taken out.
var errInUse = errors.New("nothing but the conflist and the agent's state was taken out: containers are connected")

// uninstall takes everything of ebpfnet out of this host. With stay it waits for the containers to go, and then for
// the end of ctx: a DaemonSet starts again what ends.
func (o *options) uninstall(ctx context.Context, log *slog.Logger, stay bool) error {
	const patience = 10 * time.Second

	for {
		err := o.takeOut(ctx)
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

// takeOut begins with what makes new containers, and ends with what DEL needs.
func (o *options) takeOut(ctx context.Context) error {
	for _, file := range []string{o.conflist, o.state, nodestate.PeersOf(o.state)} {
		if err := os.Remove(file); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	if err := wantUnused(); err != nil {
		return err
	}
	if err := o.leaveCluster(); err != nil {
		return err
	}
	if err := unload(ctx); err != nil {
		return err
	}
	if o.binDir == "" {
		return nil
	}
	return binaries.Remove(o.binDir)
}

// wantUnused finds containers by their devices, and by the datapath where ebpfnet is chained: a pod does not see the
// host's records.
func wantUnused() error {
	containers, err := operator.Connected(record.DefaultDir)
	if err == nil && len(containers) > 0 {
		err = fmt.Errorf("%w: %d, such as %s", errInUse, len(containers), containers[0])
	}
	return err
}

// leaveCluster removes routes, the device, and what the datapath knows of nodes.
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
	nothing := &wanted.State{}
	changes, err := reconcile.Difference(nothing, have)
	if err != nil {
		return err
	}
	_, err = host.Apply(changes, nothing, have)
	return err
}

func unload(ctx context.Context) error {
	datapath, err := loader.OpenForRelease()
	if errors.Is(err, loader.ErrNotLoaded) {
		return nil
	}
	if err != nil {
		return err
	}
	defer datapath.Close()
	return datapath.Unload(ctx)
}
