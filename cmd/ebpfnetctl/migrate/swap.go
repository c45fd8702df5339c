package migrate

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/containernetworking/cni/pkg/skel"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/loader/flock"
	"github.com/ebpfnet/ebpfnet/plugin"
	"github.com/ebpfnet/ebpfnet/plugin/operator"
	"github.com/ebpfnet/ebpfnet/plugin/record"
)

// Migrate leads all networks over that are ready, and tells what it does. A network that is blocked stays as
// it is, and is an error.
func Migrate(ctx context.Context, o Options, tell func(format string, args ...any)) error {
	return change(ctx, o, func(h *host, n *Network) error {
		switch n.State {
		case Done:
			return errors.Join(h.adoptAll(ctx, n, tell), n.notAdopted())
		case Ready:
			return h.migrate(ctx, n, tell)
		default:
			return fmt.Errorf("network %s stays as it is: %s", n.Name, strings.Join(n.Reasons, "; "))
		}
	})
}

// Back leads networks back that were migrated. An error names those that cannot be led back yet.
func Back(ctx context.Context, o Options, tell func(format string, args ...any)) error {
	return change(ctx, o, func(h *host, n *Network) error { return h.back(ctx, n, tell) })
}

// checkRoot wants the host's /run to be ours: the records of adopted containers are below it.
func checkRoot(root string) error {
	const run = "run"
	here, err := os.Stat("/" + run)
	if err != nil {
		return err
	}
	its, err := os.Stat(filepath.Join(root, run))
	if err != nil || !os.SameFile(here, its) {
		return errors.Join(fmt.Errorf("--root %s: expected its /run to be the one here, as records are there: mount it at /run", root), err)
	}
	return nil
}

// change calls do for each network. No other change looks or works meanwhile.
func change(ctx context.Context, o Options, do func(*host, *Network) error) error {
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
	networks, err := h.networks()
	for _, n := range networks {
		err = errors.Join(err, do(h, n))
	}
	return err
}

// migrate changes nothing where one of the containers cannot be adopted.
func (h *host) migrate(ctx context.Context, n *Network, tell func(string, ...any)) error {
	began := time.Now()
	if err := canAdd(ctx, n); err != nil {
		return fmt.Errorf("network %s stays as it is: %w", n.Name, err)
	}
	err := h.adoptAll(ctx, n, tell)
	if err == nil {
		err = swap(n)
	}
	if err != nil {
		return errors.Join(err, h.releaseAll(context.WithoutCancel(ctx), n, tell))
	}
	tell("network %s is ebpfnet's: %s has the new list, and %s the old one", n.Name, n.File, keptName(n.File))
	for _, note := range n.Notes {
		tell("note: %s", note)
	}
	return h.adoptLate(ctx, n, began, tell)
}

// canAdd returns an error if an ADD by the new list could not succeed on this host. Addresses do not count:
// that none is free is no reason to stay.
func canAdd(ctx context.Context, n *Network) error {
	ctx, cancel := context.WithTimeout(ctx, lockTimeout)
	defer cancel()
	stdin := stdinOf(n.list, n.translation.ours)
	delete(stdin, "ipam")
	call, err := newCall(stdin, &skel.CmdArgs{})
	if err != nil {
		return err
	}
	return plugin.New().Status(ctx, call)
}

func (h *host) adoptAll(ctx context.Context, n *Network, tell func(string, ...any)) error {
	if !n.hasToAdopt() {
		return nil
	}
	if err := h.answerForOthers(n); err != nil {
		return fmt.Errorf("network %s: have the bridge answer ARP: %w", n.Name, err)
	}
	for i := range n.Containers {
		c := &n.Containers[i]
		if c.Fate != Adopt {
			continue
		}
		err := h.adopt(ctx, n, c)
		if errors.Is(err, errEnded) {
			continue
		}
		if err != nil {
			return fmt.Errorf("adopt container %s of network %s: %w", c.ContainerID, n.Name, err)
		}
		tell("adopted container %s %s (%s)", c.ContainerID, c.IfName, c.Device)
	}
	return nil
}

func (h *host) releaseAll(ctx context.Context, n *Network, tell func(string, ...any)) error {
	var errs []error
	for i := range n.Containers {
		c := &n.Containers[i]
		if c.Fate != Adopted && !c.attached {
			continue
		}
		if err := h.release(ctx, c); err != nil {
			errs = append(errs, fmt.Errorf("release container %s of network %s: %w", c.ContainerID, n.Name, err))
			continue
		}
		c.Fate, c.attached = Adopt, false
		tell("released container %s %s (%s)", c.ContainerID, c.IfName, c.Device)
	}
	return errors.Join(append(errs, h.answerAsBefore(n))...)
}

// notAdopted returns an error about the containers of a migrated network that cannot be adopted.
func (n *Network) notAdopted() error {
	if len(n.Reasons) == 0 {
		return nil
	}
	return fmt.Errorf("network %s is ebpfnet's, but has other containers: %s", n.Name, strings.Join(n.Reasons, "; "))
}

// swap puts the new list in the place of the old one, which keeps a second name. At each moment a runtime
// finds one of them whole.
func swap(n *Network) error {
	present, err := os.ReadFile(n.File)
	if err != nil {
		return err
	}
	if !bytes.Equal(present, n.list.Bytes) {
		return fmt.Errorf("somebody has changed %s meanwhile", n.File)
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
	if err := writeFile(partialName(n.File), n.Conflist, 0o644); err != nil {
		return err
	}
	return rename(partialName(n.File), n.File)
}

// rename survives a crash.
func rename(from, to string) error {
	if err := os.Rename(from, to); err != nil {
		return err
	}
	dir, err := os.Open(filepath.Dir(to))
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}

// partialName is the name of a new list that is being written. Runtimes do not read it.
func partialName(file string) string { return file + ".ebpfnet-new" }

// back puts the old list back, and releases what was adopted. The old plugins could not clean up behind
// containers that ebpfnet has made, so there must be none.
func (h *host) back(ctx context.Context, n *Network, tell func(string, ...any)) error {
	made, err := madeByUs(n.Name)
	if err != nil {
		return err
	}
	if n.State == Done && len(made) > 0 {
		return fmt.Errorf("network %s stays ebpfnet's: it has made containers that run; stop them before, and start them again afterwards: %s", n.Name, strings.Join(made, ", "))
	}
	if n.State == Done {
		if err := rename(n.Kept, n.File); err != nil {
			return err
		}
		tell("network %s is no longer ebpfnet's: %s has the old list", n.Name, n.File)
		if made, err = madeByUs(n.Name); err == nil && len(made) > 0 {
			err = fmt.Errorf("ebpfnet has made containers of network %s meanwhile: restart %s, and then run `ebpfnetctl doctor --fix`", n.Name, strings.Join(made, ", "))
		}
	}
	return errors.Join(err, h.releaseAll(ctx, n, tell))
}

// madeByUs returns the containers of a network that ebpfnet has connected, and not adopted.
func madeByUs(network string) (made []string, err error) {
	attachments, err := operator.Attachments(record.DefaultDir)
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
