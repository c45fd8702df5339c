package loader

import (
	"context"
	"errors"
	"fmt"
	"os"
)

// Unload detaches all programs and removes all pins, of whatever version. It leaves
// the containers' devices and addresses alone.
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
	// One rename unpublishes all pins. If we are killed after it, the next load removes
	// the temporary directory.
	temp := d.dir.temporary(os.Getpid())
	if err := errors.Join(removeLeftovers(d.dir), os.Rename(string(d.dir), temp), os.RemoveAll(temp)); err != nil {
		return fmt.Errorf("remove the pins: %w", err)
	}
	return nil
}
