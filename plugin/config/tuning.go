package config

import (
	"io/fs"
	"strings"

	"github.com/ebpfnet/ebpfnet/plugin/cnierr"
	"github.com/ebpfnet/ebpfnet/plugin/link"
)

// tuning parses the keys of the tuning plugin. IFNAME in a sysctl stands for the container's
// interface. names are the sysctls as the configuration has them.
func (c *netConf) tuning(ifName string) (tuning link.Tuning, names []string, err error) {
	tuning = link.Tuning{AllMulti: c.AllMulti, TxQLen: c.TxQLen}
	if c.Promisc {
		tuning.Promisc = &c.Promisc
	}
	if c.TxQLen != nil && *c.TxQLen < 0 {
		return tuning, nil, cnierr.Invalid("txQLen", *c.TxQLen, "0 or more packets")
	}
	for name, value := range c.Sysctl {
		path, err := sysctlPath(name, ifName)
		if err != nil {
			return tuning, nil, err
		}
		if tuning.Sysctls == nil {
			tuning.Sysctls = map[string]string{}
		}
		tuning.Sysctls[path] = value
		names = append(names, name)
	}
	return tuning, names, nil
}

// sysctlPath returns the path of a sysctl below /proc/sys/net. The container owns only those; all
// others are the host's.
func sysctlPath(name, ifName string) (string, error) {
	file := name
	if !strings.Contains(name, "/") {
		file = strings.ReplaceAll(name, ".", "/")
	}
	path, ok := strings.CutPrefix(file, "net/")
	if !ok || path == "." || !fs.ValidPath(path) {
		return "", cnierr.Invalid("sysctl", name, "the name of a network setting, like net.ipv4.conf.IFNAME.arp_notify")
	}
	return strings.ReplaceAll(path, "IFNAME", ifName), nil
}
