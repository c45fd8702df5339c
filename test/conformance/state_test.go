package conformance

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/loader/rtnl"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/record"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// state names all that the plugin can make for a container: links, addresses and routes of
// the node and of container namespaces, files of addresses, map entries, and pinned
// links. The datapath itself and its uplinks are no part of it.
type state map[string]bool

// state looks at the node and at the given containers.
func (h *host) state(t *testing.T, containers ...*testenv.Namespace) state {
	t.Helper()
	s, err := h.takeState(containers...)
	if err != nil {
		t.Fatalf("take the state: %v", err)
	}
	return s
}

// takeState starts again where a list changed while the kernel gave it.
func (h *host) takeState(containers ...*testenv.Namespace) (state, error) {
	for {
		s, err := h.takeStateOnce(containers...)
		if !errors.Is(err, netlink.ErrDumpInterrupted) {
			return s, err
		}
	}
}

func (h *host) takeStateOnce(containers ...*testenv.Namespace) (state, error) {
	s := state{}
	err := s.addNamespace("node", h.Node)
	for _, container := range containers {
		err = errors.Join(err, s.addNamespace("container "+container.Name, container))
	}
	return s, errors.Join(err, s.addFiles(addressDir), s.addFiles(record.DefaultDir), h.Node.Do(s.addDatapath))
}

// wantState fails the test, and says exactly what differs, unless the node and the containers
// are as they were in before.
func (h *host) wantState(t *testing.T, before state, containers ...*testenv.Namespace) {
	t.Helper()
	left, lost := before.compare(h.state(t, containers...))
	for _, thing := range left {
		t.Errorf("left: %s", thing)
	}
	for _, thing := range lost {
		t.Errorf("lost: %s", thing)
	}
}

// waitState is wantState for what the kernel does in its own time: it dismantles a
// namespace with its devices in the background.
func (h *host) waitState(t *testing.T, before state, containers ...*testenv.Namespace) {
	t.Helper()
	const patience = 10 * time.Second

	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	err := testenv.Wait(ctx, "the state as it was", func() error {
		after, err := h.takeState(containers...)
		if err != nil {
			return err
		}
		if left, lost := before.compare(after); len(left)+len(lost) > 0 {
			return fmt.Errorf("left %q, lost %q", left, lost)
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}

// compare returns what is in after alone, and what is in s alone.
func (s state) compare(after state) (left, lost []string) {
	for thing := range after {
		if !s[thing] {
			left = append(left, thing)
		}
	}
	for thing := range s {
		if !after[thing] {
			lost = append(lost, thing)
		}
	}
	slices.Sort(left)
	slices.Sort(lost)
	return left, lost
}

func (s state) add(format string, args ...any) { s[fmt.Sprintf(format, args...)] = true }

func (s state) addNamespace(where string, ns *testenv.Namespace) error {
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
			if !isKernels(addr.IP) {
				s.add("%s: address %s on %s", where, addr.IPNet, name)
			}
		}
		routes, err := rtnl.Routes(handle, netlink.FAMILY_ALL, &netlink.Route{LinkIndex: link.Attrs().Index}, netlink.RT_FILTER_OIF)
		if err != nil {
			return err
		}
		for _, route := range routes {
			if route.Dst == nil || !isKernels(route.Dst.IP) {
				s.add("%s: route to %s via %s by %s", where, route.Dst, route.Gw, name)
			}
		}
	}
	return nil
}

// isKernels says of an address or prefix that the kernel makes it in its own time, when a device
// has got its carrier: link-local ones, but for the fixed one of the plugin.
func isKernels(ip net.IP) bool {
	return ip.To4() == nil && ip.IsLinkLocalUnicast() && !ip.Equal(net.ParseIP("fe80::1"))
}

// addFiles leaves out what host-local keeps for good, and the indexes of addresses, which are links.
func (s state) addFiles(dir string) error {
	return filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		name := filepath.Base(path)
		if err != nil || !entry.Type().IsRegular() || name == "lock" || strings.HasPrefix(name, "last_reserved_ip.") {
			return err
		}
		content, err := os.ReadFile(path)
		s.add("file %s: %q", path, content)
		return err
	})
}

// addDatapath looks at the datapath of the calling thread's namespace. Flows outlive their owner,
// and mean nothing then.
func (s state) addDatapath() error {
	datapath, err := loader.OpenLoaded()
	if errors.Is(err, loader.ErrNotLoaded) {
		return nil
	}
	if err != nil {
		return err
	}
	defer datapath.Close()

	endpoints, err := maps.Endpoints(datapath)
	for _, endpoint := range endpoints {
		s.add("endpoint %v", endpoint)
	}
	ports, portsErr := maps.HostPorts(datapath)
	for _, port := range ports {
		s.add("port %v", port)
	}
	links, linksErr := os.ReadDir(filepath.Join(datapath.Dir(), "links"))
	for _, link := range links {
		if !strings.HasPrefix(link.Name(), "uplink-") {
			s.add("pinned link %s", link.Name())
		}
	}
	return errors.Join(err, portsErr, linksErr)
}
