package plugin

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"

	"github.com/containernetworking/cni/pkg/skel"
	cnitypes "github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"

	"github.com/ebpfnet/ebpfnet/ipam"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/link"
	"github.com/ebpfnet/ebpfnet/plugin/record"
)

// Config is what one call asks for: the network's configuration and what the
// runtime adds to it, validated.
type Config struct {
	CNIVersion string
	Attachment maps.Attachment // the container's part is empty for STATUS and GC

	Masq     Masq
	FastPath maps.FastPath // "": see fastPath
	MaxFlows uint32        // 0: by the memory of the host
	Uplinks  uplinkNames
	MTU      int  // 0: that of the route to the outside
	BigTCP   bool // where kernel and uplinks have it
	Device   link.Kind
	// AntiSpoof lets the container send from its own MAC and addresses only.
	AntiSpoof bool
	// Ingress says which other containers may open connections to it.
	Ingress   maps.Policy
	Bandwidth record.Bandwidth
	IPAM      *ipam.Config // nil: no addresses, or those of Delegate
	Delegate  *delegate    // nil, or another plugin that gives the addresses
	DNS       cnitypes.DNS
	MAC       net.HardwareAddr // nil: derived from the attachment
	Ports     []PortMapping
	Tuning    link.Tuning

	DataDir    string // of the records
	Aliases    []string
	CgroupPath string
	Labels     []record.Label

	PrevResult *types100.Result // CHECK, and ADD after another plugin
}

// Masq says what of the container's traffic to the outside is masqueraded.
type Masq struct {
	IPv4, IPv6 bool
	Exempt     []netip.Prefix // destinations that are not
}

// Of returns whether an address is masqueraded.
func (m Masq) Of(addr netip.Addr) bool {
	if addr.Is4() {
		return m.IPv4
	}
	return m.IPv6
}

// ExemptFor returns the exempt destinations of an address's family.
func (m Masq) ExemptFor(addr netip.Addr) []netip.Prefix {
	var same []netip.Prefix
	for _, prefix := range m.Exempt {
		if prefix.Addr().Is4() == addr.Is4() {
			same = append(same, prefix)
		}
	}
	return same
}

