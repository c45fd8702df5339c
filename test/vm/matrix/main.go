// Command matrix runs the tests on real kernels, each in a guest of package vm, and updates the table of
// kernels in a README.md.
//
//	matrix -bin bin -readme README.md          # all kernels of ../kernels.txt, one guest after the other
//	matrix -bin bin -readme README.md 5.10 6.1 # only these; the other rows stay
//	matrix -bin bin -quick -jobs 2             # some tests on the oldest and the newest, concurrently
//
// `make test-kernels` builds what it needs in the directory -bin: vm, the test binaries of suites.go, and
// the product. After a failure it continues with the next suite, and fails at the end. The output of the
// tests is in BIN/kernels/SERIES-SUITE.log.
package main

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
)

type options struct {
	bin    string
	tests  string
	readme string
	quick  bool
	jobs   int
	series []string
}

func main() {
	opts := options{}
	flag.StringVar(&opts.bin, "bin", "bin", "`directory` with vm, the test binaries and the product")
	flag.StringVar(&opts.tests, "tests", "test", "`directory` with the packages of the test binaries")
	flag.StringVar(&opts.readme, "readme", "", "`file` with the table of kernels to update")
	flag.BoolVar(&opts.quick, "quick", false, "only some tests; without series, on the oldest and the newest kernel")
	flag.IntVar(&opts.jobs, "jobs", 1, "`number` of guests to run concurrently, at most one per core")
	flag.Parse()
	opts.series = flag.Args()
	if err := run(opts); err != nil {
		fmt.Fprintln(os.Stderr, "matrix:", err)
		os.Exit(1)
	}
}

func run(opts options) error {
	if opts.quick && opts.readme != "" {
		return errors.New("-quick runs too few tests for the table: omit -readme")
	}
	bin, err := filepath.Abs(opts.bin)
	if err != nil {
		return err
	}
	all, err := listKernels(bin)
	if err != nil {
		return err
	}
	chosen, err := choose(all, opts)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Join(bin, "kernels"), 0o755); err != nil {
		return err
	}
	m := &matrix{bin: bin, tests: opts.tests, quick: opts.quick, readme: opts.readme, all: all}
	return m.run(chosen, opts.jobs)
}

// listKernels returns the series of kernels.txt, from the oldest to the newest.
func listKernels(bin string) ([]string, error) {
	out, err := exec.Command(filepath.Join(bin, "vm"), "-list").Output()
	if err != nil {
		return nil, fmt.Errorf("list kernels: %w", err)
	}
	var series []string
	for line := range strings.Lines(string(out)) {
		series = append(series, strings.Fields(line)[0])
	}
	return series, nil
}

func choose(all []string, opts options) ([]string, error) {
	for _, series := range opts.series {
		if !slices.Contains(all, series) {
			return nil, fmt.Errorf("unknown kernel %q: kernels.txt has %s", series, strings.Join(all, ", "))
		}
	}
	switch {
	case len(opts.series) > 0:
		return opts.series, nil
	case opts.quick:
		return slices.Compact([]string{all[0], all[len(all)-1]}), nil
	default:
		return all, nil
	}
}

type matrix struct {
	bin   string
	tests string
	quick bool
	all   []string

	readme string

	mu sync.Mutex // guards the reports and the file
}

// run runs all suites on the kernels, up to jobs of them concurrently: the longest first, and of one suite the newest kernel, on
// which more tests run.
func (m *matrix) run(kernels []string, jobs int) error {
	reports := map[string][]*report{}
	for _, series := range kernels {
		reports[series] = make([]*report, len(suites))
	}
	slots := make(chan struct{}, max(jobs, 1))
	var wg sync.WaitGroup
	var errs []error
	for i, s := range suites {
		for _, series := range slices.Backward(kernels) {
			slots <- struct{}{}
			wg.Go(func() {
				defer func() { <-slots }()
				r, err := s.run(m.bin, m.tests, series, m.quick)
				m.mu.Lock()
				defer m.mu.Unlock()
				reports[series][i] = r
				errs = append(errs, err, m.updateRow(series, reports[series]))
			})
		}
	}
	wg.Wait()
	return errors.Join(errs...)
}

// updateRow updates the kernel's row when all of its suites have run.
func (m *matrix) updateRow(series string, reports []*report) error {
	if m.readme == "" || slices.Contains(reports, nil) {
		return nil
	}
	return updateTable(m.readme, m.all, series, newRow(reports))
}
