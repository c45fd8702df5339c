package main

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"time"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/drops"
	"github.com/ebpfnet/ebpfnet/plugin/show"
)

// deniedReasons are the drops that --log-denied is about; in audit mode, the packets pass.
var deniedReasons = []maps.Reason{
	maps.Reason(bpf.ReasonPolicyIngress), maps.Reason(bpf.ReasonPolicyEgress), maps.Reason(bpf.ReasonPolicyAudit),
}

// followDenied prints refused connections until ctx is done, as `ebpfnetctl drops --follow -o json` prints packets. While
// the datapath is not loaded, or another process follows drops, it waits.
func (o *options) followDenied(ctx context.Context, out io.Writer, log *slog.Logger) {
	const retry = time.Second

	said := ""
	for o.logDenied > 0 && ctx.Err() == nil {
		err := ignoreNotLoaded(o.readDenied(ctx, out))
		if err != nil && err.Error() != said {
			said = err.Error()
			log.Warn("log denied connections: " + said)
		}
		select {
		case <-ctx.Done():
		case <-time.After(retry):
		}
	}
	<-ctx.Done()
}

// readDenied prints until ctx is done, or the datapath is unloaded.
func (o *options) readDenied(ctx context.Context, out io.Writer) (err error) {
	const often = 200 * time.Millisecond // how often the ring is read

	datapath, err := loader.OpenLoaded()
	if err != nil {
		return err
	}
	defer datapath.Close()
	describer := drops.Describer{State: o.state}
	defer describer.Close()
	if err := describer.Open(datapath); err != nil {
		return err
	}
	reader, err := drops.Open(ctx, datapath, drops.Filter{Reasons: deniedReasons, Limit: o.logDenied})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, reader.Close()) }()
	lines := newDeniedLines(out, describer.Describe, o.logDenied)
	read, count := time.NewTicker(often), time.NewTicker(interval)
	defer read.Stop()
	defer count.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case lines.now = <-read.C:
			err = reader.Read(lines.add)
		case <-count.C:
			var leftOut map[uint32]uint64
			leftOut, err = reader.LeftOut()
			lines.addLeftOut(leftOut)
		}
		_, errRenew := reader.Renew()
		if err := errors.Join(err, errRenew, lines.err); err != nil {
			return err
		}
	}
}

// deniedLines prints a line for each connection that rules refuse.
type deniedLines struct {
	out       io.Writer
	describe  func(*bpf.DropEvent) (drops.Drop, error)
	perSecond uint32
	err       error

	now     time.Time
	second  time.Time            // since when count counts
	count   uint32               // lines
	printed map[denial]time.Time // when
	leftOut map[uint32]uint64    // packets, by reason
}

// denial is a connection that rules refuse.
type denial struct{ reason, owner, protocol, source, destination string }

func newDeniedLines(out io.Writer, describe func(*bpf.DropEvent) (drops.Drop, error), perSecond uint32) *deniedLines {
	return &deniedLines{
		out: out, describe: describe, perSecond: perSecond, printed: map[denial]time.Time{}, leftOut: map[uint32]uint64{},
	}
}

// add prints the connection of a packet, unless it has done that within a minute: clients try several times.
func (d *deniedLines) add(event *bpf.DropEvent) {
	const most = 1 << 14 // connections to remember

	if d.now.Sub(d.second) >= time.Second {
		d.second, d.count = d.now, 0
	}
	if d.count >= d.perSecond {
		d.leftOut[event.Reason]++
		return
	}
	drop, err := d.describe(event)
	its := denial{drop.Reason, drop.Owner, drop.Protocol, drop.Source, drop.Destination}
	if at, ok := d.printed[its]; ok && d.now.Sub(at) < interval {
		return
	}
	if len(d.printed) >= most {
		clear(d.printed)
	}
	d.printed[its] = d.now
	d.count++
	d.err = errors.Join(d.err, err, d.print(drop))
}

// addLeftOut prints how many packets were left out since the last call, with those that the programs have not reported.
func (d *deniedLines) addLeftOut(unreported map[uint32]uint64) {
	for reason, packets := range unreported {
		d.leftOut[reason] += packets
	}
	if len(d.leftOut) > 0 {
		d.err = errors.Join(d.err, d.print(drops.LeftOutOf(d.leftOut)))
	}
	clear(d.leftOut)
}

func (d *deniedLines) print(line any) error {
	text, err := json.Marshal(line)
	if err == nil {
		_, err = d.out.Write(append(show.JSON(text), '\n'))
	}
	return err
}
