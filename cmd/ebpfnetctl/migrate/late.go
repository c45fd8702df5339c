package migrate

import (
	"context"
	"errors"
	"time"

	"github.com/ebpfnet/ebpfnet/loader/rtnl"
)

// reload is how long a runtime takes to read the new list, and its last ADD by the old list to make a device.
const reload = time.Second

// adoptLate adopts the containers that the runtime added by the old list during the migration. Some of these ADDs may
// still go on, or begin: it waits while there are devices of containers that libcni's cache does not have.
func (h *host) adoptLate(ctx context.Context, n *Network) error {
	waiting, cancel := context.WithTimeout(ctx, lockTimeout)
	defer cancel()
	for quiet := time.Now(); ; {
		err := h.adoptNew(ctx, n)
		known := len(n.Reasons)
		h.lookAtBridge(n)
		err = errors.Join(err, h.lookAtAddresses(n))
		if len(n.Reasons) > known {
			quiet = time.Now()
		}
		if err != nil || time.Since(quiet) > reload {
			return errors.Join(err, n.notAdopted())
		}
		select {
		case <-waiting.Done():
			return errors.Join(ctx.Err(), n.notAdopted())
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// adoptNew adopts the containers that libcni's cache has by now.
func (h *host) adoptNew(ctx context.Context, n *Network) (err error) {
	if h.devices, err = rtnl.Links(h.netlink); err != nil {
		return err
	}
	n.Containers, n.Reasons = nil, nil
	if err := h.lookAtContainers(n); err != nil {
		return err
	}
	return h.adoptAll(ctx, n)
}
