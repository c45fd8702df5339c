package plugin

import (
	"context"
	"errors"
	"fmt"
	"net/netip"

	cnitypes "github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/vishvananda/netlink"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/loader/flock"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/cni"
	"github.com/ebpfnet/ebpfnet/plugin/cnierr"
	"github.com/ebpfnet/ebpfnet/plugin/link"
	"github.com/ebpfnet/ebpfnet/plugin/record"
)

// Check compares everything with what ADD left (SPEC, section 2, CHECK). The error lists all
// differences.
func (p *Plugin) Check(ctx context.Context, call *cni.Call) error {
	differences, err := p.Differences(ctx, call)
	if err != nil {
		return err
	}
	return report(differences)
}

// Differences returns the differences that CHECK finds, one by one.
func (p *Plugin) Differences(ctx context.Context, call *cni.Call) ([]error, error) {
	v, err := parse(call)
	if err != nil {
		return nil, err
	}
	if v.config.PrevResult == nil {
		return nil, cnierr.Invalid("prevResult", "", "the result of the last ADD")
	}
	c := &checker{verb: v, owner: v.config.Attachment.Owner(), netns: call.Netns}
	defer c.close()
	if err := c.open(); err != nil {
		return nil, err
	}
	c.expect()
	c.find(ctx)
	c.checkInterfaces()
	c.checkContainer()
	c.checkHost()
	c.checkForwarding()
	c.checkMaps()
	c.checkReservations(ctx)
	return c.differences, nil
}

// checker is a CHECK in progress.
type checker struct {
	*verb
	owner loader.Owner
	netns string
	opened
	chained *record.Chained // nil: the interface is ours

	netInterface     *types100.Interface // the container's in prevResult, or nil
	addresses        []link.Address      // its addresses in prevResult
	hostDevice       netlink.Link        // nil: not found
	entry            maps.Device         // of the host's device in the datapath; empty: not found
	reserved         []netip.Addr        // the container's reservations
	comparesReserved bool                // false: the addresses are not ours, or unreadable
	known            []maps.Endpoint     // what the datapath knows of all these addresses
	own              []link.Address      // those that ADD gave the container, with the gateways of then

	differences []error
}

func (c *checker) open() (err error) {
	if err := c.openNamespaces(c.netns, c.ownNetns); err != nil {
		return err
	}
	if c.datapath, err = loader.OpenLoaded(); err != nil {
		return err
	}
	return c.readRecord()
}

func (c *checker) readRecord() error {
	records, err := record.Open(c.config.DataDir)
	if err != nil {
		return err
	}
	rec, err := records.Read(c.owner)
	if c.failed(err) {
		return nil
	}
	if rec != nil {
		c.chained = rec.Chained
		if err := c.config.Apply(rec.Settings); err != nil {
			return err
		}
	}
	if expected := c.newRecord(); !expected.IsEmpty() && (rec == nil || !expected.SameInput(rec)) {
		c.differs("the record in %s is missing, or differs from the configuration in aliases, cgroupPath, labels or uplinks", c.config.DataDir)
	}
	return nil
}

func (c *checker) find(ctx context.Context) {
	var err error
	if c.hostDevice, err = c.findHostDevice(); !c.failed(err) && c.hostDevice != nil {
		c.entry, _, err = maps.GetDevice(c.datapath, c.hostDevice.Attrs().Index)
		c.failed(err)
	}
	if c.config.IPAM != nil {
		c.reserved, err = c.pool().Reserved(ctx, c.reservation())
		c.comparesReserved = !c.failed(err)
	}
	c.findOwn()
}

// Repairable ends the description of a difference that can be repaired while the container runs.
const Repairable = " (`ebpfnetctl repair` fixes it)"

func (c *checker) differs(format string, args ...any) {
	c.differences = append(c.differences, fmt.Errorf(format, args...))
}

// failed records an error of reading and reports whether there was one. The caller then skips the comparison.
func (c *checker) failed(err error) bool {
	if err != nil {
		c.differences = append(c.differences, err)
	}
	return err != nil
}

func report(differences []error) error {
	err := errors.Join(differences...)
	if errors.Is(err, flock.ErrBusy) {
		return err // something could not be read, which is no difference
	}
	for _, difference := range differences {
		if coded, ok := errors.AsType[*cnitypes.Error](difference); ok && coded.Code == cnitypes.ErrTryAgainLater {
			return coded // of another IPAM plugin, such as one that did not finish in time
		}
	}
	if err != nil {
		return cnitypes.NewError(cnierr.CodeDiffers, "not as ADD left it: "+err.Error(), "DEL and ADD the container to fix what names no other remedy")
	}
	return nil
}
