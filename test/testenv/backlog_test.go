package testenv

import (
	"errors"
	"testing"
)

func TestParseBacklog(t *testing.T) {
	const text = "00021f45 0000000a 0000004c 00000000\n0001a6d8 000000ff 00000031 00000000\n"
	for column, want := range []uint32{0x3c61d, 0x109, 0x7d, 0} {
		if got, err := parseBacklog(text, column); err != nil || got != want {
			t.Errorf("column %d: got %#x (%v), want %#x", column, got, err, want)
		}
	}
	for _, text := range []string{"00021f45\n", "00021f45 many\n"} {
		if got, err := parseBacklog(text, 1); err == nil {
			t.Errorf("parse %q: got %d, want an error", text, got)
		}
	}
}

// TestWithoutDrops repeats what fails only while packets are dropped, and not without end.
func TestWithoutDrops(t *testing.T) {
	errLost := errors.New("lost a packet")
	for _, test := range []struct {
		name         string
		drops, fails int // attempts that drop, and that fail
		attempts     int
		isError      bool
	}{
		{name: "nothing is lost", attempts: 1},
		{name: "drops of others", drops: 9, attempts: 1},
		{name: "a loss", fails: 1, attempts: 1, isError: true},
		{name: "a loss by drops", drops: 1, fails: 1, attempts: 2},
		{name: "drops hide no loss", drops: 1, fails: 9, attempts: 2, isError: true},
		{name: "drops without end", drops: 9, fails: 9, attempts: backlogAttempts, isError: true},
	} {
		t.Run(test.name, func(t *testing.T) {
			attempts, drops := 0, uint32(0)
			err := withoutDrops(t, func() (uint32, error) { return drops, nil }, func(attempt int) error {
				if attempt != attempts {
					t.Errorf("got attempt %d, want %d", attempt, attempts)
				}
				attempts++
				if attempt < test.drops {
					drops++
				}
				if attempt < test.fails {
					return errLost
				}
				return nil
			})
			if attempts != test.attempts || errors.Is(err, errLost) != test.isError {
				t.Errorf("got %d attempts and %v, want %d, and an error: %v", attempts, err, test.attempts, test.isError)
			}
		})
	}
}
