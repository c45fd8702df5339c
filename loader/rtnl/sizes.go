package rtnl

import (
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Size is an attribute of a device that limits the size of packets.
type Size struct {
	Attr  int // unix.IFLA_GSO_MAX_SIZE and others
	Bytes uint32
}

// Sizes are set together: the kernel lowers those of IPv4 with the general ones, unless the same request
// sets both. A size of 0 stays as it is.
type Sizes []Size

// SetSizes sets sizes of a device in the calling thread's network namespace. (The kernel takes no other:
// in this request IFLA_TARGET_NETNSID moves the device.)
func SetSizes(index int, sizes Sizes) error {
	device := nl.NewIfInfomsg(unix.AF_UNSPEC)
	device.Index = int32(index)
	request := nl.NewNetlinkRequest(unix.RTM_SETLINK, unix.NLM_F_ACK)
	request.AddData(device)
	for _, size := range sizes {
		if size.Bytes != 0 {
			request.AddData(nl.NewRtAttr(size.Attr, nl.Uint32Attr(size.Bytes)))
		}
	}
	_, err := request.Execute(unix.NETLINK_ROUTE, 0)
	return err
}
