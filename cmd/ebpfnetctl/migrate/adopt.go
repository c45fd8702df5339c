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
	"time"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/skel"
	cnitypes "github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/cni/pkg/version"
	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/plugin"
	"github.com/ebpfnet/ebpfnet/plugin/cni"
	"github.com/ebpfnet/ebpfnet/plugin/cnierr"
	"github.com/ebpfnet/ebpfnet/plugin/record"
)

// lockTimeout bounds the wait for other calls, for each container.
const lockTimeout = 20 * time.Second

// adopt attaches ebpfnet to a container, records how the old plugins clean up, and tells the runtime by
// libcni's cache: podman and CRI-O call DEL by the list in there, containerd by the network's present one.
func (h *host) adopt(ctx context.Context, n *Network, c *Container) error {
	if err := h.call(ctx, (&plugin.Plugin{Stdout: io.Discard}).Add, n.translation.chained, c); err != nil {
		return err
	}
	c.attached = true // even if the rest fails: release undoes all
	others, err := h.delCalls(ctx, c)
	if err == nil {
		err = recordOthers(c, others)
	}
	if err == nil {
		err = h.setCachedList(c, func(plugins []any) []any { return append(plugins, n.translation.chained) })
	}
	if err == nil {
		c.Fate = Adopted
	}
	return err
}

// release undoes adopt. Of a container that has ended since, what is left of ours goes as well.
func (h *host) release(ctx context.Context, c *Container) error {
	del := plugin.New().Del
	err := h.call(ctx, del, object{"type": pluginType}, c)
	if errors.Is(err, errEnded) {
		err = h.callIn(ctx, del, object{"type": pluginType}, c, "")
	}
	return errors.Join(err, h.setCachedList(c, func(plugins []any) []any {
		var others []any
		for _, p := range plugins {
			if keys, _ := p.(object); keys["type"] != pluginType {
				others = append(others, p)
			}
		}
		return others
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

// callIn is the same with the container's namespace, "" if it is gone.
func (h *host) callIn(ctx context.Context, verb func(context.Context, *cni.Call) error, chained object, c *Container, netns string) error {
	ctx, cancel := context.WithTimeout(ctx, lockTimeout)
	defer cancel()
	stdin := maps.Clone(chained)
	stdin["name"], stdin["cniVersion"], stdin["prevResult"] = c.Network, c.result.CNIVersion, c.result
	call, err := newCall(stdin, &skel.CmdArgs{ContainerID: c.ContainerID, IfName: c.IfName, Netns: netns})
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
func recordOthers(c *Container, others []record.OtherPlugin) error {
	records, err := record.Open(record.DefaultDir)
	if err != nil {
		return err
	}
	rec, err := records.Read(c.Owner())
	if err != nil || rec == nil {
		return errors.Join(errors.New("the container has no record"), err)
	}
	rec.Others = others
	return records.Write(rec)
}

// delCalls returns what libcni would call for a DEL by the list that made a container.
func (h *host) delCalls(ctx context.Context, c *Container) ([]record.OtherPlugin, error) {
	list, err := libcni.NetworkConfFromBytes(c.cached.Config)
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", "ebpfnetctl-") // a copy of the cache, since libcni removes what it has called DEL for
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	text, err := os.ReadFile(h.cacheFile(h.CacheDir, c))
	if err == nil {
		err = os.Mkdir(filepath.Join(dir, "results"), 0o700)
	}
	if err == nil {
		err = os.WriteFile(h.cacheFile(dir, c), text, 0o600)
	}
	if err != nil {
		return nil, err
	}
	calls := &recorder{}
	err = libcni.NewCNIConfigWithCacheDir(nil, dir, calls).DelNetworkList(ctx, list, &libcni.RuntimeConf{
		ContainerID: c.ContainerID, NetNS: c.cached.NetNS, IfName: c.IfName, Args: c.cached.CniArgs, CapabilityArgs: c.cached.CapabilityArgs,
	})
	return calls.calls, err
}

// recorder implements libcni's invoke.Exec. It records calls, and executes nothing.
type recorder struct {
	version.PluginDecoder
	calls []record.OtherPlugin
}

// FindInPath implements invoke.Exec.
func (*recorder) FindInPath(plugin string, _ []string) (string, error) { return plugin, nil }

// ExecPlugin implements invoke.Exec.
func (r *recorder) ExecPlugin(_ context.Context, plugin string, stdin []byte, _ []string) ([]byte, error) {
	r.calls = append(r.calls, record.OtherPlugin{Type: plugin, Config: stdin})
	return nil, nil
}

// cacheFile is libcni's file of a container, whose names are checked.
func (h *host) cacheFile(dir string, c *Container) string {
	return filepath.Join(dir, "results", c.Network+"-"+c.ContainerID+"-"+c.IfName)
}

// setCachedList changes the plugins of the list that libcni's cache has for a container. Its file is
// replaced only if it is still there: its removal is the end of a DEL.
func (h *host) setCachedList(c *Container, change func([]any) []any) error {
	path := h.cacheFile(h.CacheDir, c)
	text, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	var cached map[string]json.RawMessage
	if err == nil {
		err = json.Unmarshal(text, &cached)
	}
	var config []byte
	if err == nil {
		err = json.Unmarshal(cached["config"], &config)
	}
	list := object{}
	if err == nil {
		err = json.Unmarshal(config, &list)
	}
	if err != nil {
		return fmt.Errorf("read %s: %w", path, err)
	}
	plugins, _ := list["plugins"].([]any)
	list["plugins"] = change(plugins)
	if config, err = json.Marshal(list); err == nil {
		cached["config"], err = json.Marshal(config)
	}
	if err == nil {
		text, err = json.Marshal(cached)
	}
	if err != nil {
		return err
	}
	partial := filepath.Join(h.CacheDir, ".ebpfnetctl-"+filepath.Base(path)) // libcni reads all files of the directory below
	if err := writeFile(partial, text, 0o600); err != nil {
		return err
	}
	err = unix.Renameat2(unix.AT_FDCWD, partial, unix.AT_FDCWD, path, unix.RENAME_EXCHANGE)
	if errors.Is(err, unix.ENOENT) {
		err = nil
	}
	return errors.Join(err, os.Remove(partial))
}

// writeFile writes a file that survives a crash.
func writeFile(path string, text []byte, mode os.FileMode) error {
	file, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, mode)
	if err != nil {
		return err
	}
	_, err = file.Write(text)
	return errors.Join(err, file.Sync(), file.Close())
}
