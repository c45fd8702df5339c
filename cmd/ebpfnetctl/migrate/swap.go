package migrate

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/containernetworking/cni/pkg/skel"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/loader/flock"
	"github.com/ebpfnet/ebpfnet/plugin"
	"github.com/ebpfnet/ebpfnet/plugin/admin"
	"github.com/ebpfnet/ebpfnet/plugin/cni"
	"github.com/ebpfnet/ebpfnet/plugin/nodestate"
	"github.com/ebpfnet/ebpfnet/plugin/record"
)

// Migrate migrates all networks that are ready, and reports each step. A network that is blocked does not change, and is
// an error.
func Migrate(ctx context.Context, o Options, report func(format string, args ...any)) error {
	return change(ctx, o, report, func(h *host, n *Network) error {
		switch n.State {
		case Done:
			return errors.Join(h.adoptAll(ctx, n), n.notAdopted())
		case Ready:
			return h.migrate(ctx, n)
		default:
			return fmt.Errorf("network %s is not migrated: %s", n.Name, strings.Join(n.Reasons, "; "))
		}
	})
}

// Back migrates networks back to the old plugins. An error names those for which that is not possible yet.
func Back(ctx context.Context, o Options, report func(format string, args ...any)) error {
	return change(ctx, o, report, func(h *host, n *Network) error { return h.back(ctx, n) })
}

// checkRoot requires the host's /run to be ours: the records of adopted containers are below it.
func checkRoot(root string) error {
	here, err := os.Stat("/run")
	if err != nil {
		return err
	}
	its, err := os.Stat(filepath.Join(root, "run"))
	if err != nil || !os.SameFile(here, its) {
		return errors.Join(fmt.Errorf("--root %s: expected its /run to be the one here, as records are there: mount it at /run", root), err)
	}
	return nil
}

// change calls do for each network. It holds a lock that another change waits for.
func change(ctx context.Context, o Options, report func(string, ...any), do func(*host, *Network) error) error {
	if err := checkRoot(o.Root); err != nil {
		return err
	}
	if err := os.MkdirAll(o.CacheDir, 0o700); err != nil { // as libcni does
		return err
	}
	waiting, cancel := context.WithTimeout(ctx, lockTimeout)
	defer cancel()
	lock, err := flock.Acquire(waiting, o.CacheDir, flock.Exclusive)
	if err != nil {
		return err
	}
	defer lock.Release()
	h, err := open(o)
	if err != nil {
		return err
	}
	defer h.close()
	h.report = report
	networks, err := h.networks()
	for _, n := range networks {
		err = errors.Join(err, do(h, n))
	}
	return err
}

// migrate changes nothing where one of the containers cannot be adopted.
func (h *host) migrate(ctx context.Context, n *Network) error {
	if err := canAdd(ctx, n); err != nil {
		return fmt.Errorf("network %s is not migrated: %w", n.Name, err)
	}
	err := h.adoptAll(ctx, n)
	if err == nil {
		err = swap(n)
	}
	if err != nil {
		return errors.Join(err, h.releaseAll(context.WithoutCancel(ctx), n))
	}
	h.report("network %s is ebpfnet's: %s has the new list, and %s the old one", n.Name, n.File, keptName(n.File))
	return h.adoptLate(ctx, n)
}

// canAdd returns an error if an ADD by the new list could not succeed on this host. It does not look for a free address,
// which the old list would need as well.
func canAdd(ctx context.Context, n *Network) error {
	ctx, cancel := context.WithTimeout(ctx, lockTimeout)
	defer cancel()
	keys := maps.Clone(n.translation.ours)
	delete(keys, "ipam")
	call, err := cni.CallOf(n.list.Name, n.list.CNIVersion, keys, skel.CmdArgs{})
	if err != nil {
		return err
	}
	return plugin.New().Status(ctx, call)
}

