package plugin

import (
	"context"
	"errors"
)

// undo is how a failed ADD is undone: each step that changes something pushes its reversal.
type undo struct {
	steps []func(context.Context) error
}

func (u *undo) push(step func(context.Context) error) {
	u.steps = append(u.steps, step)
}

// rollback runs all steps, last pushed first, and continues after errors.
func (u *undo) rollback(ctx context.Context) error {
	var errs []error
	for len(u.steps) > 0 {
		last := len(u.steps) - 1
		errs = append(errs, u.steps[last](ctx))
		u.steps = u.steps[:last]
	}
	return errors.Join(errs...)
}
