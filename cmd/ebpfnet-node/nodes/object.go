package nodes

import (
	"bytes"
	"fmt"
	"iter"
	"slices"
	"time"

	"google.golang.org/protobuf/encoding/protowire"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/ebpfnet/ebpfnet/cmd/ebpfnet-node/wanted"
)

// object is a Node object, of which it reads only what counts. Most of one is images, labels and managed fields:
// with 50 images it has 15 KB, and each of all nodes comes every five minutes.
type object struct {
	metav1.TypeMeta
	metav1.ObjectMeta
	node    wanted.Node
	podCIDR string // what there was before dual stack
}

// objectList is a NodeList.
type objectList struct {
	metav1.TypeMeta
	metav1.ListMeta
	Items  []object
	buffer bytes.Buffer // of the field that is being read
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

// fieldsOf walks over a message. It yields an error and ends where it is malformed.
func fieldsOf(message []byte) iter.Seq2[field, error] {
	return func(yield func(field, error) bool) {
		for len(message) > 0 {
			id, kind, n := protowire.ConsumeTag(message)
			if n < 0 {
				yield(field{}, fmt.Errorf("read a Node object: %w", protowire.ParseError(n)))
				return
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
				yield(field{}, fmt.Errorf("read field %d of a Node object: %w", id, protowire.ParseError(n)))
				return
			}
			message = message[n:]
			if !yield(f, nil) {
				return
			}
		}
	}
}

// Reset and Unmarshal are what the API's decoder calls.
func (o *object) Reset() { *o = object{} }

func (o *object) Unmarshal(data []byte) error {
	for f, err := range fieldsOf(data) {
		if err == nil {
			switch f.id {
			case nodeMeta:
				err = o.readMeta(f.bytes)
			case nodeSpec:
				err = o.readSpec(f.bytes)
			case nodeStatus:
				err = o.readStatus(f.bytes)
			}
		}
		if err != nil {
			return err
		}
	}
	if len(o.node.PodCIDRs) == 0 && o.podCIDR != "" {
		o.node.PodCIDRs = []string{o.podCIDR}
	}
	return nil
}

func (o *object) readMeta(data []byte) error {
	for f, err := range fieldsOf(data) {
		if err == nil {
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
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// readAnnotation keeps the one that ends a streamed list.
func (o *object) readAnnotation(data []byte) error {
	var key, value string
	for f, err := range fieldsOf(data) {
		if err != nil {
			return err
		}
		switch f.id {
		case entryKey:
			key = string(f.bytes)
		case entryValue:
			value = string(f.bytes)
		}
	}
	if key == metav1.InitialEventsAnnotationKey {
		o.Annotations = map[string]string{key: value}
	}
	return nil
}

func timeOf(data []byte) (time.Time, error) {
	var seconds int64
	for f, err := range fieldsOf(data) {
		if err != nil {
			return time.Time{}, err
		}
		if f.id == timeSeconds {
			seconds = int64(f.number)
		}
	}
	return time.Unix(seconds, 0).UTC(), nil
}

func (o *object) readSpec(data []byte) error {
	for f, err := range fieldsOf(data) {
		if err != nil {
			return err
		}
		switch f.id {
		case specPodCIDR:
			o.podCIDR = string(f.bytes)
		case specPodCIDRs:
			o.node.PodCIDRs = append(o.node.PodCIDRs, string(f.bytes))
		}
	}
	return nil
}

func (o *object) readStatus(data []byte) error {
	for f, err := range fieldsOf(data) {
		if err == nil && f.id == statusAddresses {
			err = o.readAddress(f.bytes)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (o *object) readAddress(data []byte) error {
	var kind, address string
	for f, err := range fieldsOf(data) {
		if err != nil {
			return err
		}
		switch f.id {
		case addressType:
			kind = string(f.bytes)
		case addressAddress:
			address = string(f.bytes)
		}
	}
	if kind == internalIP {
		o.node.Addresses = append(o.node.Addresses, address)
	}
	return nil
}

func (l *objectList) readMeta(data []byte) error {
	for f, err := range fieldsOf(data) {
		if err != nil {
			return err
		}
		switch f.id {
		case listMetaVersion:
			l.ResourceVersion = string(f.bytes)
		case listMetaContinue:
			l.Continue = string(f.bytes)
		}
	}
	return nil
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
