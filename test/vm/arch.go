package main

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
)

// arch is an architecture of guests, and of the programs in them.
type arch struct {
	name    string // Go's and Debian's
	qemu    string
	pkg     string // Debian's, with qemu
	machine []string
	console string
	modules []string // where the kernel has them: to load first, since it cannot ask modprobe
	// bootable is whether qemu starts Debian's boot file as it is.
	bootable bool
}

var archs = map[string]arch{
	"amd64": {"amd64", "qemu-system-x86_64", "qemu-system-x86", []string{"-machine", "pc", "-cpu", "qemu64,+rdrand"}, "ttyS0", nil, false},
	"arm64": {"arm64", "qemu-system-aarch64", "qemu-system-arm", []string{"-machine", "virt", "-cpu", "max,pauth=off"}, "ttyAMA0", []string{"crc32c_generic"}, true},
}

// guestInit returns this program for the architecture: another one's is in a directory beside it, with the name of
// the architecture.
func (a arch) guestInit() (string, error) {
	self, err := os.Executable()
	if err != nil || a.name == runtime.GOARCH {
		return self, err
	}
	init := filepath.Join(filepath.Dir(self), a.name, "vm")
	if _, err := os.Stat(init); err != nil {
		return "", fmt.Errorf("find the guest's init: %w: build this program for %s", err, a.name)
	}
	return init, nil
}
