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

// command is a program of a release. Its package is below product/cmd.
type command struct {
	name   string
	module string // the directory of the module that builds it
}

const product = "github.com/ebpfnet/ebpfnet"

// content is what a release has programs for: their licenses and their bill of materials go with them.
type content struct {
	name     string
	commands []command
}

var (
	onHosts = content{"linux", []command{{"ebpfnet", "."}, {"ebpfnet-ipam", "."}, {"ebpfnetctl", "."}}}
	inImage = content{"image", append(slices.Clone(onHosts.commands), command{"ebpfnet-node", "cmd/ebpfnet-node"})}
)

const versionVariable = product + "/plugin/version.release"

// buildCommands builds the programs for each architecture. They depend on the sources, the version and the Go
// toolchain alone.
func (r *release) buildCommands() error {
	for _, arch := range arches {
		for _, c := range inImage.commands {
			cmd := exec.Command("go", "build", "-trimpath", "-buildvcs=false", "-ldflags", "-s -w -X "+versionVariable+"="+r.version,
				"-o", r.staged(arch, c.name), product+"/cmd/"+c.name)
			cmd.Dir = filepath.Join(r.source, c.module)
			cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux", "GOARCH="+arch, "GOAMD64=v1", "GOARM64=v8.0", "GOEXPERIMENT=", "GOFLAGS=", "GOWORK=off")
			cmd.Stdout, cmd.Stderr = os.Stderr, os.Stderr
			if err := cmd.Run(); err != nil {
				return fmt.Errorf("build %s for %s: %w", c.name, arch, err)
			}
		}
	}
	return nil
}

// ctl runs the ebpfnetctl of the release, and returns what it prints.
func (r *release) ctl(args ...string) (string, error) {
	if !slices.Contains(arches, runtime.GOARCH) {
		return "", fmt.Errorf("a release is built on one of %q, because ebpfnetctl writes its manual itself", arches)
	}
	return r.output(r.staged(runtime.GOARCH, "ebpfnetctl"), args...)
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
