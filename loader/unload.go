package loader

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/ebpfnet/ebpfnet/loader/rtnl"
)

// Unload detaches all programs and removes all pins, of whatever version, and the plugin's
// routes for unassigned addresses. It leaves the containers' devices, addresses and routes alone.
func (d *Datapath) Unload(ctx context.Context) error {
	lock, err := d.Lock(ctx)
	if err != nil {
		return err
	}
	defer lock.Release()

	attached, err := d.attachedTargets()
	if err != nil {
		return err
	}
	if err := d.detachAll(attached); err != nil {
		return err
	}
	if err := rtnl.DeletePluginRoutes(func(rtnl.NodeRoute) bool { return true }); err != nil {
		return err
	}
	// One rename unpublishes all pins. If we are killed after it, the next load removes
	// the temporary directory.
	temp := d.dir.temporary(os.Getpid())
	if err := errors.Join(removeLeftovers(d.dir), os.Rename(string(d.dir), temp), os.RemoveAll(temp)); err != nil {
		return fmt.Errorf("remove the pins: %w", err)
	}
	return nil
}
