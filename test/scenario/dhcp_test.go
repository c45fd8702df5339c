package scenario

import (
	"fmt"
	"net"
	"net/netip"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

const dhcpSocket = "/run/cni/dhcp.sock" // the reference plugin's default

// dhcpDaemon is the reference plugin's daemon, which maintains the leases.
type dhcpDaemon struct {
	cmd *exec.Cmd
	log strings.Builder // valid after stop
}

// startDHCPDaemon starts the daemon on the node. The end of the test stops it.
func startDHCPDaemon(t *testing.T, n *network, args ...string) *dhcpDaemon {
	t.Helper()
	d := &dhcpDaemon{}
	plugin := testenv.Build(t, "github.com/containernetworking/plugins/plugins/ipam/dhcp")
	d.cmd = exec.Command(plugin, append([]string{"daemon", "-socketpath", dhcpSocket}, args...)...)
	d.cmd.Stderr = &d.log
	testenv.Must(t, n.node().Do(d.cmd.Start))
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

// stop ends the daemon and returns its log.
func (d *dhcpDaemon) stop(t *testing.T) string {
	t.Helper()
	if d.cmd.ProcessState == nil {
		testenv.NoError(t, d.cmd.Process.Signal(unix.SIGTERM))
		_ = d.cmd.Wait() // a signal ended it
	}
	return d.log.String()
}

// dnsmasq is a DHCP server.
type dnsmasq struct{ leases, log string }

// startDnsmasq starts a server of the pods' subnet. The end of the test stops it.
func startDnsmasq(t *testing.T, ns *testenv.Namespace, args ...string) *dnsmasq {
	t.Helper()
	if _, err := exec.LookPath("dnsmasq"); err != nil {
		t.Fatal("dnsmasq is missing: apt-get install dnsmasq-base")
	}
	d := &dnsmasq{filepath.Join(t.TempDir(), "leases"), filepath.Join(t.TempDir(), "log")}
	server := exec.Command("dnsmasq", append(args, "--keep-in-foreground", "--log-facility="+d.log, "--conf-file=/dev/null", "--port=0", "--user=root", "--no-ping",
		"--dhcp-leasefile="+d.leases, "--pid-file", "--dhcp-range=10.88.0.10,10.88.0.200,255.255.255.0",
		"--dhcp-option=option:router,10.88.0.1")...)
	testenv.Must(t, ns.Do(server.Start))
	t.Cleanup(func() {
		testenv.NoError(t, server.Process.Kill())
		_ = server.Wait() // reports the signal
		if t.Failed() {
			t.Logf("dnsmasq's log:\n%s", d.text(t, d.log))
		}
	})
	return d
}

func (d *dnsmasq) text(t *testing.T, file string) string {
	t.Helper()
	text := testenv.ReadFile(t, file)
	return string(text)
}

// hasLease reports whether the pod has the address that the server has leased to it.
func (d *dnsmasq) hasLease(t *testing.T, pod *testenv.Pod) bool {
	t.Helper()
	return strings.Contains(d.text(t, d.leases), pod.MACOf(t, testenv.PodIfName).String()+" "+pod.Addr4().String()+" ")
}

// Pods get addresses from a DHCP server on the host, and DEL releases their leases.
func TestDHCP(t *testing.T) {
	n := newChain(t, `{"type": "ebpfnet", "ipMasq": true, "capabilities": {"portMappings": true}, "ipam": {"type": "dhcp"}}`)
	daemon := startDHCPDaemon(t, n, "-timeout", "1s")
	server := startDnsmasq(t, n.node(), "--interface=ebpf*", "--shared-network=169.254.1.1,10.88.0.0") // as documented
	web, a := n.AddPod(t, "web", mapBoth(8080, 80)), n.AddPod(t, "a", nil)
	for _, pod := range []*testenv.Pod{web, a} {
		if !server.hasLease(t, pod) {
			t.Errorf("%s: got address %s, want one of the leases %q", pod.Name, pod.Addr4(), server.text(t, server.leases))
		}
		wantCheck(t, pod)
	}
	f := testenv.IPv4
	for _, protocol := range []string{"tcp", "udp"} {
		serve(t, web.Namespace, protocol, at(f.Pod(web), 80))
		reachAsNode(t, a.Namespace, protocol, serve(t, n.Outside, protocol, at(f.Outside, 0)), n.Outside, f.Node)
		reachUntranslated(t, n.Outside, protocol, at(f.Node, 8080), web.Namespace)
		reachUntranslated(t, a.Namespace, protocol, at(f.Pod(web), 80), web.Namespace)
	}
	next := n.NewPod(t, "next")
	next.Conf.CapabilityArgs = mapBoth(8080, 80)
	if err := next.Add(testenv.Context(t)); err == nil || !strings.Contains(err.Error(), "8080") {
		t.Errorf("ADD with a host port in use: got %v, want an error that names it", err)
	}
	for _, pod := range []*testenv.Pod{next, web, a} {
		del(t, pod)
	}
	log := daemon.stop(t)
	ended := strings.Count(log, "releasing lease") + strings.Count(log, "terminating lease maintenance")
	if strings.Count(log, "lease acquired") != 3 || ended != 3 || strings.Contains(log, "failed") {
		t.Errorf("daemon's log: want 3 leases acquired and 3 ended, and no failure:\n%s", log)
	}
}

// delegatingTo returns an ebpfnet that gets its addresses from this IPAM plugin.
func delegatingTo(ipam string) string {
	return `{"type": "ebpfnet", "ipMasq": true, "capabilities": {"portMappings": true, "ips": true}, "ipam": ` + ipam + `}`
}

// The reference plugin static assigns addresses and routes, with gateways and without.
func TestStaticIPAM(t *testing.T) {
	for name, gateways := range map[string][2]string{
		"with gateways":    {`, "gateway": "10.88.0.254"`, `, "gateway": "fd00:88::fe"`},
		"without gateways": {"", ""},
	} {
		t.Run(name, func(t *testing.T) {
			testenv.Build(t, "github.com/containernetworking/plugins/plugins/ipam/static")
			n := newNetworkWith(t, allVerbs(conflistOf(delegatingTo(fmt.Sprintf(`{"type": "static",
				"addresses": [{"address": "10.88.0.7/24"%s}, {"address": "fd00:88::7/64"%s}],
				"routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}, {"dst": "203.0.113.0/24", "gw": "10.88.0.99"}]}`, gateways[0], gateways[1])))))
			if err := n.Status(testenv.Context(t)); err != nil {
				t.Errorf("STATUS: %v", err)
			}
			pod := n.AddPod(t, "a", mapBoth(8080, 80))
			if pod.Addr4() != netip.MustParseAddr("10.88.0.7") || pod.Addr6() != netip.MustParseAddr("fd00:88::7") {
				t.Errorf("addresses: got %s and %s, want 10.88.0.7 and fd00:88::7", pod.Addr4(), pod.Addr6())
			}
			wantCheck(t, pod)
			if err := n.GC(testenv.Context(t), attachmentOf(pod)); err != nil {
				t.Errorf("GC: %v", err)
			}
			forEachProtocol(t, func(t *testing.T, f testenv.Family, protocol string) {
				ping(t, pod.Namespace, f.Outside)
				outside := serve(t, n.Outside, protocol, at(f.Outside, 0))
				reachAsNode(t, pod.Namespace, protocol, outside, n.Outside, f.Node)
				serve(t, pod.Namespace, protocol, at(f.Pod(pod), 80))
				reachUntranslated(t, n.Outside, protocol, at(f.Node, 8080), pod.Namespace)
				reach(t, n.node(), protocol, at(f.Loopbacks[0], 8080), pod.Namespace)
				reach(t, pod.Namespace, protocol, at(f.Node, 8080), pod.Namespace)
			})
		})
	}
}
