package main

import (
	"fmt"
	"io"
	"time"
)

// progress prints a line every interval.
type progress struct {
	to             io.Writer
	begin, printed time.Time
	// steps is the total, past the number done since begin.
	steps, past int
}

const interval = 10 * time.Second

// start sets the number of steps and the start time for the estimate.
func (p *progress) start(steps int) { p.begin, p.steps, p.past = time.Now(), steps, 0 }

func (p *progress) done(steps int) { p.past += steps }

func (p *progress) printf(format string, args ...any) {
	if time.Since(p.printed) < interval {
		return
	}
	p.printed = time.Now()
	left := ""
	if p.past > 0 {
		left = time.Duration(float64(time.Since(p.begin))*float64(p.steps-p.past)/float64(p.past)).Round(time.Second).String() + " left: "
	}
	fmt.Fprintf(p.to, left+format+"\n", args...)
}
