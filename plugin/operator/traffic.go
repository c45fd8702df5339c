package operator

import (
	"errors"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/loader/rtnl"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/link"
)

// Counters are what attachments have sent and received so far.
type Counters struct {
	at      time.Time
	byOwner map[string]counters
}

// counters are those of one attachment. "In" is towards the container.
type counters struct {
	index                                    int // of its device: another one counts from 0
	inPackets, inBytes, outPackets, outBytes uint64
	drops                                    uint64
	flows                                    int
}

// Traffic is what an attachment sends and receives, per second.
type Traffic struct {
	maps.Attachment
	Owner      string  `json:"owner"`
	Device     string  `json:"device"`
	InPackets  float64 `json:"inPacketsPerSecond"`
	InBytes    float64 `json:"inBytesPerSecond"`
	OutPackets float64 `json:"outPacketsPerSecond"`
	OutBytes   float64 `json:"outBytesPerSecond"`
	Drops      float64 `json:"dropsPerSecond"` // by our programs, in both directions
	Flows      int     `json:"flows"`          // that it owns
}

// ReadCounters reads the counters of attachments: those of their devices, and ours.
func ReadCounters(attachments []*Attachment) (*Counters, error) {
	datapath, err := loader.OpenLoaded()
	if err != nil {
		return nil, err
	}
	defer datapath.Close()
	host, err := rtnl.Open()
	if err != nil {
		return nil, err
	}
	defer host.Close()

	peers, err := rtnl.OpenPeers()
	if err != nil {
		return nil, err
	}
	defer peers.Close()

	devices, err := link.List(host)
	if err != nil {
		return nil, err
	}
	c := &Counters{at: time.Now(), byOwner: map[string]counters{}}
	byIndex := map[int]netlink.Link{}
	for _, device := range devices {
		byIndex[device.Attrs().Index] = device
	}
	for _, a := range attachments {
		if device := byIndex[a.index]; !a.Dead && device != nil {
			c.byOwner[a.Owner] = devicesCounters(peers, device)
		}
	}
	return c, c.addOurs(datapath)
}

// Age returns for how long counters are known.
func (c *Counters) Age() time.Duration { return time.Since(c.at) }

// devicesCounters reads what has left the container at the host's end, and what has come in at the
// container's: what bypasses the host's end is counted only there (since Linux 6.8; before, nowhere).
func devicesCounters(peers *rtnl.Peers, device netlink.Link) counters {
	c := counters{index: device.Attrs().Index}
	if s := device.Attrs().Statistics; s != nil {
		c.outPackets, c.outBytes, c.inPackets, c.inBytes = s.RxPackets, s.RxBytes, s.TxPackets, s.TxBytes
	}
	inside, err := peers.Of(device)
	if err == nil && inside.Attrs().Statistics != nil {
		c.inPackets, c.inBytes = inside.Attrs().Statistics.RxPackets, inside.Attrs().Statistics.RxBytes
	}
	return c
}

// addOurs adds drops and flows.
func (c *Counters) addOurs(datapath *loader.Datapath) error {
	drops, errDrops := maps.Drops(datapath)
	flows, errFlows := maps.FlowEntries(datapath)
	add := func(owner loader.Owner, what func(*counters)) {
		name := owner.String()
		if of, ok := c.byOwner[name]; ok {
			what(&of)
			c.byOwner[name] = of
		}
	}
	for _, d := range drops {
		add(d.Owner, func(of *counters) { of.drops += d.Packets })
	}
	for _, f := range flows {
		if !f.Expired {
			add(f.Owner, func(of *counters) { of.flows++ })
		}
	}
	return errors.Join(errDrops, errFlows)
}

// Since returns the traffic of attachments since earlier counters were read. One that is new or gone is
// left out.
func (c *Counters) Since(earlier *Counters, attachments []*Attachment) (list []Traffic) {
	elapsed := c.at.Sub(earlier.at).Seconds()
	perSecond := func(now, then uint64) float64 {
		if now < then || elapsed <= 0 {
			return 0
		}
		return float64(now-then) / elapsed
	}
	for _, a := range attachments {
		now, isNow := c.byOwner[a.Owner]
		then, wasThen := earlier.byOwner[a.Owner]
		if !isNow || !wasThen || now.index != then.index {
			continue
		}
		list = append(list, Traffic{
			Attachment: a.Attachment,
			Owner:      a.Owner,
			Device:     a.Device,
			InPackets:  perSecond(now.inPackets, then.inPackets),
			InBytes:    perSecond(now.inBytes, then.inBytes),
			OutPackets: perSecond(now.outPackets, then.outPackets),
			OutBytes:   perSecond(now.outBytes, then.outBytes),
			Drops:      perSecond(now.drops, then.drops),
			Flows:      now.flows,
		})
	}
	return list
}
