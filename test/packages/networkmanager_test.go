package packages

import (
	"fmt"
	"strings"
	"testing"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// networkManagerConfig leaves all devices alone but wan2, and serves root without polkit.
const networkManagerConfig = `[main]
plugins=keyfile
auth-polkit=root-only
no-auto-default=*
dhcp=internal
dns=none
hostname-mode=none
[keyfile]
unmanaged-devices=*,except:interface-name:wan2
`

// useNetworkManager lets NetworkManager set up an uplink, change its address, and take it down and up. Only its hook
// tells the datapath. Which of its events does so is not known: connectivity-change may come just before or after.
func (h *host) useNetworkManager(t *testing.T, b *booted) {
	t.Helper()
	b.await(t, "", "systemctl", "stop", "networkd-dispatcher")
	b.await(t, "", "systemctl", "enable", "--now", "NetworkManager")
	b.await(t, "started", "nmcli", "--fields", "STARTUP", "general")
	h.ip(t, "link", "add", "wan2", "type", "veth", "peer", "name", "veth2")
	h.ip(t, "link", "set", "veth2", "up")

	b.await(t, "", "nmcli", "connection", "add", "type", "ethernet", "con-name", "wan2", "ifname", "wan2",
		"ipv4.method", "manual", "ipv4.addresses", "198.51.100.9/24", "ipv6.method", "disabled")
	b.await(t, "wan2", "ebpfnetctl", "status")
	h.awaitUplink(t, "198.51.100.9", true)
	b.await(t, "", "nmcli", "connection", "modify", "wan2", "ipv4.addresses", "198.51.100.10/24")
	b.await(t, "", "nmcli", "device", "reapply", "wan2")
	h.awaitUplink(t, "198.51.100.10", true)
	b.await(t, "", "nmcli", "device", "disconnect", "wan2")
	h.awaitUplink(t, "198.51.100.10", false)
	b.await(t, "", "nmcli", "device", "connect", "wan2")
	h.awaitUplink(t, "198.51.100.10", true)
}

// awaitUplink wants the datapath to know an uplink by its address at some time, or not to.
func (h *host) awaitUplink(t *testing.T, addr string, want bool) {
	t.Helper()
	testenv.Eventually(t, fmt.Sprintf("an uplink with %s: %v", addr, want), func() error {
		return h.Node.WithDatapath(func(datapath *loader.Datapath) error {
			uplinks, err := maps.Uplinks(datapath)
			if err == nil && strings.Contains(fmt.Sprint(uplinks), addr) != want {
				err = fmt.Errorf("got %v", uplinks)
			}
			return err
		})
	})
}
