package kube

import (
	"net"
	"net/netip"
	"strings"

	"golang.org/x/net/dns/dnsmessage"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

const (
	clusterDomain = "cluster.local"
	dnsPort       = 53
)

// startDNS answers for services' names, on the host of the control plane. It stands in for CoreDNS, which would double
// the modules here.
func (c *controlPlane) startDNS() {
	c.t.Helper()
	conn, err := c.ns.ListenPacket(testenv.Context(c.t), netip.AddrPortFrom(apiAddr(), dnsPort))
	testenv.Must(c.t, err)
	c.t.Cleanup(func() { conn.Close() })
	go func() {
		query := make([]byte, 1500)
		for {
			n, client, err := conn.ReadFromUDPAddrPort(query)
			if err != nil {
				return
			}
			var message dnsmessage.Message
			if message.Unpack(query[:n]) == nil && len(message.Questions) == 1 {
				go c.reply(conn, client, message)
			}
		}
	}()
}

// reply makes a query the reply to it and sends it.
func (c *controlPlane) reply(conn *net.UDPConn, client netip.AddrPort, message dnsmessage.Message) {
	message.Response, message.Authoritative, message.Additionals = true, true, nil
	question := message.Questions[0]
	header := dnsmessage.ResourceHeader{Name: question.Name, Type: question.Type, Class: question.Class}
	addrs := c.lookup(question.Name.String())
	if len(addrs) == 0 {
		message.RCode = dnsmessage.RCodeNameError
	}
	for _, addr := range addrs {
		var body dnsmessage.ResourceBody
		switch {
		case question.Type == dnsmessage.TypeA && addr.Is4():
			body = &dnsmessage.AResource{A: addr.As4()}
		case question.Type == dnsmessage.TypeAAAA && addr.Is6():
			body = &dnsmessage.AAAAResource{AAAA: addr.As16()}
		default:
			continue
		}
		message.Answers = append(message.Answers, dnsmessage.Resource{Header: header, Body: body})
	}
	if packed, err := message.Pack(); err == nil {
		_, _ = conn.WriteToUDPAddrPort(packed, client)
	}
}

// lookup returns the addresses of a service by its full name, or none.
func (c *controlPlane) lookup(name string) (addrs []netip.Addr) {
	labels := strings.Split(strings.TrimSuffix(strings.TrimSuffix(name, "."), ".svc."+clusterDomain), ".")
	if len(labels) != 2 || !strings.HasSuffix(name, ".svc."+clusterDomain+".") {
		return nil
	}
	output, err := c.kubectl("get", "service", labels[0], "--namespace="+labels[1], "--output=jsonpath={.spec.externalName} {.spec.clusterIPs[*]}")
	if err != nil {
		return nil
	}
	for field := range strings.FieldsSeq(output) {
		if addr, err := netip.ParseAddr(field); err == nil {
			addrs = append(addrs, addr)
		} else {
			addrs = append(addrs, c.lookup(field+".")...)
		}
	}
	return addrs
}
