package testenv

import (
	"strings"
	"testing"
)

func TestMachineProtects(t *testing.T) {
	var order []string
	m := new(Machine)
	m.Cleanup(func() { order = append(order, "first") })
	m.Cleanup(func() { m.Fatalf("clean-up failed") })
	m.Cleanup(func() { order = append(order, "last") })
	err := m.Protect(func() error {
		m.Fatalf("stop at %d", 1)
		order = append(order, "after Fatalf")
		return nil
	})
	if err == nil || err.Error() != "stop at 1" {
		t.Errorf("error %v", err)
	}
	if err := m.Protect(func() error { return nil }); err != nil {
		t.Errorf("got an earlier failure: %v", err)
	}
	if err := m.CleanUp(); err == nil || err.Error() != "clean-up failed" {
		t.Errorf("error of clean-up: %v", err)
	}
	if got := strings.Join(order, " "); got != "last first" {
		t.Errorf("order: %s", got)
	}
}
