// Package packages installs, upgrades and removes the packages of a release in a bare Debian.
//
// It is a module of its own, because it needs what `make test-packages` builds before: the packages, and the Debian.
package packages

import (
	"path/filepath"
	"runtime"
	"testing"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// buildDir has what `make test-packages` has built.
const buildDir = "../../bin/packages"

func TestMain(m *testing.M) { testenv.Main(m) }

// built returns the file of the build that matches a pattern, for this machine's architecture.
func built(t *testing.T, release, pattern string) string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(buildDir, release, pattern))
	if err != nil || len(files) != 1 {
		t.Fatalf("%s in %s/%s: got %q (%v), want one; `make test-packages` builds it", pattern, buildDir, release, files, err)
	}
	file, err := filepath.Abs(files[0])
	testenv.Must(t, err)
	return file
}

// deb returns the Debian package of a release: "present", or a tag.
func deb(t *testing.T, release string) string {
	t.Helper()
	return built(t, release, "ebpfnet_*_"+runtime.GOARCH+".deb")
}

// rpm returns the RPM package of a build: "present", or "older" from the same sources.
func rpm(t *testing.T, release string) string {
	t.Helper()
	arch := map[string]string{"amd64": "x86_64", "arm64": "aarch64"}[runtime.GOARCH]
	return built(t, release, "ebpfnet-*."+arch+".rpm")
}
