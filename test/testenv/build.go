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

// BinDirEnv is the environment variable with a directory of prebuilt binaries, for
// machines without a Go toolchain. The directory must not be under /run.
const BinDirEnv = "EBPFNET_BIN_DIR"

const mainModule = "github.com/ebpfnet/ebpfnet"

// builds has a func() (string, error) for each package, so that a process builds each one
// once, and different ones concurrently.
var builds sync.Map

// Build returns the path of a package's binary, which has the name of the package's directory.
// pkg is a path relative to the main module ("./cmd/ebpfnet"), which can be a module of its own, or the import path of a tool of the
// working directory's module ("github.com/containernetworking/cni/cnitool"). All binaries
// are in one directory, which disappears with the process.
//
// An isolated process has no network: `make modules` downloads what it needs before.
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
	moduleDir := os.Getwd
	if strings.HasPrefix(pkg, "./") {
		moduleDir = mainModuleDir
	}
	dir, err := moduleDir()
	if err != nil {
		return "", fmt.Errorf("build %s: %w", pkg, err)
	}
	if _, err := os.Stat(filepath.Join(dir, pkg, "go.mod")); err == nil {
		dir, pkg = filepath.Join(dir, pkg), "."
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

// mainModuleDir searches for the source tree from the working directory upwards.
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
			return "", fmt.Errorf("find the source tree of %s in the working directory and its parents: not found; set $%s to a directory with binaries",
				mainModule, BinDirEnv)
		}
	}
}
