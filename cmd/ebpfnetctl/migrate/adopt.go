package migrate

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/containernetworking/cni/pkg/skel"
	cnitypes "github.com/containernetworking/cni/pkg/types"
	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/loader/rtnl"
	"github.com/ebpfnet/ebpfnet/plugin"
	"github.com/ebpfnet/ebpfnet/plugin/cni"
	"github.com/ebpfnet/ebpfnet/plugin/cnierr"
	"github.com/ebpfnet/ebpfnet/plugin/config"
	"github.com/ebpfnet/ebpfnet/plugin/record"
)

// lockTimeout bounds the wait for other calls, for each container.
const lockTimeout = 20 * time.Second

// adopt attaches ebpfnet to a container, records how the old plugins clean up, and adds ebpfnet to the container's list
// in libcni's cache: podman and CRI-O call DEL by that list, containerd by the network's present list.
func (h *host) adopt(ctx context.Context, n *Network, c *Container) error {
	if err := h.call(ctx, (&plugin.Plugin{Stdout: io.Discard}).Add, n.translation.chained, c); err != nil {
		return err
	}
	c.attached = true // even if the rest fails: release undoes all
	others, err := delCalls(c)
	if err == nil {
		err = h.recordOthers(c, others)
	}
	if err == nil {
		err = h.setCachedList(c, func(plugins []any) []any { return append(plugins, n.translation.chained) })
	}
	if err == nil {
		c.Action = Adopted
	}
	return err
}

// release undoes adopt. Of a container that has ended since, what is left of ours goes as well.
func (h *host) release(ctx context.Context, c *Container) error {
	del := plugin.New().Del
	err := h.call(ctx, del, object{"type": config.PluginType}, c)
	if errors.Is(err, errEnded) {
		err = h.callIn(ctx, del, object{"type": config.PluginType}, c, "")
	}
	return errors.Join(err, h.setCachedList(c, func(plugins []any) []any {
		return slices.DeleteFunc(plugins, func(p any) bool {
			keys, _ := p.(object)
			return keys["type"] == config.PluginType
		})
	}))
}

// errEnded is about a container that has lost its interface.
var errEnded = errors.New("it has ended meanwhile")

// call calls a verb of our plugin for a container, as behind the plugins that have made it.
func (h *host) call(ctx context.Context, verb func(context.Context, *cni.Call) error, chained object, c *Container) error {
	device, ns, err := h.find(c.result)
	if err != nil {
		return err
	}
	if device == nil {
		return errEnded
	}
	defer ns.Close()
	return h.callIn(ctx, verb, chained, c, fmt.Sprintf("/proc/self/fd/%d", int(ns)))
}

// callIn calls a verb of our plugin with the file of the container's namespace, "" if the container is gone.
func (h *host) callIn(ctx context.Context, verb func(context.Context, *cni.Call) error, chained object, c *Container, netns string) error {
	ctx, cancel := context.WithTimeout(ctx, lockTimeout)
	defer cancel()
	keys := maps.Clone(chained)
	keys["prevResult"] = c.result
	call, err := cni.CallOf(c.Network, c.result.CNIVersion, keys, skel.CmdArgs{ContainerID: c.ContainerID, IfName: c.IfName, Netns: netns})
	if err != nil {
		return err
	}
	err = verb(ctx, call)
	if coded, ok := errors.AsType[*cnitypes.Error](err); ok && coded.Code == cnierr.CodeAttachmentExists {
		return nil // an earlier migrate was killed
	}
	return err
}

// recordOthers completes the record that ADD has written.
func (h *host) recordOthers(c *Container, others []record.OtherPlugin) error {
	rec, err := h.records.Read(c.Attachment.Owner())
	if err != nil || rec == nil {
		return errors.Join(errors.New("the container has no record"), err)
	}
	rec.Others = others
	return h.records.Write(rec)
}

// delCalls returns what libcni would call for a DEL by the list that made a container.
func delCalls(c *Container) (calls []record.OtherPlugin, err error) {
	for _, plugin := range slices.Backward(c.list.Plugins) {
		keys, err := keysOf(plugin)
		if err != nil {
			return nil, err
		}
		args := object{}
		for capability, has := range plugin.Network.Capabilities {
			if arg, isGiven := c.cached.CapabilityArgs[capability]; has && isGiven {
				args[capability] = arg
			}
		}
		keys["name"], keys["cniVersion"], keys["prevResult"], keys["runtimeConfig"] = c.Network, c.list.CNIVersion, c.given, args
		config, err := json.Marshal(keys)
		if err != nil {
			return nil, err
		}
		calls = append(calls, record.OtherPlugin{Type: plugin.Network.Type, Config: config})
	}
	return calls, nil
}

// cacheName is the name of libcni's file of a container, below its cache.
func (c *Container) cacheName() string {
	return "results/" + c.Network + "-" + c.ContainerID + "-" + c.IfName
}

// setCachedList changes the plugins of the list that libcni's cache has for a container. It replaces the container's file
// only if the file exists: DEL removes it at its end.
func (h *host) setCachedList(c *Container, change func([]any) []any) error {
	path := filepath.Join(h.CacheDir, c.cacheName())
	text, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	var cached map[string]json.RawMessage
	var list object
	if err = errors.Join(err, json.Unmarshal(text, &cached), json.Unmarshal(c.cached.Config, &list)); err != nil {
		return fmt.Errorf("read %s: %w", path, err)
	}
	plugins, _ := list["plugins"].([]any)
	list["plugins"] = change(plugins)
	config, err := json.Marshal(list)
	if err == nil {
		cached["config"], err = json.Marshal(config)
	}
	if err == nil {
		text, err = json.Marshal(cached)
	}
	if err != nil {
		return err
	}
	partial := filepath.Join(h.CacheDir, ".ebpfnetctl-"+filepath.Base(path)) // libcni reads all files in results
	if err := os.WriteFile(partial, text, 0o600); err != nil {
		return err
	}
	err = unix.Renameat2(unix.AT_FDCWD, partial, unix.AT_FDCWD, path, unix.RENAME_EXCHANGE)
	if errors.Is(err, unix.ENOENT) {
		err = nil
	}
	return errors.Join(err, os.Remove(partial))
}

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
