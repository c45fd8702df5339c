package plugin

import (
	"fmt"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/loader"
)

// rights are the capabilities that ADD cannot do without; loading BPF programs needs
// none besides.
var rights = []struct {
	bit   int
	name  string
	lacks string
}{
	{unix.CAP_SYS_ADMIN, "CAP_SYS_ADMIN", "enter the container's network namespace"},
	{unix.CAP_NET_ADMIN, "CAP_NET_ADMIN", "make devices and attach programs to them"},
}

// checkRights names what this process may not do, before it is half done.
func checkRights() error {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&header, &data[0]); err != nil {
		return fmt.Errorf("ask for our own capabilities: %w", err)
	}
	var missing []string
	for _, right := range rights {
		if data[right.bit/32].Effective&(1<<(right.bit%32)) == 0 {
			missing = append(missing, right.name+" to "+right.lacks)
		}
	}
	if len(missing) > 0 {
		return fmt.Errorf("%w: the plugin lacks %s: have the runtime start it as root with all capabilities",
			loader.ErrNotSupported, strings.Join(missing, ", and "))
	}
	return nil
}
