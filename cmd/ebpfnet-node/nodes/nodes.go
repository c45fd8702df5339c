// Package nodes watches the cluster's Node objects, and reads six fields of each.
package nodes

import (
	"time"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/connrotation"

	"github.com/ebpfnet/ebpfnet/cmd/ebpfnet-node/desired"
	"github.com/ebpfnet/ebpfnet/cmd/ebpfnet-node/watch"
)

// Watcher keeps the nodes.
type Watcher struct {
	*watch.Watcher[desired.Node]
	dialer *connrotation.Dialer
}

// New returns a watcher of an API server's nodes.
func New(config *rest.Config) (*Watcher, error) {
	config, dialer := watch.Dial(config)
	api, err := watch.Client(config, schema.GroupVersion{Version: "v1"}, map[string]runtime.Object{"Node": &object{}, "NodeList": &objectList{}})
	if err != nil {
		return nil, err
	}
	return &Watcher{watch.New(api, watch.Kind[desired.Node]{
		Resource: "nodes",
		Object:   &object{},
		List:     func() runtime.Object { return &objectList{} },
		Read:     func(o any) (string, desired.Node) { return o.(*object).Name, o.(*object).node },
	}, make(chan time.Time, 1)), dialer}, nil
}

// Reconnect closes all connections. The watch continues on new ones.
func (w *Watcher) Reconnect() { w.dialer.CloseAll() }

// List returns the nodes by name: see watch.Watcher.
func (w *Watcher) List() (nodes []desired.Node, synced bool) { return w.Values() }
