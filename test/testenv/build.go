package testenv

import (
	"fmt"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
)

// BinDirEnv names the environment variable with a directory of prebuilt binaries,
// for machines without a Go toolchain. It must not be under /run.
const BinDirEnv = "EBPFNET_BIN_DIR"

const mainModule = "github.com/ebpfnet/ebpfnet"

// builds holds a func() (string, error) per package, so that each is built once per
// process and different ones side by side.
var builds sync.Map

// Build returns the path of the binary of a package, named as its directory: a path
// relative to the main module ("./cmd/ebpfnet"), or the import path of a tool that the
// test module depends on ("github.com/containernetworking/cni/cnitool"). All
// of them share a directory that goes with the process.
//
// There is no network in here: `make modules` must have put them into the module cache.
func Build(tb TB, pkg string) string {
	tb.Helper()
	requireIsolated(tb)
	build, _ := builds.LoadOrStore(pkg, sync.OnceValues(func() (string, error) { return build(pkg) }))
	binary, err := build.(func() (string, error))()
	if err != nil {
		tb.Fatalf("%v", err)
	}
	return binary
}

func build(pkg string) (string, error) {
	name := path.Base(pkg)
	if dir := os.Getenv(BinDirEnv); dir != "" {
		binary := filepath.Join(dir, name)
		if _, err := os.Stat(binary); err != nil {
			return "", fmt.Errorf("find prebuilt %s in $%s: %w", pkg, BinDirEnv, err)
		}
		return binary, nil
	}
	dir, err := mainModuleDir()
	if err != nil {
		return "", fmt.Errorf("build %s: %w", pkg, err)
	}
	if !strings.HasPrefix(pkg, "./") {
		dir = filepath.Join(dir, "test")
	}
	binary := filepath.Join(buildDir, name)
	cmd := exec.Command("go", "build", "-o", binary, pkg)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOPROXY=off", "PWD="+dir)
	if output, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build %s in %s: %w\n%s", pkg, dir, err, output)
	}
	return binary, nil
}

// mainModuleDir looks for the source tree from the working directory upwards.
func mainModuleDir() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	isMain := regexp.MustCompile(`(?m)^module ` + regexp.QuoteMeta(mainModule) + `\s*$`)
	for ; ; dir = filepath.Dir(dir) {
		if content, err := os.ReadFile(filepath.Join(dir, "go.mod")); err == nil && isMain.Match(content) {
			return dir, nil
		}
		if dir == filepath.Dir(dir) {
			return "", fmt.Errorf("no source tree of %s above the working directory; set $%s to a directory with binaries",
				mainModule, BinDirEnv)
		}
	}
}
