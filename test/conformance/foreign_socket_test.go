package conformance

import (
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"testing"

	"github.com/ebpfnet/ebpfnet/plugin/cnierr"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// TestPortOfForeignSocket asks for host ports in all the ways that a process of the host may
// have them, one socket for both families among them. The error names the process.
func TestPortOfForeignSocket(t *testing.T) {
	const any4, node4, any6, node6 = "0.0.0.0", "192.0.2.1", "::", "2001:db8:1::1"

	h := newHost(t)
	warmUp := h.pod(t, "c0", dual("1.1.0"))
	warmUp.add(t)
	warmUp.del(t)
	for _, test := range []struct {
		name, addr string
		refused    []string // for these host addresses
		given      []string
	}{
		{"any of both families", "[::]:8080", []string{"", any4, node4, any6, node6}, nil},
		{"any IPv4", "0.0.0.0:8080", []string{"", any4, node4}, []string{any6, node6}},
		{"one IPv4", "192.0.2.1:8080", []string{"", any4, node4}, []string{any6, node6, "192.0.2.77"}},
		{"one IPv6", "[2001:db8:1::1]:8080", []string{"", any6, node6}, []string{any4, node4, "2001:db8:1::77"}},
		{"another port", "[::]:8081", nil, []string{"", any4, node4, any6, node6}},
	} {
		for _, protocol := range []string{"tcp", "udp"} {
			t.Run(test.name+" "+protocol, func(t *testing.T) {
				pid := holdPortElsewhere(t, h.Node, protocol, netip.MustParseAddrPort(test.addr))
				ask := func(protocol, hostIP string) (*pod, state) {
					p := h.pod(t, "c1", with(dual("1.1.0"), "runtimeConfig.portMappings", list{
						object{"hostPort": 8080, "containerPort": 80, "protocol": protocol, "hostIP": hostIP},
					}))
					return p, h.state(t, p.Namespace)
				}
				for _, hostIP := range test.refused {
					p, before := ask(protocol, hostIP)
					wantError(t, p.try(t, "ADD"), cnierr.CodePortTaken, hostIP, ":8080/"+protocol, fmt.Sprintf("cat (pid %d)", pid))
					h.wantState(t, before, p.Namespace)
				}
				for _, hostIP := range test.given {
					p, before := ask(protocol, hostIP)
					p.add(t)
					p.del(t)
					h.wantState(t, before, p.Namespace)
				}
				other := map[string]string{"tcp": "udp", "udp": "tcp"}[protocol]
				p, _ := ask(other, "")
				p.add(t)
				p.del(t)
			})
		}
	}
}

// holdPortElsewhere is holdPort by a process that is no ancestor of the plugin's, and that
// ends with the test.
func holdPortElsewhere(t *testing.T, ns *testenv.Namespace, protocol string, addr netip.AddrPort) (pid int) {
	t.Helper()
	socket := holdPort(t, ns, protocol, addr)
	defer socket.Close()
	file, err := socket.(interface{ File() (*os.File, error) }).File()
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	cmd := exec.CommandContext(testenv.Context(t), "cat")
	cmd.ExtraFiles = []*os.File{file}
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		stdin.Close()
		if err := cmd.Wait(); err != nil {
			t.Errorf("the process that holds %s: %v", addr, err)
		}
	})
	return cmd.Process.Pid
}
