// Package watch keeps the objects of a kind as the API server has them. It only lists and watches, streamed
// where the server can and else in pages.
package watch

import (
	"context"
	"maps"
	"net"
	"reflect"
	"slices"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/connrotation"
)

// Kind is a kind of objects, of which a watcher keeps values.
type Kind[T any] struct {
	Resource string // in the plural, as in URLs
	Fields   string // selector; "": all
	Object   runtime.Object
	List     func() runtime.Object                  // an empty one
	Read     func(object any) (key string, value T) // what to keep. The key is the object's alone
}

// Watcher keeps the values of a kind. It is also the store that client-go's reflector fills. After a watch expires, the
// reflector lists again and replaces everything, so an object whose deletion was missed is deleted here, too.
type Watcher[T any] struct {
	Backoff *wait.Backoff // nil: client-go's

	api     rest.Interface
	kind    Kind[T]
	changed chan time.Time

	mu     sync.Mutex
	values map[string]T
	synced bool
	err    error

	events   []Event[T] // since the last call of Take
	isRelist bool       // since then, all values may have changed
}

// Event is what has become of an object's value.
type Event[T any] struct {
	Before, Now T // zero: there was or is none
}

// New returns a watcher by a client, and the channel that it wakes when a value has changed. Watchers can share it.
func New[T any](api rest.Interface, kind Kind[T], changed chan time.Time) *Watcher[T] {
	return &Watcher[T]{api: api, kind: kind, changed: changed, values: map[string]T{}}
}

// Dial has the clients of a configuration connect by a dialer, which can close their connections.
func Dial(config *rest.Config) (*rest.Config, *connrotation.Dialer) {
	dialer := connrotation.NewDialer(func(ctx context.Context, network, address string) (net.Conn, error) {
		conn, err := (&net.Dialer{}).DialContext(ctx, network, address)
		return &paced{Conn: conn}, err
	})
	config = rest.CopyConfig(config)
	config.Dial = dialer.DialContext
	return config, dialer
}

// Client returns a client for some kinds of a group alone, which the server encodes as content. The clientset for all kinds
// makes the binary and the process three times as large.
func Client(config *rest.Config, version schema.GroupVersion, content string, kinds map[string]runtime.Object) (rest.Interface, error) {
	scheme := runtime.NewScheme()
	for kind, object := range kinds {
		scheme.AddKnownTypeWithName(version.WithKind(kind), object)
	}
	metav1.AddToGroupVersion(scheme, version)

	config = rest.CopyConfig(config)
	config.APIPath = "/apis"
	if version.Group == "" {
		config.APIPath = "/api"
	}
	config.GroupVersion = &version
	config.NegotiatedSerializer = serializer.NewCodecFactory(scheme).WithoutConversion()
	config.AcceptContentTypes, config.ContentType = content, content
	return rest.RESTClientFor(config)
}

// PageSize is the number of objects in a page of a list. 500 Node objects have 7 MB.
const PageSize = 500

// Run watches until ctx is done. The API server may be unreachable for any time.
func (w *Watcher[T]) Run(ctx context.Context) {
	reflector := cache.NewReflectorWithOptions(&cache.ListWatch{
		ListWithContextFunc:  w.list,
		WatchFuncWithContext: w.watch,
	}, w.kind.Object, w, cache.ReflectorOptions{Name: w.kind.Resource, TypeDescription: w.kind.Resource, Backoff: w.Backoff})
	reflector.WatchListPageSize = PageSize
	reflector.RunWithContext(ctx)
}

// list reads one page, from an API server that streams no list: one that has just started, or is old. It asks for no
// version, because a server ignores the size of pages for what it has in its cache.
func (w *Watcher[T]) list(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
	options.ResourceVersion, options.FieldSelector = "", w.kind.Fields
	page := w.kind.List()
	err := w.api.Get().Resource(w.kind.Resource).VersionedParams(&options, metav1.ParameterCodec).Do(ctx).Into(page)
	w.setErr(err)
	return page, err
}

func (w *Watcher[T]) watch(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
	options.Watch, options.FieldSelector = true, w.kind.Fields
	watching, err := w.api.Get().Resource(w.kind.Resource).VersionedParams(&options, metav1.ParameterCodec).Watch(ctx)
	w.setErr(err)
	return watching, err
}

func (w *Watcher[T]) setErr(err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.err = err
}

// Changed says when a value has first changed since the last receive.
func (w *Watcher[T]) Changed() <-chan time.Time { return w.changed }

// Values returns the values by key. They are complete only if synced: until the first full list, the agent must not change
// anything.
func (w *Watcher[T]) Values() (values []T, synced bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, key := range slices.Sorted(maps.Keys(w.values)) {
		values = append(values, w.values[key])
	}
	return values, w.synced
}

// Take returns the changes since the last call. isAll is false if there were too many, or a list.
func (w *Watcher[T]) Take() (events []Event[T], isAll bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	events, isAll = w.events, !w.isRelist
	w.events, w.isRelist = nil, false
	return events, isAll
}

// note keeps a change for Take.
func (w *Watcher[T]) note(event Event[T]) {
	const most = 10_000

	if w.events = append(w.events, event); len(w.events) > most {
		w.events, w.isRelist = nil, true
	}
}

// Err returns why the API server last refused a list or a watch, or nil if it did not.
func (w *Watcher[T]) Err() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.err
}

// Add, Update, Delete, Replace and Resync are called by the reflector.
func (w *Watcher[T]) Add(added any) error {
	key, value := w.kind.Read(added)
	w.change(func() bool {
		old, known := w.values[key]
		if known && reflect.DeepEqual(old, value) {
			return false // and the value stays the same pointer
		}
		w.values[key] = value
		w.note(Event[T]{old, value})
		return true
	})
	return nil
}

// Update is Add.
func (w *Watcher[T]) Update(updated any) error { return w.Add(updated) }

// Delete removes an object.
func (w *Watcher[T]) Delete(deleted any) error {
	key, _ := w.kind.Read(deleted)
	w.change(func() bool {
		old, known := w.values[key]
		delete(w.values, key)
		if known {
			w.note(Event[T]{Before: old})
		}
		return known
	})
	return nil
}

// Replace stores a full list.
func (w *Watcher[T]) Replace(all []any, _ string) error {
	values := make(map[string]T, len(all))
	for _, listed := range all {
		key, value := w.kind.Read(listed)
		values[key] = value
	}
	w.change(func() bool {
		changed := !w.synced || len(w.values) != len(values)
		for key, value := range values {
			if old, known := w.values[key]; known && reflect.DeepEqual(old, value) {
				values[key] = old // the same pointer
			} else {
				changed = true
			}
		}
		w.values, w.synced = values, true
		w.isRelist = w.isRelist || changed
		return changed
	})
	return nil
}

// Resync does nothing.
func (w *Watcher[T]) Resync() error { return nil }

// change calls a function that changes the values, and wakes the reader if it returns true.
func (w *Watcher[T]) change(apply func() bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !apply() {
		return
	}
	select {
	case w.changed <- time.Now():
	default: // the reader has not read the last change yet
	}
}
