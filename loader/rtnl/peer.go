package rtnl

import (
	"fmt"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Peer returns the other end of a pair whose ends are in different namespaces, without entering the
// other one. device is of the calling thread's network namespace.
func Peer(device netlink.Link) (netlink.Link, error) {
	attrs := device.Attrs()
	if attrs.NetNsID < 0 || attrs.ParentIndex == 0 {
		return nil, fmt.Errorf("find the other end of %s: it has none in another namespace", attrs.Name)
	}
	request := nl.NewNetlinkRequest(unix.RTM_GETLINK, 0)
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
