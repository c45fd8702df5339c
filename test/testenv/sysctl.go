package testenv

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// inheritedSysctls are the kernel's defaults of settings that a new network namespace copies from the
// machine's first one. Without them, a test would behave differently on a router, or on a host where
// systemd sets rp_filter.
var inheritedSysctls = map[string]string{
	"forwarding":       "0",
	"rp_filter":        "0",
	"route_localnet":   "0",
	"accept_local":     "0",
	"arp_filter":       "0",
	"arp_announce":     "0",
	"arp_ignore":       "0",
	"proxy_arp":        "0",
	"accept_redirects": "1",
	"send_redirects":   "1",
	"log_martians":     "0",
}

// resetSysctls gives the calling thread's network namespace the kernel's defaults.
// forwarding comes first, because a change of it resets others.
func resetSysctls() error {
	for _, conf := range []string{"all", "default", "lo"} {
		if err := writeSysctl("net/ipv4/conf/"+conf+"/forwarding", "0"); err != nil {
			return err
		}
		for name, value := range inheritedSysctls {
			if err := writeSysctl("net/ipv4/conf/"+conf+"/"+name, value); err != nil {
				return err
			}
		}
	}
	return nil
}

// Sysctl reads a setting of the namespace by its path below /proc/sys, such as
// "net/ipv4/ip_forward".
func (ns *Namespace) Sysctl(name string) (value string, err error) {
	err = ns.Do(func() error {
		content, err := os.ReadFile(filepath.Join("/proc/sys", name))
		value = strings.TrimSpace(string(content))
		return err
	})
	return value, err
}

// SetSysctl writes a setting of the namespace.
func (ns *Namespace) SetSysctl(name, value string) error {
	return ns.Do(func() error { return writeSysctl(name, value) })
}

// writeSysctl writes only a different value, because writing ip_forward and the like has side effects.
func writeSysctl(name, value string) error {
	path := filepath.Join("/proc/sys", name)
	old, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	if strings.TrimSpace(string(old)) == value {
		return nil
	}
	if err := os.WriteFile(path, []byte(value), 0); err != nil {
		return fmt.Errorf("set sysctl to %q: %w", value, err)
	}
	return nil
}
