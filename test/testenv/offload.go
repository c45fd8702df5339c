package testenv

import (
	"errors"
	"fmt"
	"slices"
	"unsafe"

	"golang.org/x/sys/unix"
)

// offloadCommands are the ethtool commands for single features, in the order in which the
// features depend on each other.
var offloadCommands = []struct {
	name string
	set  uint32
}{
	{"rx checksum", 0x15},
	{"tx checksum", 0x17},
	{"scatter-gather", 0x19},
	{"gso", 0x24},
	{"gro", 0x2c},
	{"tso", 0x1f},
}

// SetOffloads switches checksum, segmentation and receive offloads of a device, or only the named
// ones. Without offloads, every packet looks as on a wire.
func (ns *Namespace) SetOffloads(device string, on bool, only ...string) error {
	return ns.Do(func() error {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return fmt.Errorf("open socket in %s: %w", ns.Name, err)
		}
		defer unix.Close(fd)
		for _, command := range offloadCommands {
			if len(only) > 0 && !slices.Contains(only, command.name) {
				continue
			}
			if err := ethtool(fd, device, command.set, on); err != nil {
				return fmt.Errorf("set %s of %s in %s: %w", command.name, device, ns.Name, err)
			}
		}
		return nil
	})
}

// ethtool makes the SIOCETHTOOL request for a command with a boolean argument.
func ethtool(fd int, device string, command uint32, on bool) error {
	if len(device) >= unix.IFNAMSIZ {
		return errors.New("device name too long")
	}
	argument := struct{ command, data uint32 }{command: command}
	if on {
		argument.data = 1
	}
	request := struct {
		name [unix.IFNAMSIZ]byte
		data unsafe.Pointer
		_    [16]byte // the rest of struct ifreq's union
	}{data: unsafe.Pointer(&argument)}
	copy(request.name[:], device)
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.SIOCETHTOOL, uintptr(unsafe.Pointer(&request)))
	if errno != 0 {
		return errno
	}
	return nil
}
