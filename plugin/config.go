package plugin

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"

	"github.com/containernetworking/cni/pkg/skel"
	cnitypes "github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	cniversion "github.com/containernetworking/cni/pkg/version"

	"github.com/ebpfnet/ebpfnet/ipam"
	"github.com/ebpfnet/ebpfnet/maps"
)

// Config is what one call asks for: the network's configuration and what the
// runtime adds to it, validated.
type Config struct {
	CNIVersion string
	Attachment maps.Attachment // the container's part is empty for STATUS and GC

	IPMasq bool
	MTU    int // 0: that of the route to the outside
	IPAM   *ipam.Config
	DNS    cnitypes.DNS
	MAC    net.HardwareAddr // nil: derived from the attachment
	Ports  []PortMapping

	PrevResult *types100.Result // CHECK only
}

// netConf is the configuration as it is written.
type netConf struct {
	CNIVersion string          `json:"cniVersion"`
	Name       string          `json:"name"`
	IPMasq     bool            `json:"ipMasq"`
	MTU        int             `json:"mtu"`
	IPAM       json.RawMessage `json:"ipam"`
	DNS        cnitypes.DNS    `json:"dns"`
	Args       struct {
		CNI struct {
			IPs []string `json:"ips"`
			MAC string   `json:"mac"`
		} `json:"cni"`
	} `json:"args"`
	RuntimeConfig struct {
		PortMappings []portMapping   `json:"portMappings"`
		IPRanges     json.RawMessage `json:"ipRanges"`
		IPs          []string        `json:"ips"`
		MAC          string          `json:"mac"`
		DNS          *runtimeDNS     `json:"dns"`

		// Capabilities that would be promises: refused, not ignored.
		Bandwidth      json.RawMessage `json:"bandwidth"`
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
	K8S_POD_NAMESPACE          cnitypes.UnmarshallableString
	K8S_POD_NAME               cnitypes.UnmarshallableString
	K8S_POD_UID                cnitypes.UnmarshallableString
	K8S_POD_INFRA_CONTAINER_ID cnitypes.UnmarshallableString
}

// knownKeys are those of the specification and ours. Any other is refused,
// since a misspelt ipMasq would be a network that works by half.
var knownKeys = []string{
	"cniVersion", "name", "type", "disableCheck", "disableGC", "capabilities", "args", "runtimeConfig",
	"prevResult", "ipMasq", "mtu", "ipam", "dns",
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
	config := &Config{
		CNIVersion: conf.CNIVersion,
		Attachment: maps.Attachment{Network: conf.Name, ContainerID: args.ContainerID, IfName: args.IfName},
		IPMasq:     conf.IPMasq,
		MTU:        conf.MTU,
		DNS:        conf.dns(),
	}
	if err := checkMTU(conf.MTU); err != nil {
		return nil, err
	}
	var err error
	if config.MAC, err = conf.mac(env); err != nil {
		return nil, err
	}
	if config.Ports, err = parsePorts(conf.RuntimeConfig.PortMappings); err != nil {
		return nil, err
	}
	if config.IPAM, err = conf.ipam(env); err != nil {
		return nil, err
	}
	if config.PrevResult, err = conf.prevResult(); err != nil {
		return nil, err
	}
	return config, nil
}

// parseForRelease reads only what DEL and GC need, so that a configuration that
// ADD would refuse today can still be cleaned up after.
func parseForRelease(args *skel.CmdArgs) (*Config, error) {
	var conf struct {
		Name string `json:"name"`
		IPAM struct {
			DataDir string `json:"dataDir"`
		} `json:"ipam"`
	}
	if err := decodeInto(args.StdinData, &conf); err != nil {
		return nil, err
	}
	return &Config{
		Attachment: maps.Attachment{Network: conf.Name, ContainerID: args.ContainerID, IfName: args.IfName},
		IPAM:       &ipam.Config{Network: conf.Name, DataDir: conf.IPAM.DataDir},
	}, nil
}

// decodeInto tells broken JSON from a value of the wrong type, and names its key.
func decodeInto(stdin []byte, conf any) error {
	err := json.Unmarshal(stdin, conf)
	var wrongType *json.UnmarshalTypeError
	if errors.As(err, &wrongType) {
		return invalid(wrongType.Field, []byte(wrongType.Value), "a value of type "+wrongType.Type.String())
	}
	if err != nil {
		return cnitypes.NewError(cnitypes.ErrDecodingFailure, "decode the network configuration: "+err.Error(), "")
	}
	return nil
}

// checkKeys lets keys with a dot or slash pass: they belong to somebody, as
// cni.dev/attachments does.
func checkKeys(stdin []byte) error {
	var all map[string]json.RawMessage
	if err := decodeInto(stdin, &all); err != nil {
		return err
	}
	for key, value := range all {
		if strings.ContainsAny(key, "./") || slices.Contains(knownKeys, key) {
			continue
		}
		return unsupported(key, []byte(value), "no such key; ebpfnet knows "+strings.Join(knownKeys, ", "))
	}
	return nil
}

func checkCapabilities(conf *netConf) error {
	for key, value := range map[string]json.RawMessage{
		"runtimeConfig.bandwidth":      conf.RuntimeConfig.Bandwidth,
		"runtimeConfig.infinibandGUID": conf.RuntimeConfig.InfinibandGUID,
		"runtimeConfig.deviceID":       conf.RuntimeConfig.DeviceID,
	} {
		if len(value) > 0 && !bytes.Equal(value, []byte("null")) {
			return unsupported(key, []byte(value), "ebpfnet cannot do that; take the capability out of the configuration")
		}
	}
	return nil
}

func checkMTU(mtu int) error {
	const least, most = 68, 65535 // RFC 791; the largest a veth takes
	if mtu != 0 && (mtu < least || mtu > most) {
		return invalid("mtu", mtu, fmt.Sprintf("0 or a number from %d to %d", least, most))
	}
	return nil
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
	for _, asked := range []struct{ key, value string }{
		{"runtimeConfig.mac", c.RuntimeConfig.MAC},
		{"args.cni.mac", c.Args.CNI.MAC},
		{"CNI_ARGS MAC", string(env.MAC)},
	} {
		if asked.value == "" {
			continue
		}
		mac, err := net.ParseMAC(asked.value)
		if err != nil || len(mac) != 6 || mac[0]&1 != 0 {
			return nil, invalid(asked.key, asked.value, "a unicast MAC address, like 02:00:00:00:00:01")
		}
		return mac, nil
	}
	return nil, nil
}

func (c *netConf) ipam(env cniArgs) (*ipam.Config, error) {
	var section struct {
		Type string `json:"type"`
	}
	if len(c.IPAM) == 0 {
		return nil, invalid("ipam", "", `an object, like {"type": "host-local", "ranges": [[{"subnet": "10.88.0.0/24"}]]}`)
	}
	if err := json.Unmarshal(c.IPAM, &section); err != nil {
		return nil, invalid("ipam", []byte(c.IPAM), "an object with a string \"type\"")
	}
	if section.Type != "host-local" {
		return nil, unsupported("ipam.type", section.Type, `ebpfnet knows "host-local" alone, and runs it itself`)
	}
	request := ipam.Request{Ranges: c.RuntimeConfig.IPRanges, IPs: c.RuntimeConfig.IPs}
	if len(request.IPs) == 0 {
		request.IPs = c.Args.CNI.IPs
	}
	if len(request.IPs) == 0 && env.IP != "" {
		request.IPs = strings.Split(string(env.IP), ",")
	}
	config, err := ipam.Parse(c.Name, c.IPAM, request)
	return config, cniError(err)
}

func (c *netConf) prevResult() (*types100.Result, error) {
	if c.RawPrevResult == nil {
		return nil, nil
	}
	conf := cnitypes.PluginConf{CNIVersion: c.CNIVersion, RawPrevResult: c.RawPrevResult}
	if err := cniversion.ParsePrevResult(&conf); err != nil {
		return nil, invalid("prevResult", c.RawPrevResult, "a result of version "+c.CNIVersion+" ("+err.Error()+")")
	}
	return types100.NewResultFromResult(conf.PrevResult)
}
