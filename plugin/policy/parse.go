package policy

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"strconv"
	"strings"

	"github.com/containernetworking/cni/pkg/utils"

	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/cnierr"
)

// Parse parses and checks the value of the key "policy". Its errors have codes, and name the place.
func Parse(text json.RawMessage) (*Policy, error) {
	if err := json.Unmarshal(text, new(any)); err != nil {
		return nil, cnierr.InvalidAt("policy", err.Error())
	}
	keys, err := object("policy", text, "ingress", "egress", "internal", "host")
	if err != nil {
		return nil, err
	}
	p := &Policy{}
	if p.Internal, err = boolean("policy.internal", keys["internal"], false); err != nil {
		return nil, err
	}
	if p.Host, err = boolean("policy.host", keys["host"], true); err != nil {
		return nil, err
	}
	if p.Ingress, err = p.rules("policy.ingress", keys["ingress"], "from"); err != nil {
		return nil, err
	}
	if p.Egress, err = p.rules("policy.egress", keys["egress"], "to"); err != nil {
		return nil, err
	}
	return p, nil
}

// rules parses the list of a direction, whose rules name their peers by from or to.
func (p *Policy) rules(place string, text json.RawMessage, fromOrTo string) ([]Rule, error) {
	if text == nil {
		return nil, nil
	}
	parsed, err := list(place, text, func(place string, text json.RawMessage) (r Rule, err error) {
		keys, err := object(place, text, fromOrTo, "ports")
		if err != nil {
			return r, err
		}
		if r.Peers, err = list(place+"."+fromOrTo, keys[fromOrTo], p.peer); err != nil {
			return r, err
		}
		r.Ports, err = list(place+".ports", keys["ports"], ports)
		return r, err
	})
	if err != nil {
		return nil, err
	}
	if _, fits := p.CompileRules(parsed, ""); !fits {
		return nil, cnierr.InvalidAt(place, fmt.Sprintf(
			"more than %d combinations of a peer and a port, of which a range of ports can have 30", MaxEntries))
	}
	return parsed, nil
}

const onePeer = "expected exactly one of cidr, sameNetwork, network"

func (p *Policy) peer(place string, text json.RawMessage) (peer Peer, err error) {
	keys, err := object(place, text, "cidr", "except", "sameNetwork", "network", "container")
	if err != nil {
		return peer, err
	}
	if name := keys["container"]; name != nil {
		return peer, cnierr.Unsupported(place+".container", name, "containers cannot be named yet; "+onePeer)
	}
	kinds := 0
	for _, kind := range []string{"cidr", "sameNetwork", "network"} {
		if keys[kind] == nil {
			continue
		}
		kinds++
		if p.Internal && kind != "sameNetwork" {
			return peer, cnierr.InvalidAt(place+"."+kind, `with "internal", a peer can only be {"sameNetwork": true}`)
		}
	}
	if kinds != 1 {
		return peer, cnierr.InvalidAt(place, onePeer)
	}
	switch {
	case keys["cidr"] != nil:
		return cidrPeer(place, keys["cidr"], keys["except"])
	case keys["except"] != nil:
		return peer, cnierr.InvalidAt(place+".except", "there is no cidr")
	case keys["sameNetwork"] != nil:
		if peer.SameNetwork, err = boolean(place+".sameNetwork", keys["sameNetwork"], true); err == nil && !peer.SameNetwork {
			err = cnierr.Invalid(place+".sameNetwork", false, "true")
		}
	default:
		peer.Network, err = networkName(place+".network", keys["network"])
	}
	return peer, err
}

func cidrPeer(place string, text, excepts json.RawMessage) (peer Peer, err error) {
	if peer.CIDR, err = prefix(place+".cidr", text); err != nil {
		return peer, err
	}
	peer.Except, err = list(place+".except", excepts, func(place string, text json.RawMessage) (netip.Prefix, error) {
		except, err := prefix(place, text)
		if err == nil && (!contains(peer.CIDR, except) || except == peer.CIDR) {
			err = cnierr.InvalidAt(place, fmt.Sprintf("%s is not a part of %s", except, peer.CIDR))
		}
		return except, err
	})
	return peer, err
}

func networkName(place string, text json.RawMessage) (name string, err error) {
	if name, err = stringOf(place, text); err != nil {
		return name, err
	}
	if utils.ValidateNetworkName(name) != nil {
		err = cnierr.Invalid(place, name, "the name of a network")
	}
	return name, err
}

// prefix parses a network. Host bits are refused, because they may be a slip in the length.
func prefix(place string, text json.RawMessage) (netip.Prefix, error) {
	value, err := stringOf(place, text)
	if err != nil {
		return netip.Prefix{}, err
	}
	if addr, err := netip.ParseAddr(value); err == nil && addr.Zone() == "" {
		addr = addr.Unmap()
		return netip.Prefix{}, cnierr.Invalid(place, value, netip.PrefixFrom(addr, addr.BitLen()).String())
	}
	parsed, err := netip.ParsePrefix(value)
	switch {
	case err != nil || parsed.Addr().Is4In6():
		err = cnierr.Invalid(place, value, "a network, like 10.0.0.0/8 or fd00::/8")
	case parsed != parsed.Masked():
		err = cnierr.Invalid(place, value, parsed.Masked().String())
	}
	return parsed, err
}

func ports(place string, text json.RawMessage) (ports Ports, err error) {
	keys, err := object(place, text, "protocol", "port", "endPort")
	if err != nil {
		return ports, err
	}
	if len(keys) == 0 {
		return ports, cnierr.InvalidAt(place, "expected protocol, port, or both")
	}
	ports = Ports{maps.TCP, 0, lastPort}
	if name := keys["protocol"]; name != nil {
		if ports.Protocol, err = protocol(place+".protocol", name); err != nil {
			return ports, err
		}
	}
	if keys["port"] == nil && keys["endPort"] != nil {
		return ports, cnierr.InvalidAt(place+".endPort", "there is no port")
	}
	if keys["port"] == nil {
		return ports, nil
	}
	if ports.First, err = port(place+".port", keys["port"]); err != nil {
		return ports, err
	}
	if ports.Last = ports.First; keys["endPort"] == nil {
		return ports, nil
	}
	if ports.Last, err = port(place+".endPort", keys["endPort"]); err == nil && ports.Last < ports.First {
		err = cnierr.InvalidAt(place+".endPort", fmt.Sprintf("%d is below port %d", ports.Last, ports.First))
	}
	return ports, err
}

func protocol(place string, text json.RawMessage) (maps.Protocol, error) {
	value, err := stringOf(place, text)
	if err != nil {
		return 0, err
	}
	for _, known := range []maps.Protocol{maps.TCP, maps.UDP, maps.SCTP} {
		if strings.EqualFold(value, known.String()) {
			return known, nil
		}
	}
	return 0, cnierr.Invalid(place, value, `"tcp", "udp" or "sctp"`)
}

func port(place string, text json.RawMessage) (uint16, error) {
	number, err := strconv.ParseUint(string(text), 10, 16)
	if err != nil || number == 0 {
		return 0, cnierr.Invalid(place, text, "a number from 1 to 65535")
	}
	return uint16(number), nil
}
