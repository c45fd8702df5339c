package bugreport

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	"github.com/containernetworking/cni/libcni"

	"github.com/ebpfnet/ebpfnet/loader"
)

// commands are those of the host. One that is not installed is left out. None shows keys, as `ip xfrm` would.
var commands = [][]string{
	{"uname", "-a"},
	{"ip", "-s", "-d", "link"},
	{"ip", "addr"},
	{"ip", "-4", "route", "show", "table", "all"},
	{"ip", "-6", "route", "show", "table", "all"},
	{"ip", "-4", "rule"},
	{"ip", "-6", "rule"},
	{"ip", "neigh"},
	{"tc", "-s", "qdisc"},
	{"bpftool", "net"},
	{"nft", "list", "ruleset"},
	{"iptables-save", "-c"},
	{"ip6tables-save", "-c"},
	{"iptables-legacy-save", "-c"},
	{"ip6tables-legacy-save", "-c"},
}

// files are copied.
var files = []string{"/etc/os-release", "/proc/version", "/proc/meminfo", "/proc/modules", "/proc/mounts", "/proc/net/softnet_stat", "/proc/net/snmp",
	"/proc/net/snmp6", "/proc/net/netstat", "/sys/kernel/security/lsm"}

func addHost(ctx context.Context, a *archive, _ Options) {
	if build, ok := debug.ReadBuildInfo(); ok {
		a.add("host/ebpfnetctl.txt", redactText([]byte(build.String())), nil)
	}
	for _, file := range files {
		text, err := readFile(file)
		if !errors.Is(err, fs.ErrNotExist) {
			a.add("host/"+strings.ReplaceAll(file[1:], "/", "-")+".txt", redactText(text), err)
		}
	}
	for _, words := range commands {
		program, err := exec.LookPath(words[0])
		if err != nil || ctx.Err() != nil {
			continue
		}
		text, err := run(ctx, program, words[1:]...)
		a.add("host/"+strings.ReplaceAll(strings.Join(words, "-"), "--", "-")+".txt", redactText(text), err)
	}
	text, err := sysctls()
	a.add("host/sysctl.txt", redactText(text), err)
	text, err = listOf(loader.Root, "/var/lib/cni")
	a.add("host/files.txt", redactText(text), err)
}

// run runs a program, and keeps of its output what a file has room for.
func run(ctx context.Context, program string, args ...string) ([]byte, error) {
	var out bounded
	err := runTo(ctx, &out, program, args...)
	if out.more {
		err = errors.Join(err, fmt.Errorf("cut: it has more than %d bytes", mostOfFile))
	}
	return out.text, err
}

// runTo runs a program for a limited time. Exit code 3 of ebpfnetctl means that it has found something.
func runTo(ctx context.Context, out io.Writer, program string, args ...string) error {
	const timeout, exitFound = 30 * time.Second, 3

	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Env = append(os.Environ(), "LC_ALL=C", "NO_COLOR=1")
	cmd.WaitDelay = time.Second
	var errs bounded
	cmd.Stdout, cmd.Stderr = out, &errs
	err := cmd.Run()
	if cmd.ProcessState != nil && cmd.ProcessState.ExitCode() == exitFound {
		err = nil
	}
	if ctx.Err() != nil && err != nil {
		err = fmt.Errorf("%w (after %s)", err, timeout)
	}
	if text := strings.TrimSpace(string(redactText(errs.text))); text != "" {
		err = errors.Join(err, errors.New(text))
	}
	return err
}

// bounded keeps the first bytes that are written to it.
type bounded struct {
	text []byte
	more bool
}

// Write implements io.Writer.
func (b *bounded) Write(text []byte) (int, error) {
	kept := text[:min(len(text), mostOfFile-len(b.text))]
	b.text = append(b.text, kept...)
	b.more = b.more || len(kept) < len(text)
	return len(text), nil
}

func readFile(path string) ([]byte, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	var text bounded
	_, err = file.WriteTo(&text)
	if text.more {
		err = errors.Join(err, fmt.Errorf("cut: it has more than %d bytes", mostOfFile))
	}
	return text.text, err
}

// addConfigurations adds what a runtime reads. Other files there may have credentials.
func addConfigurations(_ context.Context, a *archive, o Options) {
	confs, err := libcni.ConfFiles(o.ConfDir, []string{".conf", ".conflist", ".json"})
	if err != nil || len(confs) == 0 {
		a.add("cni", nil, errors.Join(err, fmt.Errorf("no configuration in %s", o.ConfDir)))
	}
	slices.Sort(confs)
	for _, file := range confs {
		text, err := readFile(file)
		if err == nil {
			text, err = redactJSON(bytes.NewReader(text), a.room())
		} else {
			text, err = nil, fmt.Errorf("left out: %w", err)
		}
		a.add("cni/"+filepath.Base(file), text, err)
	}
}

// ofOneDevice matches the directories of settings that a host has for each of its devices, of which there are thousands.
var ofOneDevice = regexp.MustCompile(`^/proc/sys/net/ipv[46]/(conf|neigh)/(veth|ebpf|cali|lxc|vnet|tap)[^/]*$`)

// sysctls lists the settings of the network. Keys are not shown: tcp_fastopen_key, stable_secret.
func sysctls() ([]byte, error) {
	const root = "/proc/sys/"

	var text bounded
	err := filepath.WalkDir(root+"net", func(path string, entry fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return nil // a device that is gone
		case entry.IsDir() && ofOneDevice.MatchString(path):
			return fs.SkipDir
		case entry.IsDir() || secretName.MatchString(entry.Name()):
			return nil
		}
		if value, err := os.ReadFile(path); err == nil { // some can be written only
			text.Write(fmt.Appendf(nil, "%s = %s\n", strings.ReplaceAll(path[len(root):], "/", "."), strings.TrimSpace(string(value))))
		}
		return nil
	})
	return text.text, err
}

// listOf lists the files below directories, with their modes and owners but not what they contain.
func listOf(roots ...string) ([]byte, error) {
	var text bounded
	var errs []error
	for _, root := range roots {
		errs = append(errs, filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
			var info fs.FileInfo
			if err == nil {
				info, err = entry.Info()
			}
			if errors.Is(err, fs.ErrNotExist) { // not yet, or not any more
				return nil
			}
			if err != nil {
				return err
			}
			text.Write(fmt.Appendf(nil, "%s %d %s %q\n", info.Mode(), info.Size(), info.ModTime().UTC().Format(time.RFC3339), path))
			return nil
		}))
	}
	return text.text, errors.Join(errs...)
}
