package config

import (
	"encoding/json"
	"fmt"
	"strings"

	"github.com/ebpfnet/ebpfnet/ipam"
	"github.com/ebpfnet/ebpfnet/plugin/cnierr"
)

// ownIPAM is the IPAM type that ebpfnet runs itself.
const ownIPAM = "host-local"

type addressConf struct {
	Name string          `json:"name"`
	IPAM json.RawMessage `json:"ipam"`
	Args struct {
		CNI struct {
			IPs []string `json:"ips"`
		} `json:"cni"`
	} `json:"args"`
	RuntimeConfig struct {
		IPRanges json.RawMessage `json:"ipRanges"`
		IPs      []string        `json:"ips"`
	} `json:"runtimeConfig"`
}

// ParseAddresses parses the configuration of an IPAM plugin. The other keys belong to the plugin
// that calls it.
func (c *Call) ParseAddresses() (*ipam.Config, error) {
	var conf addressConf
	if err := c.decode(&conf); err != nil {
		return nil, err
	}
	if !isSection(conf.IPAM) {
		return nil, cnierr.Invalid("ipam", "", `an object, like {"type": "ebpfnet-ipam", "ranges": [[{"subnet": "10.84.0.0/24"}]]}`)
	}
	if err := c.checkObjects(ipamObjects(conf.IPAM)); err != nil {
		return nil, err
	}
	env, err := c.parseArgs()
	if err != nil {
		return nil, err
	}
	return conf.addresses(env)
}

// ParseReservations parses only what an IPAM plugin needs to release addresses.
func (c *Call) ParseReservations() (*ipam.Config, error) {
	var conf struct {
		Name string          `json:"name"`
		IPAM json.RawMessage `json:"ipam"`
	}
	if err := c.decode(&conf); err != nil {
		return nil, err
	}
	return reservationsOf(conf.Name, conf.IPAM), nil
}

// Reservations returns where the reservations are. The configuration may have lost its "ipam"
// since ADD.
func (c *Config) Reservations() *ipam.Config {
	if c.IPAM != nil {
		return c.IPAM
	}
	return &ipam.Config{Network: c.Attachment.Network}
}

// reservationsOf returns enough of an "ipam" section to release addresses.
func reservationsOf(network string, section json.RawMessage) *ipam.Config {
	var conf struct {
		DataDir string `json:"dataDir"`
	}
	_ = json.Unmarshal(section, &conf) // ADD never accepted what cannot be parsed
	return &ipam.Config{Network: network, DataDir: conf.DataDir}
}

// addresses uses the first request for addresses, in the order of CONVENTIONS.md.
func (c *addressConf) addresses(env cniArgs) (*ipam.Config, error) {
	static, err := ipam.Parse(c.Name, c.IPAM, ipam.Request{Ranges: c.RuntimeConfig.IPRanges})
	if err != nil {
		return nil, cnierr.WithCode(err)
	}
	for _, asked := range []struct {
		key     string
		value   []string
		invalid func(key string, value any, expected string) error
	}{
		{"runtimeConfig.ips", c.RuntimeConfig.IPs, cnierr.Invalid},
		{"args.cni.ips", c.Args.CNI.IPs, cnierr.Invalid},
		{"CNI_ARGS IP", split(string(env.IP)), cnierr.InvalidEnv},
	} {
		if len(asked.value) == 0 {
			continue
		}
		config, err := ipam.Parse(c.Name, c.IPAM, ipam.Request{Ranges: c.RuntimeConfig.IPRanges, IPs: asked.value})
		if err != nil {
			return nil, asked.invalid(asked.key, asked.value, fmt.Sprintf("addresses that the network can allocate (%v)", err))
		}
		return config, nil
	}
	return static, nil
}

func split(list string) []string {
	if list == "" {
		return nil
	}
	return strings.Split(list, ",")
}

// ipam returns nil where ebpfnet does not allocate addresses itself.
func (c *netConf) ipam(env cniArgs) (*ipam.Config, error) {
	kind, err := ipamType(c.IPAM)
	if err == nil && kind == "" && c.PrevResult == nil {
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

// checkNoAddresses refuses requests that need an address where the container gets none.
func (c *netConf) checkNoAddresses(env cniArgs) error {
	const none = `none without addresses: the "ipam" section is missing`

	switch {
	case len(c.RuntimeConfig.PortMappings) > 0:
		return cnierr.Invalid("runtimeConfig.portMappings", c.RuntimeConfig.PortMappings, none)
	case len(c.RuntimeConfig.IPs) > 0:
		return cnierr.Invalid("runtimeConfig.ips", c.RuntimeConfig.IPs, none)
	case isSection(c.RuntimeConfig.IPRanges):
		return cnierr.Invalid("runtimeConfig.ipRanges", c.RuntimeConfig.IPRanges, none)
	case len(c.Args.CNI.IPs) > 0:
		return cnierr.Invalid("args.cni.ips", c.Args.CNI.IPs, none)
	case env.IP != "":
		return cnierr.InvalidEnv("CNI_ARGS IP", env.IP, none)
	default:
		return nil
	}
}

// delegateType returns the IPAM plugin to execute, or "" where ebpfnet allocates addresses itself
// or the container gets none.
func delegateType(section json.RawMessage) (string, error) {
	kind, err := ipamType(section)
	if err != nil || kind == ownIPAM {
		return "", err
	}
	if kind == PluginType { // it would execute itself without end
		return "", cnierr.Invalid("ipam.type", kind, `"host-local", which ebpfnet has built in, or another IPAM plugin`)
	}
	return kind, nil
}

// ipamType returns the type of an "ipam" section, or "" for an interface without addresses.
func ipamType(section json.RawMessage) (string, error) {
	if !isSection(section) {
		return "", nil
	}
	var object struct {
		Type string `json:"type"`
	}
	if err := json.Unmarshal(section, &object); err != nil {
		return "", cnierr.Invalid("ipam", section, "an object with a string \"type\"")
	}
	if object.Type == "" {
		return "", cnierr.Invalid("ipam.type", "", `"host-local", or the name of another IPAM plugin`)
	}
	return object.Type, nil
}

// isSection returns false for one that is missing, null or {}. As with the bridge plugin these
// mean an interface without addresses.
func isSection(section json.RawMessage) bool {
	var object map[string]any
	err := json.Unmarshal(section, &object)
	return len(section) > 0 && (err != nil || len(object) > 0)
}
