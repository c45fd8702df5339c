package plugin

import (
	"context"
	"fmt"
	"math"

	"github.com/vishvananda/netlink"

	"github.com/ebpfnet/ebpfnet/loader/rtnl"
	"github.com/ebpfnet/ebpfnet/plugin/link"
	"github.com/ebpfnet/ebpfnet/plugin/record"
)

// bandwidthConf has the bandwidth plugin's keys, of the configuration or of the capability.
// Rates are in bits per second, bursts in bits.
type bandwidthConf struct {
	IngressRate    *int64   `json:"ingressRate"`
	IngressBurst   *int64   `json:"ingressBurst"`
	EgressRate     *int64   `json:"egressRate"`
	EgressBurst    *int64   `json:"egressBurst"`
	UnshapedSubnet []string `json:"unshapedSubnets"`
}

func (c bandwidthConf) isEmpty() bool {
	return c.IngressRate == nil && c.IngressBurst == nil && c.EgressRate == nil && c.EgressBurst == nil && c.UnshapedSubnet == nil
}

// bandwidth is that of the configuration, or, where it has none, that of the capability: as with the
// bandwidth plugin, a container does not get more than its network allows.
func (c *netConf) bandwidth() (record.Bandwidth, error) {
	if asked := c.RuntimeConfig.Bandwidth; c.bandwidthConf.isEmpty() && asked != nil {
		return asked.parse("runtimeConfig.bandwidth.")
	}
	return c.bandwidthConf.parse("")
}

func (c bandwidthConf) parse(prefix string) (b record.Bandwidth, err error) {
	if b.Ingress, err = parseLimit(prefix+"ingress", c.IngressRate, c.IngressBurst); err != nil {
		return b, err
	}
	if b.Egress, err = parseLimit(prefix+"egress", c.EgressRate, c.EgressBurst); err != nil {
		return b, err
	}
	b.Unshaped, err = parsePrefixes(prefix+"unshapedSubnets", c.UnshapedSubnet)
	return b, err
}

func parseLimit(key string, rate, burst *int64) (limit link.Limit, err error) {
	if rate != nil {
		if limit.Rate, err = parseRate(key+"Rate", *rate); err != nil {
			return limit, err
		}
	}
	if burst != nil {
		if limit.Burst, err = parseBurst(key+"Burst", *burst); err != nil {
			return limit, err
		}
	}
	if limit.Rate == 0 && limit.Burst != 0 {
		return limit, invalid(key+"Burst", *burst, "none without "+key+"Rate")
	}
	return limit, nil
}

func parseRate(key string, rate int64) (uint64, error) {
	const least = 8000 // a frame in two seconds

	if rate != 0 && rate < least {
		return 0, invalid(key, rate, fmt.Sprintf("0 for no limit, or at least %d bits per second", least))
	}
	return uint64(rate), nil
}

func parseBurst(key string, burst int64) (uint64, error) {
	const most = math.MaxUint32 * 8 // bits

	if burst < 0 {
		return 0, invalid(key, burst, "a number of bits, or 0 for the least that works")
	}
	return min(uint64(burst), most), nil
}

// shape holds both ends of a pair to the limits: what the container is sent leaves by the host's
// end, what it sends by its own, where its sockets wait instead of losing packets.
func shape(host, container *netlink.Handle, outside, inside netlink.Link, b record.Bandwidth) error {
	if err := link.Shape(host, outside, b.Ingress, b.Unshaped, link.PeerIsSource); err != nil {
		return err
	}
	return link.Shape(container, inside, b.Egress, b.Unshaped, link.PeerIsDestination)
}

// limit is a step of ADD.
func (a *addition) limit(context.Context) error {
	if a.config.Bandwidth.IsEmpty() {
		return nil
	}
	outside, err := a.host.LinkByIndex(a.pair.HostIndex)
	if err != nil {
		return fmt.Errorf("find device %d: %w", a.pair.HostIndex, err)
	}
	inside, err := a.container.handle.LinkByName(a.pair.ContainerName)
	if err != nil {
		return fmt.Errorf("find %s in the container: %w", a.pair.ContainerName, err)
	}
	if a.config.PrevResult != nil { // else the devices go
		a.undo.push(func(context.Context) error {
			return shape(a.host, a.container.handle, outside, inside, record.Bandwidth{})
		})
	}
	return shape(a.host, a.container.handle, outside, inside, a.config.Bandwidth)
}

// unlimit takes the limits off the devices of another plugin, as far as they are there.
func unlimit(r *record.Record, netnsPath string) error {
	if r == nil || r.Chained == nil || r.Bandwidth.IsEmpty() && r.Settings.Limits == (record.Limits{}) {
		return nil
	}
	host, err := openHandle()
	if err != nil {
		return err
	}
	defer host.Close()

	outside, err := link.Device(host, r.Chained.HostIndex)
	if err == nil && outside != nil {
		err = link.Unshape(host, outside)
	}
	if err != nil || netnsPath == "" {
		return err
	}
	container, openErr := openContainer(netnsPath)
	if openErr != nil {
		return nil // it is gone, and its queue with it
	}
	defer container.close()

	inside, err := link.Find(container.handle, r.Attachment.IfName)
	if err != nil || inside == nil {
		return err
	}
	return link.Unshape(container.handle, inside)
}

// inspectLimits is the part of CHECK.
func (i *inspection) inspectLimits(host netlink.Link) {
	inside, err := link.Find(i.container.handle, i.config.Attachment.IfName)
	if i.failed(err) || inside == nil {
		return
	}
	b := i.config.Bandwidth
	for _, end := range []struct {
		key    string
		handle *netlink.Handle
		device netlink.Link
		limit  link.Limit
	}{
		{"ingressRate", i.host, host, b.Ingress},
		{"egressRate", i.container.handle, inside, b.Egress},
	} {
		shaped, err := link.IsShaped(end.handle, end.device, end.limit, b.Unshaped)
		if !i.failed(err) && !shaped {
			i.differs("%s is not held to %s %d (0: none)", end.device.Attrs().Name, end.key, end.limit.Rate)
		}
	}
}

// setBandwidth changes the limits of a container that runs.
func (h *Host) setBandwidth(hostIndex int, ifName string, b record.Bandwidth) error {
	outside, err := h.netlink.LinkByIndex(hostIndex)
	if err != nil {
		return fmt.Errorf("find device %d: %w", hostIndex, err)
	}
	ns, err := link.NamespaceOfPeer(h.netlink, outside)
	if err != nil {
		return err
	}
	defer ns.Close()

	container, err := rtnl.OpenAt(ns)
	if err != nil {
		return err
	}
	defer container.Close()

	inside, err := container.LinkByName(ifName)
	if err != nil {
		return fmt.Errorf("find %s in the container: %w", ifName, err)
	}
	return shape(h.netlink, container, outside, inside, b)
}
