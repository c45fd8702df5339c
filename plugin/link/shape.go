package link

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/loader/rtnl"
)

// Limit is the rate that packets leave a device with. The zero Limit is none.
type Limit struct {
	Rate  uint64 // bits per second
	Burst uint64 // bits that may leave at once; at least a frame, and four milliseconds of the rate
}

// Peer says which address of a packet is the other side's, the one that is not the container's.
type Peer int

// What leaves the container's end of a pair is for the other side; what leaves the host's end
// is from there.
const (
	PeerIsDestination Peer = iota
	PeerIsSource
)

// Shape holds what leaves a device to a limit, but for the traffic of peers in the networks of
// unshaped. It does so by a token bucket (tbf) as the device's queue; where some is unshaped, that is
// below one that keeps the two apart (htb). schedule.go has what waits below the bucket.
func Shape(handle *netlink.Handle, device netlink.Link, limit Limit, unshaped []netip.Prefix, peer Peer) error {
	if limit.Rate == 0 {
		return Unshape(handle, device)
	}
	bucket := tokenBucket(device, limit)
	if len(unshaped) > 0 {
		bucket.Parent = shapedClass
	}
	present, err := bucketOf(handle, device)
	if err == nil && present != nil && present.Parent != bucket.Parent {
		err = Unshape(handle, device)
	}
	if err == nil && len(unshaped) > 0 {
		err = keepApart(handle, device, unshaped, peer)
	}
	if err == nil {
		err = handle.QdiscReplace(bucket)
	}
	if err == nil {
		err = schedule(handle, device, limit)
	}
	if err != nil {
		return fmt.Errorf("hold %s to %d bit/s: %w", device.Attrs().Name, limit.Rate, err)
	}
	return nil
}

// Unshape gives a device its own queue back.
func Unshape(handle *netlink.Handle, device netlink.Link) error {
	present, err := bucketOf(handle, device)
	if err != nil || present == nil {
		return err
	}
	root := &netlink.GenericQdisc{QdiscAttrs: attrsOf(device, bucketHandle, netlink.HANDLE_ROOT), QdiscType: "tbf"}
	if present.Parent == shapedClass {
		root.Handle, root.QdiscType = apartHandle, "htb"
	}
	if err := ignoreGone(handle.QdiscDel(root)); err != nil {
		return fmt.Errorf("remove the queue of %s: %w", device.Attrs().Name, err)
	}
	return nil
}

// IsShaped says whether a device is held to a limit as Shape does it.
func IsShaped(handle *netlink.Handle, device netlink.Link, limit Limit, unshaped []netip.Prefix) (bool, error) {
	present, err := bucketOf(handle, device)
	if err != nil {
		return false, err
	}
	if limit.Rate == 0 || present == nil {
		return limit.Rate == 0 && present == nil, nil
	}
	wanted := tokenBucket(device, limit)
	return present.Rate == wanted.Rate && present.Buffer == wanted.Buffer &&
		(present.Parent == shapedClass) == (len(unshaped) > 0), nil
}

// The token bucket, and what is above it where some traffic is unshaped.
var (
	bucketHandle = netlink.MakeHandle(0xeb, 0)
	bucketClass  = netlink.MakeHandle(0xeb, 1)
	apartHandle  = netlink.MakeHandle(0xec, 0)
	shapedClass  = netlink.MakeHandle(0xec, shapedMinor)
)

const shapedMinor = 1

// bucketOf returns the token bucket that Shape has made, or nil.
func bucketOf(handle *netlink.Handle, device netlink.Link) (*netlink.Tbf, error) {
	qdiscs, err := rtnl.Qdiscs(handle, device)
	if err != nil {
		return nil, fmt.Errorf("list the queues of %s: %w", device.Attrs().Name, err)
	}
	for _, qdisc := range qdiscs {
		if tbf, is := qdisc.(*netlink.Tbf); is && tbf.Handle == bucketHandle {
			return tbf, nil
		}
	}
	return nil, nil
}

func attrsOf(device netlink.Link, handle, parent uint32) netlink.QdiscAttrs {
	return netlink.QdiscAttrs{LinkIndex: device.Attrs().Index, Handle: handle, Parent: parent}
}

