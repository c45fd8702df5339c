package admin

import (
	"context"
	"fmt"
	"time"
)

// Traffic is what an attachment sends and receives, per second.
type Traffic struct {
	Named
	Device     string  `json:"device"`
	InPackets  float64 `json:"inPacketsPerSecond"`
	InBytes    float64 `json:"inBytesPerSecond"`
	OutPackets float64 `json:"outPacketsPerSecond"`
	OutBytes   float64 `json:"outBytesPerSecond"`
	Drops      float64 `json:"dropsPerSecond"` // by our programs, in both directions
	Flows      int     `json:"flows"`          // that it owns
}

// MeasureTraffic measures for an interval what attachments send and receive. It leaves out those that come or go
// meanwhile.
func MeasureTraffic(ctx context.Context, attachments []*Attachment, interval time.Duration) (list []Traffic, err error) {
	began := time.Now()
	before, err := totalsByOwner(false)
	if err != nil {
		return nil, err
	}
	select {
	case <-ctx.Done():
		return nil, fmt.Errorf("interrupted: %w", ctx.Err())
	case <-time.After(interval):
	}
	elapsed := time.Since(began).Seconds()
	after, err := totalsByOwner(true)
	if err != nil {
		return nil, err
	}
	perSecond := func(now, then uint64) float64 { return float64(max(now, then)-then) / elapsed }
	for _, a := range attachments {
		now, isNow := after[a.Owner]
		then, wasThen := before[a.Owner]
		if !isNow || !wasThen || now.index != then.index {
			continue
		}
		list = append(list, Traffic{
			Named:      a.Named,
			Device:     a.Device,
			InPackets:  perSecond(now.InPackets, then.InPackets),
			InBytes:    perSecond(now.InBytes, then.InBytes),
			OutPackets: perSecond(now.OutPackets, then.OutPackets),
			OutBytes:   perSecond(now.OutBytes, then.OutBytes),
			Drops:      perSecond(now.dropped(), then.dropped()),
			Flows:      now.Flows,
		})
	}
	return list, nil
}

func totalsByOwner(withFlows bool) (map[string]ContainerTotals, error) {
	totals, err := ReadTotals(TotalsOptions{Containers: true, ContainerFlows: withFlows})
	if err != nil {
		return nil, err
	}
	byOwner := map[string]ContainerTotals{}
	for _, c := range totals.Containers {
		byOwner[c.Owner] = c
	}
	return byOwner, nil
}
