package loader

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/bpf"
)

// Bounds of the ports that masquerading may choose: lower ones belong to the host's
// services. Kubernetes allocates its node ports between the two ranges.
const (
	firstPort     = 1024
	firstNodePort = 30000
	lastNodePort  = 32767
	lastPort      = 65535

	// minPorts is enough for the connections to one busy remote.
	minPorts = 4096
)

// chooseConfig returns the datapath's configuration for this host, without what depends on
// its maps.
func chooseConfig(options Options) (bpf.HostConfig, error) {
	low, high, err := localPortRange()
	if err != nil {
		return bpf.HostConfig{}, err
	}
	attach := options.Attach
	if attach == 0 {
		if attach, err = chooseAttach(); err != nil {
			return bpf.HostConfig{}, err
		}
	}
	config := bpf.HostConfig{Attach: uint32(attach), Secret: newSecret(), Timeout: timeouts()}
	for i, ports := range masqPorts(low, high) {
		config.MasqPorts[i] = ports
	}
	return config, nil
}

// newSecret returns the key of the datapath's hashes. An upgrade keeps it.
func newSecret() (secret [2]uint64) {
	var random [16]byte
	rand.Read(random[:]) // never fails
	for i := range secret {
		secret[i] = binary.NativeEndian.Uint64(random[8*i:])
	}
	return secret
}

// masqPorts returns the ports that masquerading may choose. The host's own sockets get
// theirs from [low, high], so it returns the ports below and above. If those are not
// enough, masquerading shares a range with the host's sockets; the datapath looks for a
// socket before it allocates a port.
func masqPorts(low, high int) [2]bpf.PortRange {
	below := portRange(firstPort, min(low, firstNodePort)-1)
	above := portRange(max(high, lastNodePort)+1, lastPort)
	switch {
	case int(below.Count)+int(above.Count) < minPorts:
		return [2]bpf.PortRange{portRange(firstPort, firstNodePort-1)}
	case below.Count == 0:
		return [2]bpf.PortRange{above}
	default:
		return [2]bpf.PortRange{below, above}
	}
}

// portRange returns an empty range if last is less than first.
func portRange(first, last int) bpf.PortRange {
	if last < first {
		return bpf.PortRange{}
	}
	return bpf.PortRange{First: uint16(first), Count: uint16(last - first + 1)}
}

func localPortRange() (low, high int, err error) {
	const path = "/proc/sys/net/ipv4/ip_local_port_range"

	text, err := os.ReadFile(path)
	if err != nil {
		return 0, 0, err
	}
	if _, err := fmt.Sscan(string(text), &low, &high); err != nil {
		return 0, 0, fmt.Errorf("read %s: %w", path, err)
	}
	return low, high, nil
}

// chooseAttach probes the kernel for tcx by a query for the programs on lo, because
// version numbers do not show backports.
func chooseAttach() (bpf.Attach, error) {
	_, err := link.QueryPrograms(link.QueryOptions{Target: loopback, Attach: ebpf.AttachTCXIngress})
	if err == nil {
		return bpf.AttachTCX, nil
	}
	if errors.Is(err, ebpf.ErrNotSupported) || errors.Is(err, unix.EINVAL) {
		return bpf.AttachClsact, nil
	}
	return 0, fmt.Errorf("probe the kernel for tcx: %w", err)
}

// Bounds of the default number of flows: enough for a small machine, and the default
// size of a busy node's conntrack table.
const (
	minFlows = 1 << 14
	maxFlows = 1 << 19
)

// flowsFor returns the number of flows that take about a thousandth of the memory.
func flowsFor(memory uint64) uint32 {
	const flowSize = uint64(unsafe.Sizeof(bpf.FlowEntry{}) + unsafe.Sizeof(bpf.FlowBucket{})/uintptr(flowWays))

	return uint32(min(max(memory/1024/flowSize, minFlows), maxFlows))
}

// MaxFlows returns the number of places in flow_table.
func (d *Datapath) MaxFlows() int { return int(d.Config.FlowBuckets * flowWays) }

// memory returns the host's memory in bytes, or 0 if it is unknown.
func memory() uint64 {
	var info unix.Sysinfo_t
	if err := unix.Sysinfo(&info); err != nil {
		return 0
	}
	return uint64(info.Totalram) * uint64(info.Unit)
}

// flowTimeouts are the times for which an idle flow keeps its masquerading port: netfilter's
// (Documentation/networking/nf_conntrack-sysctl.rst).
var flowTimeouts = [bpf.FlowStates]time.Duration{
	bpf.FlowSYNSent:     2 * time.Minute,
	bpf.FlowSYNRecv:     time.Minute,
	bpf.FlowEstablished: 5 * 24 * time.Hour,
	bpf.FlowFINWait:     2 * time.Minute,
	bpf.FlowCloseWait:   time.Minute,
	bpf.FlowLastACK:     30 * time.Second,
	bpf.FlowTimeWait:    2 * time.Minute,
	bpf.FlowClose:       10 * time.Second,
	bpf.FlowUDP:         30 * time.Second,
	bpf.FlowUDPStream:   2 * time.Minute,
	bpf.FlowICMP:        30 * time.Second,
	bpf.FlowOther:       10 * time.Minute,
}

// timeouts returns flowTimeouts in the datapath's unit, 2^30 ns.
func timeouts() (ticks [bpf.FlowStates]uint32) {
	for state, timeout := range flowTimeouts {
		ticks[state] = uint32(timeout >> 30)
	}
	return ticks
}