const (
	largestSegment = 1 << 16
	pieceTime      = 4   // milliseconds: a timer may be late by as much, and nothing is lost
	longestBurst   = 200 // seconds, which the kernel can count
	queueTime      = 8   // milliseconds that packets may wait
	queueFrames    = 12  // and so many frames at least
)

// sizes are those of a limit for a device, in bytes: what it passes in a second, the largest
// frame, and what may leave at once of any limit.
func sizes(device netlink.Link, limit Limit) (rate, frame, piece uint64) {
	const header = 14 + 4 // Ethernet's, and a VLAN tag

	rate = max(limit.Rate/8, 1)
	frame = uint64(device.Attrs().MTU) + header
	return rate, frame, max(rate*pieceTime/1000, frame)
}

// tokenBucket cuts segments of TCP that are larger than a piece into frames, so that none has to
// wait long for another. A burst larger than that needs a peak rate for it, which has no other purpose.
func tokenBucket(device netlink.Link, limit Limit) *netlink.Tbf {
	const peak = 10e9 / 8 // above all rates that need it

	rate, frame, piece := sizes(device, limit)
	bucket := max(min(limit.Burst/8, rate*longestBurst, 1<<31), piece)
	tbf := &netlink.Tbf{
		QdiscAttrs: attrsOf(device, bucketHandle, netlink.HANDLE_ROOT),
		Rate:       rate,
		Buffer:     netlink.Xmittime(rate, uint32(bucket)),
		Limit:      uint32(min(waiting(rate, frame), 1<<31)),
	}
	if piece < largestSegment && piece < bucket {
		tbf.Peakrate, tbf.Minburst = peak, uint32(piece)
	}
	return tbf
}

// waiting is how many bytes may wait.
func waiting(rate, frame uint64) uint64 {
	return max(rate/1000*queueTime, queueFrames*frame)
}

// keepApart leads the packets of some peers past the token bucket.
func keepApart(handle *netlink.Handle, device netlink.Link, unshaped []netip.Prefix, peer Peer) error {
	htb := netlink.NewHtb(attrsOf(device, apartHandle, netlink.HANDLE_ROOT))
	htb.Defcls = shapedMinor
	class := netlink.ClassAttrs{LinkIndex: htb.LinkIndex, Parent: apartHandle, Handle: shapedClass}
	old, err := rtnl.Filters(handle, device, apartHandle)
	errs := []error{err}
	for _, filter := range old {
		errs = append(errs, ignoreGone(handle.FilterDel(filter)))
	}
	errs = append(errs,
		addHtb(handle, device, htb),
		handle.ClassReplace(netlink.NewHtbClass(class, netlink.HtbClassAttrs{
			Rate: unlimited, Buffer: unlimitedBurst, Cbuffer: unlimitedBurst, Quantum: largestSegment,
		})))
	for i, prefix := range unshaped {
		protocol := uint16(unix.ETH_P_IP)
		if prefix.Addr().Is6() {
			protocol = unix.ETH_P_IPV6
		}
		errs = append(errs, handle.FilterAdd(&netlink.U32{
			FilterAttrs: netlink.FilterAttrs{
				LinkIndex: htb.LinkIndex, Parent: apartHandle, Priority: uint16(i + 1), Protocol: protocol,
			},
			ClassId: apartHandle, // of no class
			Sel:     &netlink.TcU32Sel{Flags: nl.TC_U32_TERMINAL, Keys: addressKeys(prefix, peer)},
		}))
	}
	return errors.Join(errs...)
}

func ignoreGone(err error) error {
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	return err
}

// addressKeys compare one address of an IP header with a prefix, word by word.
func addressKeys(prefix netip.Prefix, peer Peer) []netlink.TcU32Key {
	const source4, source6, word = 12, 8, 4

	addr, offset := prefix.Addr().AsSlice(), source4
	if prefix.Addr().Is6() {
		offset = source6
	}
	if peer == PeerIsDestination {
		offset += len(addr)
	}
	keys := []netlink.TcU32Key{}
	for at := 0; at < len(addr); at += word {
		bits := min(max(prefix.Bits()-at*8, 0), 32)
		mask := uint32(uint64(0xffffffff) << (32 - bits))
		if mask == 0 && at > 0 {
			break
		}
		keys = append(keys, key(int32(offset+at), mask, binary.BigEndian.Uint32(addr[at:])&mask))
	}
	return keys
}
