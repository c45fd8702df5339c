package policies

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/loader/rtnl"
	ebpfmaps "github.com/ebpfnet/ebpfnet/maps"
)

// Look reads what the datapath has. It does not compare rules, so Difference writes them all again.
func Look(dp *loader.Datapath) (*Present, error) {
	classes, err := ebpfmaps.PeerClasses(dp)
	return &Present{Classes: classes}, err
}

// Prepare reads what Apply needs of conntrack without the datapath's lock: where there are many connections, that takes long.
func (c *Changes) Prepare(dp *loader.Datapath) (warning error) {
	if !c.SeesDevices {
		return nil
	}
	_, isolated, err := c.devices(dp)
	if err == nil {
		c.had, err = connectionsOf(isolated)
	}
	return err
}

// Apply makes the changes. Its warning says why connections that pods had before their rules may end. If a map is full, it makes
// the other changes: rules do not admit an address without a class, and a pod keeps its former rules.
func (c *Changes) Apply(dp *loader.Datapath, store *ebpfmaps.Store) (warning, err error) {
	errFull := store.SetPeerClasses(c.Additions)
	if errFull != nil && !errors.Is(errFull, ebpfmaps.ErrFull) {
		return nil, errFull
	}
	if c.SeesDevices {
		warning, err = c.applyPolicies(dp, store)
		if errFull = errors.Join(errFull, err); err != nil && !errors.Is(err, ebpfmaps.ErrFull) {
			return warning, errFull
		}
	}
	if err := store.SetPeerClasses(c.Others); err != nil {
		return warning, err
	}
	return warning, errors.Join(errFull, store.Revoke(c.Revoked))
}

func (c *Changes) applyPolicies(dp *loader.Datapath, store *ebpfmaps.Store) (warning, err error) {
	keep := map[loader.Owner]bool{}
	for owner := range c.Want.Pods {
		keep[owner] = true
	}
	if err := store.FreePodPolicies(keep); err != nil { // of pods that are gone: others may need the room
		return nil, err
	}
	_, isolated, err := c.devices(dp)
	if err != nil {
		return nil, err
	}
	warning = c.had.admitReplies(store, isolated)
	_, errFull := store.PutPodPolicies(c.Policies)
	if errFull != nil && !errors.Is(errFull, ebpfmaps.ErrFull) {
		return warning, errFull
	}
	moved, _, err := c.devices(dp)
	if err != nil {
		return warning, err
	}
	for _, device := range moved {
		if err := store.PutDevice(device); err != nil {
			return warning, err
		}
	}
	now, errNow := connectionsOf(isolated)
	warning = errors.Join(warning, errNow, now.admitReplies(store, isolated)) // that are new since
	errFree := store.FreePodPolicies(keep)                                    // that devices have left
	return warning, errors.Join(errFull, errFree)
}

func (c *Changes) devices(dp *loader.Datapath) (moved, isolated []ebpfmaps.Device, err error) {
	policies, errPolicies := ebpfmaps.Policies(dp)
	devices, errDevices := ebpfmaps.Devices(dp)
	if err := errors.Join(errPolicies, errDevices); err != nil {
		return nil, nil, err
	}
	moved, isolated = devicesOf(devices, policies, c.Want)
	return moved, isolated, nil
}

// connections are those that containers have, by the container's address.
type connections struct {
	opened, accepted map[netip.Addr][]ebpfmaps.Connection
}

// connectionsOf returns those that conntrack knows. Connections that bypass it cannot be seen.
func connectionsOf(devices []ebpfmaps.Device) (c connections, err error) {
	const most = 4096 // of a pod and direction

	if len(devices) == 0 {
		return c, nil
	}
	c = connections{map[netip.Addr][]ebpfmaps.Connection{}, map[netip.Addr][]ebpfmaps.Connection{}}
	for _, device := range devices {
		for _, addr := range []netip.Addr{device.Addr4, device.Addr6} {
			c.opened[addr], c.accepted[addr] = nil, nil
		}
	}
	err = rtnl.TrackedConnections(func(t rtnl.Tracked) {
		add := func(to map[netip.Addr][]ebpfmaps.Connection, local, remote netip.AddrPort) {
			if list, isOurs := to[local.Addr()]; isOurs && len(list) < most {
				to[local.Addr()] = append(list, ebpfmaps.Connection{Protocol: ebpfmaps.Protocol(t.Protocol), Local: local, Remote: remote})
			}
		}
		add(c.opened, t.Opener, t.Asked)
		add(c.accepted, t.Server, t.Client)
	})
	return c, err
}

// admitReplies lets the connections of pods continue that their rules admit, when a direction of them becomes isolated.
func (c connections) admitReplies(store *ebpfmaps.Store, devices []ebpfmaps.Device) error {
	var errs []error
	for _, device := range devices {
		for _, addr := range []netip.Addr{device.Addr4, device.Addr6} {
			errs = append(errs,
				store.AdmitReplies(device.Owner, ebpfmaps.OpenedByContainer, c.opened[addr]),
				store.AdmitReplies(device.Owner, ebpfmaps.OpenedByRemote, c.accepted[addr]))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("keep connections that pods had before their rules: %w", err)
	}
	return nil
}

// Denier is a direction of a pod's rules that has dropped packets, at one of its attachments.
type Denier struct {
	Pod        loader.Owner // ebpfmaps.PodToken
	Attachment loader.Owner
	Direction  int // as in Rules
}

// Denials counts the packets that rules of pods have dropped.
func Denials(dp *loader.Datapath) (map[Denier]uint64, error) {
	drops, errDrops := ebpfmaps.Drops(dp)
	devices, errDevices := ebpfmaps.Devices(dp)
	policies, errPolicies := ebpfmaps.Policies(dp)
	if err := errors.Join(errDrops, errDevices, errPolicies); err != nil {
		return nil, err
	}
	pods, owners := map[ebpfmaps.PolicyIndex]loader.Owner{}, map[loader.Owner]loader.Owner{}
	for _, policy := range policies {
		if policy.IsPod {
			pods[policy.Index] = policy.Owner
		}
	}
	for _, device := range devices {
		owners[device.Owner] = pods[device.Policy]
	}
	denials := map[Denier]uint64{}
	for _, drop := range drops {
		direction := map[bpf.Reason]int{bpf.ReasonPolicyIngress: ingress, bpf.ReasonPolicyEgress: egress}
		if at, ok := direction[bpf.Reason(drop.Reason)]; ok && owners[drop.Owner] != 0 {
			denials[Denier{owners[drop.Owner], drop.Owner, at}] = drop.Packets
		}
	}
	return denials, nil
}
