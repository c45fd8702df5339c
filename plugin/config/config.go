// Package config parses and checks everything that a runtime sends with a call: the configuration
// on stdin, what the runtime adds to it, and the environment. ebpfnetctl's settings, which change
// some of the same keys, are parsed here, too.
//
// Nothing here has side effects: no file is written, only that of the setting "policy" is read, and the
// kernel is not asked.
package config

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"net"
	"net/netip"
	"path"
	"slices"
	"strings"

	cnitypes "github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"

	"github.com/ebpfnet/ebpfnet/ipam"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/cnierr"
	"github.com/ebpfnet/ebpfnet/plugin/link"
	"github.com/ebpfnet/ebpfnet/plugin/policy"
	"github.com/ebpfnet/ebpfnet/plugin/record"
	"github.com/ebpfnet/ebpfnet/plugin/show"
)

// PluginType is the type of our plugin in a network configuration.
const PluginType = "ebpfnet"

// Config is the checked configuration of one call.
type Config struct {
	CNIVersion string
	Attachment maps.Attachment // only the network for STATUS and GC

	Masq     Masq
	FastPath maps.FastPath // "": the default, see FastPathFor
	MaxFlows uint32        // 0: derived from the host's memory
	Uplinks  []string      // name patterns; nil: chosen by routes and kinds
	MTU      int           // 0: that of the route to the outside
	BigTCP   bool
	Device   link.Kind
	// AntiSpoof restricts the container to its own MAC and IP addresses.
	AntiSpoof bool
	// Ingress selects the other containers that may open connections to this one.
	Ingress   policy.IngressPolicy
	Policy    *policy.Policy // in place of Ingress; nil: none
	Audit     bool           // what these do not admit is reported, and passes
	Bandwidth link.Bandwidth
	IPAM      *ipam.Config // nil: no addresses, or those of Delegate
	Delegate  string       // the IPAM plugin to execute; "": none
	// DefaultRoutes adds a default route for each family that has an address and no such route.
	DefaultRoutes bool
	DNS           cnitypes.DNS
	MAC           net.HardwareAddr // nil: derived from the attachment
	HostPorts     []HostPort
	Tuning        link.Tuning
	Sysctls       []string // the names in Tuning as the configuration has them

	DataDir    string // directory of the records
	Cluster    string // path of the node agent's state; "": the host is in no cluster
	Pod        Pod
	RefusesPod bool // one whose policies the node agent has not written; else it can only talk to its node
	Aliases    []string
	CgroupPath string
	Labels     []record.Label

	PrevResult *types100.Result // for CHECK, and for ADD after another plugin
}

// Masq selects the container's traffic that is masqueraded.
type Masq struct {
	IPv4, IPv6 bool
	Tunnels    bool           // tunnels are masqueraded, too
	NonMasq    []netip.Prefix // destinations that are not masqueraded
}

// For reports whether traffic from an address is masqueraded.
func (m Masq) For(addr netip.Addr) bool {
	if addr.Is4() {
		return m.IPv4
	}
	return m.IPv6
}

// TunnelsFor reports whether tunnels from an address are masqueraded.
func (m Masq) TunnelsFor(addr netip.Addr) bool { return m.Tunnels && m.For(addr) }

// NonMasqFor returns the non-masquerade CIDRs of an address's family.
func (m Masq) NonMasqFor(addr netip.Addr) (prefixes []netip.Prefix) {
	for _, prefix := range m.NonMasq {
		if prefix.Addr().Is4() == addr.Is4() {
			prefixes = append(prefixes, prefix)
		}
	}
	return prefixes
}

// Pod is the pod of a cluster that a runtime connects. Other containers have no namespace.
type Pod struct{ Namespace, Name, UID string }

// The values of policyUnknown.
const (
	holdPod   = "hold"
	refusePod = "fail"
)