func (h *host) adoptAll(ctx context.Context, n *Network) error {
	if !slices.ContainsFunc(n.Containers, func(c Container) bool { return c.Action == Adopt }) {
		return nil
	}
	if err := h.setProxyARP(n, true); err != nil {
		return fmt.Errorf("network %s: have the bridge answer ARP: %w", n.Name, err)
	}
	for i := range n.Containers {
		c := &n.Containers[i]
		if c.Action != Adopt {
			continue
		}
		err := h.adopt(ctx, n, c)
		if errors.Is(err, errEnded) {
			continue
		}
		if err != nil {
			return fmt.Errorf("adopt container %s of network %s: %w", c.Title(), n.Name, err)
		}
		h.report("adopted container %s %s (%s)", c.Title(), c.IfName, c.Device)
	}
	return nil
}

func (h *host) releaseAll(ctx context.Context, n *Network) error {
	errs := []error{h.setProxyARP(n, false)}
	for i := range n.Containers {
		c := &n.Containers[i]
		if !c.isReleasable() {
			continue
		}
		if err := h.release(ctx, c); err != nil {
			errs = append(errs, fmt.Errorf("release container %s of network %s: %w", c.Title(), n.Name, err))
			continue
		}
		c.Action, c.attached = Adopt, false
		h.report("released container %s %s (%s)", c.Title(), c.IfName, c.Device)
	}
	return errors.Join(errs...)
}

// notAdopted returns an error about the containers of a migrated network that cannot be adopted.
func (n *Network) notAdopted() error {
	if len(n.Reasons) == 0 {
		return nil
	}
	return fmt.Errorf("network %s is ebpfnet's, but has containers that are not: %s; then run `ebpfnetctl migrate` again", n.Name, strings.Join(n.Reasons, "; "))
}

// swap replaces the old list, which keeps a second name, by the new one. At each moment a runtime finds a complete list.
func swap(n *Network) error {
	present, err := os.ReadFile(n.File)
	if err != nil {
		return err
	}
	if !bytes.Equal(present, n.list.Bytes) {
		return fmt.Errorf("%s has changed meanwhile", n.File)
	}
	kept := keptName(n.File)
	err = os.Link(n.File, kept)
	if errors.Is(err, os.ErrExist) { // of a migrate that was killed
		var former []byte
		if former, err = os.ReadFile(kept); err == nil && !bytes.Equal(former, present) {
			err = fmt.Errorf("%s is another list: move it away", kept)
		}
	}
	if err != nil {
		return err
	}
	return nodestate.ReplaceWith(n.File, bytes.NewReader(n.Conflist), 0o644)
}

// back puts the old list back, and releases what was adopted. The old plugins could not clean up behind
// containers that ebpfnet has made, so there must be none.
func (h *host) back(ctx context.Context, n *Network) error {
	made, err := madeByUs(n.Name)
	if err != nil {
		return err
	}
	if n.State == Done && len(made) > 0 {
		return fmt.Errorf("network %s is still ebpfnet's, because ebpfnet made containers that run: stop them before, and start them again afterwards: %s", n.Name, strings.Join(made, ", "))
	}
	if n.State == Done {
		if err := os.Rename(n.Kept, n.File); err != nil {
			return err
		}
		h.report("network %s is no longer ebpfnet's: %s has the old list", n.Name, n.File)
		if made, err = madeByUs(n.Name); err == nil && len(made) > 0 {
			err = fmt.Errorf("ebpfnet has made containers of network %s meanwhile: restart %s, and then run `ebpfnetctl doctor --fix`", n.Name, strings.Join(made, ", "))
		}
	}
	if n.State != Done && !slices.ContainsFunc(n.Containers, Container.isReleasable) {
		return err // it is not migrated
	}
	// The old plugins' routes may be less specific.
	return errors.Join(err, h.releaseAll(ctx, n), plugin.AcceptUnassigned(n.Name))
}

// madeByUs returns the containers of a network that ebpfnet has connected, and not adopted.
func madeByUs(network string) (made []string, err error) {
	attachments, err := admin.Attachments(record.DefaultDir)
	if errors.Is(err, loader.ErrNotLoaded) {
		return nil, nil
	}
	for _, a := range attachments {
		if a.Network == network && !a.Chained && !a.Dead {
			made = append(made, a.ContainerID)
		}
	}
	slices.Sort(made)
	return made, err
}
