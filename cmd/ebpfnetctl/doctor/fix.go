package doctor

import (
	"context"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/plugin/operator"
)

// fix is something that is safe to do while containers run, because it restores what ADD has made or
// removes what belongs to nobody.
type fix int

const (
	noFix fix = iota
	fixRepair
	fixForwarding
	fixOrphans
)

// mend mends, and returns what it did.
type mend struct {
	fix
	mend func(context.Context, Options) (did []string, err error)
}

// fixes are in the order in which they are done.
var fixes = []mend{
	{fixRepair, mendByRepair},
	{fixForwarding, mendForwarding},
	{fixOrphans, mendOrphans},
}

func (m mend) mendInTime(ctx context.Context, options Options) ([]string, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	return m.mend(ctx, options)
}

// mendByRepair does what ebpfnetctl repair does.
func mendByRepair(ctx context.Context, options Options) ([]string, error) {
	o, err := operator.Open(loader.OpenLoaded, options.DataDir)
	if err != nil {
		return nil, err
	}
	defer o.Close()
	repaired, err := o.Repair(ctx)
	for i := range repaired {
		repaired[i] = "repaired " + repaired[i]
	}
	return repaired, err
}

// mendForwarding lets containers' devices forward that were excepted.
func mendForwarding(_ context.Context, options Options) (did []string, err error) {
	h, err := newHost(options)
	if err != nil {
		return nil, err
	}
	defer h.close()
	for _, name := range notForwarding(h.ourDevices()) {
		if err := setSysctl(name, "1"); err != nil {
			return did, err
		}
		did = append(did, "set /proc/sys/net/"+name+" to 1")
	}
	return did, nil
}