// netConf is the configuration as it is written. Its json tags are the known keys.
type netConf struct {
	// Keys of the specification that only runtimes use.
	Type         json.RawMessage `json:"type"`
	Capabilities json.RawMessage `json:"capabilities"`

	CNIVersion string          `json:"cniVersion"`
	Name       string          `json:"name"`
	IPMasq     bool            `json:"ipMasq"`
	IPMasq4    *bool           `json:"ipMasq4"`
	IPMasq6    *bool           `json:"ipMasq6"`
	NonMasq    []string        `json:"nonMasqueradeCIDRs"`
	Tunnels    bool            `json:"masqTunnels"`
	FastPath   maps.FastPath   `json:"fastPath"`
	MaxFlows   int64           `json:"maxFlows"`
	Uplinks    []string        `json:"uplinks"`
	MTU        int             `json:"mtu"`
	BigTCP     json.RawMessage `json:"bigTCP"` // a mode, or a bool
	Device     link.Kind       `json:"device"`
	AntiSpoof  *bool           `json:"antiSpoof"`
	Ingress    string          `json:"ingressPolicy"`
	Policy     json.RawMessage `json:"policy"`
	PolicyMode string          `json:"policyMode"`
	bandwidthConf
	IPAM    json.RawMessage `json:"ipam"`
	DNS     cnitypes.DNS    `json:"dns"`
	DataDir string          `json:"dataDir"`
	Cluster string          `json:"cluster"`
	Unknown string          `json:"policyUnknown"`
	logConf
	IsDefaultGateway bool `json:"isDefaultGateway"` // bridge's

	Sysctl   map[string]string `json:"sysctl"`
	Promisc  bool              `json:"promisc"`
	AllMulti *bool             `json:"allmulti"`
	TxQLen   *int              `json:"txQLen"`

	Args struct {
		CNI struct {
			IPs         []string       `json:"ips"`
			MAC         string         `json:"mac"`
			Labels      []record.Label `json:"labels"`
			PortSources []portSources  `json:"portSources"` // ours
		} `json:"cni"`
	} `json:"args"`
	RuntimeConfig struct {
		PortMappings []portMapping   `json:"portMappings"`
		IPRanges     json.RawMessage `json:"ipRanges"`
		IPs          []string        `json:"ips"`
		MAC          string          `json:"mac"`
		DNS          *runtimeDNS     `json:"dns"`
		Aliases      []string        `json:"aliases"`
		CgroupPath   string          `json:"cgroupPath"`
		Bandwidth    *bandwidthConf  `json:"bandwidth"`

		// Capabilities that ebpfnet cannot provide: refused, not ignored.
		InfinibandGUID json.RawMessage `json:"infinibandGUID"`
		DeviceID       json.RawMessage `json:"deviceID"`
	} `json:"runtimeConfig"`
	PrevResult map[string]any `json:"prevResult"`
}

// runtimeDNS is the dns capability of CONVENTIONS.md, whose keys differ from those of a result.
type runtimeDNS struct {
	Servers  []string `json:"servers"`
	Searches []string `json:"searches"`
	Options  []string `json:"options"`
}

// cniArgs is CNI_ARGS, which CONVENTIONS.md deprecates and runtimes send.
type cniArgs struct {
	cnitypes.CommonArgs
	IP                         cnitypes.UnmarshallableString
	MAC                        cnitypes.UnmarshallableString
	GATEWAY                    cnitypes.UnmarshallableString // for IPAM plugins that ask for it
	K8S_POD_NAMESPACE          cnitypes.UnmarshallableString
	K8S_POD_NAME               cnitypes.UnmarshallableString
	K8S_POD_UID                cnitypes.UnmarshallableString
	K8S_POD_INFRA_CONTAINER_ID cnitypes.UnmarshallableString
}

func (c *Call) parseArgs() (env cniArgs, err error) {
	if err := cnitypes.LoadArgs(c.Args, &env); err != nil {
		return env, cnierr.InvalidEnv("CNI_ARGS", c.Args, fmt.Sprintf("known keys, or IgnoreUnknown=1 (%v)", err))
	}
	return env, nil
}

