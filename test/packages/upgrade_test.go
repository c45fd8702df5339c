package packages

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/loader/rtnl"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// outside is where a server outside listens.
var outside = netip.AddrPortFrom(testenv.OutsideAddr4, 7)

// published are the host ports of startTraffic.
var published = map[string]any{"portMappings": []map[string]any{
	{"hostPort": 8080, "containerPort": 7, "protocol": "tcp"}, {"hostPort": 8080, "containerPort": 7, "protocol": "udp"},
}}

// TestUpgrade upgrades from each release that has a tag, and from the present sources as an older release, while
// containers exchange packets, of which none may be lost.
func TestUpgrade(t *testing.T) {
	releases, err := os.ReadDir(buildDir)
	testenv.Must(t, err)
	for _, release := range releases {
		if strings.HasPrefix(release.Name(), "v") {
			t.Run(release.Name(), func(t *testing.T) { upgrade(t, deb(t, release.Name()), func(*host) {}) })
		}
	}
	t.Run("present", func(t *testing.T) {
		older := repack(t, deb(t, "present"), func(dir string) {
			replace(t, dir+"/DEBIAN/control", "\nVersion: ", "\nVersion: 0.0.0~")
		})
		upgrade(t, older, func(h *host) { h.loadOlder(t) })
	})
}

// upgrade installs a release, connects a container and installs the present one.
func upgrade(t *testing.T, from string, prepare func(*host)) {
	h := newHost(t)
	h.run(t, h.dpkg(t, "-i", from))
	pod := h.runtime(t, pluginsOfDebian).AddPod(t, "web", published)
	prepare(h)
	load := h.startTraffic(t, pod)
	install := h.dpkg(t, "-i", deb(t, "present"))
	if version := h.run(t, []string{"ebpfnetctl", "version"}); !strings.HasSuffix(version, fmt.Sprintf(", ABI %d\n", loader.ABI)) {
		h.upgradeLayout(t, install, pod, load)
		return
	}
	testenv.NoError(t, load.Lossless(t, func(attempt int) error {
		if attempt > 0 {
			h.loadOlder(t)
		}
		h.run(t, install)
		return nil
	}))
	h.run(t, []string{"ebpfnetctl", "upgrade"}, "already loaded")
	if err := pod.Check(testenv.Context(t)); err != nil {
		t.Errorf("CHECK after the upgrade: %v", err)
	}
}

// upgradeLayout upgrades to another map layout. That is refused while a container is connected: no other one could
// be added afterwards. Without containers the old layout is unloaded.
func (h *host) upgradeLayout(t *testing.T, install []string, pod *testenv.Pod, load testenv.Askers) {
	t.Helper()
	testenv.NoError(t, load.Lossless(t, func(int) error {
		h.refuse(t, install, "another map layout", "pods web eth0")
		wantInstalled(t, h)
		h.run(t, []string{"ebpfnetctl", "status"})
		return nil
	}))
	load.Stop()
	if err := pod.Check(testenv.Context(t)); err != nil {
		t.Errorf("CHECK after a refused upgrade: %v", err)
	}
	testenv.Must(t, pod.Del(testenv.Context(t)))
	h.run(t, install, "unloaded")
}

// loadOlder replaces the loaded programs by the same ones with a lower revision.
func (h *host) loadOlder(t *testing.T) {
	t.Helper()
	older := loader.Embedded()
	older.Revision, older.Build = older.Revision-1, older.Build+1
	testenv.Must(t, h.Node.Upgrade(testenv.Context(t), older))
}

// startTraffic lets a container and the outside exchange packets by masquerading and by host ports.
func (h *host) startTraffic(t *testing.T, pod *testenv.Pod) (all testenv.Askers) {
	t.Helper()
	inside := netip.AddrPortFrom(netip.IPv4Unspecified(), 7)
	port := netip.AddrPortFrom(testenv.NodeAddr4, 8080)
	for _, network := range []string{"udp", "tcp"} {
		serve := testenv.ServeUDP
		if network == "tcp" {
			serve = testenv.ServeTCP
		}
		serve(t, h.Outside, outside)
		serve(t, pod.Namespace, inside)
		for from, to := range map[*testenv.Namespace]netip.AddrPort{pod.Namespace: outside, h.Outside: port} {
			client, err := testenv.NewClient(testenv.Context(t), from, network, netip.AddrPort{}, to)
			testenv.Must(t, err)
			t.Cleanup(func() { client.Close() })
			all = append(all, client.KeepAsking(t, network+" from "+from.Name, 0))
		}
	}
	testenv.Must(t, all.Lossless(t, func(int) error { return nil }))
	return all
}

