package plugin

import (
	"context"
	"errors"
	"fmt"
	"testing"
)

func TestRollback(t *testing.T) {
	var u undo
	var ran []int
	first, third := errors.New("first"), errors.New("third")
	for i, err := range []error{first, nil, third} {
		u.push(func(context.Context) error {
			ran = append(ran, i)
			return err
		})
	}
	err := u.rollback(t.Context())
	if fmt.Sprint(ran) != "[2 1 0]" {
		t.Errorf("steps ran in the order %v", ran)
	}
	if !errors.Is(err, first) || !errors.Is(err, third) {
		t.Errorf("got %v", err)
	}
	if err := u.rollback(t.Context()); err != nil || len(ran) != 3 {
		t.Errorf("a second rollback ran %v, %v", ran, err)
	}
}

func TestRollbackOfNothing(t *testing.T) {
	var u undo
	if err := u.rollback(t.Context()); err != nil {
		t.Error(err)
	}
}
