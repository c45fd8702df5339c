package firewall

import (
	"fmt"
	"net/netip"
	"strings"
)

// Manager is the tool that keeps rules: they are changed by it, or it undoes the change.
type Manager string

// The managers.
const (
	Nft       Manager = "nft"
	IPTables  Manager = "iptables"
	Legacy    Manager = "iptables-legacy"
	Firewalld Manager = "firewalld"
	UFW       Manager = "ufw"
	Docker    Manager = "docker"
)

// managerOf recognizes who keeps a ruleset by the names of its chains.
func managerOf(tool Manager, table string, chains map[string]*chain) Manager {
	if table == "firewalld" {
		return Firewalld
	}
	for name := range chains {
		switch {
		case strings.HasSuffix(name, " ufw-user-forward"), strings.HasSuffix(name, " ufw6-user-forward"):
			return UFW
		case strings.HasSuffix(name, " FORWARD_direct"):
			return Firewalld
		case strings.HasSuffix(name, " DOCKER-USER"):
			return Docker
		}
	}
	return tool
}

// Accept returns the command that lets the packets of a subnet pass where a verdict dropped them.
func (v Verdict) Accept(subnet netip.Prefix) string {
	ip, suffix := "ip", ""
	if subnet.Addr().Is6() {
		ip, suffix = "ip6", "6"
	}
	switch v.Manager {
	case Firewalld:
		return fmt.Sprintf("firewall-cmd --permanent --zone=trusted --add-source=%s && firewall-cmd --reload", subnet)
	case UFW:
		return fmt.Sprintf("ufw route allow from %s && ufw route allow to %s", subnet, subnet)
	case Docker:
		return fmt.Sprintf("ip%stables -I DOCKER-USER -s %s -j ACCEPT && ip%stables -I DOCKER-USER -d %s -j ACCEPT", suffix, subnet, suffix, subnet)
	case Nft:
		return fmt.Sprintf("nft insert rule %s %s saddr %s accept && nft insert rule %s %s daddr %s accept",
			v.Position, ip, subnet, v.Position, ip, subnet)
	default:
		tool := strings.Replace(string(v.Manager), "iptables", "ip"+suffix+"tables", 1)
		return fmt.Sprintf("%s -t %s -s %s -j ACCEPT && %s -t %s -d %s -j ACCEPT", tool, v.Position, subnet, tool, v.Position, subnet)
	}
}