// TestUpgradeToOtherLayout upgrades to a release with another map layout.
func TestUpgradeToOtherLayout(t *testing.T) {
	h := newHost(t)
	h.run(t, h.dpkg(t, "-i", deb(t, "present")))
	pod := h.runtime(t, pluginsOfDebian).AddPod(t, "web", nil)
	newer := repack(t, deb(t, "present"), func(dir string) {
		replace(t, dir+"/DEBIAN/control", "\nVersion: ", "\nVersion: 9.")
		replace(t, dir+"/DEBIAN/preinst", fmt.Sprint("ABI ", loader.ABI), fmt.Sprint("ABI ", loader.ABI+1))
	})
	h.upgradeLayout(t, h.dpkg(t, "-i", newer), pod, nil)
	h.run(t, []string{"dpkg-query", "-W", "-f", "${Version}", "ebpfnet"}, "9.")
}

// TestInstallOverMakeInstall replaces what `make install` has left in /opt/cni/bin, by a rename.
func TestInstallOverMakeInstall(t *testing.T) {
	h := newHost(t)
	h.run(t, []string{"sh", "-c", "mkdir -p /opt/cni/bin && echo old > /opt/cni/bin/ebpfnet && chmod +x /opt/cni/bin/ebpfnet"})
	h.run(t, h.dpkg(t, "-i", deb(t, "present")))
	h.run(t, []string{"/opt/cni/bin/ebpfnet"}, "CNI protocol versions supported")
	left, err := filepath.Glob(h.root + "/opt/cni/bin/.*new")
	if err != nil || len(left) > 0 {
		t.Errorf("temporary links: got %q (%v), want none", left, err)
	}
}

// TestInstallBesideTheNodeAgent leaves the agent's plugins, whose map layout is that of the loaded datapath.
func TestInstallBesideTheNodeAgent(t *testing.T) {
	h := newHost(t)
	h.run(t, []string{"sh", "-c", "mkdir -p /opt/cni/bin /run/ebpfnet-node && echo its >/opt/cni/bin/ebpfnet && touch /run/ebpfnet-node/node.json"})
	h.run(t, h.dpkg(t, "-i", deb(t, "present")), "/opt/cni/bin/ebpfnet stays: it is the node agent's")
	h.run(t, []string{"cat", "/opt/cni/bin/ebpfnet"}, "its")
	h.run(t, []string{"readlink", "/opt/cni/bin/ebpfnet-ipam"}, "/usr/lib/cni/ebpfnet-ipam")
	h.run(t, []string{"dpkg", "--purge", "ebpfnet"})
	h.run(t, []string{"cat", "/opt/cni/bin/ebpfnet"}, "its")
}

// TestInstallWhereDirectoriesAreOne leaves the plugins alone where /opt/cni/bin is a link to their directory.
func TestInstallWhereDirectoriesAreOne(t *testing.T) {
	h := newHost(t)
	h.run(t, []string{"sh", "-c", "mkdir -p /opt/cni /usr/lib/cni && ln -s /usr/lib/cni /opt/cni/bin"})
	install := h.dpkg(t, "-i", deb(t, "present"))
	for range 2 {
		h.run(t, install)
		wantInstalled(t, h)
	}
	h.run(t, []string{"dpkg", "--purge", "ebpfnet"})
}

// devices returns the host's ends of containers.
func devices(t *testing.T, h *host) (ours []netlink.Link) {
	t.Helper()
	all, err := rtnl.Links(h.Node.Netlink())
	testenv.Must(t, err)
	for _, link := range all {
		if strings.HasPrefix(link.Attrs().Name, "ebpf") {
			ours = append(ours, link)
		}
	}
	if len(ours) == 0 {
		t.Fatal("no container has a device")
	}
	return ours
}
