package main

import (
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"
)

type file struct {
	source string // a path on this machine
	name   string // in the package
	mode   os.FileMode
}

// distribution says where a family of distributions looks for files, and what its packages are like.
type distribution struct {
	packager string // of nfpm
	plugins  string // where its own packages have CNI plugins
	zsh      string // where its zsh looks for completions
}

var (
	debian = distribution{packager: "deb", plugins: "/usr/lib/cni", zsh: "/usr/share/zsh/vendor-completions"}
	fedora = distribution{packager: "rpm", plugins: "/usr/libexec/cni", zsh: "/usr/share/zsh/site-functions"}
)

// docDir is where packages have documents and examples. No network configuration is installed where a
// runtime would use it.
const docDir = "/usr/share/doc/ebpfnet"

func (r *release) packageFiles(arch string, d distribution) ([]file, error) {
	files := []file{
		{r.staged(arch, "ebpfnet"), d.plugins + "/ebpfnet", 0o755},
		{r.staged(arch, "ebpfnet-ipam"), d.plugins + "/ebpfnet-ipam", 0o755},
		{r.staged(arch, "ebpfnetctl"), "/usr/sbin/ebpfnetctl", 0o755},
		{r.staged("hooks/90-ebpfnet.rules"), "/usr/lib/udev/rules.d/90-ebpfnet.rules", 0o644},
		{r.staged("hooks/90-ebpfnet"), "/usr/lib/NetworkManager/dispatcher.d/90-ebpfnet", 0o755},
		{r.staged("hooks/90-ebpfnet"), "/usr/lib/networkd-dispatcher/routable.d/90-ebpfnet", 0o755},
		{r.staged("completion/bash"), "/usr/share/bash-completion/completions/ebpfnetctl", 0o644},
		{r.staged("completion/zsh"), d.zsh + "/_ebpfnetctl", 0o644},
		{r.staged("completion/fish"), "/usr/share/fish/vendor_completions.d/ebpfnetctl.fish", 0o644},
		{r.staged("CHANGELOG.md.gz"), docDir + "/CHANGELOG.md.gz", 0o644},
	}
	if d == debian {
		files = append(files, file{r.staged("changelog.gz"), docDir + "/changelog.gz", 0o644},
			file{r.inRelease("lintian-overrides"), "/usr/share/lintian/overrides/ebpfnet", 0o644})
	}
	for _, unit := range units {
		files = append(files, file{r.inRelease("systemd", unit), "/usr/lib/systemd/system/" + unit, 0o644})
	}
	pages, err := filepath.Glob(r.staged("man.gz", "*"))
	if err != nil {
		return nil, err
	}
	for _, page := range pages {
		files = append(files, file{page, "/usr/share/man/man8/" + filepath.Base(page), 0o644})
	}
	return append(files, r.documents(arch, docDir)...), nil
}

// units are those of systemd. No package enables one.
var units = []string{"ebpfnet-load.service", "ebpfnet-metrics.service", "ebpfnet-metrics.timer"}

// documents returns what people read, below a directory.
func (r *release) documents(arch, dir string) (files []file) {
	add := func(source, name string) { files = append(files, file{source, filepath.Join(dir, name), 0o644}) }
	for _, name := range shipped {
		add(r.staged("documents", name), name)
	}
	add(filepath.Join(r.source, "cmd/ebpfnet/example.conflist"), "examples/10-ebpfnet.conflist")
	add(filepath.Join(r.source, "cmd/ebpfnet/examples/containerd.conflist"), "examples/containerd.conflist")
	add(filepath.Join(r.source, "plugin/metrics/alerts.yml"), "examples/alerts.yml")
	add(filepath.Join(r.source, "plugin/metrics/dashboard.json"), "examples/dashboard.json")
	add(r.copyright(onHosts), "copyright")
	add(r.sbom(onHosts, arch), "sbom.cdx.json")
	return files
}

// inRelease returns the path of a file beside this program.
func (r *release) inRelease(name ...string) string {
	return filepath.Join(append([]string{r.source, "cmd/release"}, name...)...)
}

