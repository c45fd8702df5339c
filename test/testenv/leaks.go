package testenv

import (
	"bytes"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// A Snapshot is a set of things that exist, each in words that a failure message can print.
type Snapshot map[string]bool

// Compare returns what after has and s lacks, and what s has and after lacks, both sorted.
func (s Snapshot) Compare(after Snapshot) (added, removed []string) {
	return after.minus(s), s.minus(after)
}

// takeSnapshot lists everything that a test could leak into the isolated process:
// links, network namespaces, pins, BPF and namespace descriptors, processes.
func takeSnapshot() (Snapshot, error) {
	s := make(Snapshot)
	for _, part := range []func() error{s.addLinks, s.addNamespaces, s.addPins, s.addDescriptors, s.addProcesses} {
		if err := part(); err != nil {
			return nil, fmt.Errorf("list what tests may leak: %w", err)
		}
	}
	return s, nil
}

// minus returns what is in s but not in old, sorted.
func (s Snapshot) minus(old Snapshot) []string {
	var names []string
	for name := range s {
		if !old[name] {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

func (s Snapshot) addLinks() error {
	links, err := netlink.LinkList()
	if err != nil {
		return fmt.Errorf("list links: %w", err)
	}
	for _, link := range links {
		s[fmt.Sprintf("link %s (%s, index %d)", link.Attrs().Name, link.Type(), link.Attrs().Index)] = true
	}
	return nil
}

// addNamespaces sees bind mounts of namespaces anywhere, and files of unmounted
// ones where runtimes keep them.
func (s Snapshot) addNamespaces() error {
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return err
	}
	for line := range strings.Lines(string(mounts)) {
		fields, rest, found := strings.Cut(line, " - ")
		if path := strings.Fields(fields); found && strings.HasPrefix(rest, "nsfs ") && len(path) > 4 {
			s["namespace mounted on "+path[4]] = true
		}
	}
	files, err := os.ReadDir(netnsDir)
	if err != nil {
		return err
	}
	for _, file := range files {
		s["namespace file "+filepath.Join(netnsDir, file.Name())] = true
	}
	return nil
}

func (s Snapshot) addPins() error {
	return filepath.WalkDir(bpffsDir, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		s["pin "+path] = true
		return nil
	})
}

func (s Snapshot) addDescriptors() error {
	files, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return err
	}
	for _, file := range files {
		path := filepath.Join("/proc/self/fd", file.Name())
		target, err := os.Readlink(path)
		if err != nil {
			continue // The one that ReadDir used, or closed meanwhile.
		}
		isBPF := strings.HasPrefix(target, "anon_inode:bpf") || strings.HasPrefix(target, "anon_inode:btf")
		// The link of a namespace that was opened by its mount is just a path.
		var fs unix.Statfs_t
		isNamespace := unix.Statfs(path, &fs) == nil && fs.Type == unix.NSFS_MAGIC
		if isBPF || isNamespace {
			s[fmt.Sprintf("descriptor %s (%s)", file.Name(), target)] = true
		}
	}
	return nil
}

// addProcesses leaves out zombies: nobody but this process could reap an
// orphan, and waiting for any child would take os/exec's away.
func (s Snapshot) addProcesses() error {
	files, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		return err
	}
	for _, file := range files {
		stat, err := os.ReadFile(file)
		if err != nil {
			continue // Ended meanwhile.
		}
		// pid (command) state ...; the command may hold spaces and brackets.
		if end := bytes.LastIndex(stat, []byte(") ")); end < 0 || stat[end+2] == 'Z' {
			continue
		}
		pid := filepath.Base(filepath.Dir(file))
		command, _ := os.ReadFile(filepath.Join("/proc", pid, "cmdline"))
		name := strings.TrimSpace(string(bytes.ReplaceAll(command, []byte{0}, []byte{' '})))
		if pid != "1" {
			s[fmt.Sprintf("process %s (%s)", pid, name)] = true
		}
	}
	return nil
}
