package loader

import (
	"context"
	"errors"
	"fmt"
	"os"
)

// Unload takes all programs off their devices, and removes all pins, of whatever
// version. Devices and addresses of containers stay.
func (d *Datapath) Unload(ctx context.Context) error {
	lock, err := d.Lock(ctx)
	if err != nil {
		return err
	}
	defer lock.Release()

	placed, err := d.placed()
	if err != nil {
		return err
	}
	if err := d.detachAll(placed); err != nil {
		return err
	}
	// At once: the directory of one that is killed here is a leftover for the next load.
	temp := d.dir.temporary(os.Getpid())
	if err := errors.Join(removeLeftovers(d.dir), os.Rename(string(d.dir), temp), os.RemoveAll(temp)); err != nil {
		return fmt.Errorf("remove the pins: %w", err)
	}
	return nil
}