// Parse parses the configuration of ADD, CHECK and STATUS. Its errors have codes.
func (c *Call) Parse() (*Config, error) {
	conf := &netConf{}
	if err := c.decode(conf); err != nil {
		return nil, err
	}
	if err := c.checkKeys(conf); err != nil {
		return nil, err
	}
	env, err := c.parseArgs()
	if err != nil {
		return nil, err
	}
	if err := c.checkIfName(); err != nil {
		return nil, err
	}
	if err := conf.check(); err != nil {
		return nil, err
	}
	config := &Config{
		CNIVersion: conf.CNIVersion,
		Attachment: c.attachment(conf.Name),
		MTU:        conf.MTU,
		Device:     conf.Device,
		FastPath:   conf.FastPath,
		AntiSpoof:  conf.AntiSpoof == nil || *conf.AntiSpoof,
		MaxFlows:   uint32(conf.MaxFlows),
		Uplinks:    conf.Uplinks,
		DNS:        conf.dns(),
		DataDir:    DataDir(conf.DataDir),
		Cluster:    conf.Cluster,
		Pod:        Pod{string(env.K8S_POD_NAMESPACE), string(env.K8S_POD_NAME), string(env.K8S_POD_UID)},
		RefusesPod: conf.Unknown == refusePod,
		Aliases:    conf.RuntimeConfig.Aliases,
		CgroupPath: conf.RuntimeConfig.CgroupPath,
		Labels:     conf.Args.CNI.Labels,

		DefaultRoutes: conf.IsDefaultGateway,
	}
	if config.Masq, err = conf.masq(); err != nil {
		return nil, err
	}
	if config.MAC, err = conf.mac(env); err != nil {
		return nil, err
	}
	if config.Tuning, config.Sysctls, err = conf.tuning(c.IfName); err != nil {
		return nil, err
	}
	if config.HostPorts, err = conf.hostPorts(); err != nil {
		return nil, err
	}
	if config.Bandwidth, err = conf.bandwidth(); err != nil {
		return nil, err
	}
	if config.BigTCP, err = parseBigTCP(conf.BigTCP); err != nil {
		return nil, err
	}
	if err := config.setPolicies(conf); err != nil {
		return nil, err
	}
	if config.IPAM, err = conf.ipam(env); err != nil {
		return nil, err
	}
	if config.Delegate, err = delegateType(conf.IPAM); err != nil {
		return nil, err
	}
	if config.PrevResult, err = parsePrevResult(conf.CNIVersion, conf.PrevResult); err != nil {
		return nil, err
	}
	return config, config.check()
}

func (c *Call) attachment(network string) maps.Attachment {
	return maps.Attachment{Network: network, ContainerID: c.ContainerID, IfName: c.IfName}
}

// checkIfName refuses what the kernel takes for a pattern, and what other tools may not print.
func (c *Call) checkIfName() error {
	if strings.Contains(c.IfName, "%") || show.Text(c.IfName) != c.IfName {
		return cnierr.InvalidEnv("CNI_IFNAME", c.IfName, "a printable name without %")
	}
	return nil
}

func (c *netConf) check() error {
	const (
		minMTU, largestMTU = 68, 65535     // RFC 791; the largest MTU of a veth
		minFlows, maxFlows = 1024, 1 << 24 // 1.7 GiB
	)
	for key, value := range map[string]json.RawMessage{
		"runtimeConfig.infinibandGUID": c.RuntimeConfig.InfinibandGUID,
		"runtimeConfig.deviceID":       c.RuntimeConfig.DeviceID,
	} {
		if len(value) > 0 && !bytes.Equal(value, []byte("null")) {
			return cnierr.Unsupported(key, value, "ebpfnet does not support this; remove the capability from the configuration")
		}
	}
	if c.Cluster != "" && !path.IsAbs(c.Cluster) {
		return cnierr.Invalid("cluster", c.Cluster, "the absolute path of the node agent's state")
	}
	if c.Unknown != "" && c.Unknown != holdPod && c.Unknown != refusePod {
		return cnierr.Invalid("policyUnknown", c.Unknown, `"hold" or "fail"`)
	}
	if c.DataDir != "" && !path.IsAbs(c.DataDir) {
		return cnierr.Invalid("dataDir", c.DataDir, "the absolute path of a directory")
	}
	if err := c.logConf.check(); err != nil {
		return err
	}
	if err := checkUplinks(c.Uplinks); err != nil {
		return err
	}
	if c.MTU != 0 && (c.MTU < minMTU || c.MTU > largestMTU) {
		return cnierr.Invalid("mtu", c.MTU, fmt.Sprintf("0 or a number from %d to %d", minMTU, largestMTU))
	}
	if c.MaxFlows != 0 && (c.MaxFlows < minFlows || c.MaxFlows > maxFlows) {
		return cnierr.Invalid("maxFlows", c.MaxFlows, fmt.Sprintf("0 or a number from %d to %d", minFlows, maxFlows))
	}
	if known := []maps.FastPath{"", maps.FastPathAuto, maps.FastPathEstablished, maps.FastPathAlways, maps.FastPathNever}; !slices.Contains(known, c.FastPath) {
		return cnierr.Invalid("fastPath", c.FastPath, `"auto", "established", "always" or "never"`)
	}
	if known := []link.Kind{"", link.Veth, link.Netkit, link.Auto}; !slices.Contains(known, c.Device) {
		return cnierr.Invalid("device", c.Device, `"veth", "netkit" or "auto"`)
	}
	return nil
}

