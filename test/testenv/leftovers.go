package testenv

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/loader/rtnl"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/record"
)

// ReservationDir holds the reserved addresses of all networks, by host-local's default.
const ReservationDir = "/var/lib/cni/networks"

// Leftovers lists everything on a node that belongs to an attachment: devices, pins, map
// entries, reservations and records, each in words for a failure message. It is empty when
// no container is attached. It ignores what a network keeps: the loaded datapath, its uplinks,
// and routes for unassigned addresses. Neither do flows, which the datapath ignores once their
// owner's endpoint is gone.
func Leftovers(node *Namespace) ([]string, error) {
	s, err := retryDumps(func() (Snapshot, error) {
		s := Snapshot{}
		return s, s.addAttachments(node)
	})
	return s.minus(nil), err
}

// NodeSnapshot lists what Leftovers lists, and all links, addresses and routes of the node and
// of the given containers.
func NodeSnapshot(node *Namespace, containers ...*Namespace) (Snapshot, error) {
	return retryDumps(func() (Snapshot, error) {
		s := Snapshot{}
		err := errors.Join(s.addAttachments(node), s.addNetwork("node", node))
		for _, container := range containers {
			err = errors.Join(err, s.addNetwork("container "+container.Name, container))
		}
		return s, err
	})
}

// retryDumps starts again when a list changed while the kernel sent it.
func retryDumps(take func() (Snapshot, error)) (Snapshot, error) {
	for {
		s, err := take()
		if !errors.Is(err, netlink.ErrDumpInterrupted) {
			return s, err
		}
	}
}

func (s Snapshot) addAttachments(node *Namespace) error {
	return errors.Join(s.addDevices(node), s.addAttachmentPins(), s.addReservations(), s.addRecords(), node.Do(s.addEntries))
}

func (s Snapshot) add(format string, args ...any) { s[fmt.Sprintf(format, args...)] = true }

// addDevices finds the plugin's devices by alias, and by name those of an ADD that failed before it set one.
func (s Snapshot) addDevices(node *Namespace) error {
	links, err := rtnl.Links(node.Netlink())
	if err != nil {
		return fmt.Errorf("list links of %s: %w", node.Name, err)
	}
	for _, link := range links {
		attrs := link.Attrs()
		if strings.HasPrefix(attrs.Alias, "ebpfnet ") || strings.HasPrefix(attrs.Name, "ebpf") {
			s.add("device %s (%s)", attrs.Name, attrs.Alias)
		}
	}
	return nil
}

// addAttachmentPins lists every pin of ebpfnet, in any network namespace, that is not the datapath's own.
func (s Snapshot) addAttachmentPins() error {
	spec, err := datapathSpec()
	if err != nil {
		return err
	}
	return walk(loader.Root, func(path string, _ fs.DirEntry) error {
		pin, err := filepath.Rel(loader.Root, path)
		if pin != "." && !isDatapathPin(spec, pin) {
			s.add("pin %s", path)
		}
		return err
	})
}

var datapathSpec = sync.OnceValues(bpf.LoadDatapath)

var (
	buildDirName = regexp.MustCompile(`^[0-9a-f]{16}$`)
	uplinkPin    = regexp.MustCompile(`^uplink-[0-9]+-([a-z]+_uplink)$`)
)

// isDatapathPin reports whether a path below loader.Root belongs to a datapath without
// attachments. The directory of a network namespace holds maps, progs/BUILD and links.
func isDatapathPin(spec *ebpf.CollectionSpec, path string) bool {
	parts := strings.Split(path, "/")
	if !strings.HasPrefix(parts[0], "netns-") {
		return false
	}
	if len(parts) == 1 {
		return true
	}
	dir, names := parts[1], parts[2:]
	switch {
	case len(names) == 0:
		return dir == "maps" || dir == "progs" || dir == "links"
	case dir == "maps" && len(names) == 1:
		return names[0] == "config" || spec.Maps[names[0]] != nil
	case dir == "progs" && len(names) <= 2:
		return buildDirName.MatchString(names[0]) && (len(names) == 1 || spec.Programs[names[1]] != nil)
	case dir == "links" && len(names) == 1:
		match := uplinkPin.FindStringSubmatch(names[0])
		return match != nil && spec.Programs[match[1]] != nil
	}
	return false
}

// Reservations lists every reserved address of every network, with its content.
func Reservations() (Snapshot, error) {
	s := Snapshot{}
	return s, s.addReservations()
}

