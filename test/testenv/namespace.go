package testenv

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// waitDelay is how long the children of a killed process may keep its output open.
const waitDelay = 2 * time.Second

// Namespace is a network namespace that exists until it is closed, even without a process in
// it.
type Namespace struct {
	// Name is unique among the open namespaces.
	Name string
	// Path is the value of CNI_NETNS.
	Path string

	fd    netns.NsHandle
	rtnl  *netlink.Handle
	close func() error
}

// New makes a network namespace with lo up. If the name is in use, it gets a number. The end of
// the test closes it.
func New(tb TB, name string) *Namespace {
	tb.Helper()
	requireIsolated(tb)
	ns, err := newNamespace(name)
	if err != nil {
		tb.Fatalf("make network namespace %s: %v", name, err)
	}
	tb.Cleanup(func() {
		if err := ns.Close(); err != nil {
			tb.Logf("close namespace %s: %v", ns.Name, err)
		}
	})
	return ns
}

func newNamespace(name string) (*Namespace, error) {
	path, err := reservePath(name)
	if err != nil {
		return nil, err
	}
	ns := &Namespace{Name: filepath.Base(path), Path: path, fd: netns.None()}
	ns.close = sync.OnceValue(ns.release)

	if err := onThread(ns.populate); err != nil {
		return nil, errors.Join(err, ns.Close())
	}
	if ns.fd, err = netns.GetFromPath(path); err != nil {
		return nil, errors.Join(fmt.Errorf("open %s: %w", path, err), ns.Close())
	}
	// For one protocol: without any, NewHandleAt opens a socket for every protocol, and the
	// kernel loads modules for them.
	if ns.rtnl, err = netlink.NewHandleAt(ns.fd, unix.NETLINK_ROUTE); err != nil {
		return nil, errors.Join(fmt.Errorf("open netlink in %s: %w", path, err), ns.Close())
	}
	lo, err := ns.rtnl.LinkByName("lo")
	if err == nil {
		err = ns.rtnl.LinkSetUp(lo)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("set lo up in %s: %w", path, err), ns.Close())
	}
	return ns, nil
}

// reservePath creates the mount point of the namespace.
func reservePath(name string) (string, error) {
	for i := 1; ; i++ {
		path := filepath.Join(netnsDir, name)
		if i > 1 {
			path += fmt.Sprintf("-%d", i)
		}
		f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_RDONLY, 0o444)
		if errors.Is(err, os.ErrExist) {
			continue
		}
		if err != nil {
			return "", err
		}
		return path, f.Close()
	}
}

// populate moves the calling thread to a new network namespace and binds that to Path.
func (ns *Namespace) populate() error {
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("unshare: %w", err)
	}
	if err := resetSysctls(); err != nil {
		return err
	}
	return bind("/proc/thread-self/ns/net", ns.Path)
}

// Do runs fn on a thread inside the namespace. Sockets that fn opens stay in the namespace;
// goroutines that it starts run outside. FailNow and panics in fn have the same effect as in the
// caller.
func (ns *Namespace) Do(fn func() error) error {
	return onThread(func() error {
		if err := netns.Set(ns.fd); err != nil {
			return fmt.Errorf("enter namespace %s: %w", ns.Name, err)
		}
		return fn()
	})
}

// Command is exec.CommandContext for a process in the namespace, through nsenter of util-linux.
// Unlike with `ip netns exec`, all mounts are this process's: bpffs has its pins, and /sys its
// devices.
func (ns *Namespace) Command(ctx context.Context, name string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, "nsenter", append([]string{"--net=" + ns.Path, "--", name}, args...)...)
	cmd.WaitDelay = waitDelay
	return cmd
}

// Run runs a command in the namespace and returns its standard output. An error includes the
// command and both outputs.
func (ns *Namespace) Run(ctx context.Context, name string, args ...string) (string, error) {
	cmd := ns.Command(ctx, name, args...)
	var stdout, stderr strings.Builder
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("run %s %s in %s: %w: %s%s",
			name, strings.Join(args, " "), ns.Name, err, stderr.String(), stdout.String())
	}
	return stdout.String(), nil
}

// Netlink returns a handle for NETLINK_ROUTE requests in the namespace. Close closes it; the
// caller must not.
func (ns *Namespace) Netlink() *netlink.Handle { return ns.rtnl }

// Close releases the namespace; the kernel removes it with its links when its last user is
// gone. A second call does nothing.
func (ns *Namespace) Close() error { return ns.close() }

func (ns *Namespace) release() error {
	if ns.rtnl != nil {
		ns.rtnl.Close()
	}
	var errs []error
	if ns.fd.IsOpen() {
		errs = append(errs, ns.fd.Close())
	}
	// EINVAL: nothing was mounted. ENOENT: the test removed the namespace.
	if err := unix.Unmount(ns.Path, unix.MNT_DETACH); err != nil && err != unix.EINVAL && err != unix.ENOENT {
		errs = append(errs, fmt.Errorf("unmount %s: %w", ns.Path, err))
	}
	if err := os.Remove(ns.Path); err != nil && !errors.Is(err, os.ErrNotExist) {
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}
