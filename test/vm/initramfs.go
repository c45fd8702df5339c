package main

import (
	"bytes"
	"debug/elf"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"runtime"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// job is the guest's init's task. It is a file in the initramfs.
type job struct {
	Release     string
	Foreign     bool     // the host's programs do not run
	BootModules []string // in the initramfs, in the order of loading
	ModuleDir   string   // on the host
	Modules     []string // below ModuleDir, in the order of loading
	Shares      []string // directories where writes reach the host

	Command []string
	Dir     string
	Env     []string
}

const (
	jobFile       = "/job.json"
	bootModuleDir = "/modules"
)

// newJob describes a run of opts.command in the working directory and environment of this process.
func newJob(opts *options, img image) (*job, error) {
	index, err := readModuleIndex(img.moduleDir())
	if err != nil {
		return nil, err
	}
	boot, err := index.closure(bootModules)
	if err != nil {
		return nil, err
	}
	names := strings.FieldsFunc(opts.modules, func(r rune) bool { return r == ',' })
	late, err := index.closure(append(index.known(opts.arch.modules), names...))
	if err != nil {
		return nil, err
	}
	late = slices.DeleteFunc(late, func(m string) bool { return slices.Contains(boot, m) })
	dir, err := os.Getwd()
	if err != nil {
		return nil, err
	}
	shares, err := absoluteDirs(opts.shares)
	if err != nil {
		return nil, err
	}
	return &job{
		Release:     img.release,
		Foreign:     opts.arch.name != runtime.GOARCH,
		BootModules: boot,
		ModuleDir:   img.moduleDir(),
		Modules:     late,
		Shares:      shares,
		Command:     opts.command,
		Dir:         dir,
		Env:         os.Environ(),
	}, nil
}

// absoluteDirs also checks that the directories exist. qemu's options cannot contain a comma in a name.
func absoluteDirs(dirs []string) ([]string, error) {
	var absolute []string
	for _, dir := range dirs {
		abs, err := filepath.Abs(dir)
		if err != nil {
			return nil, err
		}
		info, err := os.Stat(abs)
		if err != nil {
			return nil, err
		}
		if !info.IsDir() || strings.Contains(abs, ",") {
			return nil, fmt.Errorf("share %s: expected a directory without a comma in its name", abs)
		}
		absolute = append(absolute, abs)
	}
	return absolute, nil
}

// buildInitramfs writes this program, the job and the boot modules to a memory file, which the caller
// must close.
func buildInitramfs(a arch, j *job) (*os.File, error) {
	self, err := a.guestInit()
	if err != nil {
		return nil, err
	}
	init, err := static(self)
	if err != nil {
		return nil, err
	}
	description, err := json.Marshal(j)
	if err != nil {
		return nil, err
	}
	var buf bytes.Buffer
	archive := &cpioWriter{w: &buf}
	err = errors.Join(
		archive.directory("dev", 0o755),
		archive.directory("proc", 0o755),
		archive.directory("sys", 0o755),
		archive.file("init", 0o755, init),
		archive.file(jobFile[1:], 0o600, description),
		archive.directory(bootModuleDir[1:], 0o755),
	)
	if err != nil {
		return nil, err
	}
	for i, module := range j.BootModules {
		data, err := os.ReadFile(filepath.Join(j.ModuleDir, module))
		if err != nil {
			return nil, err
		}
		if err := archive.file(bootModulePath(i, module)[1:], 0o644, data); err != nil {
			return nil, err
		}
	}
	if err := archive.close(); err != nil {
		return nil, err
	}
	return memoryFile("initramfs", buf.Bytes())
}

// bootModulePath is the path of a job's i-th boot module in the initramfs.
func bootModulePath(i int, module string) string {
	return fmt.Sprintf("%s/%02d-%s", bootModuleDir, i, path.Base(module))
}

// static reads a program, which must be static: the initramfs has no libraries.
func static(self string) ([]byte, error) {
	binary, err := elf.Open(self)
	if err != nil {
		return nil, err
	}
	defer binary.Close()
	for _, segment := range binary.Progs {
		if segment.Type == elf.PT_INTERP {
			return nil, errors.New("the guest's init must be static: build this program with CGO_ENABLED=0 and without -race")
		}
	}
	return os.ReadFile(self)
}

func memoryFile(name string, content []byte) (*os.File, error) {
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("create file %s in memory: %w", name, err)
	}
	f := os.NewFile(uintptr(fd), name)
	if _, err := f.Write(content); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}
