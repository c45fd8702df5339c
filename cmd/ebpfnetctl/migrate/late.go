package migrate

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/loader/rtnl"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/names"
)

const (
	longestAdd = time.Minute // from the reservation of an address to the entry in libcni's cache
	reload     = time.Second // until a runtime has read the new list, and its last ADD by the old one has an address
)

// adoptLate adopts the containers that the runtime has added by the old list while migrate was at work, which began at
// a time. Some of these ADDs may still go on, or begin: it waits for them.
func (h *host) adoptLate(ctx context.Context, n *Network, began time.Time, tell func(string, ...any)) error {
	waiting, cancel := context.WithTimeout(ctx, lockTimeout)
	defer cancel()
	for quiet := time.Now(); ; {
		coming, err := h.coming(n, began.Add(-longestAdd)) // before the look at the cache, into which they go
		if err == nil {
			err = h.adoptNew(ctx, n, tell)
		}
		if len(coming) > 0 {
			quiet = time.Now()
		}
		if err != nil || time.Since(quiet) > reload {
			return errors.Join(err, n.notAdopted())
		}
		select {
		case <-waiting.Done():
			if len(coming) == 0 {
				return errors.Join(n.notAdopted(), ctx.Err())
			}
			return errors.Join(n.notAdopted(), fmt.Errorf("network %s is ebpfnet's, but an ADD of %s goes on, perhaps by the old list: "+
				"run `ebpfnetctl migrate` again when it has ended", n.Name, strings.Join(coming, ", ")))
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// adoptNew adopts the containers that libcni's cache has by now.
func (h *host) adoptNew(ctx context.Context, n *Network, tell func(string, ...any)) (err error) {
	if h.devices, err = rtnl.Links(h.netlink); err != nil {
		return err
	}
	n.Containers, n.Reasons = nil, nil
	if err := h.lookAtContainers(n); err != nil {
		return err
	}
	return h.adoptAll(ctx, n, tell)
}

// coming returns the containers that have got an address since a time, of which libcni's cache does not know, and that
// have no device of ours: their ADDs go on.
func (h *host) coming(n *Network, since time.Time) (ids []string, err error) {
	dir := filepath.Join(h.Root, n.translation.reservations)
	files, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	known, err := h.known()
	for _, file := range files {
		if _, errName := netip.ParseAddr(file.Name()); errName != nil {
			continue // the lock
		}
		info, errInfo := file.Info()
		text, errRead := os.ReadFile(filepath.Join(dir, file.Name()))
		holder := append(strings.Fields(string(text)), "", "") // container and interface
		owner := maps.Attachment{Network: n.Name, ContainerID: holder[0], IfName: holder[1]}.Owner()
		if errInfo != nil || errRead != nil || info.ModTime().Before(since) || known[owner] || slices.Contains(ids, holder[0]) {
			continue // released, old, or not new
		}
		ids = append(ids, holder[0])
	}
	return ids, err
}

// known returns the owners of containers that libcni's cache has, or that have a device of ours.
func (h *host) known() (map[loader.Owner]bool, error) {
	known := map[loader.Owner]bool{}
	for _, device := range h.devices {
		if label, ok := names.ParseAlias(device.Attrs().Alias); ok {
			known[label.Owner] = true
		}
	}
	cached, err := h.cni.GetCachedAttachments("")
	for _, c := range cached {
		known[maps.Attachment{Network: c.Network, ContainerID: c.ContainerID, IfName: c.IfName}.Owner()] = true
	}
	return known, err
}
