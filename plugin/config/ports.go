package config

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/cnierr"
)

// HostPort is a host port that the runtime asks for, before the container has addresses.
type HostPort struct {
	HostAddr      netip.Addr // invalid: any address of both families
	HostPort      uint16
	ContainerPort uint16
	Protocol      maps.Protocol
	SrcRanges     []netip.Prefix // networks of the clients that may use it; none: all clients
}

// portMapping is an element of runtimeConfig.portMappings. Runtimes differ in the case of the
// keys, and encoding/json ignores it.
type portMapping struct {
	HostPort      int    `json:"hostPort"`
	ContainerPort int    `json:"containerPort"`
	Protocol      string `json:"protocol"`
	HostIP        string `json:"hostIP"`
}

// portSources is an element of args.cni.portSources: the source ranges of one host port.
type portSources struct {
	HostPort int      `json:"hostPort"`
	Protocol string   `json:"protocol"`
	Sources  []string `json:"sources"`
}

func (c *netConf) hostPorts() ([]HostPort, error) {
	ports, err := parsePorts(c.RuntimeConfig.PortMappings)
	if err != nil {
		return nil, err
	}
	return ports, addSrcRanges(ports, c.Args.CNI.PortSources)
}

func parsePorts(asked []portMapping) ([]HostPort, error) {
	var parsed []HostPort
	seen := map[maps.HostPort]bool{}
	for i, mapping := range asked {
		key := fmt.Sprintf("runtimeConfig.portMappings[%d]", i)
		port, err := mapping.parse(key)
		if err != nil {
			return nil, err
		}
		for _, ipv4 := range port.families() {
			entry := maps.HostPort{HostAddr: port.hostAddr(ipv4), HostPort: port.HostPort, Protocol: port.Protocol}
			if seen[entry] {
				return nil, cnierr.Invalid(key+".hostPort", mapping.HostPort, "each port once per address and protocol")
			}
			seen[entry] = true
		}
		parsed = append(parsed, port)
	}
	return parsed, nil
}

// families returns, for each family of the port, whether it is IPv4.
func (p HostPort) families() []bool {
	if p.HostAddr.IsValid() {
		return []bool{p.HostAddr.Is4()}
	}
	return []bool{true, false}
}

func (m portMapping) parse(key string) (HostPort, error) {
	port := HostPort{HostPort: uint16(m.HostPort), ContainerPort: uint16(m.ContainerPort)}
	if m.HostPort < 1 || m.HostPort > 65535 {
		return port, cnierr.Invalid(key+".hostPort", m.HostPort, "a port from 1 to 65535")
	}
	if m.ContainerPort < 1 || m.ContainerPort > 65535 {
		return port, cnierr.Invalid(key+".containerPort", m.ContainerPort, "a port from 1 to 65535")
	}
	var err error
	if port.Protocol, err = parseProtocol(key, m.Protocol); err != nil {
		return port, err
	}
	if m.HostIP == "" {
		return port, nil
	}
	addr, err := netip.ParseAddr(m.HostIP)
	if err != nil || addr.Zone() != "" {
		return port, cnierr.Invalid(key+".hostIP", m.HostIP, "an IP address, or \"\" for any")
	}
	port.HostAddr = addr.Unmap()
	return port, nil
}

func parseProtocol(key, name string) (maps.Protocol, error) {
	switch strings.ToLower(name) {
	case "tcp", "":
		return maps.TCP, nil
	case "udp":
		return maps.UDP, nil
	case "sctp":
		return 0, cnierr.Unsupported(key+".protocol", name, "ebpfnet forwards tcp and udp")
	default:
		return 0, cnierr.Invalid(key+".protocol", name, `"tcp" or "udp"`)
	}
}

// addSrcRanges sets the source ranges of ports. A list may name a port that this container does
// not have: it can be in the configuration of the whole network.
func addSrcRanges(ports []HostPort, lists []portSources) error {
	for i, list := range lists {
		key := fmt.Sprintf("args.cni.portSources[%d]", i)
		protocol, err := parseProtocol(key, list.Protocol)
		if err != nil {
			return err
		}
		ranges, err := parsePrefixes(key+".sources", list.Sources)
		if err != nil {
			return err
		}
		if len(ranges) == 0 {
			return cnierr.Invalid(key+".sources", list.Sources, "client networks, like 192.0.2.0/24")
		}
		if list.HostPort < 1 || list.HostPort > 65535 {
			return cnierr.Invalid(key+".hostPort", list.HostPort, "a port from 1 to 65535")
		}
		for i := range ports {
			if int(ports[i].HostPort) == list.HostPort && ports[i].Protocol == protocol {
				ports[i].SrcRanges = append(ports[i].SrcRanges, ranges...)
			}
		}
	}
	return nil
}

// EntriesFor returns the map entries of a port for a container's addresses: one for each family
// that both have. As with portmap the first address of a family receives the traffic.
func (p HostPort) EntriesFor(endpoints []maps.Endpoint) (entries []maps.HostPort) {
	used := map[bool]bool{} // by family
	for _, endpoint := range endpoints {
		ipv4 := endpoint.Addr.Is4()
		if used[ipv4] || !slices.Contains(p.families(), ipv4) {
			continue
		}
		used[ipv4] = true
		entries = append(entries, maps.HostPort{
			HostAddr:      p.hostAddr(ipv4),
			HostPort:      p.HostPort,
			Protocol:      p.Protocol,
			ContainerAddr: endpoint.Addr,
			ContainerPort: p.ContainerPort,
			SrcRanges:     maps.PrefixSetOf(p.SrcRanges),
			Owner:         endpoint.Owner,
			Network:       endpoint.Network,
		})
	}
	return entries
}

func (p HostPort) hostAddr(ipv4 bool) netip.Addr {
	switch {
	case p.HostAddr.IsValid():
		return p.HostAddr
	case ipv4:
		return netip.IPv4Unspecified()
	default:
		return netip.IPv6Unspecified()
	}
}
