// Package nodes watches the cluster's Node objects. It only lists and watches nodes, in protobuf,
// streamed where the server can and else in pages, and reads six fields of each.
package nodes

import (
	"context"
	"maps"
	"net"
	"reflect"
	"slices"
	"sync"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/connrotation"

	"github.com/ebpfnet/ebpfnet/cmd/ebpfnet-node/desired"
)

// Watcher keeps the nodes. It is also the store that client-go's reflector fills. After a watch expires, the reflector
// lists again and replaces everything, so a node whose deletion was missed is deleted here, too.
type Watcher struct {
	api     rest.Interface
	dialer  *connrotation.Dialer
	backoff *wait.Backoff // nil: client-go's
	changed chan struct{}

	mu     sync.Mutex
	nodes  map[string]desired.Node
	synced bool
	err    error
}

// New returns a watcher of an API server's nodes.
func New(config *rest.Config) (*Watcher, error) {
	dialer := connrotation.NewDialer((&net.Dialer{}).DialContext)
	config = rest.CopyConfig(config)
	config.Dial = dialer.DialContext
	api, err := clientOf(config)
	if err != nil {
		return nil, err
	}
	return &Watcher{api: api, dialer: dialer, changed: make(chan struct{}, 1), nodes: map[string]desired.Node{}}, nil
}

// clientOf returns a client for Node objects alone. The clientset for all kinds makes the binary and the process three
// times as large.
func clientOf(config *rest.Config) (rest.Interface, error) {
	const protobuf = runtime.ContentTypeProtobuf
	version := schema.GroupVersion{Version: "v1"}
	scheme := runtime.NewScheme()
	scheme.AddKnownTypeWithName(version.WithKind("Node"), &object{})
	scheme.AddKnownTypeWithName(version.WithKind("NodeList"), &objectList{})
	metav1.AddToGroupVersion(scheme, version)

	config.APIPath = "/api"
	config.GroupVersion = &version
	config.NegotiatedSerializer = serializer.NewCodecFactory(scheme).WithoutConversion()
	config.AcceptContentTypes, config.ContentType = protobuf, protobuf
	return rest.RESTClientFor(config)
}

// pageSize is the number of nodes in a page of a list. 500 Node objects have 7 MB.
const pageSize = 500

// Run watches until ctx is done. The API server may be unreachable for any time.
func (w *Watcher) Run(ctx context.Context) {
	reflector := cache.NewReflectorWithOptions(&cache.ListWatch{
		ListWithContextFunc:  w.list,
		WatchFuncWithContext: w.watch,
	}, &object{}, w, cache.ReflectorOptions{Name: "nodes", TypeDescription: "nodes", Backoff: w.backoff})
	reflector.WatchListPageSize = pageSize
	reflector.RunWithContext(ctx)
}

// list reads one page, from an API server that streams no list: one that has just started, or is old. It asks for no
// version, because a server ignores the size of pages for what it has in its cache.
func (w *Watcher) list(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
	options.ResourceVersion = ""
	page := &objectList{}
	err := w.api.Get().Resource("nodes").VersionedParams(&options, metav1.ParameterCodec).Do(ctx).Into(page)
	w.setErr(err)
	return page, err
}

func (w *Watcher) watch(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
	options.Watch = true
	watching, err := w.api.Get().Resource("nodes").VersionedParams(&options, metav1.ParameterCodec).Watch(ctx)
	w.setErr(err)
	return watching, err
}

func (w *Watcher) setErr(err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.err = err
}

// Changed is ready when a relevant field of a node has changed since the last receive. Heartbeats change none.
func (w *Watcher) Changed() <-chan struct{} { return w.changed }

// Reconnect closes all connections. The watch continues on new ones.
func (w *Watcher) Reconnect() { w.dialer.CloseAll() }

// List returns the nodes by name. They are complete only if synced: until the first full list, the agent must not change
// anything.
func (w *Watcher) List() (nodes []desired.Node, synced bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, name := range slices.Sorted(maps.Keys(w.nodes)) {
		nodes = append(nodes, w.nodes[name])
	}
	return nodes, w.synced
}

// Err returns why the API server last refused a list or a watch, or nil if it did not.
func (w *Watcher) Err() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.err
}

// Add, Update, Delete, Replace and Resync are called by the reflector.
func (w *Watcher) Add(added any) error {
	node := added.(*object).node
	w.change(func() bool {
		old, known := w.nodes[node.Name]
		w.nodes[node.Name] = node
		return !known || !reflect.DeepEqual(old, node)
	})
	return nil
}

// Update is Add.
func (w *Watcher) Update(updated any) error { return w.Add(updated) }

// Delete removes a node.
func (w *Watcher) Delete(deleted any) error {
	name := deleted.(*object).Name
	w.change(func() bool {
		_, known := w.nodes[name]
		delete(w.nodes, name)
		return known
	})
	return nil
}

// Replace stores a full list.
func (w *Watcher) Replace(all []any, _ string) error {
	nodes := make(map[string]desired.Node, len(all))
	for _, listed := range all {
		node := listed.(*object).node
		nodes[node.Name] = node
	}
	w.change(func() bool {
		changed := !w.synced || !reflect.DeepEqual(w.nodes, nodes)
		w.nodes, w.synced = nodes, true
		return changed
	})
	return nil
}

// Resync does nothing.
func (w *Watcher) Resync() error { return nil }

// change calls a function that changes the nodes, and wakes the reader if it returns true.
func (w *Watcher) change(apply func() bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !apply() {
		return
	}
	select {
	case w.changed <- struct{}{}:
	default: // the reader has not read the last change yet
	}
}
