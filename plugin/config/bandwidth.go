package config

import (
	"fmt"
	"math"

	"github.com/ebpfnet/ebpfnet/plugin/cnierr"
	"github.com/ebpfnet/ebpfnet/plugin/link"
)

// bandwidthConf has the bandwidth plugin's keys, in the configuration or in the capability. Rates
// are in bits per second, bursts in bits.
type bandwidthConf struct {
	IngressRate     *int64   `json:"ingressRate"`
	IngressBurst    *int64   `json:"ingressBurst"`
	EgressRate      *int64   `json:"egressRate"`
	EgressBurst     *int64   `json:"egressBurst"`
	UnshapedSubnets []string `json:"unshapedSubnets"`
}

func (c bandwidthConf) hasLimits() bool {
	return c.IngressRate != nil || c.IngressBurst != nil || c.EgressRate != nil || c.EgressBurst != nil
}

// bandwidth prefers the configuration's limits to those of the capability: as with the bandwidth
// plugin, a container does not get more than its network allows. The configuration's unshapedSubnets
// are for either.
func (c *netConf) bandwidth() (link.Bandwidth, error) {
	own, err := c.bandwidthConf.parse("")
	asked := c.RuntimeConfig.Bandwidth
	if err != nil || asked == nil || c.bandwidthConf.hasLimits() {
		return own, err
	}
	b, err := asked.parse("runtimeConfig.bandwidth.")
	b.Unshaped = append(own.Unshaped, b.Unshaped...)
	return b, err
}

func (c bandwidthConf) parse(prefix string) (b link.Bandwidth, err error) {
	if b.Ingress, err = parseLimit(prefix+"ingress", c.IngressRate, c.IngressBurst); err != nil {
		return b, err
	}
	if b.Egress, err = parseLimit(prefix+"egress", c.EgressRate, c.EgressBurst); err != nil {
		return b, err
	}
	b.Unshaped, err = parsePrefixes(prefix+"unshapedSubnets", c.UnshapedSubnets)
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
		return limit, cnierr.Invalid(key+"Burst", *burst, "no burst without "+key+"Rate")
	}
	return limit, nil
}

func parseRate(key string, rate int64) (uint64, error) {
	const least = 8000 // a frame in two seconds

	if rate != 0 && rate < least {
		return 0, cnierr.Invalid(key, rate, fmt.Sprintf("0 for no limit, or at least %d bits per second", least))
	}
	return uint64(rate), nil
}

func parseBurst(key string, burst int64) (uint64, error) {
	const most = math.MaxUint32 * 8 // bits

	if burst < 0 {
		return 0, cnierr.Invalid(key, burst, "a number of bits, or 0 for the smallest burst that works")
	}
	return min(uint64(burst), most), nil
}
