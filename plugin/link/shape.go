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

// Limit is the rate at which packets leave a device. The zero Limit means no limit.
type Limit struct {
	Rate  uint64 // bits per second
	Burst uint64 // bits that may leave at once; at least one frame, and four milliseconds of Rate
}

// shape limits the rate at which packets leave a device, except for peers in the networks of unshaped. The device's
// root qdisc becomes a token bucket (tbf) or, with unshaped networks, an htb with the tbf below one of its classes.
// schedule.go has the queue below the tbf. The peer is the source of packets that leave the host's end of a pair, and the
// destination of those that leave the container's.
func shape(handle *netlink.Handle, device netlink.Link, limit Limit, unshaped []netip.Prefix, peerIsSource bool) error {
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
		err = addUnshapedClass(handle, device, unshaped, peerIsSource)
	}
	if err == nil {
		err = handle.QdiscReplace(bucket)
	}
	if err == nil {
		err = schedule(handle, device, limit)
	}
	if err != nil {
		return fmt.Errorf("limit %s to %d bit/s: %w", device.Attrs().Name, limit.Rate, err)
	}
	return nil
}

// Unshape removes the qdiscs that shape adds.
func Unshape(handle *netlink.Handle, device netlink.Link) error {
	present, err := bucketOf(handle, device)
	if err != nil || present == nil {
		return err
	}
	root := &netlink.GenericQdisc{QdiscAttrs: attrsOf(device, bucketHandle, netlink.HANDLE_ROOT), QdiscType: "tbf"}
	if present.Parent == shapedClass {
		root.Handle, root.QdiscType = splitHandle, "htb"
	}
	if err := ignoreGone(handle.QdiscDel(root)); err != nil {
		return fmt.Errorf("remove the rate limit of %s: %w", device.Attrs().Name, err)
	}
	return nil
}

// IsShaped reports whether a device has the limit that shape would set.
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

// Handles of the token bucket, and of the htb above it if some networks are unshaped.
var (
	bucketHandle = netlink.MakeHandle(0xeb, 0)
	bucketClass  = netlink.MakeHandle(0xeb, 1)
	splitHandle  = netlink.MakeHandle(0xec, 0)
	shapedClass  = netlink.MakeHandle(0xec, shapedMinor)
)

const shapedMinor = 1

// bucketOf returns the token bucket of shape, or nil.
func bucketOf(handle *netlink.Handle, device netlink.Link) (*netlink.Tbf, error) {
	qdiscs, err := rtnl.Qdiscs(handle, device)
	if err != nil {
		return nil, fmt.Errorf("list the qdiscs of %s: %w", device.Attrs().Name, err)
	}
	for _, qdisc := range qdiscs {
		if tbf, ok := qdisc.(*netlink.Tbf); ok && tbf.Handle == bucketHandle {
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
	pieceTime      = 4   // milliseconds: a timer may be this late without loss of throughput
	maxBurst       = 200 // seconds: the kernel's counters hold no more
	queueTime      = 8   // milliseconds that packets may wait
	queueFrames    = 12  // but at least this many frames may wait
)

// sizes returns the sizes of a limit on a device in bytes: the rate per second, the largest frame, and the smallest
// burst.
func sizes(device netlink.Link, limit Limit) (rate, frame, piece uint64) {
	const header = 14 + 4 // Ethernet's, and a VLAN tag

	rate = max(limit.Rate/8, 1)
	frame = uint64(device.Attrs().MTU) + header
	return rate, frame, max(rate*pieceTime/1000, frame)
}

// tokenBucket makes the kernel segment TCP packets larger than a piece, so that no packet waits long for another. If
// the burst is larger than a piece, segmentation requires a peak rate, which has no other purpose here.
func tokenBucket(device netlink.Link, limit Limit) *netlink.Tbf {
	const peak = 10e9 / 8 // above all rates that need it

	rate, frame, piece := sizes(device, limit)
	bucket := max(min(limit.Burst/8, rate*maxBurst, 1<<31), piece)
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

// waiting returns the number of bytes that may wait.
func waiting(rate, frame uint64) uint64 {
	return max(rate/1000*queueTime, queueFrames*frame)
}

// addUnshapedClass adds an htb that sends packets of unshaped peers past the token bucket.
func addUnshapedClass(handle *netlink.Handle, device netlink.Link, unshaped []netip.Prefix, peerIsSource bool) error {
	htb := netlink.NewHtb(attrsOf(device, splitHandle, netlink.HANDLE_ROOT))
	htb.Defcls = shapedMinor
	class := netlink.ClassAttrs{LinkIndex: htb.LinkIndex, Parent: splitHandle, Handle: shapedClass}
	old, err := rtnl.Filters(handle, device, splitHandle)
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
				LinkIndex: htb.LinkIndex, Parent: splitHandle, Priority: uint16(i + 1), Protocol: protocol,
			},
			ClassId: splitHandle, // the htb itself: no class, so no limit
			Sel:     &netlink.TcU32Sel{Flags: nl.TC_U32_TERMINAL, Keys: addressKeys(prefix, peerIsSource)},
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

// addressKeys returns the u32 keys that match the source or destination of an IP header with a prefix, word by word.
func addressKeys(prefix netip.Prefix, isSource bool) []netlink.TcU32Key {
	const source4, source6, word = 12, 8, 4

	addr, offset := prefix.Addr().AsSlice(), source4
	if prefix.Addr().Is6() {
		offset = source6
	}
	if !isSource {
		offset += len(addr)
	}
	keys := []netlink.TcU32Key{}
	for i := 0; i < len(addr); i += word {
		bits := min(max(prefix.Bits()-i*8, 0), 32)
		mask := uint32(uint64(0xffffffff) << (32 - bits))
		if mask == 0 && i > 0 {
			break
		}
		keys = append(keys, key(int32(offset+i), mask, binary.BigEndian.Uint32(addr[i:])&mask))
	}
	return keys
}

// Bandwidth limits a container's traffic: ingress is what the container receives, egress what it sends. Traffic with
// peers in the networks of Unshaped has no limit.
type Bandwidth struct {
	Ingress  Limit          `json:"ingress,omitzero"`
	Egress   Limit          `json:"egress,omitzero"`
	Unshaped []netip.Prefix `json:"unshaped,omitempty"`
}

// IsEmpty reports whether there is no limit.
func (b Bandwidth) IsEmpty() bool { return b.Ingress.Rate == 0 && b.Egress.Rate == 0 }

// IsZero makes encoding/json omit a Bandwidth without limits.
func (b Bandwidth) IsZero() bool { return b.IsEmpty() }

// Shape sets the limits of both ends of a pair: ingress where the host's end transmits, egress
// where the container's end transmits, so that the container's sockets wait instead of losing
// packets. An empty Bandwidth removes the limits.
func (b Bandwidth) Shape(host, container *netlink.Handle, outside, inside netlink.Link) error {
	if err := shape(host, outside, b.Ingress, b.Unshaped, true); err != nil {
		return err
	}
	return shape(container, inside, b.Egress, b.Unshaped, false)
}