// parseBigTCP reports whether TCP packets may be larger than 64 KiB.
func parseBigTCP(value json.RawMessage) (isAuto bool, err error) {
	switch string(value) {
	case "", "null", "true", `"auto"`:
		return true, nil
	case "false", `"never"`:
		return false, nil
	}
	return false, cnierr.Invalid("bigTCP", value, `"auto" or "never"`)
}

// checkUplinks refuses what no device can be called.
func checkUplinks(patterns []string) error {
	for i, pattern := range patterns {
		if _, err := path.Match(pattern, ""); pattern == "" || err != nil {
			return cnierr.Invalid(fmt.Sprintf("uplinks[%d]", i), pattern, "the name of a device, or a pattern like eth*")
		}
	}
	if patterns != nil && len(patterns) == 0 {
		return cnierr.Invalid("uplinks", []string{}, "at least one name; without the key ebpfnet chooses by routes and kinds")
	}
	return nil
}

func (c *Config) check() error {
	const minIPv6MTU = 1280 // RFC 8200, 5

	if c.IPAM == nil || c.MTU == 0 || c.MTU >= minIPv6MTU {
		return nil
	}
	for i, set := range c.IPAM.Ranges {
		if len(set) > 0 && set[0].Subnet.Addr().Is6() {
			return cnierr.Invalid("mtu", c.MTU, fmt.Sprintf("at least %d, because ipam.ranges[%d] is IPv6", minIPv6MTU, i))
		}
	}
	return nil
}

const interfaceOfOther = "after another plugin the interface belongs to that plugin"

// IsChained reports whether an ADD works on the interface that a plugin before it made. With ipam
// ebpfnet makes the interface itself, whatever came before.
func (c *Config) IsChained() bool { return c.PrevResult != nil && !c.HasIPAM() }

// HasIPAM reports whether the list's addresses are those of our plugin, or of one that it executes. Then our plugin is
// not behind the one that has made a container.
func (c *Config) HasIPAM() bool { return c.IPAM != nil || c.Delegate != "" }

// CheckPosition refuses what ADD cannot do at its place in the list: to make an interface that a plugin
// before it made, or on such an interface what only that plugin can do.
func (c *Config) CheckPosition() error {
	switch {
	case c.PrevResult == nil:
		return nil
	case c.HasIPAM() && InterfaceOf(c.PrevResult, c.Attachment.IfName) >= 0:
		return cnierr.Unsupported("prevResult.interfaces", c.Attachment.IfName,
			`a plugin before made it; with "ipam" ebpfnet makes the interface itself, without it ebpfnet works on that plugin's`)
	case c.HasIPAM():
		return nil
	case c.MTU != 0:
		return cnierr.Unsupported("mtu", c.MTU, interfaceOfOther)
	case c.Device != "":
		return cnierr.Unsupported("device", c.Device, interfaceOfOther)
	case c.FastPath != "" && c.FastPath != maps.FastPathNever:
		return cnierr.Unsupported("fastPath", c.FastPath, "after another plugin that plugin decides how packets travel")
	default:
		return nil
	}
}

