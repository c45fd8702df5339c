package testenv

import (
	"context"
	"fmt"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"
)

// Runtime does what a container runtime does with CNI: it runs a network's plugins
// in the node's network namespace by way of libcni. Add, Del, Check, GC and
// Status may be called concurrently.
type Runtime struct {
	Node *Namespace
	// PluginPath are the directories plugins are looked for in, and their CNI_PATH.
	PluginPath []string

	list *libcni.NetworkConfigList
	cni  *libcni.CNIConfig
	exec *recorder
}

// NewRuntime returns a runtime for the network that conflist, a JSON network configuration
// list, describes. Results are cached in a directory of the test's own.
func NewRuntime(tb TB, node *Namespace, conflist []byte, pluginPath ...string) *Runtime {
	tb.Helper()
	r := &Runtime{Node: node, PluginPath: pluginPath, exec: &recorder{ns: node}}
	r.cni = libcni.NewCNIConfigWithCacheDir(pluginPath, tb.TempDir(), r.exec)
	if err := r.SetNetwork(conflist); err != nil {
		tb.Fatalf("%v", err)
	}
	return r
}

// SetNetwork replaces the network configuration, as an operator who edits the file
// under running containers. What libcni cached of them stays.
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

// Add attaches a container and returns the result in the current version, whatever the
// one that the plugin printed; that one is in [Runtime.Calls]. A plugin's own
// error is a *types.Error.
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

// Check asks whether a container's network still is what Add made it.
func (r *Runtime) Check(ctx context.Context, conf *libcni.RuntimeConf) error {
	return r.cni.CheckNetworkList(ctx, r.list, conf)
}

// GC removes every attachment but the valid ones. libcni first calls DEL for those that its
// cache knows and that are not valid, and then GC. [Runtime.ForgetPods] avoids that.
func (r *Runtime) GC(ctx context.Context, valid ...types.GCAttachment) error {
	return r.cni.GCNetworkList(ctx, r.list, &libcni.GCArgs{ValidAttachments: valid})
}

// Status asks whether the plugins are ready for Add.
func (r *Runtime) Status(ctx context.Context) error {
	return r.cni.GetStatusNetworkList(ctx, r.list)
}

// ForgetPods empties libcni's cache, as a runtime that lost its state: later calls of Del
// have no prevResult, and GC no DEL before it.
func (r *Runtime) ForgetPods(tb TB) {
	tb.Helper()
	r.cni = libcni.NewCNIConfigWithCacheDir(r.PluginPath, tb.TempDir(), r.exec)
}

// Calls returns every execution of a plugin so far, in the order they ended, with what
// exactly the plugin read and wrote. IPAM plugins that a plugin executes
// itself are not among them.
func (r *Runtime) Calls() []*Call { return r.exec.list() }

// LastCall returns the execution of a plugin that ended last.
func (r *Runtime) LastCall(tb TB) *Call {
	tb.Helper()
	calls := r.Calls()
	if len(calls) == 0 {
		tb.Fatalf("no plugin has been executed")
	}
	return calls[len(calls)-1]
}
