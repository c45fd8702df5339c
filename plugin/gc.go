package plugin

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"os"
	"strings"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/vishvananda/netlink"

	"github.com/ebpfnet/ebpfnet/ipam"
	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/loader/flock"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/link"
	"github.com/ebpfnet/ebpfnet/plugin/record"
)

// GC removes what no attachment of this network needs any more (SPEC, section
// 2, GC). It goes on after errors and reports all.
func (p *Plugin) GC(ctx context.Context, args *skel.CmdArgs) error {
	config, err := parseForRelease(args)
	if err != nil {
		return err
	}
	lock, err := config.keepApart(ctx, flock.Exclusive)
	if err != nil {
		return err
	}
	defer lock.Release()

	host, err := openHandle()
	if err != nil {
		return err
	}
	defer host.Close()

	devices, err := networkDevices(host, config.Attachment.Network)
	if err != nil {
		return err
	}
	records, err := record.Open(config.DataDir)
	if err != nil {
		return err
	}
	kept, unread := records.List()
	living, err := livingAttachments(host, config.Attachment.Network, devices, kept)
	if err != nil {
		return err
	}
	valid, err := validAttachments(args.StdinData, config.Attachment.Network, living)
	if err != nil {
		return err
	}
	deleted := deleteDevices(host, devices, valid.owners)
	swept := sweepDatapath(ctx, valid, kept)
	forgotten := forget(records, kept, valid)
	if config.Delegate != nil {
		return errors.Join(unread, deleted, swept, forgotten, config.Delegate.gc(ctx))
	}
	if config.IPAM == nil {
		return errors.Join(unread, deleted, swept, forgotten)
	}
	_, released := p.pool(config).Retain(ctx, valid.has)
	return errors.Join(unread, deleted, swept, forgotten, released)
}

// keepApart has GC wait for the ADDs under way, and ADDs for a GC: one that has addresses and
// has no device yet looks like one whose container is gone. ADDs do not wait for each other. A
// host where the directory cannot be does without.
func (c *Config) keepApart(ctx context.Context, how flock.Mode) (*flock.Lock, error) {
	if err := os.MkdirAll(c.DataDir, 0o700); err != nil {
		return nil, nil
	}
	return flock.Acquire(ctx, c.DataDir, how)
}

// livingAttachments are those of a network that have their device: ours, or the one of
// another plugin that a chained ebpfnet works on.
func livingAttachments(host *netlink.Handle, network string, devices map[loader.Owner]netlink.Link, kept []*record.Record) ([]maps.Attachment, error) {
	living := []maps.Attachment{}
	for _, device := range devices {
		at, _ := attachmentOf(device)
		living = append(living, at)
	}
	for _, r := range kept {
		if r.Attachment.Network != network || r.Chained == nil {
			continue
		}
		device, err := link.Device(host, r.Chained.HostIndex)
		if err != nil {
			return nil, err
		}
		if device != nil {
			living = append(living, r.Attachment)
		}
	}
	return living, nil
}

// forget removes the records of a network's attachments that are not valid.
func forget(records record.Dir, kept []*record.Record, valid *attachments) error {
	var errs []error
	for _, r := range kept {
		if valid.misses(r.Attachment) {
			errs = append(errs, records.Remove(r.Attachment.Owner()))
		}
	}
	return errors.Join(errs...)
}

// attachments are those of one network that are valid.
type attachments struct {
	network    string
	owners     map[loader.Owner]bool
	containers map[string]bool
}

func (v *attachments) add(containerID, ifName string) {
	v.owners[maps.Attachment{Network: v.network, ContainerID: containerID, IfName: ifName}.Owner()] = true
	v.containers[containerID] = true
}

// misses says that an attachment of this network is not valid.
func (v *attachments) misses(a maps.Attachment) bool {
	return a.Network == v.network && !v.owners[a.Owner()]
}

