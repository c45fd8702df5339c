package plugin

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net/netip"
	"os"
	"regexp"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/ipam"
	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/loader/flock"
	"github.com/ebpfnet/ebpfnet/loader/rtnl"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/cni"
	"github.com/ebpfnet/ebpfnet/plugin/cnierr"
	"github.com/ebpfnet/ebpfnet/plugin/config"
	"github.com/ebpfnet/ebpfnet/plugin/link"
	"github.com/ebpfnet/ebpfnet/plugin/names"
	"github.com/ebpfnet/ebpfnet/plugin/namespace"
	"github.com/ebpfnet/ebpfnet/plugin/record"
)

// Plugin implements the verbs, cni.Verbs.
type Plugin struct {
	Stdout io.Writer // receives ADD's result

	// BeforeStep, if not nil, is called with the name of each step of ADD; an error fails the step.
	// Tests use it to stop ADD before any of its steps.
	BeforeStep func(step string) error
}

// New returns the plugin as a runtime calls it: the result goes to stdout.
func New() *Plugin { return &Plugin{Stdout: os.Stdout} }

type verb struct {
	config   *config.Config
	delegate *delegate // nil: addresses, if any, are ours
	log      *slog.Logger
	ownNetns bool // the container's namespace may be our own
}

// parse is for the verbs that need the whole configuration: ADD, CHECK and STATUS.
func parse(call *cni.Call) (*verb, error) {
	c, err := call.Parse()
	if err == nil {
		err = checkSysctls(c.Sysctls)
	}
	if err != nil {
		return nil, err
	}
	return &verb{c, newDelegate(c, call), call.Log, call.OwnNetns}, nil
}

// parseForRelease is for the verbs that release: DEL and GC.
func parseForRelease(call *cni.Call) (*verb, error) {
	c, err := call.ParseForRelease()
	if err != nil {
		return nil, err
	}
	return &verb{c, newDelegate(c, call), call.Log, call.OwnNetns}, nil
}

// opened is what ADD and CHECK work on.
type opened struct {
	host      *netlink.Handle
	container *namespace.Container
	datapath  *loader.Datapath
}

// openNamespaces opens all but the datapath. The caller must call close, also after an error.
func (o *opened) openNamespaces(path string, orOwn bool) (err error) {
	if o.container, err = namespace.OpenContainer(path, orOwn); err != nil {
		return err
	}
	o.host, err = rtnl.Open()
	return err
}

func (o *opened) close() {
	if o.datapath != nil {
		o.datapath.Close()
	}
	if o.container != nil {
		o.container.Close()
	}
	if o.host != nil {
		o.host.Close()
	}
}

// lockAgainstGC makes GC wait for ADDs in progress, and ADDs for GC: an ADD with addresses and no
// device yet looks like a container that is gone. The lock is nil if the directory cannot be
// created. doc.go has the order of the locks.
func (v *verb) lockAgainstGC(ctx context.Context, mode flock.Mode) (*flock.Lock, error) {
	if err := os.MkdirAll(v.config.DataDir, 0o700); err != nil {
		return nil, nil
	}
	if err := checkPrivate(v.config.DataDir); err != nil {
		return nil, err
	}
	return flock.Acquire(ctx, v.config.DataDir, mode)
}

// checkPrivate refuses a directory of records that others than root can open: they could take its
// lock and block all ADDs.
func checkPrivate(dir string) error {
	var stat unix.Stat_t
	if err := unix.Stat(dir, &stat); err != nil {
		return &os.PathError{Op: "stat", Path: dir, Err: err}
	}
	if mode := stat.Mode & 0o7777; stat.Uid != 0 || mode&0o077 != 0 {
		return cnierr.Invalid("dataDir", dir, fmt.Sprintf("a directory of root with mode 0700, which user %d's with mode %04o is not: others could hold its lock (`chown 0 %s && chmod 0700 %s`)",
			stat.Uid, mode, dir, dir))
	}
	return nil
}

func (v *verb) pool() *ipam.Pool { return v.poolWithout(nil) }

// poolWithout opens the pool without addresses for which inUse returns an error.
func (v *verb) poolWithout(inUse func(netip.Addr) error) *ipam.Pool {
	return ipam.Open(v.config.Reservations(), ipam.Options{
		IndexDir: record.IndexDir(v.config.DataDir),
		Alive:    v.hasDevice,
		InUse:    inUse,
		Log:      v.log,
	})
}

// hasDevice reports whether an attachment of this network has its device. It returns true if
// that is unknown.
func (v *verb) hasDevice(a ipam.Attachment) bool {
	host, err := rtnl.Open()
	if err != nil {
		return true
	}
	defer host.Close()

	attachment := maps.Attachment{Network: v.config.Attachment.Network, ContainerID: a.ContainerID, IfName: a.IfName}
	device, err := link.Find(host, names.HostDevice(attachment.Owner()))
	return err != nil || device != nil
}

// reservation returns the attachment as package ipam names it.
func (v *verb) reservation() ipam.Attachment {
	return ipam.Attachment{ContainerID: v.config.Attachment.ContainerID, IfName: v.config.Attachment.IfName}
}

// requiredCapabilities are those that ADD needs, including those for loading BPF programs.
var requiredCapabilities = []struct {
	bit     int
	name    string
	purpose string
}{
	{unix.CAP_SYS_ADMIN, "CAP_SYS_ADMIN", "enter the container's network namespace"},
	{unix.CAP_NET_ADMIN, "CAP_NET_ADMIN", "create devices and attach programs to them"},
}

// CheckCapabilities returns an error that names the required capabilities that this process lacks. The
// error wraps loader.ErrNotSupported.
func CheckCapabilities() error {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&header, &data[0]); err != nil {
		return fmt.Errorf("read the capabilities of this process: %w", err)
	}
	var missing []string
	for _, required := range requiredCapabilities {
		if data[required.bit/32].Effective&(1<<(required.bit%32)) == 0 {
			missing = append(missing, required.name+" to "+required.purpose)
		}
	}
	if len(missing) > 0 {
		return fmt.Errorf("%w: the plugin lacks %s: let the runtime start it as root with all capabilities",
			loader.ErrNotSupported, strings.Join(missing, ", and "))
	}
	return nil
}

// sysctlAllowlist is the tuning plugin's: one regular expression per line. Where the file exists,
// only sysctls that match a line may be set.
const sysctlAllowlist = "/etc/cni/tuning/allowlist.conf"

// checkSysctls refuses sysctls that the allowlist does not match. Without sysctls it reads nothing.
func checkSysctls(names []string) error {
	for _, name := range names {
		allowed, err := sysctlAllowed(name)
		if err != nil {
			return err
		}
		if !allowed {
			return cnierr.Invalid("sysctl", name, "a name that a line of "+sysctlAllowlist+" matches")
		}
	}
	return nil
}

func sysctlAllowed(name string) (bool, error) {
	file, err := os.Open(sysctlAllowlist)
	if errors.Is(err, fs.ErrNotExist) {
		return true, nil
	}
	if err != nil {
		return false, err
	}
	defer file.Close()

	lines := bufio.NewScanner(file)
	for lines.Scan() {
		pattern := strings.TrimSpace(lines.Text())
		if pattern == "" {
			continue
		}
		matches, err := regexp.MatchString(pattern, name)
		if err != nil {
			return false, fmt.Errorf("%s: line %q: %w", sysctlAllowlist, pattern, err)
		}
		if matches {
			return true, nil
		}
	}
	return false, lines.Err()
}
