package testenv

import (
	"context"

	"github.com/ebpfnet/ebpfnet/loader"
)

// WithDatapath calls use with the datapath that is loaded in the namespace.
func (ns *Namespace) WithDatapath(use func(*loader.Datapath) error) error {
	return ns.Do(func() error {
		datapath, err := loader.OpenLoaded()
		if err != nil {
			return err
		}
		defer datapath.Close()
		return use(datapath)
	})
}

// Upgrade replaces the programs of the datapath that is loaded in the namespace.
func (ns *Namespace) Upgrade(ctx context.Context, programs loader.Programs) error {
	return ns.Do(func() error {
		_, err := loader.Upgrade(ctx, loader.Options{Programs: &programs})
		return err
	})
}
