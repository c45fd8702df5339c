package main

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
)

// commands are the programs of a release.
var commands = []string{"ebpfnet", "ebpfnet-ipam", "ebpfnetctl"}

const versionVariable = "github.com/ebpfnet/ebpfnet/plugin/version.release"

// buildCommands builds the programs for each architecture. They depend on the sources, the version and the Go
// toolchain alone.
func (r *release) buildCommands() error {
	for _, arch := range arches {
		args := []string{"build", "-trimpath", "-buildvcs=false", "-ldflags", "-s -w -X " + versionVariable + "=" + r.version, "-o", r.staged(arch) + "/"}
		for _, command := range commands {
			args = append(args, "./cmd/"+command)
		}
		cmd := exec.Command("go", args...)
		cmd.Dir = r.source
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux", "GOARCH="+arch, "GOAMD64=v1", "GOARM64=v8.0", "GOEXPERIMENT=", "GOFLAGS=", "GOWORK=off")
		cmd.Stdout, cmd.Stderr = os.Stderr, os.Stderr
		if err := cmd.Run(); err != nil {
			return fmt.Errorf("build the commands for %s: %w", arch, err)
		}
	}
	return nil
}

// command returns the path of a program.
func (r *release) command(arch, name string) string { return r.staged(arch, name) }

// ctl runs the ebpfnetctl of the release, and returns what it prints.
func (r *release) ctl(args ...string) (string, error) {
	if !slices.Contains(arches, runtime.GOARCH) {
		return "", fmt.Errorf("a release is built on one of %q, because ebpfnetctl writes its manual itself", arches)
	}
	return r.output(r.command(runtime.GOARCH, "ebpfnetctl"), args...)
}

// abi returns the version of the map layout.
func (r *release) abi() (int, error) {
	text, err := r.ctl("version", "-o", "json")
	if err != nil {
		return 0, err
	}
	var version struct{ ABI int }
	err = json.Unmarshal([]byte(text), &version)
	return version.ABI, err
}

// manual returns the pages of the manual, which it lets ebpfnetctl write.
func (r *release) manual() (pages []string, err error) {
	dir := r.staged("man")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	if _, err := r.ctl("man", dir); err != nil {
		return nil, err
	}
	return filepath.Glob(dir + "/*.8")
}
