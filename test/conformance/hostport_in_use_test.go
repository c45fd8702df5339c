package conformance

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/plugin/cnierr"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// TestHostPortOfAnotherProcess requests host ports that a host process has bound in different ways, including one
// socket for both families. The error names the process.
func TestHostPortOfAnotherProcess(t *testing.T) {
	const any4, node4, any6, node6 = "0.0.0.0", "192.0.2.1", "::", "2001:db8:1::1"

	h := newLoadedHost(t)
	for _, test := range []struct {
		name, addr string
		refused    []string // host addresses
		granted    []string
	}{
		{"any address of both families", "[::]:8080", []string{"", any4, node4, any6, node6}, nil},
		{"any IPv4 address", "0.0.0.0:8080", []string{"", any4, node4}, []string{any6, node6}},
		{"one IPv4 address", "192.0.2.1:8080", []string{"", any4, node4}, []string{any6, node6, "192.0.2.77"}},
		{"one IPv6 address", "[2001:db8:1::1]:8080", []string{"", any6, node6}, []string{any4, node4, "2001:db8:1::77"}},
		{"another port", "[::]:8081", nil, []string{"", any4, node4, any6, node6}},
	} {
		for _, protocol := range []string{"tcp", "udp"} {
			t.Run(test.name+" "+protocol, func(t *testing.T) {
				pid := bindPortInProcess(t, h.Node, protocol, netip.MustParseAddrPort(test.addr))
				request := func(protocol, hostIP string) (*pod, testenv.Snapshot) {
					p := h.pod(t, "c1", with(dual("1.1.0"), "runtimeConfig.portMappings", list{
						object{"hostPort": 8080, "containerPort": 80, "protocol": protocol, "hostIP": hostIP},
					}))
					return p, h.snapshot(t, p.Namespace)
				}
				for _, hostIP := range test.refused {
					p, before := request(protocol, hostIP)
					wantError(t, p.try(t, "ADD"), cnierr.CodePortTaken, hostIP, ":8080/"+protocol, fmt.Sprintf("cat (pid %d)", pid))
					h.wantUnchanged(t, before, p.Namespace)
				}
				for _, hostIP := range test.granted {
					p, before := request(protocol, hostIP)
					p.add(t)
					p.del(t)
					h.wantUnchanged(t, before, p.Namespace)
				}
				other := map[string]string{"tcp": "udp", "udp": "tcp"}[protocol]
				p, _ := request(other, "")
				p.add(t)
				p.del(t)
			})
		}
	}
}

// bindPortInProcess is bindPort in a process that is no ancestor of the plugin's, and ends with the test.
func bindPortInProcess(t *testing.T, ns *testenv.Namespace, protocol string, addr netip.AddrPort) (pid int) {
	t.Helper()
	return keepPort(t, exec.CommandContext(testenv.Context(t), "cat"), bindPort(t, ns, protocol, addr))
}

// keepPort hands a socket over to a process that ends with its standard input: at the end of the test.
func keepPort(t *testing.T, cmd *exec.Cmd, socket io.Closer) (pid int) {
	t.Helper()
	defer socket.Close()
	file, err := socket.(interface{ File() (*os.File, error) }).File()
	testenv.Must(t, err)
	defer file.Close()
	cmd.ExtraFiles = []*os.File{file}
	stdin, err := cmd.StdinPipe()
	testenv.Must(t, err)
	testenv.Must(t, cmd.Start())
	t.Cleanup(func() {
		stdin.Close()
		if err := cmd.Wait(); err != nil {
			t.Errorf("process with a port: %v", err)
		}
	})
	return cmd.Process.Pid
}

// TestHostPortOfConnection requests host ports from which the host has opened a TCP connection, or had one that it has
// closed: no clients' port. The connection continues.
func TestHostPortOfConnection(t *testing.T) {
	h := newLoadedHost(t)
	testenv.Must(t, h.Node.SetSysctl("net/ipv4/ip_local_port_range", "8080 8080"))
	p := h.pod(t, "c1", with(dual("1.1.0"), "runtimeConfig.portMappings", webPort))
	for _, outside := range []netip.Addr{testenv.OutsideAddr4, testenv.OutsideAddr6} {
		t.Run(outside.String(), func(t *testing.T) {
			server := netip.AddrPortFrom(outside, 7777)
			testenv.ServeTCP(t, h.Outside, server)
			var conn net.Conn
			err := h.Node.Do(func() (err error) {
				conn, err = net.Dial("tcp", server.String())
				return err
			})
			testenv.Must(t, err)
			defer conn.Close()
			replies := bufio.NewReader(conn)
			ask := func(when string) {
				t.Helper()
				errDeadline := conn.SetDeadline(time.Now().Add(testenv.Timeout))
				_, errSend := fmt.Fprintln(conn, "1 hello")
				_, err := replies.ReadString('\n')
				if err := errors.Join(errDeadline, errSend, err); err != nil {
					t.Fatalf("connection of the host %s: %v", when, err)
				}
			}
			wantFetch(t, h, p.Namespace, p.add(t))
			ask("after ADD")
			p.del(t)
			ask("after DEL")
			conn.Close()
			p.add(t)
			p.del(t)
		})
	}
}

// TestHostPortLimit opens the last host port of 65,536 of both families, and one more.
func TestHostPortLimit(t *testing.T) {
	const limit, perPort = 65536, 4 // entries: two directions, two families

	h := newHost(t)
	h.pod(t, "first", dual("1.0.0")).add(t) // loads the datapath
	last, beyond := h.pod(t, "last", withPort(dual("1.0.0"), 8080)), h.pod(t, "beyond", withPort(dual("1.0.0"), 8081))
	before := h.snapshot(t, beyond.Namespace)

	keys, values := make([]bpf.HostPortKey, perPort*(limit-1)), make([]bpf.HostPort, perPort*(limit-1))
	for i := range keys {
		keys[i] = bpf.HostPortKey{Port: uint16(i / perPort), Protocol: 6}
		keys[i].Addr.Bytes[0], keys[i].Addr.Bytes[1] = 0xfd, byte(i%perPort)
	}
	h.withDatapath(t, func(d *loader.Datapath) error {
		_, err := d.HostPorts.BatchUpdate(keys, values, nil)
		return err
	})
	wantFetch(t, h, last.Namespace, last.add(t))
	wantError(t, beyond.try(t, "ADD"), codeTryAgain, "8081", "all 262144 entries", "host_ports")
	h.withDatapath(t, func(d *loader.Datapath) error {
		_, err := d.HostPorts.BatchDelete(keys, nil)
		return err
	})
	last.del(t)
	h.wantUnchanged(t, before, beyond.Namespace)
}
