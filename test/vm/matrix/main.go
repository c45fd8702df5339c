// Command matrix runs the tests on real kernels, each in a guest of package vm, and
// writes what it has seen into README's table of kernels.
//
//	matrix -bin bin -readme README.md          # all kernels of ../kernels.txt, one after the other
//	matrix -bin bin -readme README.md 5.10 6.1 # these, and the other rows stay
//	matrix -bin bin -quick                     # a choice of tests on the oldest and the newest, at the same time
//
// `make test-kernels` builds what it needs in the directory -bin: vm, the test
// binaries of suites.go and the product. It goes on after a failure, and fails at
// the end. What tests print is in BIN/kernels/SERIES-SUITE.log.
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
	readme string
	quick  bool
	series []string
}

func main() {
	opts := options{}
	flag.StringVar(&opts.bin, "bin", "bin", "`directory` with vm, the test binaries and the product")
	flag.StringVar(&opts.readme, "readme", "", "`file` whose table of kernels to renew")
	flag.BoolVar(&opts.quick, "quick", false, "only a choice of tests; without series, on the oldest and the newest kernel")
	flag.Parse()
	opts.series = flag.Args()
	if err := run(opts); err != nil {
		fmt.Fprintln(os.Stderr, "matrix:", err)
		os.Exit(1)
	}
}

func run(opts options) error {
	if opts.quick && opts.readme != "" {
		return errors.New("-quick runs too little for a table: give no -readme")
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
	if opts.quick {
		return runBeside(bin, chosen)
	}
	return runInTurn(bin, chosen, all, opts.readme)
}

// listKernels asks vm for the series of kernels.txt, from the oldest to the newest.
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
			return nil, fmt.Errorf("no kernel %q in kernels.txt, which has %s", series, strings.Join(all, ", "))
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

// runBeside runs the quick tests on all kernels at the same time.
func runBeside(bin string, kernels []string) error {
	errs := make([]error, len(kernels))
	var wg sync.WaitGroup
	for i, series := range kernels {
		wg.Go(func() { _, errs[i] = runKernel(bin, series, true) })
	}
	wg.Wait()
	return errors.Join(errs...)
}

// runInTurn writes the row of a kernel as soon as its run is over.
func runInTurn(bin string, kernels, all []string, readme string) error {
	var errs []error
	for _, series := range kernels {
		row, err := runKernel(bin, series, false)
		errs = append(errs, err)
		if readme != "" {
			errs = append(errs, renewTable(readme, all, series, row))
		}
	}
	return errors.Join(errs...)
}

// runKernel runs all suites on one kernel.
func runKernel(bin, series string, quick bool) (row, error) {
	var reports []*report
	var errs []error
	for _, s := range suites {
		r, err := s.run(bin, series, quick)
		reports = append(reports, r)
		errs = append(errs, err)
	}
	return newRow(reports), errors.Join(errs...)
}
