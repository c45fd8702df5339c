package maps

import (
	"net/netip"
	"runtime"
	"sync/atomic"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader"
)

// PodToken owns the policy of a pod. The node agent writes it before ADD connects the pod, so it has no attachment.
func PodToken(uid string) loader.Owner { return loader.Owner(token("pod", uid)) }

// PutPodPolicies is PutPolicy for pods, by the tokens of their UIDs. Only FreePodPolicies frees them.
func (s *Store) PutPodPolicies(pods []OwnPolicy) (map[loader.Owner]PolicyIndex, error) {
	return s.putPolicies(pods, bpf.PolicyPod)
}

// PodPolicy returns the index of a pod's policy; 0: it has none.
func PodPolicy(dp *loader.Datapath, uid string) (index PolicyIndex, err error) {
	all, err := mapPolicies(dp)
	if err != nil {
		return 0, err
	}
	owner := PodToken(uid)
	if index, entry := all.find(owner); entry != nil && loader.Owner(entry.Owner) == owner {
		return index, nil
	}
	return 0, nil
}

// FreePodPolicies frees the policies of pods, except those to keep and those of devices.
func (s *Store) FreePodPolicies(keep map[loader.Owner]bool) error {
	devices, err := Devices(s.dp)
	if err != nil {
		return err
	}
	used := map[PolicyIndex]bool{}
	for _, device := range devices {
		used[device.Policy] = true
	}
	return s.freeEntries(func(index PolicyIndex, entry *bpf.Policy) bool {
		return entry.Checks&bpf.PolicyPod != 0 && !keep[loader.Owner(entry.Owner)] && !used[index]
	})
}

// Revoke has the programs judge all connections of owners again, because a class has lost an address.
func (s *Store) Revoke(owners map[loader.Owner]bool) (err error) {
	if len(owners) == 0 {
		return nil
	}
	all, err := mapPolicies(s.dp)
	if err != nil {
		return err
	}
	for i, left := 1, len(owners); i < len(all) && left > 0; i++ {
		if entry := &all[i]; owners[loader.Owner(entry.Owner)] {
			left--
			atomic.AddUint32(&entry.Generation, 1)
			if reordersLoads {
				s.revoked = append(s.revoked, entry)
			}
		}
	}
	return nil
}

// reordersLoads says that a program may read a new generation, and then an old value that changed earlier.
const reordersLoads = runtime.GOARCH != "amd64"

// PeerClasses returns the classes of pods' addresses.
func PeerClasses(dp *loader.Datapath) (map[netip.Addr]uint32, error) {
	if err := dp.OpenOnDemand(bpf.MapPeerClasses); err != nil {
		return nil, err
	}
	classes := map[netip.Addr]uint32{}
	for entry, err := range entries[bpf.Addr, uint32](dp.PeerClasses) {
		if err != nil {
			return nil, err
		}
		classes[addrOf(entry.key)] = entry.value
	}
	return classes, nil
}

// SetPeerClasses changes the classes of some addresses; 0: the address has none.
func (s *Store) SetPeerClasses(changes map[netip.Addr]uint32) error {
	if len(changes) == 0 {
		return nil
	}
	if err := s.dp.OpenOnDemand(bpf.MapPeerClasses); err != nil {
		return err
	}
	var addrs []bpf.Addr
	var classes []uint32
	var gone [][]byte
	for addr, class := range changes {
		if wire := wireAddr(addr); class != 0 {
			addrs, classes = append(addrs, wire), append(classes, class)
		} else {
			gone = append(gone, wire.Bytes[:])
		}
	}
	if err := deleteAll(s.dp.PeerClasses, gone); err != nil {
		return err
	}
	return putAll(s.dp.PeerClasses, addrs, classes)
}
