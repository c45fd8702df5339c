package plugin

import (
	"context"
	"errors"
)

// undo is what takes a failed ADD back: each step that changed something pushes
// how to unmake it.
type undo struct {
	steps []func(context.Context) error
}

func (u *undo) push(step func(context.Context) error) {
	u.steps = append(u.steps, step)
}

// rollback runs all steps, the last pushed first, whatever fails meanwhile.
func (u *undo) rollback(ctx context.Context) error {
	var errs []error
	for len(u.steps) > 0 {
		last := len(u.steps) - 1
		errs = append(errs, u.steps[last](ctx))
		u.steps = u.steps[:last]
	}
	return errors.Join(errs...)
}
