package main

import (
	"fmt"
	"io"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// progress is one line that says what is being done and for how long. Where nobody looks at a
// terminal it is a new line now and then.
type progress struct {
	to       io.Writer
	terminal bool
	begin    time.Time
	spoken   time.Time
	// The number of steps, and those that were done since begin.
	steps, past int
}

// silence is how long a progress without a terminal says nothing.
const silence = 10 * time.Second

func newProgress(to *os.File) *progress {
	_, err := unix.IoctlGetTermios(int(to.Fd()), unix.TCGETS)
	return &progress{to: to, terminal: err == nil}
}

// start begins with a number of steps.
func (p *progress) start(steps int) { p.begin, p.steps, p.past = time.Now(), steps, 0 }

func (p *progress) done(steps int) { p.past += steps }

func (p *progress) say(format string, args ...any) {
	if !p.terminal && time.Since(p.spoken) < silence {
		return
	}
	p.spoken = time.Now()
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

// end takes the line away.
func (p *progress) end() {
	if p.terminal {
		fmt.Fprint(p.to, "\r\033[K")
	}
}
