package doctor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/ebpfnet/ebpfnet/ipam"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin"
	"github.com/ebpfnet/ebpfnet/plugin/containers"
)

// lookReservations finds what containers that are gone have left, and ranges without a free address.
func lookReservations(ctx context.Context, h *host) (findings []Finding, err error) {
	dead := map[string]bool{}
	for _, a := range h.attachments {
		dead[a.Owner] = a.Dead
	}
	for _, n := range h.ours() {
		found, errNetwork := h.lookAtNetwork(ctx, n)
		findings = append(findings, found...)
		owners, errOwners := h.ownersOf(n)
		for owner := range owners {
			delete(dead, owner)
		}
		err = errors.Join(err, errNetwork, errOwners)
	}
	for owner, isDead := range dead {
		if isDead {
			findings = append(findings, warning("DEL, or GC of its network", "a container that is gone has left entries (owner %s in `ebpfnetctl attachments`), and no configuration here has its network", owner))
		}
	}
	if err != nil {
		return findings, err
	}
	return orGood(findings, "no address is held for a container that is gone"), nil
}

func (h *host) lookAtNetwork(ctx context.Context, n *network) (findings []Finding, err error) {
	orphans, kept, err := h.orphans(ctx, n)
	if err != nil {
		return nil, err
	}
	if len(orphans) > 0 {
		f := warning("doctor --fix, or GC by the runtime", "%s: %d containers that are gone hold addresses or entries: %s", n.name(), len(orphans), list(orphans))
		switch f.fix = &fixOrphans; {
		case len(kept) > 0:
			f.fix, f.Remedy = nil, "GC by the runtime: doctor --fix leaves networks alone that running containers without a device of ours use"
		case h.datapath == nil: // the containers may be those of another network namespace
			f.fix, f.Remedy = nil, "nothing: ADD takes over what is from before a reboot; or GC by the runtime"
		}
		findings = append(findings, f)
	}
	left, err := h.addressesLeft(ctx, n)
	if left != nil {
		findings = append(findings, wrong("widen the range, or remove what containers have left", "%s: ADD gets no address: %v", n.name(), left))
	}
	return findings, err
}

// addressesLeft returns why ADD would get no address. A network that was never used has all of them, and
// looking would create its directory.
func (h *host) addressesLeft(ctx context.Context, n *network) (why, err error) {
	if n.config.IPAM == nil || !exists(n.config.IPAM.Dir()) {
		return nil, nil
	}
	call, err := n.call()
	if err != nil {
		return nil, err
	}
	err = plugin.New().AddressesLeft(ctx, call)
	if errors.Is(err, ipam.ErrExhausted) {
		return err, nil
	}
	return nil, err
}

// orphans returns the containers of a network that are gone and have left something, by GC's own rules, and
// those that run without a device of ours here.
func (h *host) orphans(ctx context.Context, n *network) (orphans, kept []string, err error) {
	call, err := n.call()
	if err != nil {
		return nil, nil, err
	}
	reserved, err := plugin.New().Orphans(ctx, call)
	if err != nil {
		return nil, nil, err
	}
	running, err := h.runningContainers(n.file.List.Name)
	cannotTell := errors.Is(err, fs.ErrNotExist) // then all of them may run
	if err != nil && !cannotTell {
		return nil, nil, err
	}
	for _, a := range reserved {
		if cannotTell || running[a.ContainerID] {
			kept = append(kept, a.ContainerID)
		} else {
			orphans = append(orphans, a.ContainerID)
		}
	}
	owners, err := h.ownersOf(n)
	for _, a := range reserved { // those have a name
		delete(owners, a.Owner().String())
	}
	for _, a := range h.attachments {
		if a.Dead && owners[a.Owner] {
			orphans = append(orphans, cmp.Or(a.ContainerID, "owner "+a.Owner))
		}
	}
	slices.Sort(orphans)
	return slices.Compact(orphans), kept, err
}

// ownersOf returns the owners of a network's entries, as attachments have them.
func (h *host) ownersOf(n *network) (owners map[string]bool, err error) {
	owners = map[string]bool{}
	if h.datapath == nil {
		return owners, nil
	}
	all, err := maps.Owners(h.datapath, maps.NetworkToken(n.file.List.Name))
	for owner := range all {
		owners[owner.String()] = true
	}
	return owners, err
}

// runningContainers returns the containers of a network that libcni's cache has, and that run: also those of
// another plugin, on a host that changes over to ebpfnet, and those of another network namespace. Without a cache
// the error is fs.ErrNotExist.
func (h *host) runningContainers(name string) (running map[string]bool, err error) {
	if _, err := os.Stat(filepath.Join(h.CacheDir, "results")); err != nil {
		return nil, err // libcni would find nothing
	}
	all, err := containers.Cached(h.CacheDir)
	if err != nil {
		return nil, err
	}
	running = map[string]bool{}
	for _, a := range all {
		if a.NetNS == "" && hasOurs(a) {
			continue // old versions do not keep the namespace; the check of the device counts
		}
		if a.Network == name && (a.NetNS == "" || exists(a.NetNS) || exists(h.path(a.NetNS))) {
			running[a.ContainerID] = true
		}
	}
	return running, nil
}

// exists reports whether a file exists, and true if that cannot be found out.
func exists(file string) bool {
	_, err := os.Stat(file)
	return !errors.Is(err, fs.ErrNotExist)
}

// removeOrphans runs GC for the networks that have orphans, which keeps whatever has a device.
func removeOrphans(ctx context.Context, h *host) (did []string, err error) {
	for _, n := range h.ours() {
		orphans, kept, err := h.orphans(ctx, n)
		if err != nil || len(kept) > 0 || len(orphans) == 0 || h.datapath == nil {
			continue // the check that follows says why
		}
		call, err := n.call()
		if err == nil { // GC executes plugins that made adopted containers
			err = os.Setenv("CNI_PATH", strings.Join(n.runtime.BinDirs, ":"))
		}
		if err == nil {
			err = plugin.New().GC(ctx, call)
		}
		if err != nil {
			return did, err
		}
		did = append(did, fmt.Sprintf("removed what %s had left in %s", list(orphans), n.name()))
	}
	return did, nil
}
