package prog

import (
	_ "embed"
	"errors"
	"fmt"
	"maps"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/cilium/ebpf/asm"
)

const verifiedFile = "testdata/verified.txt"

// renewVerified is the command that renews verified.txt, for messages.
const renewVerified = "`make verified` renews testdata/verified.txt (KERNEL=5.10 for one; on this kernel: go test ./prog -run TestLoad -update)"

//go:embed testdata/verified.txt
var verifiedText string

// cost is a program's verifier cost. The kernel limits both.
type cost struct {
	insns int // instructions verified, at most 1,000,000
	stack int // bytes of the deepest call chain, at most 512
}

// verified has the costs by kernel series, such as 5.10, and program.
type verified map[string]map[string]cost

func parseVerified(text string) (verified, error) {
	v := make(verified)
	for i, line := range strings.Split(text, "\n") {
		line, _, _ = strings.Cut(line, "#")
		if strings.TrimSpace(line) == "" {
			continue
		}
		var series, program string
		var c cost
		if _, err := fmt.Sscan(line, &series, &program, &c.insns, &c.stack); err != nil {
			return nil, fmt.Errorf("%s:%d: want series, program, instructions and stack, got %q", verifiedFile, i+1, line)
		}
		if v[series] == nil {
			v[series] = make(map[string]cost)
		}
		v[series][program] = c
	}
	return v, nil
}

func (v verified) String() string {
	var text strings.Builder
	text.WriteString("# What each program costs the verifier, by series of kernels: instructions that it walks\n" +
		"# through, and bytes of stack. TestLoad fails when they grow; `make verified` renews them.\n")
	for _, series := range slices.SortedFunc(maps.Keys(v), compareSeries) {
		for _, program := range slices.Sorted(maps.Keys(v[series])) {
			c := v[series][program]
			fmt.Fprintf(&text, "%-5s %-14s %7d %4d\n", series, program, c.insns, c.stack)
		}
	}
	return text.String()
}

// compareSeries compares numerically: 5.10 comes after 5.9.
func compareSeries(a, b string) int {
	numbers := func(series string) (n []int) {
		for _, part := range strings.Split(series, ".") {
			number, _ := strconv.Atoi(part)
			n = append(n, number)
		}
		return n
	}
	return slices.Compare(numbers(a), numbers(b))
}

// maxStack leaves 32 of the 512 bytes that the kernel allows to the caller that tests add (tagReader).
const maxStack = 480

// checkGrowth returns an error if a cost has grown by more than a tenth, or a program needs too much stack.
func checkGrowth(committed, now map[string]cost) error {
	var errs []error
	grown := func(program, what string, from, to int) {
		if to*10 > from*11 {
			errs = append(errs, fmt.Errorf("%s: %s grew from %d to %d", program, what, from, to))
		}
	}
	for _, program := range slices.Sorted(maps.Keys(now)) {
		if stack := now[program].stack; stack > maxStack {
			errs = append(errs, fmt.Errorf("%s: got %d bytes of stack, want at most %d", program, stack, maxStack))
		}
		was, ok := committed[program]
		if !ok {
			errs = append(errs, fmt.Errorf("%s: not in %s", program, verifiedFile))
			continue
		}
		grown(program, "verified instructions", was.insns, now[program].insns)
		grown(program, "stack", was.stack, now[program].stack)
	}
	for _, program := range slices.Sorted(maps.Keys(committed)) {
		if _, ok := now[program]; !ok {
			errs = append(errs, fmt.Errorf("%s: in %s, but not loaded", program, verifiedFile))
		}
	}
	return errors.Join(errs...)
}

// renew writes the costs of one series into the file in the source tree.
func renew(series string, now map[string]cost) error {
	text, err := os.ReadFile(verifiedFile)
	if err != nil {
		return fmt.Errorf("%w (the working directory must be test/prog)", err)
	}
	v, err := parseVerified(string(text))
	if err != nil {
		return err
	}
	v[series] = now
	return os.WriteFile(verifiedFile, []byte(v.String()), 0o644)
}

