package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// report tells what happens: to a person as it goes, or to a program at the end.
// Nothing else writes to standard output.
type report struct {
	summary summary
	person  io.Writer // nowhere for JSON
	program io.Writer // nil for a person
	colours bool
	start   time.Time
}

// summary is what -o json prints.
type summary struct {
	OK       bool     `json:"ok"`
	Kernel   string   `json:"kernel"`
	Conflist string   `json:"conflist,omitempty"`
	Seconds  float64  `json:"seconds"`
	Missing  []string `json:"missing,omitempty"` // why the demo cannot run here
	Error    string   `json:"error,omitempty"`   // why it stopped
	Steps    []*step  `json:"steps"`
}

type step struct {
	Name         string   `json:"name"`
	Title        string   `json:"title"`
	OK           bool     `json:"ok"`
	Milliseconds float64  `json:"milliseconds"`
	Details      []detail `json:"details"`

	width int // of what is done, for a person
}

// detail is one thing that was done or looked at, and what was seen.
type detail struct {
	What     string          `json:"what"`
	Seen     string          `json:"seen"`
	Expected string          `json:"expected,omitempty"` // where it is not what was seen
	OK       bool            `json:"ok"`
	Skipped  bool            `json:"skipped,omitempty"`
	Data     json.RawMessage `json:"data,omitempty"`
}

// mismatch is the error for what went otherwise than it should.
type mismatch struct {
	what, expected, seen string
}

func (m *mismatch) Error() string {
	return fmt.Sprintf("%s: expected %s, saw %s", m.what, m.expected, m.seen)
}

func newReport(out *os.File, asJSON bool) *report {
	r := &report{person: out, start: time.Now()}
	r.summary.Kernel = kernelRelease()
	r.summary.Steps = []*step{}
	if asJSON {
		r.person, r.program = io.Discard, out
		return r
	}
	_, err := unix.IoctlGetTermios(int(out.Fd()), unix.TCGETS)
	r.colours = err == nil && os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb"
	return r
}

// Colours, as in "select graphic rendition".
const (
	bold  = "1"
	faint = "2"
	red   = "31"
	green = "32"
	cyan  = "36"
)

func (r *report) paint(colour, text string) string {
	if !r.colours {
		return text
	}
	return "\x1b[" + colour + "m" + text + "\x1b[0m"
}

func (r *report) printf(format string, args ...any) { fmt.Fprintf(r.person, format, args...) }

// begin starts a step, with what happens and why it matters.
func (r *report) begin(s *step, why string) {
	r.summary.Steps = append(r.summary.Steps, s)
	r.printf("\n%s\n", r.paint(bold, fmt.Sprintf("%d. %s", len(r.summary.Steps), s.Title)))
	r.printf("%s\n", r.paint(faint, indent(why)))
}

func (r *report) last() *step { return r.summary.Steps[len(r.summary.Steps)-1] }

// line is what a person sees of a detail that has been added. What was done is not
// repeated in the lines below.
func (r *report) line(colour, mark string) {
	s := r.last()
	d := s.Details[len(s.Details)-1]
	what := d.What
	if len(s.Details) > 1 && s.Details[len(s.Details)-2].What == what {
		what = ""
	}
	below := "\n" + strings.Repeat(" ", s.width+5)
	r.printf("  %s %-*s %s\n", r.paint(colour, mark), s.width, what, strings.ReplaceAll(d.Seen, "\n", below))
}

// ok tells what was done and its good outcome.
func (r *report) ok(what, format string, args ...any) {
	seen := fmt.Sprintf(format, args...)
	r.last().Details = append(r.last().Details, detail{What: what, Seen: seen, OK: true})
	r.line(green, "✓")
}

// data adds to the last detail what a program may want of it.
func (r *report) data(raw []byte) {
	details := r.last().Details
	if json.Valid(raw) {
		details[len(details)-1].Data = raw
	}
}

// skip tells what could not be looked at, which is no failure.
func (r *report) skip(what, why string) {
	r.last().Details = append(r.last().Details, detail{What: what, Seen: why, OK: true, Skipped: true})
	r.line(faint, "–")
}

// note is for a person alone, below a detail.
func (r *report) note(text string) { r.printf("%s\n", r.paint(cyan, indent(text))) }

// end finishes a step, and tells the failure if there was one.
func (r *report) end(took time.Duration, err error) {
	s := r.last()
	s.Milliseconds, s.OK = milliseconds(took), err == nil
	if err == nil {
		return
	}
	bad := detail{What: s.Title, Seen: err.Error()}
	if m := (*mismatch)(nil); errors.As(err, &m) {
		bad = detail{What: m.what, Expected: m.expected, Seen: m.seen}
	}
	s.Details = append(s.Details, bad)
	r.printf("  %s %s\n", r.paint(red, "✗"), bad.What)
	if bad.Expected != "" {
		r.printf("      expected %s\n", bad.Expected)
	}
	r.printf("      saw      %s\n", strings.ReplaceAll(bad.Seen, "\n", "\n               "))
}

// finish tells the end and returns the exit code.
func (r *report) finish(err error) int {
	r.summary.Seconds = float64(time.Since(r.start).Milliseconds()) / 1000
	r.summary.OK = err == nil
	if err != nil {
		r.summary.Error = err.Error()
		r.printf("\n%s\n", r.paint(red, "✗ The demo failed: "+err.Error()))
		r.printf("  What it had set up has been removed; this host was not touched.\n")
		if r.program != nil {
			fmt.Fprintf(os.Stderr, "demo: %v\n", err)
		}
		return r.exit(1)
	}
	checks := 0
	for _, s := range r.summary.Steps {
		for _, d := range s.Details {
			if !d.Skipped {
				checks++
			}
		}
	}
	r.printf("\n%s %d steps, %d outcomes as expected, in %.1f s.\n",
		r.paint(green, "✓ Everything worked:"), len(r.summary.Steps), checks, r.summary.Seconds)
	r.printf("  It was all in namespaces of the demo's own, which end with it: this host was not touched.\n")
	return r.exit(0)
}

// cannotRun tells what this host lacks and returns the exit code.
func (r *report) cannotRun(missing []string) int {
	r.summary.Missing = missing
	fmt.Fprintln(os.Stderr, "demo: cannot run here:")
	for _, what := range missing {
		fmt.Fprintf(os.Stderr, "  - %s\n", strings.ReplaceAll(what, "\n", "\n  - "))
	}
	return r.exit(1)
}

func (r *report) exit(code int) int {
	if r.program == nil {
		return code
	}
	encoder := json.NewEncoder(r.program)
	encoder.SetEscapeHTML(false)
	encoder.SetIndent("", "  ")
	if err := encoder.Encode(r.summary); err != nil {
		fmt.Fprintf(os.Stderr, "demo: print the summary: %v\n", err)
		return 1
	}
	return code
}

func milliseconds(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

func indent(text string) string {
	return "   " + strings.ReplaceAll(text, "\n", "\n   ")
}
