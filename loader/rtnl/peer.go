package rtnl

import (
	"fmt"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// Peers reads the other ends of pairs through one socket.
type Peers struct {
	sockets map[int]*nl.SocketHandle
}

// OpenPeers opens the socket in the calling thread's network namespace.
func OpenPeers() (*Peers, error) {
	socket, err := nl.GetNetlinkSocketAt(netns.None(), netns.None(), unix.NETLINK_ROUTE)
	if err != nil {
		return nil, explain(err)
	}
	return &Peers{map[int]*nl.SocketHandle{unix.NETLINK_ROUTE: {Socket: socket}}}, nil
}

// Close closes the socket.
func (p *Peers) Close() { p.sockets[unix.NETLINK_ROUTE].Close() }

// Of returns the other end of a pair whose ends are in different namespaces, without entering the other namespace.
func (p *Peers) Of(device netlink.Link) (netlink.Link, error) {
	attrs := device.Attrs()
	if attrs.NetNsID < 0 || attrs.ParentIndex == 0 {
		return nil, fmt.Errorf("find the other end of %s: it has none in another namespace", attrs.Name)
	}
	request := nl.NewNetlinkRequest(unix.RTM_GETLINK, 0)
	request.Sockets = p.sockets
	message := nl.NewIfInfomsg(unix.AF_UNSPEC)
	message.Index = int32(attrs.ParentIndex)
	request.AddData(message)
	request.AddData(nl.NewRtAttr(unix.IFLA_TARGET_NETNSID, nl.Uint32Attr(uint32(attrs.NetNsID))))
	answers, err := request.Execute(unix.NETLINK_ROUTE, unix.RTM_NEWLINK)
	if err == nil && len(answers) != 1 {
		err = fmt.Errorf("got %d answers", len(answers))
	}
	if err != nil {
		return nil, fmt.Errorf("read the other end of %s: %w", attrs.Name, err)
	}
	return netlink.LinkDeserialize(nil, answers[0])
}