// addReservations leaves out the lock and the last addresses, which host-local never removes.
func (s Snapshot) addReservations() error {
	return s.addFiles(ReservationDir, func(entry fs.DirEntry) bool {
		return entry.Name() != "lock" && !strings.HasPrefix(entry.Name(), "last_reserved_ip.")
	})
}

// addRecords leaves out the index of reservations, which consists of symbolic links and may be stale.
func (s Snapshot) addRecords() error {
	return s.addFiles(record.DefaultDir, func(entry fs.DirEntry) bool { return entry.Type().IsRegular() })
}

func (s Snapshot) addFiles(dir string, counts func(fs.DirEntry) bool) error {
	return walk(dir, func(path string, entry fs.DirEntry) error {
		if entry.IsDir() || !counts(entry) {
			return nil
		}
		if !entry.Type().IsRegular() {
			s.add("file %s (%s)", path, entry.Type())
			return nil
		}
		content, err := os.ReadFile(path)
		if err == nil {
			s.add("file %s: %q", path, content)
		}
		return err
	})
}

// walk visits a directory that may be missing, and in which files may go meanwhile.
func walk(dir string, visit func(string, fs.DirEntry) error) error {
	return filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		if err == nil {
			err = visit(path, entry)
		}
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		return err
	})
}

// attachmentMaps are those whose entries ADD makes and DEL removes.
var attachmentMaps = []string{bpf.MapEndpoints, bpf.MapDevices, bpf.MapHostPorts, bpf.MapPrefixes}

// addEntries lists the entries of the datapath of the calling thread's network namespace.
func (s Snapshot) addEntries() error {
	datapath, err := loader.OpenLoaded()
	if errors.Is(err, loader.ErrNotLoaded) {
		return nil
	}
	if err != nil {
		return err
	}
	defer datapath.Close()

	endpoints, errEndpoints := maps.Endpoints(datapath)
	for _, endpoint := range endpoints {
		s.add("endpoint %v", endpoint)
	}
	ports, errPorts := maps.HostPorts(datapath)
	for _, port := range ports {
		s.add("host port %v", port)
	}
	counts, errCounts := maps.Count(datapath) // includes the entries that package maps does not list
	for _, name := range attachmentMaps {
		if counts[name] > 0 {
			s.add("%d entries in map %s", counts[name], name)
		}
	}
	return errors.Join(errEndpoints, errPorts, errCounts, s.addOwners(datapath))
}

// addOwners lists devices, and drop counters whose owner has no device: those of an
// attachment may start at any time.
func (s Snapshot) addOwners(datapath *loader.Datapath) error {
	attached := map[loader.Owner]bool{0: true} // drops of no attachment
	devices, errDevices := maps.Devices(datapath)
	for _, device := range devices {
		attached[device.Owner] = true
		s.add("device entry %d of owner %s", device.IfIndex, device.Owner)
	}
	drops, errDrops := maps.Drops(datapath)
	for _, drop := range drops {
		if !attached[drop.Owner] {
			s.add("drop counter %q of owner %s", drop.Reason, drop.Owner)
		}
	}
	return errors.Join(errDevices, errDrops)
}

func (s Snapshot) addNetwork(where string, ns *Namespace) error {
	handle := ns.Netlink()
	links, err := rtnl.Links(handle)
	if err != nil {
		return err
	}
	for _, link := range links {
		name := link.Attrs().Name
		s.add("%s: link %s", where, name)
		addrs, err := rtnl.Addresses(handle, link, netlink.FAMILY_ALL)
		if err != nil {
			return err
		}
		for _, addr := range addrs {
			if !isAutomatic(addr.IP) {
				s.add("%s: address %s on %s", where, addr.IPNet, name)
			}
		}
		routes, err := rtnl.Routes(handle, netlink.FAMILY_ALL, &netlink.Route{LinkIndex: link.Attrs().Index}, netlink.RT_FILTER_OIF)
		if err != nil {
			return err
		}
		for _, route := range routes {
			if route.Protocol != rtnl.PluginProtocol && (route.Dst == nil || !isAutomatic(route.Dst.IP)) {
				s.add("%s: route to %s via %s by %s", where, route.Dst, route.Gw, name)
			}
		}
	}
	return nil
}

// isAutomatic reports whether the kernel adds the address or prefix by itself, some time after
// the device has its carrier: any link-local one but the plugin's fixed one.
func isAutomatic(ip net.IP) bool {
	return ip.To4() == nil && ip.IsLinkLocalUnicast() && !ip.Equal(net.ParseIP("fe80::1"))
}
