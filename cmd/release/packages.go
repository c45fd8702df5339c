package main

import (
	"bytes"
	"fmt"
	"io"
	"maps"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/goreleaser/nfpm/v2"
	_ "github.com/goreleaser/nfpm/v2/deb"
	"github.com/goreleaser/nfpm/v2/files"
	_ "github.com/goreleaser/nfpm/v2/rpm"
)

const (
	maintainer  = "The ebpfnet authors <ebpfnet@ebpfnet.invalid>"
	summary     = "CNI plugin that connects containers by eBPF"
	description = `A CNI plugin that replaces bridge, ptp, portmap, host-local, bandwidth and
tuning with a veth pair and eBPF: no bridge, no iptables or nftables rules, no
daemon. This package enables nothing: copy an example from
/usr/share/doc/ebpfnet/examples to /etc/cni/net.d.`
)

func (r *release) writePackages(arch string) error {
	for _, d := range []distribution{debian, fedora} {
		info, err := r.packageInfo(arch, d)
		if err != nil {
			return err
		}
		packager, err := nfpm.Get(d.packager)
		if err != nil {
			return err
		}
		info = nfpm.WithDefaults(info)
		if err := nfpm.PrepareForPackager(info, d.packager); err != nil {
			return err
		}
		err = r.create(packager.ConventionalFileName(info), func(w io.Writer) error { return packager.Package(info, w) })
		if err != nil {
			return err
		}
	}
	return nil
}

func (r *release) packageInfo(arch string, d distribution) (*nfpm.Info, error) {
	contents, err := r.packageFiles(arch, d)
	if err != nil {
		return nil, err
	}
	abi, err := r.abi()
	if err != nil {
		return nil, err
	}
	scripts, err := r.scripts(d, abi)
	if err != nil {
		return nil, err
	}
	info := &nfpm.Info{
		Name: "ebpfnet", Arch: arch, Platform: "linux", Version: r.version, MTime: r.time,
		Section: "net", Priority: "optional",
		Maintainer: maintainer, Homepage: "https://github.com/ebpfnet/ebpfnet",
		Description: description,
		Overridables: nfpm.Overridables{
			Recommends: []string{"containernetworking-plugins"}, // containerd executes its loopback
			Scripts:    nfpm.Scripts{PreInstall: scripts["preinst"], PostInstall: scripts["postinst"], PreRemove: scripts["prerm"], PostRemove: scripts["postrm"]},
			RPM:        nfpm.RPM{BuildHost: "ebpfnet", Summary: summary},
		},
	}
	if d == debian { // its format has the summary as the first line
		info.Description = summary + "\n" + description
	} else { // an rpm system may install later what Debian always has
		info.License = "Apache-2.0 AND (GPL-2.0-only OR BSD-2-Clause)" // Debian's field is a file
		info.Depends = []string{"/bin/sh", "coreutils", "findutils", "grep"}
	}
	for _, dir := range ownedDirs(contents) {
		info.Contents = append(info.Contents, &files.Content{
			Destination: dir, Type: files.TypeDir,
			FileInfo: &files.ContentFileInfo{Mode: 0o755, Owner: "root", Group: "root", MTime: r.time},
		})
	}
	for _, f := range contents {
		info.Contents = append(info.Contents, &files.Content{
			Source: f.source, Destination: f.name,
			FileInfo: &files.ContentFileInfo{Mode: f.mode, Owner: "root", Group: "root", MTime: r.time},
		})
	}
	return info, nil
}

// ownedDirs returns the directories of files, but for those that every system has. dpkg would know them without
// this, and rpm would leave them.
func ownedDirs(contents []file) []string {
	dirs := map[string]bool{}
	for _, f := range contents {
		for dir := path.Dir(f.name); strings.Count(dir, "/") > 2; dir = path.Dir(dir) {
			dirs[dir] = true
		}
	}
	return slices.Sorted(maps.Keys(dirs))
}

// scripts stages the maintainer scripts, and returns their paths by dpkg's names. Each begins with what all share.
func (r *release) scripts(d distribution, abi int) (map[string]string, error) {
	shared, err := os.ReadFile(r.inRelease("scripts", "shared.sh"))
	if err != nil {
		return nil, err
	}
	paths := map[string]string{}
	for _, name := range []string{"preinst", "postinst", "prerm", "postrm"} {
		own, err := os.ReadFile(r.inRelease("scripts", name))
		if err != nil {
			return nil, err
		}
		text := bytes.Join([][]byte{[]byte("#!/bin/sh\n"), shared, own}, nil)
		for from, to := range map[string]string{"@PLUGINS@": d.plugins, "@ABI@": strconv.Itoa(abi)} {
			text = bytes.ReplaceAll(text, []byte(from), []byte(to))
		}
		staged := fmt.Sprintf("scripts-%s/%s", d.packager, name)
		if err := r.writeStaged(staged, text); err != nil {
			return nil, err
		}
		paths[name] = r.staged(staged)
	}
	return paths, nil
}
