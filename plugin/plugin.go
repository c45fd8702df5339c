// Package plugin is the CNI plugin: one file per verb (add.go, del.go, check.go,
// status.go, gc.go), each a list of steps over the packages below it: ipam gives
// addresses, plugin/link makes devices, maps writes what the datapath reads, and
// loader attaches it.
//
// A call is one short-lived process. Nothing is remembered between calls but
// what stands in the kernel (devices, pinned maps and links) and in the
// directory of the addresses, all of which is found again by the attachment:
// network, container id and interface name.
package plugin

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"time"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"

	cnitypes "github.com/containernetworking/cni/pkg/types"

	"github.com/ebpfnet/ebpfnet/ipam"
	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/loader/rtnl"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/link"
)

// Plugin answers the verbs. Its methods fit skel.CNIFuncs; their errors are
// those of the specification (cnitypes.Error).
type Plugin struct {
	Stdout io.Writer    // where ADD's result goes
	Log    *slog.Logger // for what is worth telling and no error; Funcs sets it as the configuration says

	// BeforeStep, if not nil, is called with the name of each step of ADD; an
	// error fails the step. Tests use it to stop ADD wherever it can be stopped.
	BeforeStep func(step string) error
	// LockTimeout is how long a verb may wait for locks, instead of a minute.
	LockTimeout time.Duration

	cniVersion string // of the configuration that a verb was called with
}

// New returns the plugin as a runtime calls it: the result on stdout.
func New() *Plugin { return &Plugin{Stdout: os.Stdout} }

// Funcs returns the verbs for the CNI library. Each waits for locks until its deadline.
func (p *Plugin) Funcs() skel.CNIFuncs {
	return verbs(&p.cniVersion, &p.Log, cmp.Or(p.LockTimeout, lockTimeout), p.Add, p.Del, p.Check, p.Status, p.GC)
}

type verb = func(context.Context, *skel.CmdArgs) error

// verbs bounds each verb's wait for locks, gives its error a code, keeps the log, and
// notes the version that the configuration names.
func verbs(cniVersion *string, log **slog.Logger, lockTimeout time.Duration, add, del, check, status, gc verb) skel.CNIFuncs {
	wrap := func(name string, do verb) func(*skel.CmdArgs) error {
		return func(args *skel.CmdArgs) error {
			*cniVersion = versionOf(args.StdinData)
			calls := openLog(args.StdinData)
			defer calls.close()
			*log = calls.Logger
			ctx, cancel := context.WithTimeout(context.Background(), lockTimeout)
			defer cancel()
			begin := time.Now()
			err := cniError(do(ctx, args))
			calls.call(name, args, time.Since(begin), err)
			return err
		}
	}
	return skel.CNIFuncs{
		Add: wrap("ADD", add), Del: wrap("DEL", del), Check: wrap("CHECK", check),
		Status: wrap("STATUS", status), GC: wrap("GC", gc),
	}
}

// CNIVersion returns the version that the configuration of the last call named,
// "" where it named none or no verb was reached. Errors are to carry it.
func (p *Plugin) CNIVersion() string { return p.cniVersion }

func versionOf(stdin []byte) string {
	var conf struct {
		CNIVersion string `json:"cniVersion"`
	}
	_ = json.Unmarshal(stdin, &conf)
	return conf.CNIVersion
}

// lockTimeout bounds the wait for other calls. They hold locks for milliseconds
// each, but a node that starts can have hundreds of them at once, and the first
// of these loads the datapath. Runtimes wait for two minutes and more.
const lockTimeout = time.Minute

// hostName is the name of the host's end of an attachment's veth: always the
// same, so that DEL finds it by the attachment alone.
func hostName(owner loader.Owner) string {
	return fmt.Sprintf("ebpf%011x", uint64(owner)>>20)
}

// aliasOf is what `ip link` shows of the host's end.
func aliasOf(a maps.Attachment) string {
	return fmt.Sprintf("ebpfnet %s %s %s", a.Network, a.ContainerID, a.IfName)
}

// MAC addresses are locally administered (bit 1 of the first octet) and made of
// the owner, so that nothing has to be read back from the kernel.
func hostMAC(owner loader.Owner) net.HardwareAddr      { return macOf(0x06, owner) }
func containerMAC(owner loader.Owner) net.HardwareAddr { return macOf(0x02, owner) }

func macOf(first byte, owner loader.Owner) net.HardwareAddr {
	return net.HardwareAddr{first, 0xeb, byte(owner >> 56), byte(owner >> 48), byte(owner >> 40), byte(owner >> 32)}
}

func ipamAttachment(a maps.Attachment) ipam.Attachment {
	return ipam.Attachment{ContainerID: a.ContainerID, IfName: a.IfName}
}

// pool opens the addresses of a network.
func (p *Plugin) pool(c *Config) *ipam.Pool {
	return ipam.Open(c.addressesForRelease(), ipam.Options{IndexDir: indexDir(c.DataDir), Alive: c.hasDevice, Log: p.Log})
}

// hasDevice says that an attachment of this network has its device, or that nobody knows.
func (c *Config) hasDevice(a ipam.Attachment) bool {
	host, err := openHandle()
	if err != nil {
		return true
	}
	defer host.Close()

	at := maps.Attachment{Network: c.Attachment.Network, ContainerID: a.ContainerID, IfName: a.IfName}
	device, err := link.Find(host, hostName(at.Owner()))
	return err != nil || device != nil
}

// openHandle opens netlink in the calling thread's namespace, for routing
// netlink alone: other families may be missing from the kernel.
func openHandle() (*netlink.Handle, error) {
	return rtnl.Open()
}

// container is an open container namespace.
type container struct {
	ns     netns.NsHandle
	handle *netlink.Handle
}

// openContainer opens the namespace at path and refuses our own: the CNI
// library looks only after the verb has run. The caller must close it.
func openContainer(path string) (*container, error) {
	ns, err := netns.GetFromPath(path)
	if err != nil {
		return nil, invalidNetNS(path, err.Error())
	}
	own, err := netns.GetFromPath("/proc/thread-self/ns/net")
	if err != nil {
		ns.Close()
		return nil, fmt.Errorf("open our own network namespace: %w", err)
	}
	defer own.Close()

	if ns.Equal(own) {
		ns.Close()
		return nil, invalidNetNS(path, "is the host's own network namespace, not a container's")
	}
	handle, err := rtnl.OpenAt(ns)
	if err != nil {
		ns.Close()
		return nil, invalidNetNS(path, err.Error())
	}
	return &container{ns: ns, handle: handle}, nil
}

func (c *container) close() {
	c.handle.Close()
	c.ns.Close()
}

func invalidNetNS(path, why string) error {
	return cnitypes.NewError(cnitypes.ErrInvalidNetNS, fmt.Sprintf("CNI_NETNS %q: expected a container's network namespace: %s", path, why), "")
}