// The verifier's statistics of a program. Kernels before 7.3 print the stack of all functions in
// one line, later ones have a line for each function.
var (
	processedLine = regexp.MustCompile(`(?m)^processed ([0-9]+) insns`)
	depthLine     = regexp.MustCompile(`(?m)^stack depth ([0-9]+(?:\+[0-9]+)*)( max [0-9]+)?$`)
	functionLine  = regexp.MustCompile(`(?m)^subprog [0-9]+ .* stack ([0-9]+)$`)
)

// parseCost reads the statistics in the verifier's log of a program.
func parseCost(log string, program asm.Instructions) (c cost, err error) {
	processed, frames := processedLine.FindStringSubmatch(log), parseFrames(log)
	if processed == nil || frames == nil {
		return c, fmt.Errorf("no instructions and stack depths in the verifier's log: %q", log)
	}
	if c.insns, err = strconv.Atoi(processed[1]); err != nil {
		return c, err
	}
	c.stack, err = maxChainDepth(program, frames)
	return c, err
}

// parseFrames returns the stack of each function, in their order.
func parseFrames(log string) (frames []int) {
	var texts []string
	if depths := depthLine.FindStringSubmatch(log); depths != nil {
		texts = strings.Split(depths[1], "+")
	}
	for _, line := range functionLine.FindAllStringSubmatch(log, -1) {
		texts = append(texts, line[1])
	}
	for _, text := range texts {
		frame, err := strconv.Atoi(text)
		if err != nil {
			return nil
		}
		frames = append(frames, frame)
	}
	return frames
}

// maxChainDepth returns the stack of the deepest call chain. Linux 5.10 rounds up each frame.
// frames are in the order of the program's functions.
func maxChainDepth(program asm.Instructions, frames []int) (int, error) {
	var functions []string
	calls := make(map[string][]string)
	for i, ins := range program {
		if symbol := ins.Symbol(); symbol != "" && (i == 0 || symbol != functions[len(functions)-1]) {
			functions = append(functions, symbol)
		}
		if ins.IsFunctionCall() {
			caller := functions[len(functions)-1]
			calls[caller] = append(calls[caller], ins.Reference())
		}
	}
	if len(functions) != len(frames) {
		return 0, fmt.Errorf("%d functions %q have %d frames", len(functions), functions, len(frames))
	}
	const unit = 32
	var depth func(function string) int
	depth = func(function string) int {
		deepest := 0
		for _, callee := range calls[function] {
			deepest = max(deepest, depth(callee))
		}
		own := max(frames[slices.Index(functions, function)], 1)
		return (own+unit-1)/unit*unit + deepest
	}
	return depth(functions[0]), nil
}

func TestCheckGrowth(t *testing.T) {
	committed := map[string]cost{"a": {1000, 100}}
	for name, test := range map[string]struct {
		now  map[string]cost
		want string // in the error
	}{
		"the same":          {map[string]cost{"a": {1000, 100}}, ""},
		"a tenth":           {map[string]cost{"a": {1100, 110}}, ""},
		"less":              {map[string]cost{"a": {1, 1}}, ""},
		"more instructions": {map[string]cost{"a": {1101, 100}}, "a: verified instructions grew from 1000 to 1101"},
		"more stack":        {map[string]cost{"a": {1000, 111}}, "a: stack grew from 100 to 111"},
		"a new program":     {map[string]cost{"a": {1, 1}, "b": {1, 1}}, "b: not in"},
		"a program removed": {nil, "a: in "},
	} {
		err := checkGrowth(committed, test.now)
		if test.want == "" && err != nil || test.want != "" && (err == nil || !strings.Contains(err.Error(), test.want)) {
			t.Errorf("%s: got %v, want %q", name, err, test.want)
		}
	}
}