// netConf is the configuration as it is written.
type netConf struct {
	CNIVersion string        `json:"cniVersion"`
	Name       string        `json:"name"`
	IPMasq     bool          `json:"ipMasq"`
	IPMasq4    *bool         `json:"ipMasq4"`
	IPMasq6    *bool         `json:"ipMasq6"`
	NonMasq    []string      `json:"nonMasqueradeCIDRs"`
	FastPath   maps.FastPath `json:"fastPath"`
	MaxFlows   int64         `json:"maxFlows"`
	Uplinks    uplinkNames   `json:"uplinks"`
	MTU        int           `json:"mtu"`
	BigTCP     *bool         `json:"bigTCP"`
	Device     string        `json:"device"`
	AntiSpoof  *bool         `json:"antiSpoof"`
	Ingress    string        `json:"ingressPolicy"`
	bandwidthConf
	IPAM     json.RawMessage `json:"ipam"`
	DNS      cnitypes.DNS    `json:"dns"`
	DataDir  string          `json:"dataDir"`
	LogFile  string          `json:"logFile"`
	LogLevel string          `json:"logLevel"`

	Sysctl   map[string]string `json:"sysctl"`
	Promisc  bool              `json:"promisc"`
	AllMulti *bool             `json:"allmulti"`
	TxQLen   *int              `json:"txQLen"`

	Args struct {
		CNI struct {
			IPs    []string       `json:"ips"`
			MAC    string         `json:"mac"`
			Labels []record.Label `json:"labels"`

			PortSources []portSources `json:"portSources"` // ours
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

		Bandwidth *bandwidthConf `json:"bandwidth"`

		// Capabilities that would be promises: refused, not ignored.
		InfinibandGUID json.RawMessage `json:"infinibandGUID"`
		DeviceID       json.RawMessage `json:"deviceID"`
	} `json:"runtimeConfig"`
	RawPrevResult map[string]any `json:"prevResult"`
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

// parseConfig reads the configuration of ADD, CHECK and STATUS.
func parseConfig(args *skel.CmdArgs) (*Config, error) {
	var conf netConf
	if err := decodeInto(args.StdinData, &conf); err != nil {
		return nil, err
	}
	if err := checkKeys(args.StdinData); err != nil {
		return nil, err
	}
	if err := checkCapabilities(&conf); err != nil {
		return nil, err
	}
	var env cniArgs
	if err := cnitypes.LoadArgs(args.Args, &env); err != nil {
		return nil, invalidEnv("CNI_ARGS", args.Args, fmt.Sprintf("known keys, or IgnoreUnknown=1 (%v)", err))
	}
	if strings.Contains(args.IfName, "%") { // a pattern, to the kernel
		return nil, invalidEnv("CNI_IFNAME", args.IfName, "a name without %")
	}
	config := &Config{
		CNIVersion: conf.CNIVersion,
		Attachment: maps.Attachment{Network: conf.Name, ContainerID: args.ContainerID, IfName: args.IfName},
		MTU:        conf.MTU,
		BigTCP:     conf.BigTCP == nil || *conf.BigTCP,
		Device:     link.Kind(conf.Device),
		FastPath:   conf.FastPath,
		AntiSpoof:  conf.AntiSpoof == nil || *conf.AntiSpoof,
		MaxFlows:   uint32(conf.MaxFlows),
		Uplinks:    conf.Uplinks,
		DNS:        conf.dns(),
		DataDir:    dataDir(conf.DataDir),
		Aliases:    conf.RuntimeConfig.Aliases,
		CgroupPath: conf.RuntimeConfig.CgroupPath,
		Labels:     conf.Args.CNI.Labels,
	}
	if err := (logConf{conf.LogFile, conf.LogLevel}).check(); err != nil {
		return nil, err
	}
	if err := conf.Uplinks.check(); err != nil {
		return nil, err
	}
	if err := checkMTU(conf.MTU); err != nil {
		return nil, err
	}
	if err := checkMaxFlows(conf.MaxFlows); err != nil {
		return nil, err
	}
	if err := checkFastPath(conf.FastPath); err != nil {
		return nil, err
	}
	if known := []link.Kind{"", link.Veth, link.Netkit, link.Auto}; !slices.Contains(known, config.Device) {
		return nil, invalid("device", conf.Device, `"veth", "netkit" or "auto"`)
	}
	var err error
	if config.Masq, err = conf.masq(); err != nil {
		return nil, err
	}
	if config.MAC, err = conf.mac(env); err != nil {
		return nil, err
	}
	if config.Tuning, err = conf.tuning(args.IfName); err != nil {
		return nil, err
	}
	if config.Ports, err = parsePorts(conf.RuntimeConfig.PortMappings); err != nil {
		return nil, err
	}
	if err := addSources(config.Ports, conf.Args.CNI.PortSources); err != nil {
		return nil, err
	}
	if config.Bandwidth, err = conf.bandwidth(); err != nil {
		return nil, err
	}
	if config.Ingress, err = parsePolicy(conf.Ingress); err != nil {
		return nil, err
	}
	if config.IPAM, err = conf.ipam(env); err != nil {
		return nil, err
	}
	if config.Delegate, err = delegated(conf.IPAM, args.StdinData); err != nil {
		return nil, err
	}
	if config.PrevResult, err = conf.prevResult(); err != nil {
		return nil, err
	}
	return config, config.check()
}

// check is for what no key alone is wrong about.
func (c *Config) check() error {
	const mostAlias = 255 // of the kernel's IFALIASZ

	if alias := aliasOf(c.Attachment); len(alias) > mostAlias {
		return invalid("name", c.Attachment.Network, fmt.Sprintf("%d characters less, for the alias of the host's device", len(alias)-mostAlias))
	}
	if c.IPAM == nil {
		return nil
	}
	for i, set := range c.IPAM.Ranges {
		const leastIPv6 = 1280 // RFC 8200, 5

		if len(set) > 0 && set[0].Subnet.Addr().Is6() && c.MTU != 0 && c.MTU < leastIPv6 {
			return invalid("mtu", c.MTU, fmt.Sprintf("at least %d, since ipam.ranges[%d] is IPv6", leastIPv6, i))
		}
	}
	return nil
}

// parseForRelease reads only what DEL and GC need, so that a configuration that
// ADD would refuse today can still be cleaned up after.
func parseForRelease(args *skel.CmdArgs) (*Config, error) {
	var conf struct {
		Name    string          `json:"name"`
		DataDir string          `json:"dataDir"`
		IPAM    json.RawMessage `json:"ipam"`
	}
	if err := decodeInto(args.StdinData, &conf); err != nil {
		return nil, err
	}
	config := &Config{
		Attachment: maps.Attachment{Network: conf.Name, ContainerID: args.ContainerID, IfName: args.IfName},
		DataDir:    dataDir(conf.DataDir),
	}
	if config.Delegate, _ = delegated(conf.IPAM, args.StdinData); config.Delegate != nil {
		return config, nil
	}
	if asksForAddresses(conf.IPAM) {
		config.IPAM = reservationsOf(conf.Name, conf.IPAM)
	}
	return config, nil
}

// reservationsOf is enough of an "ipam" to release addresses.
func reservationsOf(network string, section json.RawMessage) *ipam.Config {
	var conf struct {
		DataDir string `json:"dataDir"`
	}
	_ = json.Unmarshal(section, &conf) // what is not readable was never used
	return &ipam.Config{Network: network, DataDir: conf.DataDir}
}

func dataDir(asked string) string {
	if asked == "" {
		return record.DefaultDir
	}
	return asked
}

func checkCapabilities(conf *netConf) error {
	for key, value := range map[string]json.RawMessage{
		"runtimeConfig.infinibandGUID": conf.RuntimeConfig.InfinibandGUID,
		"runtimeConfig.deviceID":       conf.RuntimeConfig.DeviceID,
	} {
		if len(value) > 0 && !bytes.Equal(value, []byte("null")) {
			return unsupported(key, value, "ebpfnet cannot do that; take the capability out of the configuration")
		}
	}
	return nil
}

func parsePolicy(name string) (maps.Policy, error) {
	policy, known := maps.PolicyOf(cmp.Or(name, maps.Open.String()))
	if !known {
		return policy, invalid("ingressPolicy", name, `"open", "same-network" or "isolated"`)
	}
	return policy, nil
}

func checkMTU(mtu int) error {
	const least, most = 68, 65535 // RFC 791; the largest a veth takes
	if mtu != 0 && (mtu < least || mtu > most) {
		return invalid("mtu", mtu, fmt.Sprintf("0 or a number from %d to %d", least, most))
	}
	return nil
}

func checkMaxFlows(flows int64) error {
	const least, most = 1024, 1 << 24 // 4 GiB
	if flows != 0 && (flows < least || flows > most) {
		return invalid("maxFlows", flows, fmt.Sprintf("0 or a number from %d to %d", least, most))
	}
	return nil
}

func checkFastPath(value maps.FastPath) error {
	known := []maps.FastPath{"", maps.FastPathEstablished, maps.FastPathAlways, maps.FastPathNever}
	if !slices.Contains(known, value) {
		return invalid("fastPath", value, `"established", "always" or "never"`)
	}
	return nil
}

// fastPath is what was asked for, or the default. After another plugin the way of
// packets is that plugin's.
func (c *Config) fastPath(chained bool) maps.FastPath {
	switch {
	case c.FastPath != "":
		return c.FastPath
	case chained:
		return maps.FastPathNever
	default:
		return maps.FastPathEstablished
	}
}

func (c *netConf) masq() (Masq, error) {
	masq := Masq{IPv4: c.IPMasq, IPv6: c.IPMasq}
	if c.IPMasq4 != nil {
		masq.IPv4 = *c.IPMasq4
	}
	if c.IPMasq6 != nil {
		masq.IPv6 = *c.IPMasq6
	}
	var err error
	masq.Exempt, err = parsePrefixes("nonMasqueradeCIDRs", c.NonMasq)
	return masq, err
}

func parsePrefixes(key string, texts []string) (prefixes []netip.Prefix, err error) {
	for i, text := range texts {
		prefix, err := netip.ParsePrefix(text)
		if err != nil || prefix != prefix.Masked() || prefix.Addr().Is4In6() { // that would be of neither family
			return nil, invalid(fmt.Sprintf("%s[%d]", key, i), text, "a network, like 10.0.0.0/8 or fd00::/8")
		}
		prefixes = append(prefixes, prefix)
	}
	return prefixes, nil
}

// dns is that of the configuration, or what the runtime asked for instead.
func (c *netConf) dns() cnitypes.DNS {
	asked := c.RuntimeConfig.DNS
	if asked == nil {
		return c.DNS
	}
	return cnitypes.DNS{Nameservers: asked.Servers, Search: asked.Searches, Options: asked.Options}
}

// mac takes the first that is given, in the order of CONVENTIONS.md.
func (c *netConf) mac(env cniArgs) (net.HardwareAddr, error) {
	for _, asked := range []struct {
		key, value string
		invalid    func(key string, value any, expected string) error
	}{
		{"runtimeConfig.mac", c.RuntimeConfig.MAC, invalid},
		{"args.cni.mac", c.Args.CNI.MAC, invalid},
		{"CNI_ARGS MAC", string(env.MAC), invalidEnv},
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
