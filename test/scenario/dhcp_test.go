package scenario

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

const dhcpSocket = "/run/cni/dhcp.sock" // the reference plugin's default

// dhcpDaemon is the reference plugin's daemon, which keeps the leases.
type dhcpDaemon struct {
	cmd *exec.Cmd
	log strings.Builder // to be read after stop
}

// startDHCPDaemon starts it on the node, and stops it at the end of the test.
func startDHCPDaemon(t *testing.T, n *network, args ...string) *dhcpDaemon {
	t.Helper()
	d := &dhcpDaemon{}
	plugin := testenv.Build(t, "github.com/containernetworking/plugins/plugins/ipam/dhcp")
	d.cmd = exec.Command(plugin, append([]string{"daemon", "-socketpath", dhcpSocket}, args...)...)
	d.cmd.Stderr = &d.log
	if err := n.node().Do(d.cmd.Start); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.stop(t) })
	testenv.Eventually(t, "the DHCP daemon to listen", func() error {
		conn, err := net.Dial("unix", dhcpSocket)
		if err == nil {
			conn.Close()
		}
		return err
	})
	return d
}

// stop ends the daemon and returns what it has said.
func (d *dhcpDaemon) stop(t *testing.T) string {
	t.Helper()
	if d.cmd.ProcessState == nil {
		if err := d.cmd.Process.Signal(unix.SIGTERM); err != nil {
			t.Error(err)
		}
		_ = d.cmd.Wait() // it may have been in the middle of something
	}
	return d.log.String()
}

const onDHCP = `"ipam": {"type": "dhcp"}`

// dhcpNetworks are those whose addresses a DHCP server gives: by the pair of ebpfnet itself,
// at whose other end the host is, and on the bridge that ebpfnet comes after.
var dhcpNetworks = []struct {
	name   string
	list   []string
	server func(*testing.T, *network) *testenv.DHCPServer
}{
	{"own link", []string{`{"type": "ebpfnet", "ipMasq": true, "capabilities": {"portMappings": true}, ` + onDHCP + `}`},
		func(t *testing.T, n *network) *testenv.DHCPServer {
			return testenv.ServeDHCP(t, n.node(), podSubnet4, testenv.NodeAddr4)
		}},
	{"behind bridge", []string{`{"type": "bridge", "bridge": "cni0", "isGateway": true, "hairpinMode": true, ` + onDHCP + `}`, afterOthers}, serveOnBridge},
}

// serveOnBridge puts a host with a DHCP server on the bridge.
func serveOnBridge(t *testing.T, n *network) *testenv.DHCPServer {
	t.Helper()
	const bridge, port = "cni0", "dhcp"

	host := testenv.New(t, "dhcpd")
	rtnl := n.node().Netlink()
	br := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: bridge}}
	if err := rtnl.LinkAdd(br); err != nil {
		t.Fatal(err)
	}
	fd, err := unix.Open(host.Path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	veth := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: port, MasterIndex: br.Index}, PeerName: "eth0", PeerNamespace: netlink.NsFd(fd)}
	if err := rtnl.LinkAdd(veth); err != nil {
		t.Fatal(err)
	}
	self := netip.MustParseAddr("10.88.0.254")
	peer, err := host.Netlink().LinkByName("eth0")
	if err != nil {
		t.Fatal(err)
	}
	address := &netlink.Addr{IPNet: &net.IPNet{IP: self.AsSlice(), Mask: net.CIDRMask(24, 32)}}
	if err := host.Netlink().AddrAdd(peer, address); err != nil {
		t.Fatal(err)
	}
	for _, up := range []error{rtnl.LinkSetUp(br), rtnl.LinkSetUp(veth), host.Netlink().LinkSetUp(peer)} {
		if up != nil {
			t.Fatal(up)
		}
	}
	return testenv.ServeDHCP(t, host, podSubnet4, self)
}