// CheckChainedMAC refuses a MAC address that differs from the one that the other plugin has set.
func (c *Config) CheckChainedMAC(present net.HardwareAddr) error {
	if c.MAC == nil || bytes.Equal(c.MAC, present) {
		return nil
	}
	return cnierr.Unsupported("mac", c.MAC.String(), interfaceOfOther+", with the MAC "+present.String()+"; give the capability to that plugin")
}

// FastPathFor returns the configured fast path or the default. After another plugin the default is
// never, because that plugin decides how packets travel.
func (c *Config) FastPathFor(chained bool) maps.FastPath {
	switch {
	case c.FastPath != "":
		return c.FastPath
	case chained:
		return maps.FastPathNever
	default:
		return maps.FastPathAuto
	}
}

// ParseForRelease parses only what DEL and GC need, so that they can clean up after a
// configuration that ADD would refuse today.
func (c *Call) ParseForRelease() (*Config, error) {
	var conf struct {
		Name    string          `json:"name"`
		DataDir string          `json:"dataDir"`
		IPAM    json.RawMessage `json:"ipam"`
	}
	if err := c.decode(&conf); err != nil {
		return nil, err
	}
	config := &Config{Attachment: c.attachment(conf.Name), DataDir: DataDir(conf.DataDir)}
	if config.Delegate, _ = delegateType(conf.IPAM); config.Delegate == "" && isSection(conf.IPAM) {
		config.IPAM = reservationsOf(conf.Name, conf.IPAM)
	}
	return config, nil
}

// DataDir returns the directory that is asked for, or else the default.
func DataDir(asked string) string { return cmp.Or(asked, record.DefaultDir) }

func (c *netConf) masq() (masq Masq, err error) {
	masq.IPv4, masq.IPv6, masq.Tunnels = c.IPMasq, c.IPMasq, c.Tunnels
	if c.IPMasq4 != nil {
		masq.IPv4 = *c.IPMasq4
	}
	if c.IPMasq6 != nil {
		masq.IPv6 = *c.IPMasq6
	}
	masq.NonMasq, err = parsePrefixes("nonMasqueradeCIDRs", c.NonMasq)
	return masq, err
}

func parsePrefixes(key string, texts []string) (prefixes []netip.Prefix, err error) {
	for i, text := range texts {
		prefix, err := netip.ParsePrefix(text)
		if err != nil || prefix != prefix.Masked() || prefix.Addr().Is4In6() { // a mapped prefix belongs to neither family
			return nil, cnierr.Invalid(fmt.Sprintf("%s[%d]", key, i), text, "a network, like 10.0.0.0/8 or fd00::/8")
		}
		prefixes = append(prefixes, prefix)
	}
	return prefixes, nil
}

// dns returns the runtime's DNS settings, or else the configuration's.
func (c *netConf) dns() cnitypes.DNS {
	asked := c.RuntimeConfig.DNS
	if asked == nil {
		return c.DNS
	}
	return cnitypes.DNS{Nameservers: asked.Servers, Search: asked.Searches, Options: asked.Options}
}

// mac returns the first MAC address that is asked for, in the order of CONVENTIONS.md, or nil.
func (c *netConf) mac(env cniArgs) (net.HardwareAddr, error) {
	for _, asked := range []struct {
		key, value string
		invalid    func(key string, value any, expected string) error
	}{
		{"runtimeConfig.mac", c.RuntimeConfig.MAC, cnierr.Invalid},
		{"args.cni.mac", c.Args.CNI.MAC, cnierr.Invalid},
		{"CNI_ARGS MAC", string(env.MAC), cnierr.InvalidEnv},
	} {
		if asked.value == "" {
			continue
		}
		mac, err := net.ParseMAC(asked.value)
		if err != nil || len(mac) != 6 || mac[0]&1 != 0 || bytes.Equal(mac, make([]byte, 6)) {
			return nil, asked.invalid(asked.key, asked.value, "a unicast MAC address, like 02:00:00:00:00:01")
		}
		return mac, nil
	}
	return nil, nil
}
