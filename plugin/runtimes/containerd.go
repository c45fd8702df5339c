package runtimes

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/BurntSushi/toml"
)

// containerdFiles are where containerd's configuration is: the usual place, k3s and RKE2.
var containerdFiles = []string{
	"/etc/containerd/config.toml",
	"/var/lib/rancher/k3s/agent/etc/containerd/config.toml",
	"/var/lib/rancher/rke2/agent/etc/containerd/config.toml",
}

// containerdConfig has the keys of one file that matter here.
type containerdConfig struct {
	Version  int      `toml:"version"`
	Imports  []string `toml:"imports"`
	Disabled []string `toml:"disabled_plugins"`
	Plugins  map[string]struct {
		CNI containerdCNI `toml:"cni"`
	} `toml:"plugins"`
}

type containerdCNI struct {
	BinDir           string   `toml:"bin_dir"`
	BinDirs          []string `toml:"bin_dirs"` // since 2.1
	ConfDir          string   `toml:"conf_dir"`
	InternalLoopback *bool    `toml:"use_internal_loopback"` // since 2.0
}

// criPlugins are the names of the plugin that uses CNI: in version 3 of the file, 2 and 1.
var criPlugins = []string{"io.containerd.cri.v1.runtime", "io.containerd.grpc.v1.cri", "cri"}

// findContainerd returns a runtime for each containerd that serves Kubernetes.
func findContainerd(root string) (found []Runtime, err error) {
	named, err := namedFiles(root)
	for _, file := range slices.Concat(named, containerdFiles) {
		r := Runtime{Name: "containerd", Source: file, ConfDir: defaultConfDir, BinDirs: []string{"/opt/cni/bin"}, CallsLoopback: true}
		isOn, read, errFile := r.readContainerd(root, file, map[string]bool{})
		if errFile != nil {
			err = errors.Join(err, fmt.Errorf("read %s: %w", file, errFile))
		} else if read && isOn {
			found = append(found, r)
		}
		if read {
			continue
		}
		if file == containerdFiles[0] && len(named) == 0 && errFile == nil && exists(root, "/usr/bin/containerd", "/usr/local/bin/containerd", "/run/containerd/containerd.sock") {
			r.Source = ""
			found = append(found, r)
		}
	}
	return found, err
}

// namedFiles returns the configurations that running containerds have as arguments, but for the usual ones.
func namedFiles(root string) (files []string, err error) {
	processes, err := filepath.Glob(filepath.Join(root, "proc/[0-9]*/cmdline"))
	for _, process := range processes {
		text, _ := os.ReadFile(process) // or it has ended
		args := strings.Split(string(text), "\x00")
		if filepath.Base(args[0]) != "containerd" {
			continue
		}
		for i, arg := range args[1:] {
			name, file, hasFile := strings.Cut(strings.TrimLeft(arg, "-"), "=")
			if !strings.HasPrefix(arg, "-") || name != "config" && name != "c" {
				continue
			}
			if !hasFile && i+2 < len(args) {
				file = args[i+2]
			}
			if filepath.IsAbs(file) && !slices.Contains(slices.Concat(files, containerdFiles), file) {
				files = append(files, file)
			}
		}
	}
	return files, err
}

// readContainerd reads a file and those that it imports, which win. isOn is whether the CRI plugin is enabled.
func (r *Runtime) readContainerd(root, file string, seen map[string]bool) (isOn, found bool, err error) {
	text, found, err := readFile(root, file)
	if !found || seen[file] {
		return true, false, err
	}
	seen[file] = true
	var config containerdConfig
	if _, err := toml.Decode(text, &config); err != nil {
		return false, true, err
	}
	isOn = !slices.ContainsFunc(config.Disabled, func(name string) bool { return slices.Contains(criPlugins, name) })
	for _, name := range criPlugins {
		r.take(config.Plugins[name].CNI)
	}
	for _, pattern := range config.Imports {
		if !filepath.IsAbs(pattern) {
			pattern = filepath.Join(filepath.Dir(file), pattern)
		}
		imported, err := filepath.Glob(filepath.Join(root, pattern))
		if err != nil {
			return false, true, err
		}
		for _, path := range imported {
			inside, err := filepath.Rel(filepath.Join("/", root), path)
			if err != nil {
				return false, true, err
			}
			alsoOn, _, err := r.readContainerd(root, filepath.Join("/", inside), seen)
			if err != nil {
				return false, true, fmt.Errorf("%s: %w", path, err)
			}
			isOn = isOn && alsoOn
		}
	}
	return isOn, true, nil
}

func (r *Runtime) take(c containerdCNI) {
	if c.ConfDir != "" {
		r.ConfDir = c.ConfDir
	}
	if c.BinDir != "" {
		r.BinDirs = []string{c.BinDir}
	}
	if len(c.BinDirs) > 0 {
		r.BinDirs = c.BinDirs
	}
	if c.InternalLoopback != nil {
		r.CallsLoopback = !*c.InternalLoopback
	}
}