// A DHCP server gives the addresses, which are renewed while the pods live and given back at DEL.
func TestDHCP(t *testing.T) {
	for _, network := range dhcpNetworks {
		t.Run(network.name, func(t *testing.T) {
			n := chainOf(t, network.list...)
			daemon := startDHCPDaemon(t, n, "-timeout", "1s")
			server := network.server(t, n)
			web := n.AddPod(t, "web", mapBoth(8080, 80))
			a := n.AddPod(t, "a", nil)
			for _, pod := range []*testenv.Pod{web, a} {
				if lease, _ := server.Lease(macOf(t, pod)); lease != pod.Addr4() {
					t.Errorf("%s has %s, and a lease of %s", pod.Name, pod.Addr4(), lease)
				}
				if err := pod.Check(testenv.Context(t)); err != nil {
					t.Errorf("CHECK: %v", err)
				}
			}
			f := families[0]
			outside := map[string]netip.AddrPort{}
			for _, protocol := range []string{"tcp", "udp"} {
				outside[protocol] = serve(t, n.Outside, protocol, at(f.outside, 0))
				serve(t, web.Namespace, protocol, at(f.pod(web), 80))
			}
			works := func() {
				for protocol, server := range outside {
					reachAsNode(t, a.Namespace, protocol, server, n.Outside, f.node)
					reachAsOneself(t, n.Outside, protocol, at(f.node, 8080), web.Namespace)
					reachAsOneself(t, a.Namespace, protocol, at(f.pod(web), 80), web.Namespace)
				}
			}
			works()
			_, before := server.Lease(macOf(t, web))
			testenv.Eventually(t, "the lease to be renewed", func() error {
				if _, now := server.Lease(macOf(t, web)); now <= before {
					return fmt.Errorf("%d requests", now)
				}
				return nil
			})
			works()
			next := n.NewPod(t, "next")
			next.Conf.CapabilityArgs = mapBoth(8080, 80)
			if err := next.Add(testenv.Context(t)); err == nil || !strings.Contains(err.Error(), "8080") {
				t.Errorf("another pod with the same port: %v", err)
			}
			del(t, next)
			del(t, web)
			del(t, a)
			said := daemon.stop(t)
			// bridge takes the interface away first: no release is sent, and the daemon may see that itself.
			ended := strings.Count(said, "releasing lease") + strings.Count(said, "terminating lease maintenance")
			if strings.Count(said, "lease acquired") != 3 || ended != 3 {
				t.Errorf("the daemon says:\n%s", said)
			}
			if len(network.list) == 1 && strings.Contains(said, "failed") {
				t.Errorf("the daemon says:\n%s", said)
			}
		})
	}
}

// dnsmasq on the host serves the links of pods as README says.
func TestDHCPByDnsmasq(t *testing.T) {
	if _, err := exec.LookPath("dnsmasq"); err != nil {
		t.Fatal("dnsmasq is missing: apt-get install dnsmasq-base")
	}
	n := chainOf(t, dhcpNetworks[0].list...)
	startDHCPDaemon(t, n, "-timeout", "1s")
	leases := filepath.Join(t.TempDir(), "leases")
	server := exec.Command("dnsmasq", "--keep-in-foreground", "--log-facility=-", "--conf-file=/dev/null", "--port=0", "--user=root", "--no-ping",
		"--dhcp-leasefile="+leases, "--pid-file", "--interface=ebpf*", "--shared-network=169.254.1.1,10.88.0.0",
		"--dhcp-range=10.88.0.10,10.88.0.200,255.255.255.0", "--dhcp-option=option:router,10.88.0.1")
	var log strings.Builder
	server.Stderr = &log
	if err := n.node().Do(server.Start); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := server.Process.Kill(); err != nil {
			t.Error(err)
		}
		_ = server.Wait() // it was killed
		if t.Failed() {
			t.Logf("dnsmasq says:\n%s", &log)
		}
	})
	a, b := n.AddPod(t, "a", nil), n.AddPod(t, "b", nil)
	for _, pod := range []*testenv.Pod{a, b} {
		text, err := os.ReadFile(leases)
		if err != nil || !strings.Contains(string(text), macOf(t, pod).String()+" "+pod.Addr4().String()+" ") {
			t.Errorf("%s has %s, and leases are %q (%v)", pod.Name, pod.Addr4(), text, err)
		}
		if err := pod.Check(testenv.Context(t)); err != nil {
			t.Errorf("CHECK: %v", err)
		}
	}
	ping(t, a.Namespace, b.Addr4())
	ping(t, a.Namespace, families[0].outside)
}

func macOf(t *testing.T, pod *testenv.Pod) net.HardwareAddr {
	t.Helper()
	device, err := pod.Netlink().LinkByName(testenv.PodIfName)
	if err != nil {
		t.Fatal(err)
	}
	return device.Attrs().HardwareAddr
}

// Nobody answers: ADD fails in the daemon's time, and leaves nothing.
func TestDHCPWithoutServer(t *testing.T) {
	n := chainOf(t, dhcpNetworks[0].list...)
	startDHCPDaemon(t, n, "-timeout", "100ms", "-resendtimeout", "300ms")
	pod := n.NewPod(t, "a")
	err := pod.Add(testenv.Context(t))
	if err == nil || !strings.Contains(err.Error(), `ipam.type "dhcp"`) {
		t.Errorf("ADD: %v", err)
	}
	if _, err := pod.Netlink().LinkByName(testenv.PodIfName); err == nil {
		t.Error("the interface is left")
	}
	del(t, pod)
}
