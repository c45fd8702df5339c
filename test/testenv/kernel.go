package testenv

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"testing"

	"golang.org/x/sys/unix"
)

// Version is a kernel version, without the stable release.
type Version struct{ Major, Minor int }

func (v Version) String() string { return fmt.Sprintf("%d.%d", v.Major, v.Minor) }

// Less reports whether v is older than w.
func (v Version) Less(w Version) bool {
	return v.Major < w.Major || v.Major == w.Major && v.Minor < w.Minor
}

// Feature is a kernel feature that not every supported kernel has.
type Feature struct {
	Name string
	// Since is the first kernel that must have it. The zero Version means that any
	// kernel's configuration may lack it.
	Since Version
	// Module provides it. A kernel that lists the module must have the feature.
	Module string
	// Probe returns nil, or why the feature is missing.
	Probe func() error
}

// KernelRelease returns what `uname -r` prints, such as 6.1.0-56-amd64.
func KernelRelease() string {
	var name unix.Utsname
	if err := unix.Uname(&name); err != nil {
		panic(err) // uname(2) fails for a bad pointer only
	}
	return unix.ByteSliceToString(name.Release[:])
}

// KernelVersion returns the version of the running kernel.
func KernelVersion() (Version, error) { return parseVersion(KernelRelease()) }

func parseVersion(release string) (v Version, err error) {
	if _, err := fmt.Sscanf(release, "%d.%d", &v.Major, &v.Minor); err != nil {
		return Version{}, fmt.Errorf("parse kernel release %q: %w", release, err)
	}
	return v, nil
}

// Require skips the test on a kernel that may lack the feature. On a kernel that should have it,
// a failing probe fails the test, so that no regression hides behind a skip.
func Require(tb testing.TB, feature Feature) {
	tb.Helper()
	requireIsolated(tb) // probes attach programs to lo
	err := feature.Probe()
	if err == nil {
		return
	}
	version, versionErr := KernelVersion()
	if versionErr != nil {
		tb.Fatalf("%v", versionErr)
	}
	if feature.mustBeIn(version) {
		tb.Fatalf("feature %s is missing from kernel %s, which should have it since %s: %v",
			feature.Name, version, feature.Since, err)
	}
	if feature.Module != "" && moduleListed(feature.Module) {
		tb.Fatalf("feature %s is missing, though this kernel lists its module %s: %v", feature.Name, feature.Module, err)
	}
	if feature.Since == (Version{}) {
		tb.Skipf("feature %s: not in this kernel's configuration: %v", feature.Name, err)
	}
	tb.Skipf("feature %s: since kernel %s, this is %s", feature.Name, feature.Since, version)
}

func (f Feature) mustBeIn(v Version) bool {
	return f.Since != (Version{}) && !v.Less(f.Since)
}

// moduleListed reports whether the kernel has a module, loaded or not, or built in.
func moduleListed(name string) bool {
	return listsModule(filepath.Join("/lib/modules", KernelRelease()), name)
}

func listsModule(dir, name string) bool {
	for _, list := range []string{"modules.dep", "modules.builtin"} {
		text, err := os.ReadFile(filepath.Join(dir, list))
		// Lines begin with paths such as kernel/net/8021q/8021q.ko.xz.
		if err == nil && regexp.MustCompile(`(?m)^\S*/`+regexp.QuoteMeta(name)+`\.ko`).Match(text) {
			return true
		}
	}
	return false
}
