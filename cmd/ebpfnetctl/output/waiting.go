package output

import (
	"io"
	"time"
)

// patience is how long a command waits before it says for what.
const patience = time.Second

// Waiting says on a terminal what a command waits for, unless the caller calls done soon.
func Waiting(to io.Writer, what string) (done func()) {
	if columns, _ := TerminalSize(to); columns == 0 {
		return func() {}
	}
	timer := time.AfterFunc(patience, func() { Printf(to, "waiting for %s\n", what) })
	return func() { timer.Stop() }
}
