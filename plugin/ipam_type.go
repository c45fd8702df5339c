package plugin

import (
	"encoding/json"

	"github.com/ebpfnet/ebpfnet/ipam"
)

func (c *netConf) ipam(env cniArgs) (*ipam.Config, error) {
	kind, err := ipamType(c.IPAM)
	if err == nil && kind == "" && c.RawPrevResult == nil {
		err = c.checkNoAddresses(env)
	}
	if err != nil || kind != ownIPAM {
		return nil, err
	}
	conf := addressConf{Name: c.Name, IPAM: c.IPAM}
	conf.RuntimeConfig.IPRanges, conf.RuntimeConfig.IPs = c.RuntimeConfig.IPRanges, c.RuntimeConfig.IPs
	conf.Args.CNI.IPs = c.Args.CNI.IPs
	return conf.addresses(env)
}

// checkNoAddresses refuses what cannot be had without addresses.
func (c *netConf) checkNoAddresses(env cniArgs) error {
	const none = `none without addresses: an "ipam" section is missing`

	switch {
	case len(c.RuntimeConfig.PortMappings) > 0:
		return invalid("runtimeConfig.portMappings", c.RuntimeConfig.PortMappings, none)
	case len(c.RuntimeConfig.IPs) > 0:
		return invalid("runtimeConfig.ips", c.RuntimeConfig.IPs, none)
	case asksForAddresses(c.RuntimeConfig.IPRanges):
		return invalid("runtimeConfig.ipRanges", c.RuntimeConfig.IPRanges, none)
	case len(c.Args.CNI.IPs) > 0:
		return invalid("args.cni.ips", c.Args.CNI.IPs, none)
	case env.IP != "":
		return invalidEnv("CNI_ARGS IP", env.IP, none)
	default:
		return nil
	}
}

// ownIPAM is the type that ebpfnet runs itself.
const ownIPAM = "host-local"

// ipamType returns the type of an "ipam", "" for an interface without addresses.
func ipamType(section json.RawMessage) (string, error) {
	if !asksForAddresses(section) {
		return "", nil
	}
	var object struct {
		Type string `json:"type"`
	}
	if err := json.Unmarshal(section, &object); err != nil {
		return "", invalid("ipam", section, "an object with a string \"type\"")
	}
	if object.Type == "" {
		return "", invalid("ipam.type", "", `"host-local", or the name of another IPAM plugin`)
	}
	return object.Type, nil
}

// delegated returns the plugin that gives the addresses, or nil where that is us, or nobody.
func delegated(section json.RawMessage, stdin []byte) (*delegate, error) {
	kind, err := ipamType(section)
	if err != nil || kind == "" || kind == ownIPAM {
		return nil, err
	}
	return &delegate{kind: kind, stdin: stdin}, nil
}

// asksForAddresses is false of an "ipam" that is missing, null or {}: an interface
// without addresses, as the bridge plugin has it.
func asksForAddresses(section json.RawMessage) bool {
	var object map[string]any
	err := json.Unmarshal(section, &object)
	return len(section) > 0 && (err != nil || len(object) > 0)
}
