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
		for _, hostAddr := range port.hostAddrs() {
			entry := maps.HostPort{HostAddr: hostAddr, HostPort: port.HostPort, Protocol: port.Protocol}
			if seen[entry] {
				return nil, cnierr.Invalid(key+".hostPort", mapping.HostPort, "each port once per address and protocol")
			}
			seen[entry] = true
		}
		parsed = append(parsed, port)
	}
	return parsed, nil
}

// hostAddrs returns the port's address on the host for each family that it has.
func (p HostPort) hostAddrs() []netip.Addr {
	if p.HostAddr.IsValid() {
		return []netip.Addr{p.HostAddr}
	}
	return []netip.Addr{netip.IPv4Unspecified(), netip.IPv6Unspecified()}
}

func parsePort(key string, port int) (uint16, error) {
	if port < 1 || port > 65535 {
		return 0, cnierr.Invalid(key, port, "a port from 1 to 65535")
	}
	return uint16(port), nil
}

func (m portMapping) parse(key string) (port HostPort, err error) {
	if port.HostPort, err = parsePort(key+".hostPort", m.HostPort); err != nil {
		return port, err
	}
	if port.ContainerPort, err = parsePort(key+".containerPort", m.ContainerPort); err != nil {
		return port, err
	}
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
		hostPort, err := parsePort(key+".hostPort", list.HostPort)
		if err != nil {
			return err
		}
		for i := range ports {
			if ports[i].HostPort == hostPort && ports[i].Protocol == protocol {
				ports[i].SrcRanges = append(ports[i].SrcRanges, ranges...)
			}
		}
	}
	return nil
}

// HostPortsFor returns the map entries of all host ports for a container's addresses.
func (c *Config) HostPortsFor(endpoints []maps.Endpoint) (entries []maps.HostPort) {
	for _, port := range c.HostPorts {
		entries = append(entries, port.entriesFor(endpoints)...)
	}
	return entries
}

// entriesFor returns the map entries of a port: one for each family that both it and the addresses have. As with portmap
// the first address of a family receives the traffic.
func (p HostPort) entriesFor(endpoints []maps.Endpoint) (entries []maps.HostPort) {
	for _, hostAddr := range p.hostAddrs() {
		first := slices.IndexFunc(endpoints, func(e maps.Endpoint) bool { return e.Addr.Is4() == hostAddr.Is4() })
		if first < 0 {
			continue
		}
		entries = append(entries, maps.HostPort{
			HostAddr:      hostAddr,
			HostPort:      p.HostPort,
			Protocol:      p.Protocol,
			ContainerAddr: endpoints[first].Addr,
			ContainerPort: p.ContainerPort,
			SrcRanges:     maps.PrefixSetOf(p.SrcRanges),
			Owner:         endpoints[first].Owner,
			Network:       endpoints[first].Network,
		})
	}
	return entries
}
