package ipam

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/cni/pkg/utils"
)

// ErrConfig is wrapped by all errors that a change of the configuration can fix. The
// message names the key, its value and the expected one.
var ErrConfig = errors.New("invalid configuration")

const defaultDataDir = "/var/lib/cni/networks"

// Request is what the runtime adds to the static configuration.
type Request struct {
	// Ranges is runtimeConfig.ipRanges, in the format of host-local's ranges, or nil.
	// These come before the configured ranges.
	Ranges json.RawMessage
	// IPs are the requested addresses: those of runtimeConfig.ips, args.cni.ips and
	// CNI_ARGS. A prefix length is allowed and ignored: the subnet's applies.
	IPs []string
}

// Config is host-local's configuration, validated and normalized. Network and DataDir
// suffice for every method of Pool except Reserve, Replace and Available, so DEL does not
// depend on ranges that may have changed since ADD.
type Config struct {
	Network string
	DataDir string
	// Ranges gives each attachment one address per set.
	Ranges []RangeSet
	// Requested has one element per range set; the zero Addr requests none.
	Requested []netip.Addr
	Routes    []*types.Route
	// ResolvConf is the path of a resolv.conf(5) file to report as DNS, or "".
	ResolvConf string
}

// HasIPv6 reports whether the network assigns IPv6 addresses.
func (c *Config) HasIPv6() bool {
	return slices.ContainsFunc(c.Ranges, func(set RangeSet) bool {
		return len(set) > 0 && set[0].Subnet.Addr().Is6()
	})
}

// Subnets returns the subnets of all ranges.
func (c *Config) Subnets() (subnets []netip.Prefix) {
	for _, r := range slices.Concat(c.Ranges...) {
		subnets = append(subnets, r.Subnet)
	}
	return subnets
}

// Dir returns the directory of the network's reservations.
func (c *Config) Dir() string {
	dataDir := c.DataDir
	if dataDir == "" {
		dataDir = defaultDataDir
	}
	return filepath.Join(dataDir, c.Network)
}

// Parse reads the "ipam" object of a network configuration as host-local does: it
// ignores unknown keys, and the runtime's ranges come first, then the legacy single
// range, then "ranges". All errors wrap ErrConfig.
func Parse(network string, section json.RawMessage, req Request) (*Config, error) {
	if err := checkNetwork(network); err != nil {
		return nil, err
	}
	raw, err := decode[rawSection]("ipam", section, "an object")
	if err != nil {
		return nil, err
	}
	dataDir, err := decode[string]("ipam.dataDir", raw.DataDir, "a string")
	if err != nil {
		return nil, err
	}
	if dataDir != "" && !filepath.IsAbs(dataDir) {
		return nil, configErrorf("ipam.dataDir", quote(dataDir), "expected the absolute path of a directory")
	}
	resolvConf, err := decode[string]("ipam.resolvConf", raw.ResolvConf, "a string")
	if err != nil {
		return nil, err
	}
	routes, err := parseRoutes("ipam.routes", raw.Routes)
	if err != nil {
		return nil, err
	}
	ranges, err := parseAllRanges(raw, req.Ranges)
	if err != nil {
		return nil, err
	}
	requested, err := assignRequested(req.IPs, ranges)
	if err != nil {
		return nil, err
	}
	return &Config{
		Network:    network,
		DataDir:    dataDir,
		Ranges:     ranges,
		Requested:  requested,
		Routes:     routes,
		ResolvConf: resolvConf,
	}, nil
}

// checkNetwork enforces the CNI specification's rule for network names, which also makes
// them safe as names of directories.
func checkNetwork(name string) error {
	const maxFileName = 255
	if len(name) > maxFileName || utils.ValidateNetworkName(name) != nil {
		return configErrorf("name", quote(name), "expected an alphanumeric character, then alphanumerics, '_', '.' or '-', %d in all at most", maxFileName)
	}
	return nil
}

// parseAllRanges joins the ranges of all three sources, in host-local's order.
func parseAllRanges(raw rawSection, fromRuntime json.RawMessage) ([]RangeSet, error) {
	keyed, err := parseRangeSets("runtimeConfig.ipRanges", fromRuntime)
	if err != nil {
		return nil, err
	}
	legacy, err := parseLegacyRange(raw.rawRange)
	if err != nil {
		return nil, err
	}
	configured, err := parseRangeSets("ipam.ranges", raw.Ranges)
	if err != nil {
		return nil, err
	}
	keyed = slices.Concat(keyed, legacy, configured)

	if len(keyed) == 0 {
		return nil, fmt.Errorf(`%w: ipam.ranges: missing; expected for example [[{"subnet": "10.1.0.0/16"}]]`, ErrConfig)
	}
	if err := refuseOverlap(slices.Concat(keyed...)); err != nil {
		return nil, err
	}
	sets := make([]RangeSet, len(keyed))
	for i, ranges := range keyed {
		for _, r := range ranges {
			sets[i] = append(sets[i], r.Range)
		}
	}
	return sets, nil
}

// assignRequested assigns each requested address to the range set that contains it. As
// with host-local, a set takes at most one, and every address needs a set.
func assignRequested(texts []string, sets []RangeSet) ([]netip.Addr, error) {
	const key = "requested address"
	requested := make([]netip.Addr, len(sets))
	for _, text := range texts {
		addr, err := parseRequested(text)
		if err != nil {
			return nil, configErrorf(key, quote(text), "expected an IP address, with or without a prefix length")
		}
		i := slices.IndexFunc(sets, func(s RangeSet) bool { return s.contains(addr) })
		switch {
		case i < 0:
			return nil, configErrorf(key, quote(text), "expected an address in one of %v", sets)
		case sets[i].isGateway(addr):
			return nil, configErrorf(key, quote(text), "expected an address other than a gateway's")
		case requested[i].IsValid() && requested[i] != addr:
			return nil, configErrorf(key, quote(text), "range set %d already has requested address %s; expected one per set", i, requested[i])
		}
		requested[i] = addr
	}
	return requested, nil
}

func parseRequested(text string) (netip.Addr, error) {
	if prefix, err := netip.ParsePrefix(text); err == nil {
		return prefix.Addr().Unmap(), nil
	}
	return parseAddr(text)
}

// readResolvConf reads a resolv.conf(5) file; it returns the zero DNS if path is "".
func readResolvConf(path string) (types.DNS, error) {
	if path == "" {
		return types.DNS{}, nil
	}
	content, err := os.ReadFile(path)
	if err != nil {
		return types.DNS{}, fmt.Errorf("read resolvConf: %w", err)
	}
	return parseResolvConf(string(content)), nil
}

// parseResolvConf reads as host-local does: repeated keys add up, except that the last
// domain counts, and unknown keys are ignored. (A comment begins with '#' or ';', so it
// never equals a key.)
func parseResolvConf(content string) types.DNS {
	var dns types.DNS
	for line := range strings.Lines(content) {
		fields := strings.Fields(line)
		if len(fields) < 2 {
			continue
		}
		values := fields[1:]
		switch fields[0] {
		case "nameserver":
			dns.Nameservers = append(dns.Nameservers, values[0])
		case "domain":
			dns.Domain = values[0]
		case "search":
			dns.Search = append(dns.Search, values...)
		case "options":
			dns.Options = append(dns.Options, values...)
		}
	}
	return dns
}
