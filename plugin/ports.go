package plugin

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/ebpfnet/ebpfnet/maps"
)

// PortMapping is one wanted host port, before the container has addresses.
type PortMapping struct {
	HostAddr netip.Addr // invalid: any address, of both families
	HostPort uint16
	Port     uint16
	Protocol maps.Protocol
	Sources  []netip.Prefix // clients that it is for; none: all
}

// portSources is an element of args.cni.portSources: for whom a host port is.
type portSources struct {
	HostPort int      `json:"hostPort"`
	Protocol string   `json:"protocol"`
	Sources  []string `json:"sources"`
}

// portMapping is an element of runtimeConfig.portMappings. Runtimes differ in
// the case of the keys, which encoding/json does not mind.
type portMapping struct {
	HostPort      int    `json:"hostPort"`
	ContainerPort int    `json:"containerPort"`
	Protocol      string `json:"protocol"`
	HostIP        string `json:"hostIP"`
}

func parsePorts(asked []portMapping) ([]PortMapping, error) {
	var parsed []PortMapping
	seen := map[maps.HostPort]bool{}
	for i, mapping := range asked {
		key := fmt.Sprintf("runtimeConfig.portMappings[%d]", i)
		port, err := mapping.parse(key)
		if err != nil {
			return nil, err
		}
		for _, ipv4 := range port.families() {
			place := maps.HostPort{HostAddr: port.hostAddr(ipv4), HostPort: port.HostPort, Protocol: port.Protocol}
			if seen[place] {
				return nil, invalid(key+".hostPort", mapping.HostPort, "a port that is given once for an address and a protocol")
			}
			seen[place] = true
		}
		parsed = append(parsed, port)
	}
	return parsed, nil
}

// families says for each family that the mapping is for whether it is IPv4.
func (m PortMapping) families() []bool {
	if m.HostAddr.IsValid() {
		return []bool{m.HostAddr.Is4()}
	}
	return []bool{true, false}
}

func (m portMapping) parse(key string) (PortMapping, error) {
	port := PortMapping{HostPort: uint16(m.HostPort), Port: uint16(m.ContainerPort)}
	if m.HostPort < 1 || m.HostPort > 65535 {
		return port, invalid(key+".hostPort", m.HostPort, "a port from 1 to 65535")
	}
	if m.ContainerPort < 1 || m.ContainerPort > 65535 {
		return port, invalid(key+".containerPort", m.ContainerPort, "a port from 1 to 65535")
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
		return port, invalid(key+".hostIP", m.HostIP, "an IP address, or nothing for any")
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
		return 0, unsupported(key+".protocol", name, "ebpfnet maps tcp and udp")
	default:
		return 0, invalid(key+".protocol", name, `"tcp" or "udp"`)
	}
}

// addSources gives the mappings the clients that they are for. A list may be for a port that this
// container does not have: it can stand in the configuration of the whole network.
func addSources(ports []PortMapping, lists []portSources) error {
	for i, list := range lists {
		key := fmt.Sprintf("args.cni.portSources[%d]", i)
		protocol, err := parseProtocol(key, list.Protocol)
		if err != nil {
			return err
		}
		sources, err := parsePrefixes(key+".sources", list.Sources)
		if err != nil {
			return err
		}
		if len(sources) == 0 {
			return invalid(key+".sources", list.Sources, "the networks of clients, like 192.0.2.0/24")
		}
		if list.HostPort < 1 || list.HostPort > 65535 {
			return invalid(key+".hostPort", list.HostPort, "a port from 1 to 65535")
		}
		for i := range ports {
			if int(ports[i].HostPort) == list.HostPort && ports[i].Protocol == protocol {
				ports[i].Sources = append(ports[i].Sources, sources...)
			}
		}
	}
	return nil
}

// entriesFor returns the entries of a mapping for a container's addresses: one
// for each family that the mapping names and the container has.
func (m PortMapping) entriesFor(endpoints []maps.Endpoint) []maps.HostPort {
	var ports []maps.HostPort
	used := map[bool]bool{} // by family: the first address serves, as with portmap
	for _, endpoint := range endpoints {
		ipv4 := endpoint.Addr.Is4()
		if used[ipv4] || !slices.Contains(m.families(), ipv4) {
			continue
		}
		used[ipv4] = true
		ports = append(ports, maps.HostPort{
			HostAddr:      m.hostAddr(ipv4),
			HostPort:      m.HostPort,
			Protocol:      m.Protocol,
			ContainerAddr: endpoint.Addr,
			ContainerPort: m.Port,
			SrcRanges:     maps.PrefixSetOf(m.Sources),
			Owner:         endpoint.Owner,
			Network:       endpoint.Network,
		})
	}
	return ports
}

func (m PortMapping) hostAddr(ipv4 bool) netip.Addr {
	switch {
	case m.HostAddr.IsValid():
		return m.HostAddr
	case ipv4:
		return netip.IPv4Unspecified()
	default:
		return netip.IPv6Unspecified()
	}
}
