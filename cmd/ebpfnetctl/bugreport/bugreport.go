// Package bugreport writes an archive of what is needed to find a fault on a host: the JSON of ebpfnetctl's
// read commands, network configurations, versions, the host's network settings, and the journal. It keeps
// addresses and leaves out secrets.
package bugreport

import (
	"archive/tar"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/ebpfnet/ebpfnet/plugin/runtimes"
	"github.com/ebpfnet/ebpfnet/plugin/show"
)

// Options say what to collect.
type Options struct {
	Commands [][]string       // of ebpfnetctl
	Runtimes runtimes.Options // whose network configurations to collect
}

// Report says what was written.
type Report struct {
	Files   int
	Missing []string // what could not be collected, or not all of it, and why
}

// hostCommands are commands of the host, each behind the name of its file. A program that is not installed is left
// out. None shows keys, as `ip xfrm` would.
var hostCommands = [][]string{
	{"uname", "uname", "-a"},
	{"system", "tail", "-n", "+1", "/etc/os-release", "/proc/meminfo", "/proc/modules", "/proc/mounts"},
	{"counters", "tail", "-n", "+1", "/proc/net/softnet_stat", "/proc/net/snmp", "/proc/net/snmp6", "/proc/net/netstat"},
	{"link", "ip", "-s", "-d", "link"},
	{"addr", "ip", "addr"},
	{"route4", "ip", "-4", "route", "show", "table", "all"},
	{"route6", "ip", "-6", "route", "show", "table", "all"},
	{"rule4", "ip", "-4", "rule"},
	{"rule6", "ip", "-6", "rule"},
	{"neigh", "ip", "neigh"},
	{"qdisc", "tc", "-s", "qdisc"},
	{"bpf", "bpftool", "net"},
	{"nft", "nft", "list", "ruleset"},
	{"iptables", "iptables-save", "-c"},
	{"ip6tables", "ip6tables-save", "-c"},
	{"iptables-legacy", "iptables-legacy-save", "-c"},
	{"ip6tables-legacy", "ip6tables-legacy-save", "-c"},
	{"files", "ls", "-lnR", "/sys/fs/bpf/ebpfnet", "/var/lib/cni"},
	{"sysctl", "sh", "-c", `sysctl -a -r '^net\.' 2>/dev/null`},
	{"journal-kernel", "journalctl", "--no-pager", "-k", "-n", "2000"},
	{"journal", "journalctl", "--no-pager", "-n", "10000", "-u", "ebpfnet*", "-u", "kubelet", "-u", "containerd", "-u", "crio", "-u", "docker"},
}

// Write collects and writes everything. Its error is one of writing, or that ctx is done.
func Write(ctx context.Context, to io.Writer, o Options) (*Report, error) {
	a := newArchive(to)
	for _, words := range o.Commands {
		text, err := run(ctx, a.limit(), self, words...)
		if slices.Contains(words, "--output=json") {
			a.addJSON("ebpfnetctl/"+words[0]+".json", text, err)
		} else {
			a.add("ebpfnetctl/"+words[0]+".txt", redactText(text), err)
		}
	}
	a.addConfigurations(o.Runtimes)
	for _, command := range hostCommands {
		if program, err := exec.LookPath(command[1]); err == nil {
			text, err := run(ctx, a.limit(), program, command[2:]...)
			a.add("host/"+command[0]+".txt", redactText(text), err)
		}
	}
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("interrupted: %w", err)
	}
	if len(a.report.Missing) > 0 {
		a.write("missing.txt", []byte(strings.Join(a.report.Missing, "\n")+"\n"))
	}
	return &a.report, a.close()
}

// addJSON adds a JSON file without secrets. What is no JSON is left out, because secrets cannot be found in it.
func (a *archive) addJSON(name string, text []byte, err error) {
	if len(text) > 0 {
		clean, errJSON := redactJSON(text)
		text, err = clean, errors.Join(err, errJSON)
	}
	a.add(name, text, err)
}

