package main

import (
	_ "embed"
	"fmt"
	"regexp"
	"strings"
)

//go:embed kernels.txt
var kernelList string

// kernel is one line of kernels.txt.
type kernel struct {
	series  string
	suite   string
	flavour string
}

// parseKernels parses kernels.txt, whose header describes the format.
func parseKernels(text string) ([]kernel, error) {
	var kernels []kernel
	seen := make(map[string]bool)
	for i, line := range strings.Split(text, "\n") {
		line, _, _ = strings.Cut(line, "#")
		fields := strings.Fields(line)
		if len(fields) == 0 {
			continue
		}
		if len(fields) != 3 {
			return nil, fmt.Errorf("kernels.txt:%d: expected series, suite and flavour, got %q", i+1, line)
		}
		k := kernel{series: fields[0], suite: fields[1], flavour: fields[2]}
		if seen[k.series] {
			return nil, fmt.Errorf("kernels.txt:%d: duplicate series %s", i+1, k.series)
		}
		seen[k.series] = true
		kernels = append(kernels, k)
	}
	return kernels, nil
}

// dir is the kernel's directory in the cache.
func (k kernel) dir() string {
	if k.flavour == "amd64" {
		return k.series
	}
	return k.series + "-" + k.flavour
}

func findKernel(kernels []kernel, series string) (kernel, error) {
	var names []string
	for _, k := range kernels {
		if k.series == series {
			return k, nil
		}
		names = append(names, k.series)
	}
	return kernel{}, fmt.Errorf("unknown kernel %q: kernels.txt has %s", series, strings.Join(names, ", "))
}

// newestRelease picks the kernel's newest release, such as 5.10.0-46-amd64, from the names of a suite's
// packages. The longer names of other flavours and of rebuilds for other suites do not match.
func (k kernel) newestRelease(packages []string) (string, error) {
	name := regexp.MustCompile(`^linux-image-(` + regexp.QuoteMeta(k.series) +
		`\.[0-9.]+(?:-[0-9]+|\+[a-z0-9.]+)?-` + regexp.QuoteMeta(k.flavour) + `)$`)
	newest := ""
	for _, p := range packages {
		match := name.FindStringSubmatch(p)
		if match != nil && (newest == "" || versionLess(newest, match[1])) {
			newest = match[1]
		}
	}
	if newest == "" {
		return "", fmt.Errorf("suite %s has no package linux-image-%s.*-%s", k.suite, k.series, k.flavour)
	}
	return newest, nil
}

var versionParts = regexp.MustCompile(`[0-9]+|[^0-9]+`)

// versionLess compares part by part: digits as numbers, everything else as text.
func versionLess(a, b string) bool {
	as, bs := versionParts.FindAllString(a, -1), versionParts.FindAllString(b, -1)
	for i := range min(len(as), len(bs)) {
		x, y := as[i], bs[i]
		if isDigit(x[0]) && isDigit(y[0]) {
			x, y = strings.TrimLeft(x, "0"), strings.TrimLeft(y, "0")
			if len(x) != len(y) {
				return len(x) < len(y)
			}
		}
		if x != y {
			return x < y
		}
	}
	return len(as) < len(bs)
}

func isDigit(c byte) bool { return '0' <= c && c <= '9' }

func printKernels(kernels []kernel) error {
	for _, k := range kernels {
		if _, err := fmt.Printf("%s\t%s\t%s\n", k.series, k.suite, k.flavour); err != nil {
			return err
		}
	}
	return nil
}
