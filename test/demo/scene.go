package main

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/loader/rtnl"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

const (
	podPort  = 80   // the pods' web servers
	hostPort = 8080 // of the node, leads to the last pod
)

// patience is for one action. All of them take milliseconds; what takes longer is lost.
const patience = 3 * time.Second

// scene is all machines of the demo and what runs on them.
type scene struct {
	*testenv.Machine
	report *report

	conflist *conflist
	topology *testenv.Topology
	runtime  *testenv.Runtime
	pods     []*pod

	linksBefore []string         // of the node, without any pod
	datapath    *loader.Datapath // the node's, once an ADD has loaded it
}

// pod is a container, or what the network sees of one.
type pod struct {
	*testenv.Pod
	title string // "pod a"
	owner loader.Owner
	host  string // the host's end of its veth, once attached
}

// addrs returns the pod's addresses, of one family or both.
func (p *pod) addrs() []netip.Addr {
	var addrs []netip.Addr
	for _, addr := range []netip.Addr{p.Addr4(), p.Addr6()} {
		if addr.IsValid() {
			addrs = append(addrs, addr)
		}
	}
	return addrs
}

// newPods makes three pods that are not attached yet, each with a web server.
func (s *scene) newPods() error {
	for _, id := range []string{"a", "b", "c"} {
		p := &pod{Pod: s.runtime.NewPod(s, id), title: "pod " + id}
		attachment := maps.Attachment{Network: s.runtime.Network(), ContainerID: id, IfName: testenv.PodIfName}
		p.owner = attachment.Owner()
		s.pods = append(s.pods, p)
		if err := s.serve(p.Namespace, p.title); err != nil {
			return err
		}
	}
	return nil
}

// saw separates who answered from whom that server saw.
const saw = " answers, and saw "

// serve starts a web server that tells its name and the address of who asks.
func (s *scene) serve(ns *testenv.Namespace, title string) error {
	listener, err := ns.Listen(context.Background(), netip.AddrPortFrom(netip.IPv6Unspecified(), podPort))
	if err != nil {
		return fmt.Errorf("start the web server of %s: %w", title, err)
	}
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.WriteString(w, title+saw+r.RemoteAddr)
	})}
	go server.Serve(listener)
	s.Cleanup(func() { server.Close() })
	return nil
}

// fetch requests a page of one of the servers, and returns who answered and whom
// it saw.
func fetch(from *testenv.Namespace, to netip.AddrPort) (answered string, client netip.AddrPort, body string, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	body, err = testenv.HTTPGet(ctx, from, "http://"+to.String()+"/")
	if err != nil {
		return "", client, "", err
	}
	answered, address, _ := strings.Cut(body, saw)
	client, err = netip.ParseAddrPort(address)
	return answered, client, body, err
}

// output runs a command on the node, if it is installed, and returns what it
// prints. It needs no nsenter: a process inherits the thread's namespace.
func (s *scene) output(name string, args ...string) (out string, installed bool, err error) {
	path, err := exec.LookPath(name)
	for _, dir := range []string{"/usr/sbin", "/sbin"} { // not in every root's PATH
		if err != nil {
			path, err = exec.LookPath(filepath.Join(dir, name))
		}
	}
	if err != nil {
		return "", false, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, path, args...)
	var stdout, stderr strings.Builder
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := s.topology.Node.Do(cmd.Start); err != nil {
		return "", true, err
	}
	if err := cmd.Wait(); err != nil {
		return "", true, fmt.Errorf("%w: %s", err, firstLine(stderr.String()))
	}
	return stdout.String(), true, nil
}

func firstLine(text string) string {
	line, _, _ := strings.Cut(strings.TrimSpace(text), "\n")
	return line
}

// links names the devices of a namespace but lo.
func links(ns *testenv.Namespace) ([]string, error) {
	list, err := rtnl.Links(ns.Netlink())
	if err != nil {
		return nil, fmt.Errorf("list the devices of %s: %w", ns.Name, err)
	}
	var names []string
	for _, link := range list {
		if link.Attrs().Name != "lo" {
			names = append(names, link.Attrs().Name)
		}
	}
	return names, nil
}

// deviceName returns the name of a device of the node, for what maps tell by number.
func (s *scene) deviceName(index int) string {
	link, err := s.topology.Node.Netlink().LinkByIndex(index)
	if err != nil {
		return "gone"
	}
	return link.Attrs().Name
}
