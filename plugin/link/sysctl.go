package link

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// sysctls is the directory of the network sysctls. A thread sees those of its own network namespace.
const sysctls = "/proc/sys/net/"

// EnableForwarding enables forwarding of the given families in the calling thread's network namespace, which must be
// the host's.
func EnableForwarding(ipv4, ipv6 bool) error {
	if ipv4 {
		if err := ensureSysctl(forwarding4, "1"); err != nil {
			return err
		}
	}
	if !ipv6 {
		return nil
	}
	if value, err := readSysctl(forwarding6); err == nil && value == "1" {
		return nil
	}
	if err := keepRouterAdvertisements(); err != nil {
		return err
	}
	return ensureSysctl(forwarding6, "1")
}

const (
	forwarding4 = "ipv4/ip_forward"
	forwarding6 = "ipv6/conf/all/forwarding"
)

// ForwardingIsOff returns the paths of the sysctls that EnableForwarding would change.
func ForwardingIsOff(ipv4, ipv6 bool) (off []string, err error) {
	for name, wanted := range map[string]bool{forwarding4: ipv4, forwarding6: ipv6} {
		if !wanted {
			continue
		}
		value, err := readSysctl(name)
		if errors.Is(err, fs.ErrNotExist) {
			continue // a kernel without IPv6
		}
		if err != nil {
			return nil, fmt.Errorf("read sysctl: %w", err)
		}
		if value != "1" {
			off = append(off, sysctls+name)
		}
	}
	return off, nil
}

// ErrNoIPv6 is the error for a host whose kernel has no IPv6, or has it disabled.
var ErrNoIPv6 = errors.New("the host has no IPv6")

// CheckIPv6 returns an error that wraps ErrNoIPv6 if a new device would have no IPv6.
func CheckIPv6() error {
	const disabled = "ipv6/conf/default/disable_ipv6"

	value, err := readSysctl(disabled)
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%w: the kernel was built or booted without it: remove the IPv6 ranges from the network", ErrNoIPv6)
	}
	if err == nil && value == "1" {
		return fmt.Errorf("%w: %s%s is 1: set it to 0, or remove the IPv6 ranges from the network", ErrNoIPv6, sysctls, disabled)
	}
	return err
}

// ignoreRouters keeps the host from learning routes from a container through a device, which must be down. If /proc/sys
// is read-only, the device keeps the host's default.
func ignoreRouters(device string) error {
	err := os.WriteFile(sysctls+"ipv6/conf/"+device+"/accept_ra", []byte("0"), 0)
	if err == nil || errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.EROFS) { // no file: no IPv6
		return nil
	}
	return fmt.Errorf("set sysctl to 0: %w", err)
}

// keepRouterAdvertisements lets the host's devices still learn their default route from routers: with forwarding
// enabled, they need accept_ra 2 instead of 1. Devices that appear later may be those of containers, and keep the
// default.
func keepRouterAdvertisements() error {
	files, err := filepath.Glob(sysctls + "ipv6/conf/*/accept_ra")
	if err != nil {
		return err
	}
	for _, file := range files {
		name := strings.TrimPrefix(file, sysctls)
		value, err := readSysctl(name)
		if errors.Is(err, fs.ErrNotExist) || value != "1" || strings.Contains(name, "/all/") || strings.Contains(name, "/default/") {
			continue
		}
		err = ensureSysctl(name, "2")
		if errors.Is(err, unix.EROFS) {
			return nil // the caller's write fails, too, with a better message
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) { // the device was deleted meanwhile
			return err
		}
	}
	return nil
}

// SetProxyARP sets whether a device of the host answers ARP, at once, for addresses that the host reaches through other
// devices. false restores the kernel's defaults.
func SetProxyARP(device string, on bool) error {
	answers, delay := "0", "80" // 0.8 seconds
	if on {
		answers, delay = "1", "0"
	}
	return errors.Join(ensureSysctl("ipv4/conf/"+device+"/proxy_arp", answers), ensureSysctl("ipv4/neigh/"+device+"/proxy_delay", delay))
}

func readSysctl(name string) (string, error) {
	text, err := os.ReadFile(sysctls + name)
	return strings.TrimSpace(string(text)), err
}

// ensureSysctl writes a value only if it differs: /proc/sys may be read-only, but correct.
func ensureSysctl(name, value string) error {
	present, err := readSysctl(name)
	if err != nil {
		return fmt.Errorf("read sysctl: %w", err)
	}
	if sameWords(present, value) {
		return nil
	}
	if err := os.WriteFile(sysctls+name, []byte(value), 0); err != nil {
		return fmt.Errorf("set sysctl to %s: %w", value, err)
	}
	return nil
}

func writeSysctlIn(ns netns.NsHandle, name, value string) error {
	return InNamespace(ns, func() error { return ensureSysctl(name, value) })
}

// sameWords compares values regardless of white space, because the kernel separates numbers by tabs.
func sameWords(a, b string) bool {
	return slices.Equal(strings.Fields(a), strings.Fields(b))
}
