// Package version names the release that a binary belongs to.
package version

import (
	"runtime/debug"
	"strings"
)

// release is set by the linker: `make build VERSION=1.2.3`.
var release string

// String returns the release, such as "1.2.3". Without one it is what the Go tool knows: the version
// that `go install` has been asked for, or "devel".
func String() string {
	if release != "" {
		return release
	}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "devel"
	}
	return ofModule(info.Main.Version)
}

// ofModule turns a version of the Go module into one of ours.
func ofModule(version string) string {
	if version == "" || version == "(devel)" {
		return "devel"
	}
	return strings.TrimPrefix(version, "v")
}