// addConfigurations adds what runtimes read, each directory once. Other files there may have credentials.
func (a *archive) addConfigurations(o runtimes.Options) {
	found, err := o.Find()
	if err != nil {
		a.add("cni", nil, err)
	}
	seen := map[string]bool{}
	for _, r := range found {
		files, err := r.Files()
		if err != nil || len(files) == 0 {
			a.add("cni", nil, errors.Join(err, fmt.Errorf("no configuration in %s", r.ConfDir)))
		}
		for _, file := range files {
			if !seen[file.Path] {
				seen[file.Path] = true
				text, err := os.ReadFile(file.Path)
				a.addJSON("cni/"+filepath.Base(file.Path), text, err)
			}
		}
	}
}

const self = "/proc/self/exe" // also after an upgrade

// run runs a program for a limited time, and keeps the first bytes of its output. Exit code 3 of ebpfnetctl
// means that it has found something.
func run(ctx context.Context, limit int, program string, args ...string) ([]byte, error) {
	const timeout, exitFound = 30 * time.Second, 3

	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Env = append(os.Environ(), "LC_ALL=C")
	cmd.WaitDelay = time.Second
	out, errs := bounded{limit: limit}, bounded{limit: 4096}
	cmd.Stdout, cmd.Stderr = &out, &errs
	err := cmd.Run()
	switch {
	case ctx.Err() != nil:
		err = fmt.Errorf("%w (after %s)", err, timeout)
	case cmd.ProcessState != nil && cmd.ProcessState.ExitCode() == exitFound:
		err = nil
	}
	if out.more {
		err = errors.Join(err, fmt.Errorf("cut after %d bytes", limit))
	}
	if text := strings.TrimSpace(string(redactText(errs.text))); text != "" {
		err = errors.Join(err, errors.New(text))
	}
	return out.text, err
}

// bounded keeps the first bytes that are written to it.
type bounded struct {
	limit int
	text  []byte
	more  bool
}

// Write implements io.Writer.
func (b *bounded) Write(text []byte) (int, error) {
	kept := text[:min(len(text), b.limit-len(b.text))]
	b.text = append(b.text, kept...)
	b.more = b.more || len(kept) < len(text)
	return len(text), nil
}

// maxSize is the size of all files, before compression. One file may have half of what is left of it.
const maxSize = 32 << 20

// archive is a tar file under construction. It keeps the first error of writing.
type archive struct {
	zip    *gzip.Writer
	tar    *tar.Writer
	now    time.Time
	left   int
	err    error
	report Report
}

func newArchive(to io.Writer) *archive {
	zip := gzip.NewWriter(to)
	return &archive{zip: zip, tar: tar.NewWriter(zip), now: time.Now().Truncate(time.Second), left: maxSize}
}

func (a *archive) limit() int { return a.left / 2 }

// add adds what could be collected for a file, and records why something is missing.
func (a *archive) add(name string, content []byte, err error) {
	if limit := a.limit(); len(content) > limit {
		content, err = content[:limit], errors.Join(err, fmt.Errorf("cut after %d bytes", limit))
	}
	if err != nil {
		a.report.Missing = append(a.report.Missing, show.Short(name)+": "+show.Message(err.Error()))
	}
	if len(content) > 0 || err == nil {
		a.left -= len(content)
		a.write(name, content)
	}
}

func (a *archive) write(name string, content []byte) {
	const directory = "ebpfnet-bugreport/"

	if a.err != nil {
		return
	}
	a.report.Files++
	a.err = a.tar.WriteHeader(&tar.Header{Name: directory + show.Short(name), Mode: 0o600, Size: int64(len(content)), ModTime: a.now})
	if a.err == nil {
		_, a.err = a.tar.Write(content)
	}
}

func (a *archive) close() error { return errors.Join(a.err, a.tar.Close(), a.zip.Close()) }
