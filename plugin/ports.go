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
	seen := map[PortMapping]bool{}
	for i, mapping := range asked {
		key := fmt.Sprintf("runtimeConfig.portMappings[%d]", i)
		port, err := mapping.parse(key)
		if err != nil {
			return nil, err
		}
		for _, ipv4 := range port.families() {
			place := PortMapping{HostAddr: port.hostAddr(ipv4), HostPort: port.HostPort, Protocol: port.Protocol}
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
	switch strings.ToLower(m.Protocol) {
	case "tcp", "":
		port.Protocol = maps.TCP
	case "udp":
		port.Protocol = maps.UDP
	case "sctp":
		return port, unsupported(key+".protocol", m.Protocol, "ebpfnet maps tcp and udp")
	default:
		return port, invalid(key+".protocol", m.Protocol, `"tcp" or "udp"`)
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

// entriesFor returns the entries of a mapping for a container's addresses: one
// for each family that the mapping names and the container has.
func (m PortMapping) entriesFor(endpoints []maps.Endpoint) []maps.Port {
	var ports []maps.Port
	used := map[bool]bool{} // by family: the first address serves, as with portmap
	for _, endpoint := range endpoints {
		ipv4 := endpoint.Addr.Is4()
		if used[ipv4] || !slices.Contains(m.families(), ipv4) {
			continue
		}
		used[ipv4] = true
		ports = append(ports, maps.Port{
			HostAddr: m.hostAddr(ipv4),
			HostPort: m.HostPort,
			Protocol: m.Protocol,
			Addr:     endpoint.Addr,
			Port:     m.Port,
			Owner:    endpoint.Owner,
			Network:  endpoint.Network,
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
