package plugin

import (
	"fmt"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/loader"
)

// requiredCapabilities are those that ADD needs, including those for loading BPF programs.
var requiredCapabilities = []struct {
	bit     int
	name    string
	purpose string
}{
	{unix.CAP_SYS_ADMIN, "CAP_SYS_ADMIN", "enter the container's network namespace"},
	{unix.CAP_NET_ADMIN, "CAP_NET_ADMIN", "create devices and attach programs to them"},
}

// CheckCapabilities returns an error that names the required capabilities that this process lacks. The
// error wraps loader.ErrNotSupported.
func CheckCapabilities() error {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&header, &data[0]); err != nil {
		return fmt.Errorf("read the capabilities of this process: %w", err)
	}
	var missing []string
	for _, required := range requiredCapabilities {
		if data[required.bit/32].Effective&(1<<(required.bit%32)) == 0 {
			missing = append(missing, required.name+" to "+required.purpose)
		}
	}
	if len(missing) > 0 {
		return fmt.Errorf("%w: the plugin lacks %s: let the runtime start it as root with all capabilities",
			loader.ErrNotSupported, strings.Join(missing, ", and "))
	}
	return nil
}
