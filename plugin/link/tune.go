package link

import (
	"errors"
	"fmt"
	"os"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
)

// Tuning has the settings of a container's interface and network namespace. A nil or missing setting is not changed.
type Tuning struct {
	Sysctls  map[string]string `json:"sysctls,omitempty"` // by path below /proc/sys/net
	Promisc  *bool             `json:"promisc,omitempty"`
	AllMulti *bool             `json:"allmulti,omitempty"`
	TxQLen   *int              `json:"txQLen,omitempty"` // packets
}

// IsEmpty reports whether there is nothing to set.
func (t Tuning) IsEmpty() bool {
	return len(t.Sysctls) == 0 && t.Promisc == nil && t.AllMulti == nil && t.TxQLen == nil
}

// Apply applies all settings to the interface with that name. It sets sysctls last, because some belong to the
// interface.
func (t Tuning) Apply(ns netns.NsHandle, container *netlink.Handle, name string) error {
	if t.IsEmpty() {
		return nil
	}
	device, err := mustFind(container, name)
	if err != nil {
		return err
	}
	var errs []error
	if t.Promisc != nil {
		set := container.SetPromiscOff
		if *t.Promisc {
			set = container.SetPromiscOn
		}
		errs = append(errs, wrap("promisc", set(device)))
	}
	if t.AllMulti != nil {
		set := container.LinkSetAllmulticastOff
		if *t.AllMulti {
			set = container.LinkSetAllmulticastOn
		}
		errs = append(errs, wrap("allmulti", set(device)))
	}
	if t.TxQLen != nil {
		errs = append(errs, wrap("txQLen", container.LinkSetTxQLen(device, *t.TxQLen)))
	}
	for name, value := range t.Sysctls {
		errs = append(errs, wrap("sysctl net/"+name, writeSysctlIn(ns, name, value)))
	}
	return errors.Join(errs...)
}

func wrap(what string, err error) error {
	if err != nil {
		return fmt.Errorf("set %s in the container: %w", what, err)
	}
	return nil
}

// Present returns the current values of the settings in t.
func (t Tuning) Present(ns netns.NsHandle, container *netlink.Handle, name string) (Tuning, error) {
	var present Tuning
	if t.IsEmpty() {
		return present, nil
	}
	device, err := mustFind(container, name)
	if err != nil {
		return present, err
	}
	attrs := device.Attrs()
	if t.Promisc != nil {
		present.Promisc = new(attrs.Promisc != 0)
	}
	if t.AllMulti != nil {
		present.AllMulti = new(attrs.Allmulti != 0)
	}
	if t.TxQLen != nil {
		present.TxQLen = new(attrs.TxQLen)
	}
	if len(t.Sysctls) == 0 {
		return present, nil
	}
	present.Sysctls = map[string]string{}
	return present, InNamespace(ns, func() error {
		for name := range t.Sysctls {
			value, err := readSysctl(name)
			if errors.Is(err, os.ErrNotExist) {
				return fmt.Errorf("the container's kernel has no sysctl net/%s", name)
			}
			if err != nil {
				return fmt.Errorf("read sysctl net/%s in the container: %w", name, err)
			}
			present.Sysctls[name] = value
		}
		return nil
	})
}

// Differences describes the settings of t that differ from present.
func (t Tuning) Differences(present Tuning) []string {
	var all []string
	differ := func(what string, got, want any) {
		all = append(all, fmt.Sprintf("%s is %v, expected %v", what, got, want))
	}
	if t.Promisc != nil && *t.Promisc != *present.Promisc {
		differ("promisc", *present.Promisc, *t.Promisc)
	}
	if t.AllMulti != nil && *t.AllMulti != *present.AllMulti {
		differ("allmulti", *present.AllMulti, *t.AllMulti)
	}
	if t.TxQLen != nil && *t.TxQLen != *present.TxQLen {
		differ("txQLen", *present.TxQLen, *t.TxQLen)
	}
	for name, want := range t.Sysctls {
		if !sameWords(present.Sysctls[name], want) {
			differ("sysctl net/"+name, present.Sysctls[name], want)
		}
	}
	return all
}

func mustFind(container *netlink.Handle, name string) (netlink.Link, error) {
	device, err := Find(container, name)
	if err == nil && device == nil {
		err = fmt.Errorf("%s is not in the container", name)
	}
	return device, err
}
