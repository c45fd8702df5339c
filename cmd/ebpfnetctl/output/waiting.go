package output

import (
	"io"
	"time"
)

// patience is how long a command waits before it prints why.
const patience = time.Second

// Waiting prints on a terminal what a command waits for, unless the caller calls done soon.
func Waiting(to io.Writer, what string) (done func()) {
	if !IsTerminal(to) {
		return func() {}
	}
	timer := time.AfterFunc(patience, func() { Printf(to, "waiting for %s\n", what) })
	return func() { timer.Stop() }
}
