package main

import (
	"fmt"
	"io"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// progress is one status line on a terminal, and otherwise a new line every interval.
type progress struct {
	to       io.Writer
	terminal bool
	begin    time.Time
	printed  time.Time
	// steps is the total, past the number done since begin.
	steps, past int
}

const interval = 10 * time.Second

func newProgress(to *os.File) *progress {
	_, err := unix.IoctlGetTermios(int(to.Fd()), unix.TCGETS)
	return &progress{to: to, terminal: err == nil}
}

// start sets the number of steps and the start time for the estimate.
func (p *progress) start(steps int) { p.begin, p.steps, p.past = time.Now(), steps, 0 }

func (p *progress) done(steps int) { p.past += steps }

func (p *progress) printf(format string, args ...any) {
	if !p.terminal && time.Since(p.printed) < interval {
		return
	}
	p.printed = time.Now()
	line := fmt.Sprintf(format, args...)
	if p.past > 0 {
		left := time.Duration(float64(time.Since(p.begin)) * float64(p.steps-p.past) / float64(p.past))
		line = fmt.Sprintf("%3d %%, %s left: %s", 100*p.past/p.steps, left.Round(time.Second), line)
	}
	if p.terminal {
		fmt.Fprintf(p.to, "\r\033[K%s", line)
		return
	}
	fmt.Fprintln(p.to, line)
}

// end clears the line.
func (p *progress) end() {
	if p.terminal {
		fmt.Fprint(p.to, "\r\033[K")
	}
}
