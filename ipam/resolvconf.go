package ipam

import (
	"fmt"
	"os"
	"strings"

	"github.com/containernetworking/cni/pkg/types"
)

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
