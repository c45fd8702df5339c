package link

import (
	"errors"
	"testing"

	"golang.org/x/sys/unix"
)

// TestOnThread never uses the main thread, which would keep the namespace that a function has chosen, for all that reads /proc/self.
func TestOnThread(t *testing.T) {
	want := errors.New("done")
	for range 1000 {
		err := OnThread(func() error {
			if unix.Gettid() == unix.Getpid() {
				t.Error("on the main thread")
			}
			return want
		})
		if !errors.Is(err, want) {
			t.Fatal(err)
		}
	}
}