// has knows a reservation of an old host-local, which names no interface, by its container.
func (v *attachments) has(a ipam.Attachment) bool {
	if a.IfName == "" {
		return v.containers[a.ContainerID]
	}
	return v.owners[maps.Attachment{Network: v.network, ContainerID: a.ContainerID, IfName: a.IfName}.Owner()]
}

// validAttachments returns those that the runtime names. A key that is absent or
// null names nobody's death: then those that live are valid, and nil is returned where
// they are not known either (nil). An empty list says that all are gone.
func validAttachments(stdin []byte, network string, living []maps.Attachment) (*attachments, error) {
	var lists struct {
		Current json.RawMessage `json:"cni.dev/valid-attachments"`
		Tagged  json.RawMessage `json:"cni.dev/attachments"` // as in the text of 1.1.0
	}
	if err := json.Unmarshal(stdin, &lists); err != nil {
		return nil, err
	}
	valid := &attachments{network: network, owners: map[loader.Owner]bool{}, containers: map[string]bool{}}
	named := false
	for key, list := range map[string]json.RawMessage{
		"cni.dev/valid-attachments": lists.Current,
		"cni.dev/attachments":       lists.Tagged,
	} {
		if len(list) == 0 || bytes.Equal(list, []byte("null")) {
			continue
		}
		var listed []struct {
			ContainerID string `json:"containerID"`
			IfName      string `json:"ifname"`
		}
		if err := json.Unmarshal(list, &listed); err != nil {
			return nil, invalid(key, list, `a list of {"containerID": "...", "ifname": "..."}`)
		}
		named = true
		for _, a := range listed {
			valid.add(a.ContainerID, a.IfName)
		}
	}
	if !named && living == nil {
		return nil, nil
	}
	if !named {
		for _, at := range living {
			valid.add(at.ContainerID, at.IfName)
		}
	}
	return valid, nil
}

// networkDevices returns the host's ends of a network's veths by their owner, which the alias tells.
func networkDevices(host *netlink.Handle, network string) (map[loader.Owner]netlink.Link, error) {
	all, err := link.List(host)
	if err != nil {
		return nil, err
	}
	devices := map[loader.Owner]netlink.Link{}
	for _, device := range all {
		if at, ours := attachmentOf(device); ours && at.Network == network {
			devices[at.Owner()] = device
		}
	}
	return devices, nil
}

// attachmentOf reads the alias that ADD gave the device.
func attachmentOf(device netlink.Link) (at maps.Attachment, ours bool) {
	words := strings.Fields(device.Attrs().Alias)
	if len(words) != 4 || words[0] != "ebpfnet" {
		return maps.Attachment{}, false
	}
	return maps.Attachment{Network: words[1], ContainerID: words[2], IfName: words[3]}, true
}

func deleteDevices(host *netlink.Handle, devices map[loader.Owner]netlink.Link, valid map[loader.Owner]bool) error {
	var errs []error
	for owner, device := range devices {
		if !valid[owner] {
			errs = append(errs, link.Delete(host, device.Attrs().Name))
		}
	}
	return errors.Join(errs...)
}

// sweepDatapath removes the entries of the network's owners that are not valid, those that
// have lost their owner, and takes programs off devices that other plugins made for them.
func sweepDatapath(ctx context.Context, valid *attachments, kept []*record.Record) error {
	datapath, err := loader.OpenForRelease()
	if errors.Is(err, loader.ErrNotLoaded) {
		return nil
	}
	if err != nil {
		return err
	}
	defer datapath.Close()

	return maps.With(ctx, datapath, func(store *maps.Store) error {
		owners, err := maps.Owners(datapath, maps.NetworkToken(valid.network))
		stale := map[loader.Owner]bool{}
		for owner := range owners {
			stale[owner] = !valid.owners[owner]
		}
		errs := []error{err, store.ReleaseAll(stale), store.RemoveOrphans()}
		for _, r := range kept {
			if r.Chained != nil && valid.misses(r.Attachment) {
				errs = append(errs, datapath.DetachEndpoint(r.Chained.HostIndex))
			}
		}
		return errors.Join(errs...)
	})
}
