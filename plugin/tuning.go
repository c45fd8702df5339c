package plugin

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"regexp"
	"strings"

	"github.com/ebpfnet/ebpfnet/plugin/link"
)

// sysctlAllowlist is the tuning plugin's: one regular expression a line. Where it
// exists, only sysctls that one of them matches may be set.
const sysctlAllowlist = "/etc/cni/tuning/allowlist.conf"

// tuning reads the keys of the tuning plugin. IFNAME in a sysctl stands for the
// container's interface.
func (c *netConf) tuning(ifName string) (link.Tuning, error) {
	tuning := link.Tuning{AllMulti: c.AllMulti, TxQLen: c.TxQLen}
	if c.Promisc {
		tuning.Promisc = &c.Promisc
	}
	if c.TxQLen != nil && *c.TxQLen < 0 {
		return tuning, invalid("txQLen", *c.TxQLen, "0 or more packets")
	}
	for name, value := range c.Sysctl {
		below, err := sysctlPath(name, ifName)
		if err != nil {
			return tuning, err
		}
		if tuning.Sysctls == nil {
			tuning.Sysctls = map[string]string{}
		}
		tuning.Sysctls[below] = value
	}
	return tuning, nil
}

// sysctlPath returns the path of a sysctl below /proc/sys/net, which is all that
// belongs to the container: others are the host's.
func sysctlPath(name, ifName string) (string, error) {
	file := name
	if !strings.Contains(name, "/") {
		file = strings.ReplaceAll(name, ".", "/")
	}
	below, isNet := strings.CutPrefix(file, "net/")
	if !isNet || below == "." || !fs.ValidPath(below) {
		return "", invalid("sysctl", name, "the name of a setting of the network, like net.ipv4.conf.IFNAME.arp_notify")
	}
	allowed, err := sysctlAllowed(name)
	if err != nil {
		return "", err
	}
	if !allowed {
		return "", invalid("sysctl", name, "one that a line of "+sysctlAllowlist+" matches")
	}
	return strings.ReplaceAll(below, "IFNAME", ifName), nil
}

func sysctlAllowed(name string) (bool, error) {
	file, err := os.Open(sysctlAllowlist)
	if errors.Is(err, fs.ErrNotExist) {
		return true, nil
	}
	if err != nil {
		return false, err
	}
	defer file.Close()

	lines := bufio.NewScanner(file)
	for lines.Scan() {
		text := strings.TrimSpace(lines.Text())
		if text == "" {
			continue
		}
		matches, err := regexp.MatchString(text, name)
		if err != nil {
			return false, fmt.Errorf("%s: line %q: %w", sysctlAllowlist, text, err)
		}
		if matches {
			return true, nil
		}
	}
	return false, lines.Err()
}
