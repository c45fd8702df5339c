package testenv

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"

	"github.com/ebpfnet/ebpfnet/loader"
)

// Runtime is a container runtime's use of CNI: it runs a network's plugins in the node's network
// namespace through libcni. Add, Del, Check, GC and Status may be called concurrently.
type Runtime struct {
	Node *Namespace
	// PluginPath is CNI_PATH: the directories of plugins.
	PluginPath []string
	// CacheDir is where libcni keeps configurations and results of containers.
	CacheDir string

	list *libcni.NetworkConfigList
	cni  *libcni.CNIConfig
	exec *recorder
}

// NewRuntime returns a runtime for the network of conflist, a JSON network configuration list.
// libcni caches results in the test's temporary directory.
func NewRuntime(tb TB, node *Namespace, conflist []byte, pluginPath ...string) *Runtime {
	tb.Helper()
	r := &Runtime{Node: node, PluginPath: pluginPath, CacheDir: tb.TempDir(), exec: &recorder{ns: node}}
	r.cni = libcni.NewCNIConfigWithCacheDir(pluginPath, r.CacheDir, r.exec)
	if err := r.SetNetwork(conflist); err != nil {
		tb.Fatalf("%v", err)
	}
	return r
}

// SetNetwork replaces the network configuration, as if an operator edits the file while containers
// run. libcni's cache stays.
func (r *Runtime) SetNetwork(conflist []byte) error {
	list, err := libcni.NetworkConfFromBytes(conflist)
	if err != nil {
		return fmt.Errorf("parse network configuration: %w", err)
	}
	r.list = list
	return nil
}

// Network returns the name of the network.
func (r *Runtime) Network() string { return r.list.Name }

// loadOptions returns those with which an ADD of the network loads the datapath, unless the network is one of other
// plugins alone.
func (r *Runtime) loadOptions(tb TB) (options loader.Options, loads bool) {
	tb.Helper()
	for _, plugin := range r.list.Plugins {
		var keys struct {
			Type     string
			MaxFlows uint32
		}
		if err := json.Unmarshal(plugin.Bytes, &keys); err != nil {
			tb.Fatalf("read maxFlows: %v", err)
		}
		options.MaxFlows = max(options.MaxFlows, keys.MaxFlows)
		loads = loads || keys.Type == "ebpfnet"
	}
	return options, loads
}

// Add attaches a container and returns the result, converted to the current version;
// [Runtime.Calls] has the printed one. The error of a plugin is a *types.Error.
func (r *Runtime) Add(ctx context.Context, conf *libcni.RuntimeConf) (*types100.Result, error) {
	result, err := r.cni.AddNetworkList(ctx, r.list, conf)
	if err != nil {
		return nil, err
	}
	return types100.GetResult(result)
}

// Del detaches a container.
func (r *Runtime) Del(ctx context.Context, conf *libcni.RuntimeConf) error {
	return r.cni.DelNetworkList(ctx, r.list, conf)
}

// Check runs CHECK for a container.
func (r *Runtime) Check(ctx context.Context, conf *libcni.RuntimeConf) error {
	return r.cni.CheckNetworkList(ctx, r.list, conf)
}

// GC removes all attachments except the valid ones. libcni first calls DEL for the others in its
// cache, and then GC.
func (r *Runtime) GC(ctx context.Context, valid ...types.GCAttachment) error {
	return r.cni.GCNetworkList(ctx, r.list, &libcni.GCArgs{ValidAttachments: valid})
}

// Status runs STATUS.
func (r *Runtime) Status(ctx context.Context) error {
	return r.cni.GetStatusNetworkList(ctx, r.list)
}

// Calls returns the last executions of plugins, in the order in which they ended, with their exact input and output. It does not
// include IPAM plugins that a plugin executes.
func (r *Runtime) Calls() []*Call { return r.exec.list() }

// LastCall returns the latest execution of a plugin.
func (r *Runtime) LastCall(tb TB) *Call {
	tb.Helper()
	calls := r.Calls()
	if len(calls) == 0 {
		tb.Fatalf("no plugin was executed")
	}
	return calls[len(calls)-1]
}
