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

	"github.com/ebpfnet/ebpfnet/loader/rtnl"
	"github.com/ebpfnet/ebpfnet/plugin/record"
)

// An ADD takes no longer than this from the reservation of its address to its entry in libcni's cache.
const longestAdd = time.Minute

// adoptLate adopts the containers that the runtime has added by the old list while migrate was at work, which began at
// a time. Some of these ADDs may still go on: it waits for them.
func (h *host) adoptLate(ctx context.Context, n *Network, began time.Time, tell func(string, ...any)) error {
	waiting, cancel := context.WithTimeout(ctx, lockTimeout)
	defer cancel()
	for {
		coming, err := h.coming(n, began.Add(-longestAdd)) // before the look at the cache, into which they go
		if err == nil {
			err = h.adoptNew(ctx, n, tell)
		}
		if err != nil || len(coming) == 0 {
			return errors.Join(err, n.notAdopted())
		}
		select {
		case <-waiting.Done():
			return errors.Join(n.notAdopted(), fmt.Errorf("network %s is ebpfnet's, but %s got an address by the old list and has not started yet: "+
				"run `ebpfnetctl migrate` again when it has", n.Name, strings.Join(coming, ", ")))
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

// coming returns the containers that have got an address since a time, and of which neither libcni's cache nor a record
// of ours knows: their ADDs go on.
func (h *host) coming(n *Network, since time.Time) (ids []string, err error) {
	dir := filepath.Join(h.Root, n.translation.reservations)
	files, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	known, err := h.known(n.Name)
	for _, file := range files {
		if _, errName := netip.ParseAddr(file.Name()); errName != nil {
			continue // the lock
		}
		info, errInfo := file.Info()
		text, errRead := os.ReadFile(filepath.Join(dir, file.Name()))
		id, _, _ := strings.Cut(strings.TrimSpace(string(text)), "\n")
		id = strings.TrimSpace(id)
		if errInfo != nil || errRead != nil || info.ModTime().Before(since) || known[id] || slices.Contains(ids, id) {
			continue // released, old, or not new
		}
		ids = append(ids, id)
	}
	return ids, err
}

// known returns the containers of a network that libcni's cache or a record of ours has.
func (h *host) known(network string) (map[string]bool, error) {
	known := map[string]bool{}
	cached, err := h.cni.GetCachedAttachments("")
	for _, c := range cached {
		if c.Network == network {
			known[c.ContainerID] = true
		}
	}
	records, errOpen := record.Open(record.DefaultDir)
	if err = errors.Join(err, errOpen); err != nil {
		return nil, err
	}
	recs, err := records.List()
	for _, rec := range recs {
		if rec.Attachment.Network == network {
			known[rec.Attachment.ContainerID] = true
		}
	}
	return known, err
}
