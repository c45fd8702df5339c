package doctor

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/containernetworking/cni/libcni"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/loader/rtnl"
	"github.com/ebpfnet/ebpfnet/plugin/link"
)

// container is a network namespace that a network's plugins have connected, with a server in it.
type container struct {
	ns        *netns.NsHandle // it ends with this process at the latest: nothing is mounted
	cni       *libcni.CNIConfig
	list      *libcni.NetworkConfigList
	conf      *libcni.RuntimeConf
	addresses []netip.Addr
	server    net.Listener
	port      uint16 // of the server
	hostPort  uint16 // that leads to it; 0: none
	nonce     string // that the server sends
}

// connect makes a container and connects it as the runtime would. After an error nothing is left.
func connect(ctx context.Context, n *network, cacheDir string) (c *container, err error) {
	id := "ebpfnet-doctor-" + strings.ToLower(rand.Text()[:12])
	c = &container{
		cni:   libcni.NewCNIConfigWithCacheDir(n.runtime.BinDirs, cacheDir, nil),
		list:  n.file.List,
		nonce: rand.Text(),
	}
	ns, err := newNamespace()
	if err != nil {
		return nil, fmt.Errorf("make a network namespace: %w", err)
	}
	c.ns = &ns
	c.conf = &libcni.RuntimeConf{ContainerID: id, NetNS: fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), ns), IfName: "eth0"}
	if err := c.serve(); err != nil {
		ns.Close()
		return nil, fmt.Errorf("listen in the container: %w", err)
	}
	makesHostPorts := func(p *libcni.PluginConfig) bool { return p.Network.Capabilities["portMappings"] }
	if slices.ContainsFunc(n.file.List.Plugins, makesHostPorts) {
		c.hostPort, err = freePort()
		c.conf.CapabilityArgs = map[string]any{"portMappings": []map[string]any{
			{"hostPort": int(c.hostPort), "containerPort": int(c.port), "protocol": "tcp"}}}
	}
	if err == nil {
		err = c.add(ctx)
	}
	if err != nil {
		return nil, errors.Join(err, c.remove(ctx))
	}
	return c, nil
}

func (c *container) add(ctx context.Context) error {
	result, err := c.cni.AddNetworkList(ctx, c.list, c.conf)
	if err != nil {
		return fmt.Errorf("ADD of network %s fails: %w", c.list.Name, err)
	}
	current, err := types100.GetResult(result)
	if err != nil {
		return err
	}
	for _, ip := range current.IPs {
		if addr, ok := netip.AddrFromSlice(ip.Address.IP); ok {
			c.addresses = append(c.addresses, addr.Unmap())
		}
	}
	if len(c.addresses) == 0 {
		return fmt.Errorf("ADD of network %s gave no address", c.list.Name)
	}
	return nil
}

// remove removes the container, also when ctx has ended.
func (c *container) remove(ctx context.Context) error {
	const timeout = 30 * time.Second

	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), timeout)
	defer cancel()
	err := c.cni.DelNetworkList(ctx, c.list, c.conf)
	if err != nil { // Ctrl-C ends the plugin, too
		err = c.cni.DelNetworkList(ctx, c.list, c.conf)
	}
	if err != nil {
		err = fmt.Errorf("DEL of the container %s: %w (`ebpfnetctl doctor --fix` removes it later)", c.conf.ContainerID, err)
	}
	return errors.Join(err, c.server.Close(), c.ns.Close())
}

// freePort returns a port that no socket listens on at the moment.
func freePort() (uint16, error) {
	listener, err := net.Listen("tcp", ":0")
	if err != nil {
		return 0, fmt.Errorf("find a free host port: %w", err)
	}
	defer listener.Close()
	return portOf(listener), nil
}

func portOf(listener net.Listener) uint16 {
	return listener.Addr().(*net.TCPAddr).AddrPort().Port()
}

// newNamespace returns a new network namespace with lo up.
func newNamespace() (netns.NsHandle, error) {
	ns := netns.None()
	err := link.OnThread(func() (err error) {
		ns, err = netns.New()
		return err
	})
	if err != nil {
		return ns, err
	}
	handle, err := rtnl.OpenAt(ns)
	if err == nil {
		err = handle.LinkSetUp(&netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: 1, Name: "lo"}})
		handle.Close()
	}
	if err != nil {
		ns.Close()
	}
	return ns, err
}

// in runs do in a namespace, nil for the host's. Sockets that do opens stay there.
func in(ns *netns.NsHandle, do func() error) error {
	if ns == nil {
		return do()
	}
	return link.InNamespace(*ns, do)
}

// serve lets the container send its nonce to whoever connects.
func (c *container) serve() error {
	err := in(c.ns, func() (err error) {
		c.server, err = net.Listen("tcp", ":0")
		return err
	})
	if err != nil {
		return err
	}
	c.port = portOf(c.server)
	go c.answer()
	return nil
}

// answer answers until the server is closed.
func (c *container) answer() {
	for {
		conn, err := c.server.Accept()
		if err != nil {
			return // closed
		}
		conn.SetDeadline(time.Now().Add(answerTimeout))
		io.WriteString(conn, c.nonce) // the client compares what it gets
		conn.Close()
	}
}

func dial(ctx context.Context, from *netns.NsHandle, remote netip.AddrPort) (conn net.Conn, err error) {
	err = in(from, func() (err error) {
		conn, err = (&net.Dialer{}).DialContext(ctx, "tcp", remote.String())
		return explain(err)
	})
	return conn, err
}

// reach connects from a namespace, nil for the host's, and wants this container to answer.
func (c *container) reach(ctx context.Context, from *netns.NsHandle, remote netip.AddrPort) error {
	conn, err := dial(ctx, from, remote)
	if err != nil {
		return err
	}
	defer conn.Close()
	if deadline, ok := ctx.Deadline(); ok {
		conn.SetDeadline(deadline)
	}
	got, err := io.ReadAll(io.LimitReader(conn, int64(len(c.nonce))))
	if err != nil {
		return explain(err)
	}
	if string(got) != c.nonce {
		return errors.New("somebody else answers")
	}
	return nil
}

// answers connects from the container, and is content with any answer of the remote, also that the port is
// closed: packets go there and come back.
func (c *container) answers(ctx context.Context, remote netip.AddrPort) error {
	conn, err := dial(ctx, c.ns, remote)
	if errors.Is(err, unix.ECONNREFUSED) {
		return nil
	}
	if err != nil {
		return err
	}
	return conn.Close()
}

// explain says that nothing came, where nothing did.
func explain(err error) error {
	if errors.Is(err, context.DeadlineExceeded) || errors.Is(err, os.ErrDeadlineExceeded) {
		return fmt.Errorf("no answer within %s", answerTimeout)
	}
	return err
}
