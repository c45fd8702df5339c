package rtnl

import (
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// TestRetry asks again after an interruption, and after no other error.
func TestRetry(t *testing.T) {
	whole := []int{1, 2, 3}
	errInterrupted := fmt.Errorf("list: %w", netlink.ErrDumpInterrupted)
	for _, test := range []struct {
		name     string
		errs     []error // one for each attempt; the last one counts for all that follow
		want     []int
		wantErr  error
		attempts int
	}{
		{"at once", []error{nil}, whole, nil, 1},
		{"interrupted twice", []error{errInterrupted, errInterrupted, nil}, whole, nil, 3},
		{"always interrupted", []error{errInterrupted}, nil, netlink.ErrDumpInterrupted, 10},
		{"device is gone", []error{unix.ENODEV}, nil, unix.ENODEV, 1},
		{"interrupted, then gone", []error{errInterrupted, unix.ENODEV}, nil, unix.ENODEV, 2},
	} {
		t.Run(test.name, func(t *testing.T) {
			attempts := 0
			got, err := retry(func() ([]int, error) {
				err := test.errs[min(attempts, len(test.errs)-1)]
				attempts++
				if err != nil {
					return whole[:1], err // as the library does
				}
				return whole, nil
			})
			if !slices.Equal(got, test.want) || !errors.Is(err, test.wantErr) || attempts != test.attempts {
				t.Errorf("got %v, %v after %d attempts; want %v, %v after %d",
					got, err, attempts, test.want, test.wantErr, test.attempts)
			}
		})
	}
}
