package plugin

import (
	"context"
	"errors"
	"os"
	"path/filepath"

	"github.com/containernetworking/cni/pkg/invoke"

	"github.com/ebpfnet/ebpfnet/plugin/cnierr"
	"github.com/ebpfnet/ebpfnet/plugin/config"
	"github.com/ebpfnet/ebpfnet/plugin/record"
	"github.com/ebpfnet/ebpfnet/plugin/show"
)

// adopted ends containers that `ebpfnetctl migrate` has adopted. Other plugins made them, and the runtime does not
// call these plugins, because the network's list does not name them.
type adopted struct{ *verb }

// del lets the plugins that made a container remove what they made, if the container is adopted. After an error its
// record and its address must stay, for the runtime's next DEL.
func (a adopted) del(ctx context.Context, rec *record.Record, netns string) (isAdopted bool, err error) {
	if rec == nil || len(rec.Others) == 0 || !a.config.HasIPAM() {
		return false, nil
	}
	return true, a.delByOthers(ctx, rec, netns)
}

// gc calls del for containers that are not valid. One whose plugins fail becomes valid, so that it stays for the next GC.
func (a adopted) gc(ctx context.Context, valid *config.ValidAttachments, recs []*record.Record) (err error) {
	for _, rec := range recs {
		if !valid.Lacks(rec.Attachment) {
			continue
		}
		if _, errDel := a.del(ctx, rec, ""); errDel != nil {
			valid.Add(rec.Attachment)
			err = errors.Join(err, errDel)
		}
	}
	return err
}

// delByOthers calls DEL of each plugin that made a container. Like libcni it stops at the first failure, so the address
// stays reserved while rules for it are left. It skips plugins that are not installed.
func (a adopted) delByOthers(ctx context.Context, rec *record.Record, netns string) error {
	path := os.Getenv("CNI_PATH")
	args := &invoke.Args{Command: "DEL", ContainerID: rec.Attachment.ContainerID, NetNS: netns, IfName: rec.Attachment.IfName,
		PluginArgsStr: os.Getenv("CNI_ARGS"), Path: path}
	for _, other := range rec.Others {
		program, err := invoke.FindInPath(other.Type, filepath.SplitList(path))
		if err != nil {
			a.log.Warn("cannot remove what another plugin has made of the container", "plugin", other.Type, "error", err.Error())
			continue
		}
		if err := invoke.ExecPluginWithoutResult(ctx, program, other.Config, args, nil); err != nil {
			return cnierr.WithPrefix(cnierr.WithCode(err), "plugin "+show.Value(other.Type)+", which made the container: ")
		}
	}
	return nil
}