// writeDocuments stages what is not a plain copy of a file of the sources.
func (r *release) writeDocuments() error {
	if err := r.writeShipped(); err != nil {
		return err
	}
	for _, hook := range []string{"90-ebpfnet", "90-ebpfnet.rules"} {
		text, err := os.ReadFile(filepath.Join(r.source, "cmd/ebpfnetctl/hooks", hook))
		if err != nil {
			return err
		}
		if err := r.writeStaged("hooks/"+hook, bytes.ReplaceAll(text, []byte("@SBIN@"), []byte("/usr/sbin"))); err != nil {
			return err
		}
	}
	for _, shell := range []string{"bash", "zsh", "fish"} {
		script, err := r.ctl("completion", shell)
		if err != nil {
			return err
		}
		if err := r.writeStaged("completion/"+shell, []byte(script+"\n")); err != nil {
			return err
		}
	}
	pages, err := r.manual()
	if err != nil {
		return err
	}
	for _, page := range pages {
		if err := r.compress(page, "man.gz/"+filepath.Base(page)+".gz"); err != nil {
			return err
		}
	}
	if err := r.writeStaged("changelog", r.debianChangelog()); err != nil {
		return err
	}
	return errors.Join(r.compress(r.changelog(), "CHANGELOG.md.gz"), r.compress(r.staged("changelog"), "changelog.gz"))
}

// debianChangelog has the format that Debian's tools read.
func (r *release) debianChangelog() []byte {
	version := strings.Replace(r.version, "-", "~", 1) // nfpm's
	return fmt.Appendf(nil, "ebpfnet (%s) unstable; urgency=medium\n\n  * See CHANGELOG.md.gz in this directory.\n\n -- %s  %s\n",
		version, maintainer, r.time.Format(time.RFC1123Z))
}

// compress stages a file with gzip, without its name and time.
func (r *release) compress(from, to string) error {
	text, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	var packed bytes.Buffer
	w, _ := gzip.NewWriterLevel(&packed, gzip.BestCompression) // a valid level
	if _, err := w.Write(text); err != nil {
		return err
	}
	if err := w.Close(); err != nil {
		return err
	}
	return r.writeStaged(to, packed.Bytes())
}

// copyright returns the path of the licenses of programs.
func (r *release) copyright(c content) string { return r.staged("copyright-" + c.name) }

// writeCopyright stages the licenses of the product and of the modules in programs.
func (r *release) writeCopyright(c content) error {
	var text strings.Builder
	fmt.Fprint(&text, "ebpfnet: Apache-2.0. The eBPF programs in it: GPL-2.0-only or BSD-2-Clause.\nModules in its programs have the licenses below.\n")
	for _, name := range []string{"LICENSE", "bpf/LICENSE.BSD-2-Clause", "bpf/LICENSE.GPL-2.0"} {
		if err := appendFile(&text, "ebpfnet "+name, filepath.Join(r.source, name)); err != nil {
			return err
		}
	}
	libraries, err := r.libraries(c)
	if err != nil {
		return err
	}
	dirs, err := r.libraryDirs(libraries)
	if err != nil {
		return err
	}
	for i, library := range libraries {
		if err := appendLicenses(&text, library.Path+" "+library.Version, dirs[i]); err != nil {
			return err
		}
	}
	goroot, err := r.output("go", "env", "GOROOT")
	if err != nil {
		return err
	}
	if err := appendLicenses(&text, "the Go standard library", goroot); err != nil {
		return err
	}
	return os.WriteFile(r.copyright(c), []byte(text.String()), 0o644)
}

// libraryDirs returns the directories of modules. The Go tool runs in the module that builds the programs: only there
// it finds them without a network.
func (r *release) libraryDirs(libraries []library) ([]string, error) {
	dirs := make([]string, len(libraries))
	asked := map[string][]int{}
	for i, library := range libraries {
		asked[library.user.module] = append(asked[library.user.module], i)
	}
	for module, indexes := range asked {
		args := []string{"-C", module, "list", "-m", "-f", "{{.Dir}}"}
		for _, i := range indexes {
			args = append(args, libraries[i].Path)
		}
		found, err := r.output("go", args...)
		if err != nil {
			return nil, err
		}
		for n, dir := range strings.Split(found, "\n") {
			dirs[indexes[n]] = dir
		}
	}
	return dirs, nil
}

// appendLicenses appends the licenses and notices in a directory, which must have at least one.
func appendLicenses(text *strings.Builder, title, dir string) error {
	var licenses []string
	for _, pattern := range []string{"LICENSE*", "LICENCE*", "COPYING*", "NOTICE*"} {
		found, _ := filepath.Glob(filepath.Join(dir, pattern)) // a valid pattern
		licenses = append(licenses, found...)
	}
	if len(licenses) == 0 {
		return fmt.Errorf("%s: found no license in %q", title, dir)
	}
	for _, license := range licenses {
		if err := appendFile(text, title+": "+filepath.Base(license), license); err != nil {
			return err
		}
	}
	return nil
}

func appendFile(text *strings.Builder, title, file string) error {
	content, err := os.ReadFile(file)
	fmt.Fprintf(text, "\n%s\n%s\n\n%s\n", title, strings.Repeat("=", len(title)), bytes.TrimSpace(content))
	return err
}
