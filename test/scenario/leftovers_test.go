package scenario

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/loader/rtnl"
	"github.com/ebpfnet/ebpfnet/maps"
)

// reservations is where host-local keeps the files of all networks.
const reservations = "/var/lib/cni/networks"

// allowedPins are those of a loaded datapath without pods, below the directory of its
// network namespace.
var allowedPins = regexp.MustCompile(`^(maps(/(config|devices|drop_totals|drops|endpoints|flows|flows_backup|frag_queue|frag_scratch|fragments|fwd_cache|host_ports|masq_probes|masq_scratch|nonmasq_cidrs|offload_(tcp|udp)|pkt_scratch|port_src_ranges|uplinks))?|` +
	`progs(/[0-9a-f]{16}(/((from|to)_container|to_loopback|(from|to)_uplink(_l3)?))?)?|links(/uplink-[0-9]+-(from|to)_uplink)?)$`)

// checkNothingLeft looks for whatever pods that are gone may have left on the node.
func (n *network) checkNothingLeft(t *testing.T) {
	t.Helper()
	n.checkLinks(t)
	n.checkPins(t)
	n.checkReservations(t)
	if pins, err := filepath.Glob(filepath.Join(loader.Root, "netns-*")); err == nil && len(pins) > 0 {
		n.withDatapath(t, func(datapath *loader.Datapath) { checkEntries(t, datapath) })
	}
}

func (n *network) checkLinks(t *testing.T) {
	t.Helper()
	links, err := rtnl.Links(n.node().Netlink())
	if err != nil {
		t.Fatal(err)
	}
	for _, link := range links {
		if strings.HasPrefix(link.Attrs().Alias, "ebpfnet ") || isOurName(link) {
			t.Errorf("left behind: link %s (%s)", link.Attrs().Name, link.Attrs().Alias)
		}
	}
}

func isOurName(link netlink.Link) bool { return strings.HasPrefix(link.Attrs().Name, "ebpf") }

func (n *network) checkPins(t *testing.T) {
	t.Helper()
	err := filepath.WalkDir(loader.Root, func(path string, _ fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		namespace, pin, _ := strings.Cut(strings.TrimPrefix(strings.TrimPrefix(path, loader.Root), "/"), "/")
		isOurs := namespace == "" || strings.HasPrefix(namespace, "netns-")
		if !isOurs || pin != "" && !allowedPins.MatchString(pin) {
			t.Errorf("left behind: pin %s", path)
		}
		return nil
	})
	if err != nil && !os.IsNotExist(err) {
		t.Error(err)
	}
}

func (n *network) checkReservations(t *testing.T) {
	t.Helper()
	files, err := os.ReadDir(filepath.Join(reservations, n.Network()))
	if err != nil && !os.IsNotExist(err) {
		t.Error(err)
	}
	for _, file := range files {
		if file.Name() != "lock" && !strings.HasPrefix(file.Name(), "last_reserved_ip.") {
			t.Errorf("left behind: reservation %s", file.Name())
		}
	}
}

func checkEntries(t *testing.T, datapath *loader.Datapath) {
	t.Helper()
	endpoints, err := maps.Endpoints(datapath)
	if err != nil {
		t.Error(err)
	}
	for _, endpoint := range endpoints {
		t.Errorf("left behind: endpoint %s", endpoint)
	}
	ports, err := maps.HostPorts(datapath)
	if err != nil {
		t.Error(err)
	}
	for _, port := range ports {
		t.Errorf("left behind: port %s", port)
	}
	for _, device := range must(maps.Devices(datapath)) {
		t.Errorf("left behind: device %d", device.IfIndex)
	}
	for _, drop := range must(maps.Drops(datapath)) {
		if drop.Owner != 0 {
			t.Errorf("left behind: a counter of drops: %+v", drop)
		}
	}
}

// unload takes the node's datapath out of the kernel, with all that nodes share.
func (n *network) unload(t *testing.T) {
	t.Helper()
	for _, dir := range []string{loader.Root, filepath.Join(reservations, n.Network())} {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	}
}
