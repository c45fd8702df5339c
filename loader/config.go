package loader

import (
	"errors"
	"fmt"
	"os"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/bpf"
)

// Bounds of the ports that masquerading may choose: lower ones belong to the host's
// services, and Kubernetes allocates node ports from nodePorts on.
const (
	firstPort = 1024
	nodePorts = 30000
	lastPort  = 65535

	// minPorts is enough for the connections to one busy remote.
	minPorts = 4096
)

// chooseConfig returns the datapath's configuration for this host.
func chooseConfig(options Options) (bpf.HostConfig, error) {
	low, high, err := localPortRange()
	if err != nil {
		return bpf.HostConfig{}, err
	}
	first, last := masqPorts(low, high)
	if options.MasqPorts != [2]uint16{} {
		first, last = int(options.MasqPorts[0]), int(options.MasqPorts[1])
	}
	attach := options.Attach
	if attach == 0 {
		if attach, err = chooseAttach(); err != nil {
			return bpf.HostConfig{}, err
		}
	}
	return bpf.HostConfig{
		Attach:        uint32(attach),
		MasqPortFirst: uint16(first),
		MasqPortCount: uint16(last - first + 1),
		Timeout:       options.Timeouts.ticks(),
	}, nil
}

// masqPorts returns the first and last port that masquerading may choose. The host's
// own sockets get theirs from [low, high], so it returns the larger range below or
// above that. If neither is large enough, masquerading shares the default range with
// the host's sockets; the datapath looks for a socket before it takes a port.
func masqPorts(low, high int) (first, last int) {
	below := min(low, nodePorts) - 1
	switch {
	case below-firstPort >= lastPort-high && below-firstPort+1 >= minPorts:
		return firstPort, below
	case lastPort-high >= minPorts:
		return high + 1, lastPort
	default:
		return firstPort, nodePorts - 1
	}
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

// chooseAttach probes the kernel for tcx by a query for the programs on lo, since
// version numbers say nothing about backports.
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
