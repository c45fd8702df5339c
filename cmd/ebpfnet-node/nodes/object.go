// Package nodes watches the cluster's Node objects, and reads seven fields of each.
package nodes

import (
	"fmt"
	"slices"
	"time"

	"google.golang.org/protobuf/encoding/protowire"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/connrotation"

	"github.com/ebpfnet/ebpfnet/cmd/ebpfnet-node/desired"
	"github.com/ebpfnet/ebpfnet/cmd/ebpfnet-node/watch"
)

// object is a Node object. It reads only the relevant fields: most of an object are images, labels and managed fields. With
// 50 images it has 15 KB, and each node's object arrives every five minutes.
type object struct {
	metav1.TypeMeta
	metav1.ObjectMeta
	node    desired.Node
	podCIDR string // the field from before dual stack
}

type objectList struct {
	metav1.TypeMeta
	metav1.ListMeta
	Items []object
}

// Numbers of fields, from k8s.io/api/core/v1/generated.proto and apimachinery's meta/v1/generated.proto.
const (
	nodeMeta, nodeSpec, nodeStatus    = 1, 2, 3
	listMeta, listItems               = 1, 2
	metaName, metaVersion             = 1, 6
	metaCreated, metaAnnotations      = 8, 12
	listMetaVersion, listMetaContinue = 2, 3
	specPodCIDR, specPodCIDRs         = 1, 7
	statusAddresses                   = 5
	addressType, addressAddress       = 1, 2
	timeSeconds                       = 1
	entryKey, entryValue              = 1, 2

	internalIP = "InternalIP"
)

// field is one field of a message. A number has no bytes.
type field struct {
	id     protowire.Number
	bytes  []byte
	number uint64
}

// forEachField calls read with each field of a message. It stops at an error and at malformed data.
func forEachField(message []byte, read func(field) error) error {
	for len(message) > 0 {
		id, kind, n := protowire.ConsumeTag(message)
		if n < 0 {
			return fmt.Errorf("read a Node object: %w", protowire.ParseError(n))
		}
		message = message[n:]
		f := field{id: id}
		switch kind {
		case protowire.BytesType:
			f.bytes, n = protowire.ConsumeBytes(message)
		case protowire.VarintType:
			f.number, n = protowire.ConsumeVarint(message)
		default:
			n = protowire.ConsumeFieldValue(id, kind, message)
		}
		if n < 0 {
			return fmt.Errorf("read field %d of a Node object: %w", id, protowire.ParseError(n))
		}
		message = message[n:]
		if err := read(f); err != nil {
			return err
		}
	}
	return nil
}

// Reset and Unmarshal are called by the API's decoder.
func (o *object) Reset() { *o = object{} }

func (o *object) Unmarshal(data []byte) error {
	err := forEachField(data, func(f field) error {
		switch f.id {
		case nodeMeta:
			return forEachField(f.bytes, o.readMeta)
		case nodeSpec:
			return forEachField(f.bytes, o.readSpec)
		case nodeStatus:
			return forEachField(f.bytes, o.readStatus)
		}
		return nil
	})
	if len(o.node.PodCIDRs) == 0 && o.podCIDR != "" {
		o.node.PodCIDRs = []string{o.podCIDR}
	}
	return err
}

func (o *object) readMeta(f field) (err error) {
	switch f.id {
	case metaName:
		o.Name = string(f.bytes)
		o.node.Name = o.Name
	case metaVersion:
		o.ResourceVersion = string(f.bytes)
	case metaCreated:
		o.node.Created, err = timeOf(f.bytes)
	case metaAnnotations:
		err = o.readAnnotation(f.bytes)
	}
	return err
}

// readAnnotation keeps the annotation that marks the end of a streamed list.
func (o *object) readAnnotation(data []byte) error {
	key, value, err := pairOf(data, entryKey, entryValue)
	if key == metav1.InitialEventsAnnotationKey {
		o.Annotations = map[string]string{key: value}
	}
	return err
}

// pairOf returns two fields of a message as text.
func pairOf(data []byte, first, second protowire.Number) (a, b string, err error) {
	err = forEachField(data, func(f field) error {
		switch f.id {
		case first:
			a = string(f.bytes)
		case second:
			b = string(f.bytes)
		}
		return nil
	})
	return a, b, err
}

func timeOf(data []byte) (time.Time, error) {
	var seconds int64
	err := forEachField(data, func(f field) error {
		if f.id == timeSeconds {
			seconds = int64(f.number)
		}
		return nil
	})
	return time.Unix(seconds, 0).UTC(), err
}

func (o *object) readSpec(f field) error {
	switch f.id {
	case specPodCIDR:
		o.podCIDR = string(f.bytes)
	case specPodCIDRs:
		o.node.PodCIDRs = append(o.node.PodCIDRs, string(f.bytes))
	}
	return nil
}

func (o *object) readStatus(f field) error {
	if f.id != statusAddresses {
		return nil
	}
	kind, address, err := pairOf(f.bytes, addressType, addressAddress)
	if kind == internalIP {
		o.node.Addresses = append(o.node.Addresses, address)
	}
	return err
}

// Reset and Unmarshal are called by the API's decoder.
func (l *objectList) Reset() { *l = objectList{} }

func (l *objectList) Unmarshal(data []byte) error {
	return forEachField(data, func(f field) (err error) {
		switch f.id {
		case listMeta:
			l.ResourceVersion, l.Continue, err = pairOf(f.bytes, listMetaVersion, listMetaContinue)
		case listItems:
			var item object
			err = item.Unmarshal(f.bytes)
			l.Items = append(l.Items, item)
		}
		return err
	})
}

// DeepCopyObject makes it a runtime.Object.
func (o *object) DeepCopyObject() runtime.Object {
	copied := &object{TypeMeta: o.TypeMeta, ObjectMeta: *o.ObjectMeta.DeepCopy(), node: o.node}
	copied.node.PodCIDRs = slices.Clone(o.node.PodCIDRs)
	copied.node.Addresses = slices.Clone(o.node.Addresses)
	return copied
}

// DeepCopyObject makes it a runtime.Object.
func (l *objectList) DeepCopyObject() runtime.Object {
	copied := &objectList{TypeMeta: l.TypeMeta, ListMeta: *l.ListMeta.DeepCopy()}
	for i := range l.Items {
		copied.Items = append(copied.Items, *l.Items[i].DeepCopyObject().(*object))
	}
	return copied
}

// Watcher keeps the nodes.
type Watcher struct {
	*watch.Watcher[desired.Node]
	dialer *connrotation.Dialer
}

// New returns a watcher of an API server's nodes.
func New(config *rest.Config) (*Watcher, error) {
	config, dialer := watch.Dial(config)
	api, err := watch.Client(config, schema.GroupVersion{Version: "v1"}, runtime.ContentTypeProtobuf, map[string]runtime.Object{"Node": &object{}, "NodeList": &objectList{}})
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
